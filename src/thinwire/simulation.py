"""Simulated workers: one process simulates many, to show what an algorithm does to gradients.

The workers run the same algorithms and the same steps as real ones; only the transport differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thinwire.algorithms import Algorithm
from thinwire.checks import whole_number
from thinwire.comm import InProcessTransport, Machines, run_members
from thinwire.errors import ConfigError
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine, GradientSync, Settings
from thinwire.sync.settings import HostCheck, LossScale, OnNonfinite

__all__ = ["Simulation"]


class Simulation:
    """Workers of one group, driven together.

    Args:
        algorithm: How gradients become their mean.
        buckets: The parameters of each bucket.
        num_workers: Members of the group.
        workers_per_machine: Workers that share a machine. Each averages its part of the gradients for all of
            them; see `thinwire.attach`.
        loss_scale: Returns the factor that multiplies the loss; None if there is none.
        host_check: As in `thinwire.attach`.
        on_nonfinite: As in `thinwire.attach`.

    Attributes:
        buckets: As given.
        engines: The engine of each worker.
        syncs: The handle of each worker.

    Examples:
        >>> from thinwire import AllReduce
        >>> weight = ParameterSpec("weight", (2,), (1,), torch.float32)
        >>> simulation = Simulation(AllReduce(), [[weight]], num_workers=2)
        >>> gradients = [[torch.tensor([0.0, 2.0])], [torch.tensor([4.0, 0.0])]]
        >>> simulation.step(gradients), gradients[0]
        (True, [tensor([2., 1.])])
    """

    def __init__(
        self,
        algorithm: Algorithm,
        buckets: Sequence[Sequence[ParameterSpec]],
        *,
        num_workers: int,
        workers_per_machine: int = 1,
        loss_scale: LossScale | None = None,
        host_check: HostCheck = True,
        on_nonfinite: OnNonfinite = "nan",
    ) -> None:
        whole_number("num_workers", num_workers, minimum=1)
        whole_number("workers_per_machine", workers_per_machine, minimum=1)
        if num_workers % workers_per_machine:
            raise ConfigError(
                f"num_workers must be a multiple of workers_per_machine={workers_per_machine}, got "
                f"{num_workers}; change one of them"
            )
        self.buckets = list(map(tuple, buckets))
        # All parameters are known from the start, as with `attach`, so a state is checked when it is loaded.
        specs = [spec for bucket in self.buckets for spec in bucket]
        settings = Settings(loss_scale, host_check=host_check, on_nonfinite=on_nonfinite)
        transports = InProcessTransport.group(num_workers)
        machines: list[Machines] | list[None] = [None] * num_workers
        if workers_per_machine > 1:
            machines = Machines.in_process(num_workers // workers_per_machine, workers_per_machine)
        self.engines = [
            Engine(algorithm, transport, specs, settings, machines=groups)
            for transport, groups in zip(transports, machines, strict=True)
        ]
        self.syncs = [GradientSync(engine) for engine in self.engines]

    def step(self, gradients: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Average one step's gradients, in place.

        Args:
            gradients: Flat tensors, by worker and bucket.

        Returns:
            Whether the step was committed; see `Engine.average`.

        Raises:
            NonfiniteError: See `Engine.average`.
        """

        def body(rank: int) -> bool:
            return self.engines[rank].average(zip(self.buckets, gradients[rank], strict=True))

        return all(run_members(len(self.engines), body))

    def state_dicts(self) -> list[dict[str, Any]]:
        """Return the state of each worker; all are equal."""
        return run_members(len(self.syncs), lambda rank: self.syncs[rank].state_dict())
