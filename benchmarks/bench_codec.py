"""The arithmetic of one step of PowerSGD: Thinwire's beside PyTorch's, epfml's and one copy of the gradients.

One process and one bucket, so that communication is nothing; fp32, error feedback and warm start on.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from statistics import median, quantiles
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket, HashStore
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import peers
from models import SHAPE_SETS, Shape
from pages import markdown_table, page, save
from progress import Progress
from thinwire import PowerSGD, Quantize
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.comm import ProcessGroupTransport
from thinwire.kernels import dispatch
from thinwire.plan import ParameterSpec
from thinwire.sync.engine import Engine

# PyTorch's hook averages whole gradients for at least two steps, then allocates in its first compressed one.
UNCOMPRESSED_STEPS = 2
UNTIMED_STEPS = UNCOMPRESSED_STEPS + 2
SEED = 0


@dataclass(frozen=True)
class OneBucket:
    """Stands for DDP's `GradBucket`, the only bucket of a model."""

    shapes: Sequence[Shape]
    flat: torch.Tensor

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        parts = self.flat.split_with_sizes([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Contender(Protocol):
    """Something that is done to a bucket of gradients once per step."""

    def step(self) -> None:
        """What is timed."""

    def compression_ratio(self) -> float:
        """Uncompressed over compressed, warm-up included where it counts that."""

    def memory_bytes(self) -> int:
        """Kept from step to step, beyond the gradients."""


class Thinwire:
    """One of our algorithms as DDP drives it, with Numba's passes or by PyTorch's products only."""

    def __init__(self, bucket: OneBucket, algorithm: Algorithm, *, compiled: bool) -> None:
        self.flat = bucket.flat
        self.backends = (dispatch.NUMBA, dispatch.TORCH) if compiled else (dispatch.TORCH,)
        gradients = enumerate(bucket.gradients())
        self.specs = tuple(ParameterSpec.of(f"parameter {index}", each) for index, each in gradients)
        self.engine = Engine(algorithm, ProcessGroupTransport(), self.specs)

    def step(self) -> None:
        dispatch.backends = self.backends
        self.engine.average([(self.specs, self.flat)])

    def compression_ratio(self) -> float:
        return self.engine.reporter.stats().compression_ratio

    def memory_bytes(self) -> int:
        slots = self.engine.state.memory.slots.values()
        return storage_bytes([tensor for tensors in slots for tensor in tensors.values()])


class PyTorch:
    """PyTorch's `powerSGD_hook`."""

    def __init__(self, bucket: OneBucket, matrix_rank: int) -> None:
        self.bucket = cast(GradBucket, bucket)
        self.state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=matrix_rank,
            start_powerSGD_iter=UNCOMPRESSED_STEPS,
        )

    def step(self) -> None:
        powerSGD_hook(self.state, self.bucket).wait()

    def compression_ratio(self) -> float:
        state = self.state
        return state.total_numel_before_compression / max(1, state.total_numel_after_compression)

    def memory_bytes(self) -> int:
        kept = (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict)
        return storage_bytes(tensor for tensors in kept for tensor in tensors.values())


class Epfml:
    """The reference implementation. The residual stays in the gradients: the backward pass adds to it."""

    def __init__(self, bucket: OneBucket, matrix_rank: int) -> None:
        powersgd: Any = import_module("powersgd")
        self.gradients = bucket.gradients()
        config = powersgd.Config(rank=matrix_rank, num_iters_per_step=2, start_compressing_after_num_steps=0)
        self.aggregator = powersgd.PowerSGD(self.gradients, config)

    def step(self) -> None:
        self.aggregator.aggregate(self.gradients)

    def compression_ratio(self) -> float:
        return float(self.aggregator._powersgd.compression_rate)

    def memory_bytes(self) -> int:
        inner = self.aggregator._powersgd
        residual = 4 * sum(gradient.numel() for gradient in self.gradients)
        return storage_bytes([inner._ps_buffer, inner._qs_buffer]) + residual


def ours(bucket: OneBucket, rank: int, of_rank: Callable[[int], Algorithm], compiled: bool) -> Contender:
    return Thinwire(bucket, of_rank(rank), compiled=compiled)


# By the matrix rank; few bits, which are only there by name, have none.
OURS: dict[str, Callable[[int], Algorithm]] = {
    "Thinwire": lambda matrix_rank: PowerSGD(matrix_rank=matrix_rank),
    "batched": lambda matrix_rank: BatchedPowerSGD(matrix_rank=matrix_rank),
    **{f"{bits} bits": lambda _, bits=bits: Quantize(bits=bits) for bits in (8, 6, 5, 4, 3, 2, 1)},  # type: ignore[misc]
}
# Not with PyTorch's last: a process that ends while its callbacks are being torn down is aborted.
CONTENDERS: dict[str, Callable[[OneBucket, int], Contender]] = {
    "PyTorch": PyTorch,
    "epfml": Epfml,
    **{
        f"{name}{', Numba' if compiled else ''}": partial(ours, of_rank=of_rank, compiled=compiled)
        for name, of_rank in OURS.items()
        for compiled in (False, True)
    },
}
BY_NAME_ONLY = tuple(name for name in CONTENDERS if "bits" in name)
LAYERWISE = {"batched": "Thinwire", "batched, Numba": "Thinwire, Numba"}


@dataclass(frozen=True)
class Measurement:
    """One shape set at one matrix rank; by contender, in the order of the table."""

    shape_set: str
    gradient_bytes: int
    matrix_rank: int
    copy_ms: Sequence[float]
    step_ms: Mapping[str, Sequence[float]]
    memory_bytes: Mapping[str, int]

    @property
    def label(self) -> str:
        return f"{self.shape_set}, {self.gradient_bytes / 4e6:.1f} M"


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Memory that the tensors keep alive: several may be views of one storage."""
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def measure(
    shape_set: str, matrix_rank: int, device: torch.device, num_rounds: int, progress: Progress, before: int
) -> Measurement:
    """Time the contenders in turn, each on the same fresh gradients every time."""
    shapes = list(SHAPE_SETS[shape_set]())
    torch.manual_seed(SEED)
    fresh = torch.randn(sum(map(math.prod, shapes)), device=device)
    bucket = OneBucket(shapes, torch.empty_like(fresh))
    target = torch.empty_like(fresh)
    contenders = {name: make(bucket, matrix_rank) for name, make in CONTENDERS.items()}
    # One copy of the gradients is the unit of everything that touches them all.
    steps = [lambda: target.copy_(bucket.flat), *(contender.step for contender in contenders.values())]
    for _ in range(UNTIMED_STEPS):
        for step in steps:
            step_ms(step, bucket, fresh)
    rounds = []
    for number in range(num_rounds):
        progress.show(before + number, f"{shape_set}, matrix rank {matrix_rank}")
        rounds.append([step_ms(step, bucket, fresh) for step in steps])
    for name, contender in contenders.items():
        assert contender.compression_ratio() > 3.5, f"{name} compressed {contender.compression_ratio()} times"
    copy_ms, *contenders_ms = zip(*rounds, strict=True)
    return Measurement(
        shape_set=shape_set,
        gradient_bytes=fresh.numel() * fresh.element_size(),
        matrix_rank=matrix_rank,
        copy_ms=copy_ms,
        step_ms=dict(zip(contenders, contenders_ms, strict=True)),
        memory_bytes={name: contender.memory_bytes() for name, contender in contenders.items()},
    )


def step_ms(step: Callable[[], object], bucket: OneBucket, fresh: torch.Tensor) -> float:
    """Refill the gradients, then time one step."""
    bucket.flat.copy_(fresh)
    synchronize(fresh.device)
    start_seconds = time.perf_counter()
    step()
    synchronize(fresh.device)
    return 1000 * (time.perf_counter() - start_seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(
    measurements: Sequence[Measurement], header: Sequence[str], cells: Callable[[Measurement], Iterable[str]]
) -> str:
    rows = [[each.label, str(each.matrix_rank), *cells(each)] for each in measurements]
    return markdown_table(["gradients", "matrix rank", *header], rows)


def ratio_table(measurements: Sequence[Measurement]) -> str:
    """Ratios of medians."""
    ours = [name for name in CONTENDERS if name.startswith("Thinwire") or name in BY_NAME_ONLY]
    others = [name for name in CONTENDERS if name in ("PyTorch", "epfml")]
    pairs = [(other, mine) for mine in ours for other in others] + [(mine, "copy") for mine in ours]

    def cells(m: Measurement) -> list[str]:
        medians = {name: median(ms) for name, ms in {"copy": m.copy_ms, **m.step_ms}.items()}
        return [f"{medians[a] / medians[b]:.1f}" for a, b in pairs]

    return table(measurements, [f"{a} / {b}" for a, b in pairs], cells)


def batched_table(measurements: Sequence[Measurement]) -> str:
    """Ratios round by round, of times that were taken one after the other."""
    pairs = [(name, other) for name, other in LAYERWISE.items() if {name, other} <= CONTENDERS.keys()]

    def cell(m: Measurement, name: str, other: str) -> str:
        ratios = [a / b for a, b in zip(m.step_ms[name], m.step_ms[other], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        return f"{middle:.2f} ({low:.2f} to {high:.2f})"

    header = [f"{a} / {b}" for a, b in pairs]
    return table(measurements, header, lambda m: [cell(m, *pair) for pair in pairs])


def result_page(measurements: Sequence[Measurement], num_rounds: int, device: str) -> str:
    return page(
        "One step of PowerSGD, without communication",
        f"On {device}, one thread, fp32, error feedback and warm start on, one process, one bucket with the "
        f"whole model; {num_rounds} rounds of all contenders in turn. epfml makes two of its iterations, "
        "which are one of PyTorch's and ours. Milliseconds per step, minimum / median:",
        table(
            measurements,
            ["copy, ms", *[f"{name}, ms" for name in CONTENDERS]],
            lambda m: [f"{min(ms):.0f} / {median(ms):.0f}" for ms in (m.copy_ms, *m.step_ms.values())],
        ),
        "Ratios of the medians:",
        ratio_table(measurements),
        "The batched variant beside layer by layer, in the same round, median (quartiles) of the ratios:",
        batched_table(measurements),
        "Memory kept from step to step (error, factors), in % of the gradients:",
        table(
            measurements,
            list(CONTENDERS),
            lambda m: [f"{100 * kept / m.gradient_bytes:.1f} %" for kept in m.memory_bytes.values()],
        ),
    )


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each contender")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", choices=tuple(SHAPE_SETS), help="one shape set instead of all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4], help="matrix ranks")
    parser.add_argument("--contenders", choices=tuple(CONTENDERS), nargs="+", help="some instead of all")
    parser.add_argument("--save", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    arguments = parsed_arguments()
    for name in tuple(CONTENDERS):
        is_served = "Numba" not in name or (find_spec("numba") is not None and arguments.device == "cpu")
        is_wanted = name in arguments.contenders if arguments.contenders else name not in BY_NAME_ONLY
        if not (is_served and is_wanted):
            del CONTENDERS[name]
    with peers.epfml(is_wanted="epfml" in CONTENDERS) as folder:
        if folder:
            sys.path.append(folder)
        else:
            CONTENDERS.pop("epfml", None)
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    backend = "gloo" if arguments.device == "cpu" else "nccl"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    parts = list(product([arguments.only] if arguments.only else SHAPE_SETS, arguments.ranks))
    processor, rounds = torch.device(arguments.device), arguments.rounds
    with torch.no_grad(), Progress(len(parts) * rounds) as progress:
        measurements = [
            measure(shape_set, matrix_rank, processor, rounds, progress, number * rounds)
            for number, (shape_set, matrix_rank) in enumerate(parts)
        ]
    dist.destroy_process_group()
    text = result_page(measurements, arguments.rounds, arguments.device)
    print(text)
    if arguments.save:
        some = "-".join(arguments.contenders or ()).lower().replace(", ", "-") or None
        device = None if arguments.device == "cpu" else arguments.device
        print(f"saved as {save(text, 'codec', device, arguments.only, some)}")


if __name__ == "__main__":
    main()
