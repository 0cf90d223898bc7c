"""Whole training steps over a slow network: Thinwire's beside PyTorch's and epfml's, in `thinwire lab`.

Every contender trains a model of its own, the same at the start, on real text. They take turns within one
run, a few steps each and in another order every time, so that a busy machine slows all of them: trust the
ratios. Of those that average models every so many steps a turn is that many, and a step their mean.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any, NoReturn, TypeAlias

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
import timeline
import whole_steps
from in_lab import UNSHAPED, leave_job, run_in_lab
from pages import page, save, save_json
from progress import Kept
from thinwire.algorithms import Algorithm
from thinwire.demo.gpt import GPT
from torchft_diloco import OUTER_LR, OUTER_MOMENTUM, fragments, torchft_diloco
from turns import UNTIMED_STEPS
from whole_steps import (
    ALL_SIZES,
    BATCH,
    COMPUTE_ONLY,
    EVERY_STEPS,
    FIRST_BUCKET,
    FORWARD,
    IN_STEP,
    OVERLAPPED,
    Batch,
    Runs,
    Setting,
    loss_of,
)

EXACT = "PyTorch exact"
BASELINE = "PyTorch fp16 hook"
EPFML = "epfml PowerSGD 4"
# Over slow links, more of what is sent in few bits can be sent before the backward pass ends.
SMALL_BUCKET_MB = 4
OVERLAPPED_STEPS = 20  # of a turn: its last one has no forward pass behind it
RATES = ("100mbit", "1gbit", UNSHAPED)
MIX = 0.5
KEPT = Kept("network")

NewTrainer: TypeAlias = Callable[[GPT], whole_steps.Trainer]
Averaging: TypeAlias = Callable[[GPT, Optimizer], AbstractContextManager[object]]


def new_network(size: str) -> GPT:
    """The same at the start for all."""
    torch.manual_seed(0)
    return GPT(ALL_SIZES[size])


class Synced(whole_steps.Trainer):
    """PyTorch's own all-reduce."""

    bucket_cap_mb = 25

    def __init__(self, network: GPT) -> None:
        self.model: DistributedDataParallel = DistributedDataParallel(
            network, bucket_cap_mb=self.bucket_cap_mb, gradient_as_bucket_view=True
        )
        self.optimizer = SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.attach()

    def attach(self) -> None:
        """Make the model average its gradients in the contender's way."""


class Alone(Synced):
    """Sends nothing."""

    def step(self, batch: Batch) -> float | None:
        with self.model.no_sync():
            torch.autograd.backward(loss_of(self.model, batch))
        self.update()
        return None


class FirstBucket(Synced):
    """Sends nothing; what counts is the time until DDP has filled its first bucket."""

    bucket_cap_mb = SMALL_BUCKET_MB

    def attach(self) -> None:
        self.model.register_comm_hook(self, note_bucket)

    def step(self, batch: Batch) -> float | None:
        self.first: float | None = None
        start = time.perf_counter()
        super().step(batch)
        assert self.first is not None
        return 1e3 * (self.first - start)


def note_bucket(trainer, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations
    trainer.first = trainer.first or time.perf_counter()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Forward(Alone):
    """Sends nothing; what counts is the forward pass."""

    def step(self, batch: Batch) -> float | None:
        start = time.perf_counter()
        loss_of(self.model, batch)
        return 1e3 * (time.perf_counter() - start)


class InStep(Alone):
    """Sends nothing, but hosts wait for each other: what synchronous training takes at least.

    Hosts that share a machine then want its memory at the same moments.
    """

    def update(self) -> None:
        dist.barrier()
        super().update()


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


class Epfml(Alone):
    """As its own page says: no DDP averaging, no zero_grad; the residual stays in the gradients."""

    def attach(self) -> None:
        self.powersgd: Any = import_module("powersgd")
        config = self.powersgd.Config(rank=4, num_iters_per_step=2, start_compressing_after_num_steps=0)
        self.aggregator = self.powersgd.PowerSGD(list(self.model.parameters()), config)

    def update(self) -> None:
        self.powersgd.optimizer_step(self.optimizer, self.aggregator)


class Local(whole_steps.Trainer):
    """Steps of its own on every host, in a context that averages models; it sends as its optimizer steps."""

    period_steps = EVERY_STEPS

    def __init__(self, network: GPT, averaging: Averaging) -> None:
        self.model: GPT = network
        self.optimizer = SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        # Kept: a generator's context that nobody holds is closed, and then nothing is averaged.
        self.context = averaging(self.model, self.optimizer)
        self.context.__enter__()


def ours(
    algorithm: Algorithm, *, bucket_cap_mb: int = Synced.bucket_cap_mb, machines: bool = True
) -> NewTrainer:
    class Ours(Synced):
        def attach(self) -> None:
            thinwire.attach(self.model, algorithm, machines=machines)

    Ours.bucket_cap_mb = bucket_cap_mb
    return Ours


def overlapped(algorithm: Algorithm, *, bucket_cap_mb: int) -> NewTrainer:
    class Overlapped(Synced):
        period_steps = OVERLAPPED_STEPS

        def attach(self) -> None:
            self.sync = thinwire.overlap_forward(self.model, algorithm, self.optimizer)
            self.steps = 0

        def step(self, batch: Batch) -> float | None:
            super().step(batch)
            self.steps += 1
            if self.steps % self.period_steps == 0:  # so that a turn has all that it sends
                self.sync.flush()
            return None

    Overlapped.bucket_cap_mb = bucket_cap_mb
    return Overlapped


def local(averaging: Averaging) -> NewTrainer:
    return lambda network: Local(network, averaging)


def diloco(algorithm: Algorithm, num_fragments: int = 1, delay_steps: int = 0) -> NewTrainer:
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


def torchft(num_fragments: int = 1, delay_steps: int = 0) -> NewTrainer:
    return local(
        lambda model, optimizer: torchft_diloco(
            model,
            optimizer,
            fragments(model, num_fragments),
            every_steps=EVERY_STEPS,
            delay_steps=delay_steps,
            mix=MIX if delay_steps else 0.0,
        )
    )


def few_entries(model: nn.Module, optimizer: Optimizer) -> thinwire.LocalSGD:
    """Return what sends a 64th of each change, five steps at a time."""
    return thinwire.LocalSGD(model, optimizer, every_steps=5, algorithm=thinwire.TopK())


CONTENDERS: dict[str, NewTrainer] = {
    COMPUTE_ONLY: Alone,
    FORWARD: Forward,
    FIRST_BUCKET: FirstBucket,
    IN_STEP: InStep,
    EXACT: Synced,
    BASELINE: StockCast,
    f"{BASELINE}, small buckets": SmallBuckets,
    "PyTorch PowerSGD 4, one bucket": StockPowerSGD,
    EPFML: Epfml,
    "AllReduce()": ours(thinwire.AllReduce()),
    'Cast("bf16")': ours(thinwire.Cast("bf16")),
    "PowerSGD(matrix_rank=1)": ours(thinwire.PowerSGD(matrix_rank=1)),
    "PowerSGD(matrix_rank=4)": ours(thinwire.PowerSGD(matrix_rank=4)),
    "PowerSGD(matrix_rank=4, alternating=True)": ours(thinwire.PowerSGD(matrix_rank=4, alternating=True)),
    **{f"Quantize(bits={bits})": ours(thinwire.Quantize(bits=bits)) for bits in (8, 4, 2)},
    **{
        f"Quantize(bits={bits}), {words}": ours(thinwire.Quantize(bits=bits), bucket_cap_mb=bucket_cap_mb)
        for words, bucket_cap_mb, some_bits in (
            ("small buckets", SMALL_BUCKET_MB, (6, 4, 2)),
            ("buckets of 2 MB", 2, (4, 2)),
            ("buckets of 8 MB", 8, (4, 2)),
            ("buckets of 16 MB", 16, (2,)),
        )
        for bits in some_bits
    },
    **{
        f"Quantize(bits={bits}), {words}, {OVERLAPPED}": overlapped(
            thinwire.Quantize(bits=bits), bucket_cap_mb=bucket_cap_mb
        )
        for words, bucket_cap_mb in (("small buckets", SMALL_BUCKET_MB), ("buckets of 2 MB", 2))
        for bits in (4, 2)
    },
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
    "torchft DiLoCo, 3 fragments, 5 steps late": torchft(3, 5),
}
# Those that send 16 or 32 bits of every gradient.
WHOLE = (EXACT, BASELINE, f"{BASELINE}, small buckets", "AllReduce()", 'Cast("bf16")', 'Cast("bf16"), flat')


def work(arguments: argparse.Namespace) -> NoReturn:
    """On each host: time contenders."""
    whole_steps.start_work()
    trainers = {
        name: CONTENDERS[name](new_network(arguments.size).to(arguments.device))
        for name in arguments.contenders
    }
    if arguments.timeline:
        (trainer,) = trainers.values()
        picture = timeline.take(trainer, whole_steps.batches(arguments.size), arguments.setting)
        of_hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_hosts, asdict(picture))
        leave_job(of_hosts, arguments.work)
    whole_steps.take_part(arguments, trainers, KEPT, UNTIMED_STEPS)


def main() -> None:
    parser = whole_steps.parser_of(__doc__, CONTENDERS, RATES, rounds=4)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2])
    parser.add_argument("--processes-per-machine", type=int, default=1)
    parser.add_argument("--latency", default="0ms", help="a round trip between hosts, such as 20ms")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="all hosts share one GPU")
    parser.add_argument("--timeline", action="store_true", help="draw one step of each contender instead")
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(arguments)
    chosen = (COMPUTE_ONLY, FORWARD, FIRST_BUCKET, BASELINE, *(arguments.contenders or CONTENDERS))
    names = [name for name in CONTENDERS if name in chosen]
    if arguments.timeline:
        draw_timelines(arguments, arguments.contenders or ["Quantize(bits=4), small buckets"])
        return
    if find_spec("torchft") is None:
        print("SKIPPED: torchft is not installed, so it is not measured")
        names = [name for name in names if not name.startswith("torchft")]
    with peers.epfml(is_wanted=EPFML in names) as packages:
        names = [name for name in names if packages or name != EPFML]
        processes = arguments.processes_per_machine
        by_hosts = {
            hosts: [
                Setting(hosts, rate, processes, arguments.latency, arguments.device)
                for rate in arguments.rates
            ]
            for hosts in arguments.hosts
        }
        every = [setting for settings in by_hosts.values() for setting in settings]
        runs = Runs(__file__, arguments, names, every, KEPT, WHOLE, packages)
        with runs.progress:
            for hosts, settings in by_hosts.items():
                several = f"-of-{processes}" if processes > 1 else ""
                late = "" if arguments.latency == "0ms" else f"-{arguments.latency}"
                gpu = "" if arguments.device == "cpu" else "-gpu"
                compare(runs, settings, f"{hosts}-hosts{several}{late}{gpu}")
    KEPT.finish()


def draw_timelines(arguments: argparse.Namespace, names: list[str]) -> None:
    """Write a page that shows one step of each contender, host by host."""
    sections = []
    for rate in arguments.rates:
        sections.append(f"## {rate}, round trips of {arguments.latency}")
        for name in names:
            script = [__file__, "--timeline", f"--setting={rate}", f"--size={arguments.size}"]
            found = run_in_lab(
                arguments.hosts[0], rate, [*script, f"--contenders={name}"], latency=arguments.latency
            )
            pictures = {f"host {rank}": timeline.Picture(**picture) for rank, picture in enumerate(found)}
            parts = ("timeline", arguments.latency, rate, "".join(filter(str.isalnum, name)))
            picture = timeline.drawn(pictures, f"{name}, {rate}", *parts)
            sections += [timeline.section(name, pictures), f"![a step]({picture})"]
    text = page("Where the time of a step goes", timeline.EXPLANATION, *sections)
    print(save(text, "timeline", arguments.latency))


def compare(runs: Runs, settings: list[Setting], name: str) -> None:
    explanation = (
        f"A GPT of {runs.num_parameters / 1e6:.1f} M parameters, {BATCH} sequences a process and step, SGD "
        "with momentum, Gloo, `gradient_as_bucket_view`, one thread a process. "
        f"{runs.arguments.rounds} rounds of {runs.arguments.steps} steps each; a turn of local SGD and "
        f"DiLoCo is {EVERY_STEPS} steps, with one averaging of each fragment. Buckets are of DDP's 25 MB, "
        f"small ones of {SMALL_BUCKET_MB}, unless their size is named. MB are those of host 0's interface. "
        "The hosts share one machine's processors."
    )
    if settings[0].device == "cuda":
        explanation += f" And they share one {torch.cuda.get_device_name()}, with bf16 autocast."
    sections, by_rate = runs.compared(settings, BASELINE, "fp16")
    raw = [
        asdict(setting) | {"algorithm": algorithm} | asdict(result)
        for setting in settings
        for algorithm, result in by_rate[setting.rate].items()
    ]
    save_json(raw, "network", name)
    medians = {
        rate: {algorithm: median(each.step_ms) for algorithm, each in results.items()}
        for rate, results in by_rate.items()
    }
    baselines = [each for each in (COMPUTE_ONLY, IN_STEP) if each in runs.names]
    picture = plots.step_time(medians, name.replace("-", " "), baselines=baselines)[0]
    sections.append(f"![step time against link rate]({picture})")
    print(save(page("Whole steps over a slow network", explanation, *sections), "network", name))


if __name__ == "__main__":
    main()
