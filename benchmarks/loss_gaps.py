"""The table of loss gaps that `thinwire advise` ships: from this project's result files, and from papers.

python benchmarks/loss_gaps.py    # after one of the benchmarks below measured anything new
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import bench_adamw
import bench_quality
from bench_adamw import METHODS, Averaging, WarmedUp
from pages import RESULTS_FOLDER, STUDENT_T
from thinwire.advice import loss
from thinwire.advice.loss import LossGap
from thinwire.algorithms import AllReduce
from trainings import EXACT, percents

QUALITY_PAGES = (
    "2026-11-21-quality.md",
    "2026-11-21-quality-400-steps.md",
    "2026-11-21-quality-powersgd-4-powersgd-8-alternating.md",
    "2026-11-21-quality-powersgd-1-powersgd-4-64-workers.md",
)
# Of two seeds the interval is so wide that nothing should be advised by their mean.
MIN_SEEDS = 3
# One training of so large a model is enough for a warning, until there are several seeds.
LARGE_PARAMETERS = 5_000_000
# Of known.jsonl and sizes.jsonl, whose scripts are archived (README.md).
ARCHIVED = RESULTS_FOLDER / "gaps-known-sizes.json"
SHIPPED = Path(loss.__file__).with_name("loss_gaps.json")

# Charles et al., "Communication-Efficient Language Model Training Scales Reliably and Robustly: Scaling Laws
# for DiLoCo" (arXiv 2503.09799): AdamW, every 30 steps, outer Nesterov momentum 0.9, both sides tuned,
# changes uncompressed. Percent, by parameters, then by members.
SCALING_LAWS = {
    35_000_000: {2: 0.7, 4: 2.0, 8: 3.9},
    90_000_000: {2: 0.5, 4: 1.5, 8: 3.1},
    180_000_000: {2: 0.3, 4: 1.1, 8: 2.3},
    335_000_000: {2: 0.1, 4: 0.9, 8: 2.0},
    550_000_000: {2: 0.2, 4: 0.7, 8: 1.7},
    1_300_000_000: {2: 0.2, 4: 0.5, 8: 1.3},
    2_400_000_000: {2: -0.1, 4: 0.3, 8: 1.1},
    4_000_000_000: {2: -0.2, 4: 0.2},
    10_000_000_000: {2: -0.2, 4: 0.3},
}
# Thérien et al., "MuLoCo" (arXiv 2505.23725): DiLoCo against data-parallel AdamW, 16 members, every 30 steps.
MULOCO_SIXTEEN_MEMBERS = {
    150_000_000: 5.3,
    416_000_000: 4.7,
    914_000_000: 3.4,
    1_760_000_000: 3.6,
    3_100_000_000: 3.3,
    15_000_000_000: 1.0,
}


def gaps() -> list[LossGap]:
    """Everything, in a fixed order."""
    found = [*of_adamw(), *of_quality_pages(), *archived(), *published()]
    of_seeds = [gap for gap in found if gap.seeds >= MIN_SEEDS]
    return sorted(
        (gap for gap in found if not (gap.is_single and any(covers(other, gap) for other in of_seeds))),
        key=lambda gap: (gap.is_published, gap.optimizer, gap.name, gap.members, gap.parameters, gap.source),
    )


def covers(gap: LossGap, single: LossGap) -> bool:
    """Whether several seeds replace a single training: of the same, and at least half as large a model."""
    is_large = 2 * gap.parameters > single.parameters
    return is_large and (gap.name, gap.optimizer) == (single.name, single.optimizer)


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
            # How long a warm-up is to be depends on the run's steps, which advice does not know.
            if made.func is not WarmedUp:
                is_simple = made.func is Averaging
                code = str(made.keywords["algorithm"]) if is_simple else code_of(made.keywords["adapter"])
                yield from measured(code, percents(losses[method], losses.get(EXACT, {})), where)


def code_of(adapter: partial[Any]) -> str:
    """An adapter with its settings, as it is written in code."""
    settings = {name: value for name, value in adapter.keywords.items() if value is not None}
    if settings.get("algorithm") == AllReduce():
        del settings["algorithm"]
    func: type = adapter.func  # type: ignore[assignment]
    return f"{func.__name__}({', '.join(f'{name}={value}' for name, value in settings.items())})"


def archived() -> Iterator[LossGap]:
    """Of trainings whose scripts are archived."""
    for gap in json.loads(ARCHIVED.read_text())["gaps"]:
        yield LossGap(**gap)


def measured(code: str, gaps: Sequence[float], where: dict[str, Any]) -> Iterator[LossGap]:
    """What seeds tell, if there are enough."""
    if len(gaps) >= (1 if where["parameters"] >= LARGE_PARAMETERS else MIN_SEEDS):
        yield gap_of(code, len(gaps), fmean(gaps), stdev(gaps) if len(gaps) > 1 else None, where)


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


def gap_of(code: str, seeds: int, percent: float, deviation: float | None, where: dict[str, Any]) -> LossGap:
    low = high = None
    if deviation is not None:
        half = STUDENT_T[seeds - 1] * deviation / math.sqrt(seeds)
        low, high = round(percent - half, 2), round(percent + half, 2)
    return LossGap(
        name=code,
        seeds=seeds,
        percent=round(percent, 2),
        low_percent=low,
        high_percent=high,
        is_published=False,
        **where,
    )


def published() -> Iterator[LossGap]:
    """Of papers, for what `advise` prices."""
    laws = "arXiv 2503.09799"
    for parameters, by_members in SCALING_LAWS.items():
        for members, percent in by_members.items():
            yield of_paper(members, parameters, percent, laws)
    for parameters, percent in MULOCO_SIXTEEN_MEMBERS.items():
        yield of_paper(16, parameters, percent, "arXiv 2505.23725")


def of_paper(members: int, parameters: int, percent: float, source: str) -> LossGap:
    return LossGap(
        "DiLoCo(every_steps=30)", "AdamW", members, parameters, None, 1, percent, None, None, source, True
    )


if __name__ == "__main__":
    SHIPPED.write_text(text(), encoding="utf-8")
    print(f"{len(gaps())} gaps in {SHIPPED}")
