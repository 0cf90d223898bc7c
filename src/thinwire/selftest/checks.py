"""What every algorithm must do, checked on the processes of a job. Each check is collective."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.algorithms import Algorithm, AllReduce, BatchedPowerSGD, Cast, PowerSGD
from thinwire.channel import ProcessGroupChannel
from thinwire.ddp import attach
from thinwire.engine import Engine
from thinwire.errors import AgreementError
from thinwire.loss_scale import LossScale, loss_scale_of
from thinwire.plan import ParameterSpec

__all__ = ["CHECKS", "Bench", "Check"]

STEPS = 6
SHAPES = {"conv": (40, 6, 3, 3), "linear": (64, 32), "same": (64, 32), "bias": (64,), "scale": ()}
LOW_RANK: list[Algorithm] = [
    PowerSGD(matrix_rank=2),
    PowerSGD(matrix_rank=2, alternating=True),
    PowerSGD(matrix_rank=2, wire_dtype="bf16"),
    BatchedPowerSGD(),
]


Check: TypeAlias = "Callable[[Bench], None]"


class Bench:
    """A process's gradients, what averages them, and what its checks have found.

    A check notes what is wrong and goes on, so that it makes the same collectives on all processes.

    Args:
        device: Where gradients lie.
        group: The process group, None for the default one.

    Attributes:
        findings: What was wrong on this process since the check began.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self.device = device
        self.findings: list[str] = []
        self.channel = ProcessGroupChannel(group, device)
        self.specs = tuple(
            ParameterSpec.of(name, torch.empty(shape, device="meta")) for name, shape in SHAPES.items()
        )

    def expect(self, holds: bool, found: str) -> None:
        """Note what was found, unless it holds."""
        if not holds:
            self.findings.append(found)

    def gradient(self, step: int) -> torch.Tensor:
        """This process's, of all parameters; another one in each step."""
        return self.gradient_of(self.channel.process_rank, step)

    def gradient_of(self, process_rank: int, step: int) -> torch.Tensor:
        """That of any process: known everywhere, so that the true mean is."""
        generator = torch.Generator().manual_seed(1000 * process_rank + step)
        numel = sum(spec.numel for spec in self.specs)
        return torch.randn(numel, generator=generator).to(self.device)

    def true_mean(self, step: int) -> torch.Tensor:
        """Of all processes, fp64."""
        of_all = [self.gradient_of(each, step).double() for each in range(self.channel.size)]
        return torch.stack(of_all).mean(0)

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of all processes' numbers, on the CPU."""
        told = numbers.double().to(self.device)
        mean = self.channel.average(told, "thinwire check", is_gradient=False).wait()
        return mean.cpu() * self.channel.size

    def sync(
        self, algorithm: Algorithm, *, host_check: bool = True, loss_scale: LossScale | None = None
    ) -> Engine:
        """A new one over the group."""
        channel = ProcessGroupChannel(self.channel.group, self.device)  # which counts its own traffic only
        return Engine(algorithm, channel, self.specs, host_check=host_check, loss_scale=loss_scale)

    def average(self, sync: Engine, gradient: torch.Tensor) -> torch.Tensor:
        """One step."""
        sync.start(self.specs, gradient)
        sync.finish()
        return gradient


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The relative distance of two tensors."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def means(bench: Bench, algorithm: Algorithm, most: float) -> None:
    """Every step's result is the mean, up to a relative error."""
    sync = bench.sync(algorithm)
    for step in range(STEPS):
        missed = gap(bench.average(sync, bench.gradient(step)), bench.true_mean(step))
        bench.expect(missed < most, f"the mean is missed by {missed:.1e}, expected less than {most:.0e}")


def nothing_is_lost(bench: Bench, algorithm: Algorithm) -> None:
    """What was sent and what is still owed add up to the true means; and something was compressed."""
    sync = bench.sync(algorithm)
    sent, true = (torch.zeros_like(bench.true_mean(0)) for _ in range(2))
    for step in range(STEPS):
        sent += bench.average(sync, bench.gradient(step))
        true += bench.true_mean(step)
    error = dict(sync.state_dict()["error"])
    owed = [error.get(spec.name, torch.zeros(spec.shape)).reshape(-1) for spec in bench.specs]
    missed = gap(sent + torch.cat(owed).to(bench.device), true)
    most = 2e-2 if getattr(algorithm, "wire_dtype", None) else 1e-5
    bench.expect(missed < most, f"{missed:.1e} of the gradients is lost, expected less than {most:.0e}")
    ratio = sync.stats().compression_ratio
    bench.expect(ratio > 2, f"the compression ratio is {ratio:.1f}, expected above 2")


def overflow_leaves_no_trace(bench: Bench, *, host_check: bool) -> None:
    """An infinite gradient on one process is NaN on all, which a GradScaler skips; and no more is left."""
    algorithm = PowerSGD(matrix_rank=2)
    plain = bench.sync(algorithm)
    hit = bench.sync(algorithm, host_check=host_check, loss_scale=loss_scale_of(lambda: 1.0))
    for step in range(STEPS):
        if step == 3:
            gradient = bench.gradient(99)
            gradient[0] = torch.inf if bench.channel.process_rank == 0 else gradient[0]
            bench.expect(
                bool(bench.average(hit, gradient).isnan().all()), "the gradients of that step are not all NaN"
            )
        a, b = (bench.average(sync, bench.gradient(step)) for sync in (plain, hit))
        bench.expect(torch.equal(a, b), f"step {step} is another one than without the overflow")
    nonfinite_steps = hit.stats().nonfinite_steps
    bench.expect(nonfinite_steps == 1, f"{nonfinite_steps} steps were not finite, expected 1")


def state_resumes(bench: Bench) -> None:
    """A run that goes on after saving and one that resumes are equal to the bit."""
    first = bench.sync(PowerSGD(matrix_rank=2))
    for step in range(STEPS):
        bench.average(first, bench.gradient(step))
    second = bench.sync(PowerSGD(matrix_rank=2))
    second.load_state_dict(first.state_dict())
    a, b = (bench.average(sync, bench.gradient(STEPS)) for sync in (first, second))
    bench.expect(torch.equal(a, b), f"they differ by {gap(a, b):.1e}")


def differences_are_told(bench: Bench) -> None:
    """Processes with unlike settings are told so, all of them."""
    if bench.channel.size == 1:
        return
    matrix_rank = 1 + (bench.channel.process_rank == 0)
    sync = bench.sync(PowerSGD(matrix_rank=matrix_rank))
    try:
        sync.agree(bench.specs)
    except AgreementError:
        return
    bench.expect(False, "unlike matrix ranks were not told")


def models_stay_the_same(bench: Bench) -> None:
    """After some steps of a DDP model, all processes hold the same parameters to the bit."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 64)).to(bench.device),
        process_group=bench.channel.group,
    )
    sync = attach(model, PowerSGD(matrix_rank=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(model(bench.gradient(step)[:512].view(8, 64)).square().mean())
        optimizer.step()
    flat = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    # Whole numbers below 2^24: their mean is exact, so equal bits have it as their own value.
    bits = flat.view(torch.int32)
    for part in (bits & 0xFFFF, (bits >> 16) & 0xFFFF):
        own = part.double()
        mean = bench.channel.average(own.clone(), "thinwire check", is_gradient=False).wait()
        bench.expect(bool((mean == own).all()), "parameters differ between processes")
    bench.expect(sync.stats().compression_ratio > 2, "nothing was compressed")


CHECKS: dict[str, Check] = {
    "AllReduce() gives the mean": partial(means, algorithm=AllReduce(), most=1e-5),
    'Cast("fp16") gives the mean in 16 bits': partial(means, algorithm=Cast("fp16"), most=3e-3),
    'Cast("bf16") gives the mean in 16 bits': partial(means, algorithm=Cast("bf16"), most=2e-2),
    **{f"{each} loses nothing": partial(nothing_is_lost, algorithm=each) for each in LOW_RANK},
    "an overflow on one process is skipped by a GradScaler on all": partial(
        overflow_leaves_no_trace, host_check=True
    ),
    "the same with host_check=False": partial(overflow_leaves_no_trace, host_check=False),
    "a saved state resumes to the bit": state_resumes,
    "unlike settings are told": differences_are_told,
    "a DDP model stays the same on all processes": models_stay_the_same,
}
