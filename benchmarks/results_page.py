"""The page of results, `docs/results.md`, from the files in `benchmarks/results`.

python benchmarks/results_page.py    # after anything new was measured
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import bench_adamw
from pages import RESULTS_FOLDER, ROOT, half_interval
from trainings import EXACT, percents

PAGE = ROOT / "docs" / "results.md"
GAP_PICTURE = "gap-against-bytes"
FROM_DOCS = "../benchmarks/results/"
MIN_SEEDS = 3
# Of a machine that was busy; measured again on a quiet one.
LEFT_OUT = ("network-2-hosts-few-bits",)

INTRODUCTION = """# Results

Measured figures of this project, each with its command, date and processor; made by `python
benchmarks/results_page.py` from the files in [benchmarks/results](../benchmarks/README.md). Differences
to exact averaging are taken seed by seed, on the same batches. Compare within a table only: they are of
different machines, and steps over slow links were timed on hosts that share two cores. Rows of "whole
matrices" are of an option that is gone. What they mean for your run: [choosing](choosing.md), [AdamW over
a slow link](optimizers.md), [speed](speed.md)."""

NOT_MEASURED = """## Not measured

- **Several GPUs, and NCCL between them.** One GPU at a time was there, for a quarter of an hour each.
  All times over links are of processors and Gloo.
- **Real networks.** Links are those of [`thinwire lab`](lab.md): a limited rate on one machine, no loss
  of packets, no other traffic.
- **Links of 10 Gbit/s that are full.** Two cores do not fill them: in rows of `10gbit` and `unshaped`,
  hosts of one machine passed on what their processors could.
- **Large models.** The largest model timed over a link has 10.9 M parameters. The largest whose loss was
  compared has 85 M. ResNets have their arithmetic timed, not their accuracy.
- **Long runs.** 2 000 steps are the most.
- **Many members.** At most 8 that compute, 64 that are simulated; [a cost model](scaling.md) says the
  rest."""


@dataclass(frozen=True)
class ResultPage:
    """A page in the folder of results."""

    path: Path

    @property
    def date(self) -> str:
        return self.path.stem[:10]

    @property
    def name(self) -> str:
        """What was measured, without the date and the number of the run on that day."""
        return re.sub(r"-run-\d+$", "", self.path.stem[11:])

    @property
    def title(self) -> str:
        return self.path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")

    def origin(self) -> str:
        """Return by what command, when and on what machine, in a line."""
        text = self.path.read_text(encoding="utf-8")
        facts = re.findall(
            r"^- (?:command: |date: |machine: )?(.*)$", text.partition("\n## ")[0], re.MULTILINE
        )
        return " · ".join([*facts, f"[page]({FROM_DOCS}{self.path.name})"])

    def body(self) -> str:
        """Return what follows its head; with pictures that are there, sections lower."""
        text = self.path.read_text(encoding="utf-8").partition("\n- Python ")[2].partition("\n")[2]
        text = re.sub(r"!\[(.*?)\]\((.*?)\)", self._picture, text)
        text = re.sub(r"\]\((\d[\w-]*\.md)\)", rf"]({FROM_DOCS}\1)", text)  # to other pages of results
        return re.sub(r"^##", "####", text, flags=re.MULTILINE).strip()

    def _picture(self, found: re.Match[str]) -> str:
        file = found[2]
        return f"![{found[1]}]({FROM_DOCS}{file})" if (RESULTS_FOLDER / file).exists() else ""


def latest(kind: str) -> list[ResultPage]:
    """Return the pages of a kind, the last one of each name."""
    paths = RESULTS_FOLDER.glob(f"????-??-??-{kind}.md")
    pages = {page.name: page for page in map(ResultPage, sorted(paths, key=lambda path: path.stem))}
    return [pages[name] for name in sorted(pages) if name not in LEFT_OUT]


def section(title: str, *kinds: str) -> Iterator[str]:
    """Yield pages of some kinds whole, under a title."""
    found = [page for kind in kinds for page in latest(kind)]
    if found:
        yield f"## {title}"
    for page in found:
        yield f"### {page.title} (`{page.name}`)\n\n{page.origin()}"
        yield page.body()


def adamw() -> Iterator[str]:
    """Yield losses with AdamW, from their file."""
    found = bench_adamw.by_setting(bench_adamw.records(bench_adamw.RECORDS))
    yield "## Loss after equally many tokens, with AdamW"
    # The file's lines do not say where: the page of the same day does.
    (page,) = latest("adamw")
    command = "`python benchmarks/bench_adamw.py train …`, one line a training in `adamw.jsonl`"
    yield f"{command} · {page.origin().partition(' · ')[2]}"
    yield bench_adamw.EXPLANATION
    yield f"![loss gap against bytes]({FROM_DOCS}{GAP_PICTURE}.png)"
    for setting, of_setting in found.items():
        if bench_adamw.compared(of_setting):
            yield f"### {bench_adamw.section_title(setting)}\n\n{bench_adamw.table(setting, found)}"


def gaps() -> dict[str, tuple[float, float, float]]:
    """Return by method how many times fewer bytes than bf16, gap in percent, and half of its 95 % interval.

    Of four members with AdamW, and of at least three seeds.
    """
    every = bench_adamw.by_setting(bench_adamw.records(bench_adamw.RECORDS))
    compared = bench_adamw.compared(every[bench_adamw.Setting()])
    exact = bench_adamw.losses_by_seed(compared.pop(EXACT))
    found = {}
    for name, runs in compared.items():
        gaps = percents(bench_adamw.losses_by_seed(runs), exact)
        if len(gaps) >= MIN_SEEDS:
            found[name] = runs[0].outcome.times_fewer, fmean(gaps), half_interval(gaps)
    return dict(sorted(found.items(), key=lambda each: each[1][0]))


def advice() -> Iterator[str]:
    """Yield how right the advice was, without its long table of every prediction."""
    for page in latest("advice*"):
        yield f"## {page.title} (`{page.name}`)\n\n{page.origin()}"
        summary, table, *_, picture = page.body().split("\n\n")
        yield "\n\n".join([summary, table, picture])


def text() -> str:
    """Return the whole page."""
    parts = [
        INTRODUCTION,
        *adamw(),
        *section("On data that packages bring along", "known"),
        *section("Few bits by the size of the model", "sizes", "tried-bits"),
        *section("Loss by matrix rank", "quality"),
        *section("Time to the same loss", "time-to-loss", "steps-to-loss-adamw"),
        *section("Whole steps over a slow link", "network-*"),
        *section("On a GPU", "gpu*", "triton"),
        *section("Models averaged beside torchft", "torchft"),
        *section("Sharded models over a slow link", "sharded-*"),
        *section("The arithmetic of a step", "codec*"),
        *advice(),
        NOT_MEASURED,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def main() -> None:
    import plots  # noqa: PLC0415 - the text needs no pictures

    plots.gap_against_bytes(gaps(), RESULTS_FOLDER / GAP_PICTURE)
    PAGE.write_text(text(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
