"""The engines that average a model: after the warm-up, in it, and within a subgroup."""

from __future__ import annotations

from typing import Any, NamedTuple

from thinwire.algorithms import Algorithm
from thinwire.comm import ProcessGroupTransport, Transport
from thinwire.comm.machines import machines_of_subgroups
from thinwire.local_sgd.averaged_model import AveragedModel
from thinwire.local_sgd.fragment import layouts_of
from thinwire.local_sgd.schedule import EXACT, Schedule
from thinwire.sync import Engine, Settings


class Engines(NamedTuple):
    """Engines of a model and its schedule; they share the counts of what they send over the group."""

    main: Engine  # averages changes after the warm-up
    warmup: Engine  # averages in the warm-up: gradients of a DDP model, changes of a plain module
    exact: Engine  # averages a DDP model's parameters after the warm-up's last step
    subgroup: Engine | None = None  # averages changes or gradients within the subgroup


def engines_of(
    model: AveragedModel,
    schedule: Schedule,
    algorithm: Algorithm,
    group: Transport,
    health_group: Transport | None,
    subgroup: Transport | None = None,
) -> Engines:
    """Return the engines for averagings over a group and, if given, a subgroup."""
    averaged = model.tensors()
    specs = [tensor.spec for tensor in averaged]
    parts = layouts_of(averaged, schedule.streaming.fragments)
    # The processes of a subgroup have the same changes, so each sends a part of them.
    machines = None
    if isinstance(group, ProcessGroupTransport) and isinstance(subgroup, ProcessGroupTransport):
        machines = machines_of_subgroups(group, subgroup)
    # `on_nonfinite` is about gradients: changes that are not finite always raise.
    for_changes = Settings(health_group=health_group)
    for_gradients = Settings(on_nonfinite=schedule.warmup.on_nonfinite, health_group=health_group)
    main = Engine(algorithm, group, specs, for_changes, parts=parts, machines=machines)
    shared: dict[str, Any] = {"clock": main.clock, "machines": machines}
    warmup = Engine(schedule.warmup.algorithm or EXACT, group, specs, for_gradients, **shared)
    # The residuals of `warmup` are of gradients: no average of parameters may add them.
    exact = Engine(EXACT, group, specs, for_changes, **shared)
    within = None if subgroup is None else Engine(EXACT, subgroup, specs, for_gradients)
    return Engines(main, warmup, exact, within)
