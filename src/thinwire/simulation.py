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
        syncs: The `GradientSync` of each worker.

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
        self.syncs = [
            GradientSync(
                algorithm,
                channel,
                specs,
                loss_scale=loss_scale,
                host_check=host_check,
                on_nonfinite=on_nonfinite,
            )
            for channel in InProcessChannel.group(num_workers)
        ]

    def step(self, gradients: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Average one step's gradients, in place.

        Args:
            gradients: By worker and bucket, flat tensors.

        Returns:
            Whether the step was committed; see `GradientSync.finish`.

        Raises:
            NonfiniteError: See `GradientSync.finish`.
        """
        for sync, of_worker in zip(self.syncs, gradients, strict=True):
            for specs, flat in zip(self.buckets, of_worker, strict=True):
                sync.start(specs, flat)
        committed: list[bool] = []
        with exact_arithmetic(torch.device("cpu")):
            lockstep([_noting(sync.finishing(), committed) for sync in self.syncs])
        for sync, of_worker_committed in zip(self.syncs, committed, strict=True):
            sync.raise_unless(of_worker_committed)
        return all(committed)

    def state_dicts(self) -> list[dict[str, Any]]:
        """The state of each worker; all are equal."""
        states: list[dict[str, Any]] = []
        with exact_arithmetic(torch.device("cpu")):
            lockstep([_noting(sync.saving(), states) for sync in self.syncs])
        return states


def _noting(generator: Generator[None, None, Any], values: list[Any]) -> Generator[None, None, None]:
    """`generator`, its value appended to `values` at the end."""
    values.append((yield from generator))
