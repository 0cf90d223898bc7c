"""The arithmetic of one step of PowerSGD: Thinwire's beside PyTorch's own hook and one copy of the gradients.

One process and one bucket, so that communication is nothing; fp32, error feedback and warm start on.
"""

from __future__ import annotations

import argparse
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket, HashStore
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from report import markdown_table, page, save
from shapes import SHAPE_SETS, Shape
from thinwire import GradientSync, PowerSGD
from thinwire.channel import ProcessGroupChannel
from thinwire.plan import ParameterSpec

MATRIX_RANKS = (1, 4)
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


class Contender(ABC):
    """Something that is done to a bucket of gradients once a step."""

    @abstractmethod
    def step(self) -> None:
        """What is timed."""

    @abstractmethod
    def compression_ratio(self) -> float:
        """Uncompressed over compressed, warm-up included where it counts that."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Kept from step to step, beyond the gradients."""


class Copy(Contender):
    """One `copy_` of the gradients: the unit of everything that touches them all."""

    def __init__(self, bucket: OneBucket) -> None:
        self.flat = bucket.flat
        self.target = torch.empty_like(bucket.flat)

    def step(self) -> None:
        self.target.copy_(self.flat)

    def compression_ratio(self) -> float:
        return 1.0

    def memory_bytes(self) -> int:
        return 0


class Thinwire(Contender):
    """`thinwire.PowerSGD` as DDP drives it."""

    def __init__(self, bucket: OneBucket, matrix_rank: int) -> None:
        self.flat = bucket.flat
        gradients = enumerate(bucket.gradients())
        self.specs = tuple(ParameterSpec.of(f"parameter {index}", each) for index, each in gradients)
        self.sync = GradientSync(PowerSGD(matrix_rank=matrix_rank), ProcessGroupChannel(), self.specs)

    def step(self) -> None:
        self.sync.start(self.specs, self.flat)
        self.sync.finish()

    def compression_ratio(self) -> float:
        return self.sync.stats().compression_ratio

    def memory_bytes(self) -> int:
        memory = self.sync._memory
        kept = [*memory.error.values(), *memory.factor.values(), *memory.sent.values()]
        return storage_bytes(kept)


class PyTorch(Contender):
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


@dataclass(frozen=True)
class Measurement:
    """One shape set at one matrix rank."""

    shape_set: str
    gradient_bytes: int
    matrix_rank: int
    copy_ms: Sequence[float]
    ours_ms: Sequence[float]
    pytorch_ms: Sequence[float]
    ours_memory_bytes: int
    pytorch_memory_bytes: int

    @property
    def label(self) -> str:
        return f"{self.shape_set}, {self.gradient_bytes / 4e6:.1f} M"


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Memory that the tensors keep alive: several may be views of one storage."""
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def measure(shape_set: str, matrix_rank: int, device: torch.device, num_rounds: int) -> Measurement:
    """Time the contenders in turn, each on the same fresh gradients every time."""
    shapes = list(SHAPE_SETS[shape_set]())
    torch.manual_seed(SEED)
    fresh = torch.randn(sum(map(math.prod, shapes)), device=device)
    bucket = OneBucket(shapes, torch.empty_like(fresh))
    ours, pytorch = Thinwire(bucket, matrix_rank), PyTorch(bucket, matrix_rank)
    # Not with PyTorch's last: a process that ends while its callbacks are being torn down is aborted.
    contenders = [Copy(bucket), pytorch, ours]
    for _ in range(UNTIMED_STEPS):
        for contender in contenders:
            step_ms(contender, bucket, fresh)
    rounds = [[step_ms(contender, bucket, fresh) for contender in contenders] for _ in range(num_rounds)]
    assert ours.compression_ratio() > 10, f"Thinwire compressed {ours.compression_ratio()} times"
    assert pytorch.compression_ratio() > 10, f"PyTorch's hook compressed {pytorch.compression_ratio()} times"
    copy_ms, pytorch_ms, ours_ms = zip(*rounds, strict=True)
    return Measurement(
        shape_set=shape_set,
        gradient_bytes=fresh.numel() * fresh.element_size(),
        matrix_rank=matrix_rank,
        copy_ms=copy_ms,
        ours_ms=ours_ms,
        pytorch_ms=pytorch_ms,
        ours_memory_bytes=ours.memory_bytes(),
        pytorch_memory_bytes=pytorch.memory_bytes(),
    )


def step_ms(contender: Contender, bucket: OneBucket, fresh: torch.Tensor) -> float:
    """Refill the gradients, then time one step."""
    bucket.flat.copy_(fresh)
    synchronize(fresh.device)
    start_seconds = time.perf_counter()
    contender.step()
    synchronize(fresh.device)
    return 1000 * (time.perf_counter() - start_seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_table(measurements: Sequence[Measurement]) -> str:
    header = ["gradients", "matrix rank", "copy, ms", "PyTorch, ms", "Thinwire, ms"]
    header += ["PyTorch / Thinwire", "Thinwire / copy"]
    return markdown_table(header, [time_row(measurement) for measurement in measurements])


def time_row(m: Measurement) -> list[str]:
    times = [m.copy_ms, m.pytorch_ms, m.ours_ms]
    ratios = [(m.pytorch_ms, m.ours_ms), (m.ours_ms, m.copy_ms)]
    return [
        m.label,
        str(m.matrix_rank),
        *[f"{min(each):.0f} / {median(each):.0f}" for each in times],
        *[f"{min(a) / min(b):.1f} / {median(a) / median(b):.1f}" for a, b in ratios],
    ]


def memory_table(measurements: Sequence[Measurement]) -> str:
    rows = []
    for m in measurements:
        kept_bytes = [m.pytorch_memory_bytes, m.ours_memory_bytes]
        rows.append(
            [m.label, str(m.matrix_rank), *[f"{100 * each / m.gradient_bytes:.1f} %" for each in kept_bytes]]
        )
    return markdown_table(["gradients", "matrix rank", "PyTorch", "Thinwire"], rows)


def result_page(measurements: Sequence[Measurement], num_rounds: int, device: str) -> str:
    return page(
        "One step of PowerSGD, without communication",
        f"On {device}, one thread, fp32, error feedback and warm start on, one process, one bucket with the "
        f"whole model; {num_rounds} rounds of copy, PyTorch's `powerSGD_hook`, Thinwire in turn. Each cell: "
        "minimum / median, and the ratio of the minima / of the medians.",
        time_table(measurements),
        "Memory kept from step to step (error, factors), in % of the gradients:",
        memory_table(measurements),
    )


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each contender")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", choices=tuple(SHAPE_SETS), help="one shape set instead of all")
    parser.add_argument("--save", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    arguments = parsed_arguments()
    torch.set_num_threads(1)
    backend = "gloo" if arguments.device == "cpu" else "nccl"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    with torch.no_grad():
        measurements = [
            measure(shape_set, matrix_rank, torch.device(arguments.device), arguments.rounds)
            for shape_set in ([arguments.only] if arguments.only else SHAPE_SETS)
            for matrix_rank in MATRIX_RANKS
        ]
    dist.destroy_process_group()
    text = result_page(measurements, arguments.rounds, arguments.device)
    print(text)
    if arguments.save:
        device = None if arguments.device == "cpu" else arguments.device
        print(f"saved as {save(text, 'codec', device, arguments.only)}")


if __name__ == "__main__":
    main()
