"""Simulated workers: one process stands for many, to see what an algorithm does to gradients.

The workers run the same algorithms and the same exchange as real ones; only the channel differs.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from thinwire.algorithms import Algorithm
from thinwire.arithmetic import exact_arithmetic
from thinwire.channel import InProcessChannel, lockstep
from thinwire.checks import whole_number
from thinwire.engine import Engine
from thinwire.loss_scale import LossScale
from thinwire.nonfinite import OnNonfinite
from thinwire.plan import ParameterSpec
from thinwire.sync import GradientSync

__all__ = ["Simulation"]


class Simulation:
    """Workers of one group, driven together.

    Args:
        algorithm: How gradients become their mean.
        buckets: The parameters of each bucket.
        num_workers: Members of the group.
        loss_scale: Tells what the loss is multiplied by; None if it is not.
        host_check: As of `thinwire.attach`.
        on_nonfinite: Likewise.

    Attributes:
        engines: What averages, of each worker.
        syncs: The handle of each.

    Examples:
        >>> from thinwire import AllReduce
        >>> weight = ParameterSpec("weight", (2,), (1,), torch.float32)
        >>> simulation = Simulation(AllReduce(), [(weight,)], num_workers=2)
        >>> gradients = [[torch.tensor([0.0, 2.0])], [torch.tensor([4.0, 0.0])]]
        >>> simulation.step(gradients), gradients[0]
        (True, [tensor([2., 1.])])
    """

    def __init__(
        self,
        algorithm: Algorithm,
        buckets: Sequence[tuple[ParameterSpec, ...]],
        *,
        num_workers: int,
        loss_scale: LossScale | None = None,
        host_check: bool = True,
        on_nonfinite: OnNonfinite = "nan",
    ) -> None:
        whole_number("num_workers", num_workers, least=1)
        self.buckets = list(buckets)
        specs = [spec for bucket in self.buckets for spec in bucket]
        self.engines = [
            Engine(
                algorithm,
                channel,
                specs,
                loss_scale=loss_scale,
                host_check=host_check,
                on_nonfinite=on_nonfinite,
            )
            for channel in InProcessChannel.group(num_workers)
        ]
        self.syncs = [GradientSync(engine) for engine in self.engines]

    def step(self, gradients: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Average one step's gradients, in place.

        Args:
            gradients: By worker and bucket, flat tensors.

        Returns:
            Whether the step was committed; see `Engine.finish`.

        Raises:
            NonfiniteError: See `Engine.finish`.
        """
        for engine, of_worker in zip(self.engines, gradients, strict=True):
            for specs, flat in zip(self.buckets, of_worker, strict=True):
                engine.start(specs, flat)
        committed: list[bool] = []
        with exact_arithmetic(torch.device("cpu")):
            lockstep([_noting(engine.finishing(), committed) for engine in self.engines])
        for engine, of_worker_committed in zip(self.engines, committed, strict=True):
            engine.raise_unless(of_worker_committed)
        return all(committed)

    def state_dicts(self) -> list[dict[str, Any]]:
        """The state of each worker; all are equal."""
        states: list[dict[str, Any]] = []
        with exact_arithmetic(torch.device("cpu")):
            lockstep([_noting(engine.saving(), states) for engine in self.engines])
        return states


def _noting(generator: Generator[None, None, Any], values: list[Any]) -> Generator[None, None, None]:
    """`generator`, its value appended to `values` at the end."""
    values.append((yield from generator))
