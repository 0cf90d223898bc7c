"""Whole steps of several ways to train, in `thinwire lab`: for `bench_network.py` and `bench_sharded.py`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from in_lab import UNSHAPED, leave_job, run_in_lab
from pages import markdown_table
from progress import Kept, Progress
from thinwire.demo.gpt import GPT, SIZES, GPTConfig, next_byte_loss, sample_batch
from thinwire.lab import BITS, number_with_unit
from trainings import text
from turns import Contender, Measured, take_turns, turns_done

# For a GPU: GPT-2 small's blocks, with fewer words, since its head is not tied to its embedding.
ALL_SIZES = SIZES | {
    "gpt2": GPTConfig(layers=12, heads=12, width=768, context_length=1024, vocabulary=25_000)
}
BATCH = 4
COMPUTE_ONLY = "compute only"
IN_STEP = "compute only, in step"
# Parts of a step that sends nothing: before them a link can't have been busy.
FORWARD, FIRST_BUCKET = "forward pass", "until the first bucket"
SILENT = (COMPUTE_ONLY, IN_STEP, FORWARD, FIRST_BUCKET)
OVERLAPPED = "overlapped"  # in the names of those that send during the next forward pass, too
# DiLoCo's, ours and torchft's.
EVERY_STEPS = 30

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class Trainer:
    """A contender's model, and a step of it.

    Attributes:
        period_steps: Steps after which what it does begins again.
    """

    period_steps = 1
    model: nn.Module
    optimizer: Optimizer

    def step(self, batch: Batch) -> float | None:
        torch.autograd.backward(loss_of(self.model, batch))
        self.update()
        return None

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss; on a GPU by bf16 autocast."""
    device = next(model.parameters()).device
    inputs, targets = (part.to(device) for part in batch)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return next_byte_loss(model, inputs, targets)


@dataclass(frozen=True)
class Setting:
    """Hosts and links of one run."""

    hosts: int
    rate: str
    processes: int = 1
    latency: str = "0ms"
    device: str = "cpu"

    def __str__(self) -> str:
        several = f" of {self.processes} processes" if self.processes > 1 else ""
        late = "" if self.latency == "0ms" else f", round trips of {self.latency}"
        shared = "" if self.device == "cpu" else " on one GPU"
        return f"{self.hosts} hosts{several}{shared}, {self.rate}{late}"


def parser_of(
    description: str | None, contenders: Collection[str], rates: Sequence[str], rounds: int
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rates", nargs="+", default=list(rates))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=3, help="of each contender in a round")
    parser.add_argument("--size", choices=sorted(ALL_SIZES), default="medium")
    parser.add_argument("--contenders", choices=tuple(contenders), nargs="+", help="some instead of all")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    return parser


def start_work() -> None:
    """Join the processes of the lab."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)


def batches(size: str) -> Callable[[], Batch]:
    """Return what draws this process's next batch."""
    draws = torch.Generator().manual_seed(dist.get_rank())
    length = ALL_SIZES[size].context_length
    return lambda: sample_batch(text().train, batch_size=BATCH, context_length=length, generator=draws)


def take_part(
    arguments: argparse.Namespace, trainers: Mapping[str, Trainer], kept: Kept, untimed_steps: int
) -> NoReturn:
    """On each host: time contenders in turns; the first process tells what was found."""
    found = take_turns(
        {name: Contender(trainer.step, trainer.period_steps) for name, trainer in trainers.items()},
        batches(arguments.size),
        rounds=arguments.rounds,
        steps=arguments.steps,
        kept=kept,
        setting=arguments.setting,
        untimed_steps=untimed_steps,
    )
    leave_job({name: asdict(measured) for name, measured in found.items()}, arguments.work)


class Runs:
    """Runs contenders in the lab, one setting after the other, and tells how far all of it is.

    Args:
        script: Of the benchmark.
        arguments: As parsed.
        names: Of the contenders.
        settings: Of all runs.
        kept: Has the turns of a run that was interrupted.
        whole: The contenders that send 16 or 32 bits of every gradient.
        packages: A folder with more packages to import.
    """

    def __init__(
        self,
        script: str,
        arguments: argparse.Namespace,
        names: Sequence[str],
        settings: Sequence[Setting],
        kept: Kept,
        whole: Collection[str],
        packages: str = "",
    ) -> None:
        self.arguments, self.names, self.settings = arguments, names, settings
        self._script, self._kept, self._whole, self._packages = script, kept, whole, packages
        self._before = self._turns_done()
        turns = len(settings) * len(names) * arguments.rounds
        self.progress = Progress(turns - self._before, kept=kept.path)
        self.num_parameters = sum(p.numel() for p in GPT(ALL_SIZES[arguments.size]).parameters())

    def _key(self, setting: Setting) -> str:
        """Return what tells turns from those of other settings."""
        return f"{setting}, {self.arguments.size}, {self.arguments.steps} steps"

    def _turns_done(self) -> int:
        settings = [self._key(setting) for setting in self.settings]
        return turns_done(self._kept, settings, self.names, self.arguments.rounds)

    def measured(self, setting: Setting) -> dict[str, Measured]:
        """Run all contenders; check that each sends about what it should."""
        script = [self._script, f"--rounds={self.arguments.rounds}", f"--steps={self.arguments.steps}"]
        script += [f"--size={self.arguments.size}", f"--setting={self._key(setting)}"]
        if setting.device != "cpu":
            script.append(f"--device={setting.device}")
        found = run_in_lab(
            setting.hosts,
            setting.rate,
            [*script, "--contenders", *self.names],
            processes=setting.processes,
            latency=setting.latency,
            packages=self._packages,
            meanwhile=lambda: self.progress.show(self._turns_done() - self._before, setting),
        )
        results = {name: Measured(**result) for name, result in found.items()}
        exact_bytes = 4 * self.num_parameters * 2 * (setting.hosts - 1) / setting.hosts
        for name, result in results.items():
            sends_whole = result.sent_bytes > exact_bytes / 3
            assert sends_whole == (name in self._whole), f"{name}: {result.sent_bytes} bytes of {exact_bytes}"
            assert result.sent_bytes or name in SILENT, f"{name} sent nothing"
        return results

    def compared(
        self, settings: Sequence[Setting], baseline: str, called: str
    ) -> tuple[list[str], dict[str, dict[str, Measured]]]:
        """Return a section for each setting, and what was measured by rate."""
        sections, by_rate = [], {}
        for setting in settings:
            results = by_rate[setting.rate] = self.measured(setting)
            others = 100 * median(share for each in results.values() for share in each.others_share)
            busy = f"Other processes took {others:.0f} % of the processors meanwhile, median of all turns."
            sections.append(f"## {setting}\n\n{table(results, baseline, called, setting.rate)}\n\n{busy}")
            print(sections[-1], flush=True)
        return sections, by_rate


def bound_ms(name: str, results: Mapping[str, Measured], rate: str) -> float | None:
    """Return what a step takes at least if its bytes are on the link from its first bucket on.

    If a step must have all gradients before it ends, the forward pass comes before those; else only the part
    of the backward pass does that makes the first bucket. None if it was not measured, or nothing is sent.
    """
    if FIRST_BUCKET not in results or rate == UNSHAPED or name in SILENT:
        return None
    first, forward = (median(results[part].step_ms) for part in (FIRST_BUCKET, FORWARD))
    before = first - forward if name.endswith(OVERLAPPED) else first
    sending = 8e3 * results[name].sent_bytes / number_with_unit(rate, BITS, 1, 1e12, "a rate")
    return max(before + sending, median(results[COMPUTE_ONLY].step_ms))


def table(results: Mapping[str, Measured], baseline: str, called: str, rate: str) -> str:
    alone, compared = median(results[COMPUTE_ONLY].step_ms), results[baseline]
    rows = []
    for name, result in results.items():
        ms, sent = median(result.step_ms), result.sent_bytes
        fewer = f"{compared.sent_bytes / sent:.1f}" if sent > compared.sent_bytes / 1e3 else ""
        faster = f"{median(compared.step_ms) / ms:.2f}"
        least = f"{min(result.step_ms):.0f}"
        bound = bound_ms(name, results, rate)
        bounds = ["", ""] if bound is None else [f"{bound:.0f}", f"{ms / bound:.2f}"]
        rows.append(
            [name, f"{ms:.0f}", least, f"{ms / alone:.2f}", *bounds, faster, f"{sent / 1e6:.3f}", fewer]
        )
    header = ["", "ms per step, median", "minimum", "× compute only", "bound, ms", "× bound"]
    header += [f"faster than {called}"]
    return markdown_table([*header, "MB that left host 0, per step", f"fewer than {called}"], rows)
