"""Checks of every algorithm on the processes of a job. Each check is collective."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.attach import attach
from thinwire.adapters.replicas import check_replicas
from thinwire.algorithms import Algorithm, PowerSGD
from thinwire.algorithms.registry import REGISTRY
from thinwire.comm import ProcessGroupTransport, machines_of
from thinwire.errors import AgreementError
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine, GradientSync, Settings
from thinwire.sync.settings import loss_scale_of

# Enough that an overflow in the middle would show in later steps.
STEPS = 6
# Two of one shape, so that matrices are batched; some too small to be compressed.
SHAPES = {"conv": (40, 6, 3, 3), "linear": (64, 32), "same": (64, 32), "bias": (64,), "scale": ()}

Check: TypeAlias = "Callable[[CheckContext], None]"


class CheckContext:
    """A process's gradients, the engines that average them, and the current check's problems in `findings`.

    A check records problems and continues, so that it makes the same collectives on all processes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.findings: list[str] = []
        self.transport = ProcessGroupTransport(None, device)
        # Groups inside the machine and between machines, as `attach` finds them.
        self.machines = machines_of(self.transport)
        self.specs = tuple(
            ParameterSpec.of(name, torch.empty(shape, device="meta")) for name, shape in SHAPES.items()
        )

    def expect(self, holds: bool, finding: str) -> None:
        if not holds:
            self.findings.append(finding)

    def say(self, what: str) -> None:
        print(f"thinwire: process {self.transport.rank}: {what}", file=sys.stderr, flush=True)

    def gradient(self, step: int, process_rank: int | None = None) -> torch.Tensor:
        # Drawn on the CPU: generators of other devices draw other numbers, and devices may differ.
        seed = 1000 * (self.transport.rank if process_rank is None else process_rank) + step
        numel = sum(spec.numel for spec in self.specs)
        return torch.randn(numel, generator=torch.Generator().manual_seed(seed), device="cpu").to(self.device)

    def true_mean(self, step: int) -> torch.Tensor:
        """Return the mean of all processes' gradients in a step, fp64; each process can compute it."""
        gradients = [self.gradient(step, rank).double() for rank in range(self.transport.size)]
        return torch.stack(gradients).mean(0)

    def engine(self, algorithm: Algorithm, **settings: Any) -> Engine:
        return Engine(algorithm, self.transport, self.specs, Settings(**settings), machines=self.machines)

    def average(self, engine: Engine, gradient: torch.Tensor) -> torch.Tensor:
        """Make one step, and return the gradient, averaged in place."""
        engine.average([(self.specs, gradient)])
        return gradient


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the distance of two tensors, relative to the second."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def gives_the_mean(context: CheckContext, algorithm: Algorithm, tolerance: float) -> None:
    """Check that every step's result is the mean."""
    engine = context.engine(algorithm)
    for step in range(STEPS):
        error = gap(context.average(engine, context.gradient(step)), context.true_mean(step))
        finding = f"the relative error of the mean is {error:.1e}, expected below {tolerance:.0e}"
        context.expect(error < tolerance, finding)


def loses_nothing(context: CheckContext, algorithm: Algorithm, tolerance: float) -> None:
    """Check that results and residual add up to the true means, and that something was compressed."""
    engine = context.engine(algorithm)
    # In float64, so that the sums themselves lose nothing.
    sent, true = (torch.zeros_like(context.true_mean(0)) for _ in range(2))
    for step in range(STEPS):
        sent += context.average(engine, context.gradient(step))
        true += context.true_mean(step)
    # The saved state has the mean of the processes' residuals, which the sum of means lacks. Parameters that
    # are sent uncompressed have none.
    saved = dict(engine.state_dict()["error"])
    residual = [
        saved.get(spec.name, torch.zeros(spec.shape, device="cpu")).reshape(-1) for spec in context.specs
    ]
    lost = gap(sent + torch.cat(residual).to(context.device), true)
    context.expect(lost < tolerance, f"{lost:.1e} of the gradients is lost, expected below {tolerance:.0e}")
    # If nothing was compressed, nothing could have been lost either.
    ratio = engine.reporter.counts().compression_ratio
    context.expect(ratio > 2, f"the compression ratio is {ratio:.1f}, expected above 2")


def overflow_leaves_no_trace(context: CheckContext, *, host_check: bool) -> None:
    """Check that an infinity on one process becomes NaN on all, which a GradScaler skips, and no more."""
    algorithm = PowerSGD(matrix_rank=2)
    plain = context.engine(algorithm)
    scaled = {"loss_scale": loss_scale_of(lambda: 1.0), "scaler_skips": True}
    hit = context.engine(algorithm, host_check=host_check, **scaled)
    for step in range(STEPS):
        if step == 3:
            gradient = context.gradient(99)
            # On one process: the others must notice it in what they receive.
            gradient[0] = torch.inf if context.transport.rank == 0 else gradient[0]
            is_skipped = bool(context.average(hit, gradient).isnan().all())
            context.expect(is_skipped, "the gradients of that step are not all NaN")
        a, b = (context.average(engine, context.gradient(step)) for engine in (plain, hit))
        context.expect(torch.equal(a, b), f"step {step} differs from that without the overflow")
    nonfinite_steps = hit.reporter.stats().nonfinite_steps
    context.expect(nonfinite_steps == 1, f"{nonfinite_steps} steps were not finite, expected 1")


def state_resumes(context: CheckContext) -> None:
    """Check that a run that continues after saving and one that resumes are equal to the bit."""
    first = context.engine(PowerSGD(matrix_rank=2))
    for step in range(STEPS):
        context.average(first, context.gradient(step))
    second = context.engine(PowerSGD(matrix_rank=2))
    GradientSync(second).load_state_dict(first.state_dict())
    a, b = (context.average(engine, context.gradient(STEPS)) for engine in (first, second))
    context.expect(torch.equal(a, b), f"they differ by {gap(a, b):.1e}")


def differences_are_refused(context: CheckContext) -> None:
    """Check that all processes raise if their settings differ."""
    # A single process can't differ.
    if context.transport.size == 1:
        return
    # One differs from all others, which must raise as well: a process that continued would wait in vain.
    engine = context.engine(PowerSGD(matrix_rank=1 + (context.transport.rank == 0)))
    try:
        engine.buckets.agree(context.device)
    except AgreementError:
        return
    context.expect(False, "unlike matrix ranks were not refused")


def models_stay_the_same(context: CheckContext) -> None:
    """Check that after some steps of a DDP model all processes hold the same parameters to the bit."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 64)).to(context.device),
        process_group=context.transport.group,
    )
    sync = attach(model, PowerSGD(matrix_rank=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(model(context.gradient(step)[:512].view(8, 64)).square().mean())
        optimizer.step()
    try:
        check_replicas(model, context.transport.group)
    except AgreementError as error:
        context.expect(False, str(error))
    context.expect(sync.stats().compression_ratio > 2, "nothing was compressed")


CHECKS: dict[str, Check] = {
    **{
        f"{variant.code} {'loses nothing' if entry.has_memory else 'gives the mean'}": partial(
            loses_nothing if entry.has_memory else gives_the_mean,
            algorithm=variant.algorithm,
            tolerance=variant.tolerance,
        )
        for entry in REGISTRY
        for variant in entry.variants
    },
    "an overflow on one process is skipped by a GradScaler on all": partial(
        overflow_leaves_no_trace, host_check=True
    ),
    "the same with host_check=False": partial(overflow_leaves_no_trace, host_check=False),
    "a saved state resumes to the bit": state_resumes,
    "unlike settings are refused": differences_are_refused,
    "a DDP model stays the same on all processes": models_stay_the_same,
}
