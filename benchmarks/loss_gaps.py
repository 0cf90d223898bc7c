"""The table of loss gaps that `thinwire advise` ships, from this project's result files.

python benchmarks/loss_gaps.py    # after one of the benchmarks below measured anything new
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import bench_adamw
import bench_quality
from bench_adamw import METHODS, Averaging
from pages import RESULTS_FOLDER, STUDENT_T
from thinwire.advice import losses as losses_module
from thinwire.advice.losses import LossGap
from trainings import EXACT, percents

QUALITY_PAGES = (
    "2026-11-21-quality.md",
    "2026-11-21-quality-400-steps.md",
    "2026-11-21-quality-powersgd-4-powersgd-8-alternating.md",
    "2026-11-21-quality-powersgd-1-powersgd-4-64-workers.md",
)
# Of two seeds the interval is so wide that nothing should be advised by their mean.
MIN_SEEDS = 3
# The gaps of known.jsonl and sizes.jsonl, whose scripts are archived (README.md).
ARCHIVED = RESULTS_FOLDER / "gaps-known-sizes.json"
SHIPPED = Path(losses_module.__file__).with_name("loss_gaps.json")


def gaps() -> list[LossGap]:
    """Everything, in a fixed order."""
    found = [*of_adamw(), *of_quality_pages(), *archived()]
    return sorted(found, key=lambda gap: (gap.optimizer, gap.name, gap.members, gap.parameters, gap.source))


def text() -> str:
    """What is shipped."""
    rows = ",\n".join(f"  {json.dumps(asdict(gap), ensure_ascii=False)}" for gap in gaps())
    return f'{{"made_by": "benchmarks/loss_gaps.py", "gaps": [\n{rows}\n]}}\n'


def of_adamw() -> Iterator[LossGap]:
    """Of `bench_adamw.py`: each method at its own best rate, against exact averaging of the same seed."""
    for setting, of_setting in bench_adamw.by_setting(bench_adamw.records(bench_adamw.RECORDS)).items():
        losses = {
            name: bench_adamw.losses_by_seed(runs) for name, runs in bench_adamw.compared(of_setting).items()
        }
        parameters = round(float(setting.model.partition(" ")[0]) * 1e6)
        where = {"optimizer": setting.inner, "members": setting.members, "parameters": parameters}
        where |= {"steps": setting.steps, "source": f"benchmarks/results/{bench_adamw.RECORDS.name}"}
        for method in losses.keys() & METHODS.keys() - {EXACT}:
            made: Any = METHODS[method]
            # Only of what `attach` takes.
            if made.func is Averaging:
                code = str(made.keywords["algorithm"])
                yield from measured(code, percents(losses[method], losses.get(EXACT, {})), where)


def archived() -> Iterator[LossGap]:
    """Of trainings whose scripts are archived: of enough seeds, and only of what `attach` takes."""
    for gap in json.loads(ARCHIVED.read_text())["gaps"]:
        if gap["seeds"] >= MIN_SEEDS and not gap["name"].startswith("LocalSGD"):
            yield LossGap(**{field.name: gap[field.name] for field in fields(LossGap)})


def measured(code: str, gaps: Sequence[float], where: dict[str, Any]) -> Iterator[LossGap]:
    """What seeds tell, if there are enough."""
    if len(gaps) >= MIN_SEEDS:
        yield gap_of(code, len(gaps), fmean(gaps), stdev(gaps), where)


def of_quality_pages() -> Iterator[LossGap]:
    """Of `bench_quality.py`, from its pages: difference to exact and its standard deviation over seeds."""
    for name in QUALITY_PAGES:
        page = (RESULTS_FOLDER / name).read_text()
        size, steps, members, seeds = (
            re.search(pattern, page)[1]  # type: ignore[index]
            for pattern in (
                r"byte GPT of ([\d.]+) M parameters",
                r"standard library of this Python, (\d+) steps",
                r"(\d+) simulated workers",
                r"standard deviation over (\d+) seeds",
            )
        )
        algorithms = bench_quality.algorithms(int(steps))
        where = {"members": int(members), "parameters": round(float(size) * 1e6), "steps": int(steps)}
        for section in page.split("\n## ")[1:]:
            optimizer = section.partition("\n")[0].partition(",")[0]
            rows = re.findall(r"\| (\S+) \| [^|]+ \| ([+-][\d.]+) ± ([\d.]+) % \|", section)
            for algorithm, percent, deviation in rows:
                here = where | {"optimizer": optimizer, "source": f"benchmarks/results/{name}"}
                yield gap_of(str(algorithms[algorithm]), int(seeds), float(percent), float(deviation), here)


def gap_of(code: str, seeds: int, percent: float, deviation: float, where: dict[str, Any]) -> LossGap:
    half = STUDENT_T[seeds - 1] * deviation / math.sqrt(seeds)
    return LossGap(
        name=code,
        seeds=seeds,
        percent=round(percent, 2),
        low_percent=round(percent - half, 2),
        high_percent=round(percent + half, 2),
        **where,
    )


if __name__ == "__main__":
    SHIPPED.write_text(text(), encoding="utf-8")
    print(f"{len(gaps())} gaps in {SHIPPED}")
