"""The table of loss gaps that `thinwire advise` ships, from this project's result files.

python benchmarks/loss_gaps.py    # after one of the benchmarks below measured anything new
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

import bench_adamw
import bench_known
import bench_quality
import bench_sizes
from bench_adamw import METHODS, Averaging
from bench_known import GPT2Small, InProcess, LSTMBytes
from captured import Run
from pages import RESULTS_FOLDER, STUDENT_T
from thinwire.advice import losses as losses_module
from thinwire.advice.losses import LossGap
from trainings import EXACT, PER_STEP, percents

QUALITY_PAGES = (
    "2026-11-21-quality.md",
    "2026-11-21-quality-400-steps.md",
    "2026-11-21-quality-powersgd-4-powersgd-8-alternating.md",
    "2026-11-21-quality-powersgd-1-powersgd-4-64-workers.md",
)
# Of two seeds the interval is so wide that nothing should be advised by their mean.
MIN_SEEDS = 3
# Of `bench_sizes.py`: other shapes of a size, and an LSTM whose exact trainings ended 7 % apart.
LEFT_OUT = (*bench_sizes.SHAPES, "LSTM, 1.2 M")
SHIPPED = Path(losses_module.__file__).with_name("loss_gaps.json")


def gaps() -> list[LossGap]:
    """Everything, in a fixed order."""
    found = [*of_adamw(), *of_quality_pages(), *of_known(), *of_sizes()]
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


def of_known() -> Iterator[LossGap]:
    """Of `bench_known.py`: losses. Other tasks have accuracies, or are of too few seeds."""
    tasks: dict[str, InProcess] = {bench_known.LSTM: LSTMBytes(), bench_known.GPT2_SMALL: GPT2Small()}
    for name, task in tasks.items():
        # On no device it takes no memory.
        with torch.device("meta"):
            parameters = sum(each.numel() for each in task.model().parameters())
        losses: dict[tuple[str, str, int], dict[int, float]] = {}
        for run in bench_known.records(bench_known.RECORDS):
            if run.task == name:
                losses.setdefault((run.method, run.optimizer, run.steps), {})[run.seed] = run.score
        for (method, optimizer, steps), by_seed in losses.items():
            where = {"optimizer": optimizer, "members": task.members, "parameters": parameters}
            where |= {"steps": steps, "source": f"benchmarks/results/{bench_known.RECORDS.name}"}
            if method != EXACT and method in PER_STEP:
                gaps = percents(by_seed, losses.get((EXACT, optimizer, steps), {}))
                where |= {"is_recurrent": name == bench_known.LSTM}
                yield from measured(str(PER_STEP[method]), gaps, where)


def of_sizes() -> Iterator[LossGap]:
    """Of `bench_sizes.py`: what the library has, at the usual rate and batch, of enough seeds."""
    by_seed: dict[tuple[str, int, int], dict[str, dict[int, float]]] = {}
    for record in bench_sizes.records(bench_sizes.RECORDS):
        run = record.run
        is_usual = run.times_rate == 1 and run.windows == Run.windows and run.model not in LEFT_OUT
        if is_usual and not run.is_tuning:
            of_setting = by_seed.setdefault((run.model, run.steps, run.members), {})
            of_setting.setdefault(run.method, {})[run.seed] = record.outcome.loss
    for (model, steps, members), losses in by_seed.items():
        with torch.device("meta"):
            parameters = sum(each.numel() for each in bench_sizes.MODELS[model].new().parameters())
        where = {"optimizer": "AdamW", "members": members, "parameters": parameters, "steps": steps}
        where |= {"source": f"benchmarks/results/{bench_sizes.RECORDS.name}"}
        for method in losses.keys() & bench_sizes.METHODS.keys() - {EXACT}:
            gaps = percents(losses[method], losses.get(EXACT, {}))
            if len(gaps) >= MIN_SEEDS:
                yield from measured(str(bench_sizes.METHODS[method]), gaps, where)


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
