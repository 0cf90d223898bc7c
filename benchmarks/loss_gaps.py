"""The table of loss gaps that `thinwire advise` ships: from this project's result files, and from papers.

python benchmarks/loss_gaps.py    # after bench_adamw, bench_quality or bench_known measured anything new
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

import torch

import bench_adamw
import bench_known
import bench_quality
from bench_adamw import EXACT, METHODS, RECORDS, STUDENT_T, Averaging, Record, Setting, WarmedUp
from bench_known import GPT2Small, InProcess, LSTMBytes
from known_methods import LOCAL, PER_STEP
from thinwire.advice import loss
from thinwire.advice.loss import LossGap
from thinwire.algorithms import AllReduce
from thinwire.localsgd import DiLoCo, LocalSGD

RESULTS = Path(__file__).parent / "results"
QUALITY_PAGES = (
    "2026-11-21-quality.md",
    "2026-11-21-quality-400-steps.md",
    "2026-11-21-quality-powersgd-4-powersgd-8-alternating.md",
    "2026-11-21-quality-powersgd-1-powersgd-4-64-workers.md",
)
# Of two seeds the interval is so wide that nothing should be advised by their mean.
MIN_SEEDS = 3
# Of such models there are single trainings only, and advice takes them for a warning.
LARGE_PARAMETERS = 5_000_000
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
    found = [*of_adamw(), *of_quality_pages(), *of_known(), *published()]
    return sorted(
        found,
        key=lambda gap: (gap.is_published, gap.optimizer, gap.name, gap.members, gap.parameters, gap.source),
    )


def text() -> str:
    """What is shipped."""
    rows = ",\n".join(f"  {json.dumps(asdict(gap), ensure_ascii=False)}" for gap in gaps())
    return f'{{"made_by": "benchmarks/loss_gaps.py", "gaps": [\n{rows}\n]}}\n'


def of_adamw() -> Iterator[LossGap]:
    """Of `bench_adamw.py`: each method at its own best rate, against exact averaging of the same seed."""
    by_setting: dict[Setting, list[Record]] = {}
    for record in bench_adamw.records(RECORDS):
        by_setting.setdefault(record.setting, []).append(record)
    for setting, of_setting in by_setting.items():
        by_method = bench_adamw.compared(of_setting)
        exact = {each.lane.seed: each.outcome.loss for each in by_method.pop(EXACT, [])}
        for method, runs in by_method.items():
            # How long a warm-up is to be depends on the run's steps, which advice does not know.
            if method in METHODS and METHODS[method].func is WarmedUp:  # type: ignore[attr-defined]
                continue
            percents = [
                100 * (each.outcome.loss / exact[each.lane.seed] - 1)
                for each in runs
                if each.lane.seed in exact
            ]
            parameters = round(float(setting.model.partition(" ")[0]) * 1e6)
            if method in METHODS and len(percents) >= (1 if parameters >= LARGE_PARAMETERS else MIN_SEEDS):
                yield gap_of(
                    code_of(method),
                    setting.inner,
                    setting.members,
                    parameters,
                    setting.steps,
                    len(percents),
                    fmean(percents),
                    stdev(percents) if len(percents) > 1 else None,
                    f"benchmarks/results/{RECORDS.name}",
                )


def code_of(method: str) -> str:
    """A method of `bench_adamw.py` as it is written in code."""
    options = METHODS[method].keywords  # type: ignore[attr-defined]
    if METHODS[method].func is Averaging:  # type: ignore[attr-defined]
        return str(options["algorithm"])
    return code_of_front(options["front"])


def code_of_front(front: partial[LocalSGD] | partial[DiLoCo]) -> str:
    """A front with its settings, as it is written in code."""
    settings = {name: value for name, value in front.keywords.items() if value is not None}
    if settings.get("algorithm") == AllReduce():
        del settings["algorithm"]
    func: type = front.func  # type: ignore[assignment]
    return f"{func.__name__}({', '.join(f'{name}={value}' for name, value in settings.items())})"


def of_known() -> Iterator[LossGap]:
    """Of `bench_known.py`: losses. Other tasks have accuracies, or are of too few seeds."""
    tasks: dict[str, InProcess] = {bench_known.LSTM: LSTMBytes(), bench_known.GPT2_SMALL: GPT2Small()}
    for name, task in tasks.items():
        # On no device it takes no memory.
        with torch.device("meta"):
            parameters = sum(each.numel() for each in task.model().parameters())
        losses: dict[tuple[str, str, int], dict[int, float]] = {}
        for record in bench_known.records(bench_known.RECORDS):
            if record.task == name:
                losses.setdefault((record.method, record.optimizer, record.steps), {})[record.seed] = (
                    record.score
                )
        for (method, optimizer, steps), by_seed in losses.items():
            exact = losses.get((EXACT, optimizer, steps), {})
            percents = [100 * (by_seed[seed] / exact[seed] - 1) for seed in by_seed.keys() & exact.keys()]
            if method != EXACT and len(percents) >= (1 if parameters >= LARGE_PARAMETERS else MIN_SEEDS):
                yield gap_of(
                    str(PER_STEP[method]) if method in PER_STEP else code_of_front(LOCAL[method]),
                    optimizer,
                    task.members,
                    parameters,
                    steps,
                    len(percents),
                    fmean(percents),
                    stdev(percents) if len(percents) > 1 else None,
                    f"benchmarks/results/{bench_known.RECORDS.name}",
                    is_recurrent=name == bench_known.LSTM,
                )


def of_quality_pages() -> Iterator[LossGap]:
    """Of `bench_quality.py`, from its pages: difference to exact and its standard deviation over seeds."""
    for name in QUALITY_PAGES:
        page = (RESULTS / name).read_text()
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
        for section in page.split("\n## ")[1:]:
            optimizer = section.partition("\n")[0].partition(",")[0]
            rows = re.findall(r"\| (\S+) \| [^|]+ \| ([+-][\d.]+) ± ([\d.]+) % \|", section)
            for algorithm, percent, deviation in rows:
                yield gap_of(
                    str(algorithms[algorithm]),
                    optimizer,
                    int(members),
                    round(float(size) * 1e6),
                    int(steps),
                    int(seeds),
                    float(percent),
                    float(deviation),
                    f"benchmarks/results/{name}",
                )


def gap_of(
    code: str,
    optimizer: str,
    members: int,
    parameters: int,
    steps: int,
    seeds: int,
    percent: float,
    deviation: float | None,
    source: str,
    *,
    is_recurrent: bool = False,
) -> LossGap:
    half = None if deviation is None else STUDENT_T[seeds - 1] * deviation / math.sqrt(seeds)
    return LossGap(
        code,
        optimizer,
        members,
        parameters,
        steps,
        seeds,
        round(percent, 2),
        None if half is None else round(percent - half, 2),
        None if half is None else round(percent + half, 2),
        source,
        is_published=False,
        is_recurrent=is_recurrent,
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
