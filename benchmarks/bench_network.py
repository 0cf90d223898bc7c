"""Whole training steps over a slow network: Thinwire's beside PyTorch's and epfml's, in `thinwire lab`.

Every contender trains a model of its own, the same at the start, on real text. They take turns within one
run, a few steps each and in another order every time, so that a busy machine slows all of them: trust the
ratios. Of those that average models every so many steps a turn is that many, and a step their mean.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import peers
import plots
import thinwire
from in_lab import UNSHAPED, leave_job, run_in_lab
from pages import markdown_table, page, save, save_json
from progress import Kept, Progress
from thinwire.algorithms import Algorithm
from thinwire.demo.model import GPT, SIZES, load_text, next_byte_loss, sample_batch
from torchft_diloco import fragments, torchft_diloco
from turns import Contender, Measured, take_turns, turns_done

BATCH = 4
COMPUTE_ONLY = "compute only"
IN_STEP = "compute only, in step"
EXACT = "PyTorch exact"
BASELINE = "PyTorch fp16 hook"
# Over slow links, more of what is sent in few bits can be sent before the backward pass ends.
SMALL_BUCKET_MB = 4
RATES = ("100mbit", "1gbit", UNSHAPED)
TORCHFT_LATE = "torchft DiLoCo, 3 fragments, 5 steps late"
# DiLoCo's, ours and torchft's.
EVERY_STEPS, OUTER_LR, OUTER_MOMENTUM, MIX = 30, 0.7, 0.9, 0.5

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Averaging: TypeAlias = Callable[[GPT, Optimizer], AbstractContextManager[object]]


class Trainer:
    """A contender's model, and a step of it. This one sends nothing.

    Attributes:
        period_steps: Steps after which what it does begins again.
    """

    bucket_cap_mb = 25
    period_steps = 1

    def __init__(self, size: str) -> None:
        torch.manual_seed(0)
        self.network = GPT(SIZES[size])
        self.model = DistributedDataParallel(
            self.network, bucket_cap_mb=self.bucket_cap_mb, gradient_as_bucket_view=True
        )
        self.optimizer = SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.attach()

    def attach(self) -> None:
        """Make the model average its gradients in the contender's way."""

    def step(self, batch: Batch) -> None:
        with self.model.no_sync():
            torch.autograd.backward(next_byte_loss(self.model, *batch))
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

    def step(self, batch: Batch) -> None:
        torch.autograd.backward(next_byte_loss(self.model, *batch))
        self.update()


class StockCast(Synced):
    def attach(self) -> None:
        self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)


class SmallBuckets(StockCast):
    bucket_cap_mb = SMALL_BUCKET_MB


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


class Local(Trainer):
    """Steps of its own on every host, within a context that averages models; sends when its optimizer steps.

    Args:
        size: Of the model.
        averaging: Makes that context of model and optimizer.
    """

    period_steps = EVERY_STEPS

    def __init__(self, size: str, averaging: Averaging) -> None:
        torch.manual_seed(0)
        self.network = GPT(SIZES[size])
        self.optimizer = SGD(self.network.parameters(), lr=0.05, momentum=0.9)
        # Kept: a generator's context that nobody holds is closed, and then nothing is averaged.
        self.context = averaging(self.network, self.optimizer)
        self.context.__enter__()

    def step(self, batch: Batch) -> None:
        torch.autograd.backward(next_byte_loss(self.network, *batch))
        self.update()


def ours(
    algorithm: Algorithm, *, bucket_cap_mb: int = Trainer.bucket_cap_mb, machines: bool = True
) -> Callable[[str], Trainer]:
    class Ours(Synced):
        def attach(self) -> None:
            thinwire.attach(self.model, algorithm, machines=machines)

    Ours.bucket_cap_mb = bucket_cap_mb
    return Ours


def local(averaging: Averaging) -> Callable[[str], Trainer]:
    return lambda size: Local(size, averaging)


def diloco(algorithm: Algorithm, num_fragments: int = 1, delay_steps: int = 0) -> Callable[[str], Trainer]:
    return local(
        lambda model, optimizer: thinwire.DiLoCo(
            model,
            optimizer,
            every_steps=EVERY_STEPS,
            algorithm=algorithm,
            outer=thinwire.Nesterov(lr=OUTER_LR, momentum=OUTER_MOMENTUM),
            streaming=thinwire.Streaming(
                fragments=num_fragments, delay_steps=delay_steps, local_weight=MIX if delay_steps else None
            ),
        )
    )


def torchft(num_fragments: int = 1, delay_steps: int = 0) -> Callable[[str], Trainer]:
    return local(
        lambda model, optimizer: torchft_diloco(
            model,
            optimizer,
            fragments(model, num_fragments),
            every_steps=EVERY_STEPS,
            delay_steps=delay_steps,
            mix=MIX if delay_steps else 0.0,
            outer_lr=OUTER_LR,
            outer_momentum=OUTER_MOMENTUM,
        )
    )


def few_entries(model: nn.Module, optimizer: Optimizer) -> thinwire.LocalSGD:
    """Return what sends a 64th of each change, five steps at a time."""
    return thinwire.LocalSGD(model, optimizer, every_steps=5, algorithm=thinwire.TopK())


CONTENDERS: dict[str, Callable[[str], Trainer]] = {
    COMPUTE_ONLY: Trainer,
    IN_STEP: InStep,
    EXACT: Synced,
    BASELINE: StockCast,
    f"{BASELINE}, small buckets": SmallBuckets,
    "PyTorch PowerSGD 4, one bucket": StockPowerSGD,
    "epfml PowerSGD 4": Epfml,
    "AllReduce()": ours(thinwire.AllReduce()),
    'Cast("bf16")': ours(thinwire.Cast("bf16")),
    "PowerSGD(matrix_rank=1)": ours(thinwire.PowerSGD(matrix_rank=1)),
    "PowerSGD(matrix_rank=4)": ours(thinwire.PowerSGD(matrix_rank=4)),
    "PowerSGD(matrix_rank=4, alternating=True)": ours(thinwire.PowerSGD(matrix_rank=4, alternating=True)),
    "Quantize(bits=8)": ours(thinwire.Quantize(bits=8)),
    "Quantize(bits=4)": ours(thinwire.Quantize(bits=4)),
    "Quantize(bits=2)": ours(thinwire.Quantize(bits=2)),
    "Quantize(bits=4), small buckets": ours(thinwire.Quantize(bits=4), bucket_cap_mb=SMALL_BUCKET_MB),
    "Quantize(bits=2), small buckets": ours(thinwire.Quantize(bits=2), bucket_cap_mb=SMALL_BUCKET_MB),
    "Quantize(bits=4), buckets of 2 MB": ours(thinwire.Quantize(bits=4), bucket_cap_mb=2),
    "Quantize(bits=2), buckets of 2 MB": ours(thinwire.Quantize(bits=2), bucket_cap_mb=2),
    "Quantize(bits=4), buckets of 8 MB": ours(thinwire.Quantize(bits=4), bucket_cap_mb=8),
    "Quantize(bits=2), buckets of 8 MB": ours(thinwire.Quantize(bits=2), bucket_cap_mb=8),
    "Quantize(bits=2), buckets of 16 MB": ours(thinwire.Quantize(bits=2), bucket_cap_mb=16),
    # Of hosts of several processes: each sends by itself.
    'Cast("bf16"), flat': ours(thinwire.Cast("bf16"), machines=False),
    "Quantize(bits=4), flat": ours(thinwire.Quantize(bits=4), machines=False),
    "Quantize(bits=2), flat": ours(thinwire.Quantize(bits=2), machines=False),
    "PowerSGD(matrix_rank=4), flat": ours(thinwire.PowerSGD(matrix_rank=4), machines=False),
    "LocalSGD every 5, TopK": local(few_entries),
    "DiLoCo, exact": diloco(thinwire.AllReduce()),
    "DiLoCo, 4 bits": diloco(thinwire.Quantize(bits=4)),
    "DiLoCo, 4 bits, 3 fragments, 5 steps late": diloco(thinwire.Quantize(bits=4), 3, 5),
    "torchft DiLoCo": torchft(),
    TORCHFT_LATE: torchft(3, 5),
}
# Those that send 16 or 32 bits of every gradient.
WHOLE = (EXACT, BASELINE, f"{BASELINE}, small buckets", "AllReduce()", 'Cast("bf16")', 'Cast("bf16"), flat')
PEERS = {"epfml PowerSGD 4": "powersgd", "torchft DiLoCo": "torchft", TORCHFT_LATE: "torchft"}


@dataclass(frozen=True)
class Setting:
    """Hosts and links of one run."""

    hosts: int
    rate: str
    processes: int = 1

    def __str__(self) -> str:
        several = f" of {self.processes} processes" if self.processes > 1 else ""
        return f"{self.hosts} hosts{several}, {self.rate}"


KEPT = Kept("network")


def work(arguments: argparse.Namespace) -> None:
    """On each host: time contenders."""
    names, size, out = arguments.contenders, arguments.size, arguments.work
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    text = load_text()
    draws = torch.Generator().manual_seed(dist.get_rank())
    length = SIZES[size].context_length
    trainers = {name: CONTENDERS[name](size) for name in names}
    found = take_turns(
        {name: Contender(trainer.step, trainer.period_steps) for name, trainer in trainers.items()},
        lambda: sample_batch(text.train, batch_size=BATCH, context_length=length, generator=draws),
        rounds=arguments.rounds,
        steps=arguments.steps,
        kept=KEPT,
        setting=arguments.setting,
    )
    if dist.get_rank() == 0:
        out.write_text(json.dumps({name: asdict(measured) for name, measured in found.items()}))
    leave_job()


def kept_as(setting: Setting, arguments: argparse.Namespace) -> str:
    """Return what tells turns from those of other settings."""
    return f"{setting}, {arguments.size}, {arguments.steps} steps"


def measured(
    setting: Setting,
    names: Sequence[str],
    arguments: argparse.Namespace,
    packages: str,
    show: Callable[[object], None],
) -> dict[str, Measured]:
    """Run contenders in the lab."""
    with TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        script = [__file__, f"--work={out}", f"--rounds={arguments.rounds}"]
        script += [f"--steps={arguments.steps}", f"--size={arguments.size}", "--contenders", *names]
        script += [f"--setting={kept_as(setting, arguments)}"]
        run_in_lab(
            setting.hosts,
            setting.rate,
            script,
            processes=setting.processes,
            packages=packages,
            meanwhile=lambda: show(setting),
        )
        results = {name: Measured(**result) for name, result in json.loads(out.read_text()).items()}
    num_parameters = sum(p.numel() for p in GPT(SIZES[arguments.size]).parameters())
    exact_bytes = 4 * num_parameters * 2 * (setting.hosts - 1) / setting.hosts
    for name, result in results.items():
        is_whole = name in WHOLE
        sends_whole = result.sent_bytes > exact_bytes / 3
        assert sends_whole == is_whole, f"{name}: {result.sent_bytes} bytes, exact {exact_bytes}"
        assert result.sent_bytes or name in (COMPUTE_ONLY, IN_STEP), f"{name} sent nothing"
    return results


def table(results: dict[str, Measured]) -> str:
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
    parser.add_argument("--processes-per-machine", type=int, default=1)
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="of each contender in a round")
    parser.add_argument("--size", choices=sorted(SIZES), default="medium")
    parser.add_argument("--contenders", choices=tuple(CONTENDERS), nargs="+", help="some instead of all")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parsed_arguments()
    if arguments.work is not None:
        work(arguments)
        return
    names = [COMPUTE_ONLY, BASELINE]
    names = [name for name in CONTENDERS if name in (*names, *(arguments.contenders or CONTENDERS))]
    wanted = {PEERS[name] for name in names if name in PEERS}
    with peers.installed(wanted) as installed:
        names = [name for name in names if PEERS.get(name) not in installed.missing]
        settings = [
            kept_as(Setting(hosts, rate, arguments.processes_per_machine), arguments)
            for hosts in arguments.hosts
            for rate in arguments.rates
        ]
        before = turns_done(KEPT, settings, names, arguments.rounds)
        with Progress(len(settings) * len(names) * arguments.rounds - before, kept=KEPT.path) as progress:
            compare(
                names,
                arguments,
                installed.path,
                lambda now: progress.show(turns_done(KEPT, settings, names, arguments.rounds) - before, now),
            )
    KEPT.finish()


def compare(
    names: Sequence[str], arguments: argparse.Namespace, packages: str, show: Callable[[object], None]
) -> None:
    num_parameters = sum(p.numel() for p in GPT(SIZES[arguments.size]).parameters())
    explanation = (
        f"A GPT of {num_parameters / 1e6:.1f} M parameters, {BATCH} sequences a process and step, SGD with "
        f"momentum, Gloo, `gradient_as_bucket_view`, one thread a process. {arguments.rounds} rounds of "
        f"{arguments.steps} steps each; a turn of local SGD and DiLoCo is {EVERY_STEPS} steps, with one "
        f"averaging of each fragment. Buckets are of DDP's 25 MB, small ones of {SMALL_BUCKET_MB}, unless "
        "their size is named. MB are those of host 0's interface. The hosts share one machine's processors."
    )
    processes = arguments.processes_per_machine
    for hosts in arguments.hosts:
        by_rate, sections = {}, [explanation]
        for rate in arguments.rates:
            setting = Setting(hosts, rate, processes)
            by_rate[rate] = measured(setting, names, arguments, packages, show)
            others = median(share for each in by_rate[rate].values() for share in each.others_share)
            busy = (
                f"Other processes took {100 * others:.0f} % of the processors meanwhile, median of all turns."
            )
            sections.append(f"## {setting}\n\n{table(by_rate[rate])}\n\n{busy}")
            print(sections[-1], flush=True)
        name = f"{hosts}-hosts" if processes == 1 else f"{hosts}-hosts-of-{processes}"
        raw = [
            asdict(Setting(hosts, rate, processes)) | {"algorithm": algorithm} | asdict(result)
            for rate, results in by_rate.items()
            for algorithm, result in results.items()
        ]
        save_json(raw, "network", name)
        medians = {
            rate: {algorithm: median(each.step_ms) for algorithm, each in results.items()}
            for rate, results in by_rate.items()
        }
        baselines = [each for each in (COMPUTE_ONLY, IN_STEP) if each in names]
        picture = plots.step_time(medians, name.replace("-", " "), baselines=baselines)[0]
        sections.append(f"![step time against link rate]({picture})")
        print(save(page("Whole steps over a slow network", *sections), "network", name))


if __name__ == "__main__":
    main()
