"""The engines that average a model: after the warm-up, in it, and within a subgroup."""

from __future__ import annotations

from typing import Any, NamedTuple

from thinwire.algorithms import Algorithm
from thinwire.comm import ProcessGroupTransport, Transport, machines_of_subgroups
from thinwire.local_sgd.averaged_model import AveragedModel
from thinwire.local_sgd.fragment import layouts_of
from thinwire.local_sgd.schedule import EXACT, Schedule
from thinwire.sync import Engine, Settings


class Engines(NamedTuple):
    """Engines of a model and its schedule; they share the counts of what they send over the group."""

    main: Engine  # averages with `algorithm`
    warmup: Engine  # averages changes in the warm-up
    gradients: Engine  # averages a DDP model's gradients in the warm-up; `warmup` if there is no DDP model
    subgroup: Engine | None = None  # averages changes or gradients within the subgroup

    def averaging(self) -> list[Engine]:
        """Return the engines that average over the group for a contributor, each once."""
        return list(dict.fromkeys((self.main, self.warmup)))


def engines_of(
    model: AveragedModel,
    schedule: Schedule,
    algorithm: Algorithm,
    group: Transport,
    health_group: Transport | None,
    within: Transport | None = None,
) -> Engines:
    """Return the engines for averagings over a group and, if given, a subgroup."""
    averaged = model.tensors()
    specs = [tensor.spec for tensor in averaged]
    parts = layouts_of(averaged, schedule.streaming.fragments)
    # The processes of a subgroup have the same changes, so each sends a part of them.
    machines = None
    if isinstance(group, ProcessGroupTransport) and isinstance(within, ProcessGroupTransport):
        machines, _ = machines_of_subgroups(group, within)
    # With default settings: `on_nonfinite` is about gradients; changes that are not finite raise anyway.
    settings = Settings(health_group=health_group)
    main = Engine(algorithm, group, specs, settings, parts=parts, machines=machines)
    counts: dict[str, Any] = {"traffic": main.traffic, "clock": main.clock, "machines": machines}
    settings = Settings(on_nonfinite=schedule.warmup.on_nonfinite, health_group=health_group)
    gradients = warmup = Engine(schedule.warmup.algorithm or EXACT, group, specs, settings, **counts)
    if schedule.has_ddp and warmup.algorithm != EXACT:
        # A separate engine: `gradients` has residuals of gradients; this one averages the final parameters.
        warmup = Engine(EXACT, group, specs, settings, **counts)
    subgroup = None if within is None else Engine(EXACT, within, specs, settings)
    return Engines(main, warmup, gradients, subgroup)
