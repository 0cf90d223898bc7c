"""Whole training steps over a slow network: Thinwire's beside PyTorch's and epfml's, in `thinwire lab`.

Every contender trains a model of its own, the same at the start, on real text. They take turns within one
run, a few steps each and in another order every time, so that a busy machine slows all of them: trust the
ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock
from torch.nn.parallel import DistributedDataParallel

import peers
import plots
import thinwire
from in_lab import UNSHAPED, interface_sent_bytes, leave_job, run_in_lab
from pages import markdown_table, page, save, save_json
from thinwire.algorithms import Algorithm
from thinwire.demo.model import GPT, SIZES, next_byte_loss
from thinwire.demo.text import load_text, sample_batch

BATCH = 4
# PyTorch's PowerSGD averages whole gradients for at least two steps, and DDP then rebuilds its buckets.
UNTIMED_STEPS = 4
COMPUTE_ONLY = "compute only"
IN_STEP = "compute only, in step"
BASELINE = "PyTorch fp16 hook"
RATES = ("100mbit", "1gbit", UNSHAPED)


class Trainer:
    """A contender's model, and a step of it. This one sends nothing."""

    bucket_cap_mb = 25

    def __init__(self, size: str) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(
            GPT(SIZES[size]), bucket_cap_mb=self.bucket_cap_mb, gradient_as_bucket_view=True
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.attach()

    def attach(self) -> None:
        """Make the model average its gradients in the contender's way."""

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with self.model.no_sync():
            torch.autograd.backward(next_byte_loss(self.model, inputs, targets))
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class InStep(Trainer):
    """Sends nothing, but hosts wait for each other: what synchronous training takes at least.

    Hosts that share a machine then want its memory at the same moments.
    """

    def update(self) -> None:
        dist.barrier()
        super().update()


class Synced(Trainer):
    """PyTorch's own all-reduce."""

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        torch.autograd.backward(next_byte_loss(self.model, inputs, targets))
        self.update()


class StockCast(Synced):
    def attach(self) -> None:
        self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)


class StockPowerSGD(Synced):
    bucket_cap_mb = 1_000  # with more than one bucket it hangs on Gloo

    def attach(self) -> None:
        state = stock.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        self.model.register_comm_hook(state, stock.powerSGD_hook)


class Epfml(Trainer):
    """As its own page says: no DDP averaging, no zero_grad; the residual stays in the gradients."""

    def attach(self) -> None:
        self.powersgd: Any = import_module("powersgd")
        config = self.powersgd.Config(rank=4, num_iters_per_step=2, start_compressing_after_num_steps=0)
        self.aggregator = self.powersgd.PowerSGD(list(self.model.parameters()), config)

    def update(self) -> None:
        self.powersgd.optimizer_step(self.optimizer, self.aggregator)


def ours(algorithm: Algorithm) -> Callable[[str], Trainer]:
    class Ours(Synced):
        def attach(self) -> None:
            thinwire.attach(self.model, algorithm)

    return Ours


CONTENDERS: dict[str, Callable[[str], Trainer]] = {
    COMPUTE_ONLY: Trainer,
    IN_STEP: InStep,
    "PyTorch exact": Synced,
    BASELINE: StockCast,
    "PyTorch PowerSGD 4, one bucket": StockPowerSGD,
    "epfml PowerSGD 4": Epfml,
    "AllReduce()": ours(thinwire.AllReduce()),
    'Cast("bf16")': ours(thinwire.Cast("bf16")),
    "PowerSGD(matrix_rank=1)": ours(thinwire.PowerSGD(matrix_rank=1)),
    "PowerSGD(matrix_rank=4)": ours(thinwire.PowerSGD(matrix_rank=4)),
    "PowerSGD(matrix_rank=4, alternating=True)": ours(thinwire.PowerSGD(matrix_rank=4, alternating=True)),
}


@dataclass(frozen=True)
class Setting:
    """Hosts and links of one run."""

    hosts: int
    rate: str

    def __str__(self) -> str:
        return f"{self.hosts} hosts, {self.rate}"


@dataclass(frozen=True)
class Result:
    """What one host measured of one contender."""

    step_ms: list[float]
    sent_bytes: float


def work(rounds: int, steps: int, size: str, out: Path) -> None:
    """On each host: time every contender."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    text = load_text()
    draws = torch.Generator().manual_seed(dist.get_rank())
    trainers = {name: make(size) for name, make in CONTENDERS.items()}
    step_ms: dict[str, list[float]] = defaultdict(list)
    sent_bytes: dict[str, int] = defaultdict(int)
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(trainers), len(trainers)):  # the same on every host
            trainer = trainers[name]
            dist.barrier()
            before = interface_sent_bytes()
            for _ in range(steps if number else UNTIMED_STEPS):
                inputs, targets = sample_batch(
                    text.train,
                    batch_size=BATCH,
                    context_length=SIZES[size].context_length,
                    generator=draws,
                )
                start = time.perf_counter()
                trainer.step(inputs, targets)
                if number:
                    step_ms[name].append(1e3 * (time.perf_counter() - start))
            if number:
                sent_bytes[name] += interface_sent_bytes() - before
    if dist.get_rank() == 0:
        told = {
            name: {"step_ms": step_ms[name], "sent_bytes": sent_bytes[name] / len(step_ms[name])}
            for name in trainers
        }
        out.write_text(json.dumps(told))
    leave_job()


def measured(setting: Setting, arguments: argparse.Namespace, packages: str) -> dict[str, Result]:
    """Run all contenders in the lab."""
    with TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        script = [__file__, f"--work={out}", f"--rounds={arguments.rounds}"]
        script += [f"--steps={arguments.steps}", f"--size={arguments.size}"]
        run_in_lab(setting.hosts, setting.rate, script, packages=packages)
        results = {name: Result(**result) for name, result in json.loads(out.read_text()).items()}
    for name, result in results.items():
        compressed = result.sent_bytes < results["PyTorch exact"].sent_bytes / 5
        assert compressed == ("PowerSGD" in name or name in (COMPUTE_ONLY, IN_STEP)), (
            f"{name}: {result.sent_bytes} bytes"
        )
    return results


def table(results: dict[str, Result]) -> str:
    alone = median(results[COMPUTE_ONLY].step_ms)
    baseline = median(results[BASELINE].step_ms)
    rows = [
        [
            name,
            f"{median(result.step_ms):.0f}",
            f"{min(result.step_ms):.0f}",
            f"{median(result.step_ms) / alone:.2f}",
            f"{baseline / median(result.step_ms):.2f}",
            f"{result.sent_bytes / 1e6:.2f}",
        ]
        for name, result in results.items()
    ]
    header = ["", "ms per step, median", "minimum", "× compute only", "faster than fp16", "MB sent per step"]
    return markdown_table(header, rows)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2])
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="of each contender in a round")
    parser.add_argument("--size", choices=sorted(SIZES), default="medium")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parsed_arguments()
    if arguments.work is not None:
        work(arguments.rounds, arguments.steps, arguments.size, arguments.work)
        return
    with peers.installed(peers.EPFML) as packages:
        compare(arguments, packages)


def compare(arguments: argparse.Namespace, packages: str) -> None:
    num_parameters = sum(p.numel() for p in GPT(SIZES[arguments.size]).parameters())
    explanation = (
        f"A GPT of {num_parameters / 1e6:.1f} M parameters, {BATCH} sequences a host and step, SGD with "
        f"momentum, Gloo, `gradient_as_bucket_view`, one thread a process. {arguments.rounds} rounds of "
        f"{arguments.steps} steps each. MB are those of host 0's interface. The hosts share one machine's "
        "processors."
    )
    for hosts in arguments.hosts:
        by_rate, sections = {}, [explanation]
        for rate in arguments.rates:
            setting = Setting(hosts, rate)
            print(f"{setting} …", flush=True)
            by_rate[rate] = measured(setting, arguments, packages)
            sections.append(f"## {setting}\n\n{table(by_rate[rate])}")
            print(sections[-1], flush=True)
        name = f"{hosts}-hosts"
        raw = [
            asdict(Setting(hosts, rate)) | {"algorithm": algorithm} | asdict(result)
            for rate, results in by_rate.items()
            for algorithm, result in results.items()
        ]
        save_json(raw, "network", name)
        medians = {
            rate: {algorithm: median(each.step_ms) for algorithm, each in results.items()}
            for rate, results in by_rate.items()
        }
        picture = plots.step_time(medians, name.replace("-", " "), baselines=(COMPUTE_ONLY, IN_STEP))[0]
        sections.append(f"![step time against link rate]({picture})")
        print(save(page("Whole steps over a slow network", *sections), "network", name))


if __name__ == "__main__":
    main()
