"""The engines of a `LocalSGD` over members that stay: of changes, of the warm-up, within subgroups."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from thinwire.adapters.common import averaging_model
from thinwire.algorithms import Algorithm
from thinwire.comm import ProcessGroupTransport, Transport, machines_of_subgroups
from thinwire.local_sgd.averaged_model import AveragedModel
from thinwire.local_sgd.fragment import layouts_of
from thinwire.local_sgd.schedule import EXACT, Level, Schedule
from thinwire.local_sgd.training_loop import driven_gradients
from thinwire.sync import Engine, Settings


class Engines(NamedTuple):
    """Engines that count together what they send over the group; a subgroup has a faster network."""

    main: Engine  # of the changes that `algorithm` averages
    warmup: Engine  # of changes in the warm-up
    gradients: Engine  # of a DDP model in the warm-up; `warmup` if there is none
    subgroup: Engine | None  # of changes or gradients within it
    together: Transport | None  # joins processes whose changes must all be finite

    @property
    def num_members(self) -> int:
        """The members that train on their own."""
        return self.main.transport.size // (1 if self.subgroup is None else self.subgroup.transport.size)

    def driving(
        self, owner: object, model: AveragedModel, level: Callable[[], Level | None]
    ) -> AbstractContextManager[None]:
        """Direct a DDP model's gradients; of a different model, refuse that they are averaged besides."""
        if model.ddp is None:
            return averaging_model(owner, model.module, self.main.transport)
        driven: dict[Level, Engine] = {"group": self.gradients}
        if self.subgroup is not None:
            driven["subgroup"] = self.subgroup
        return driven_gradients(model.ddp, driven, level)

    def end_warmup(self, schedule: Schedule, step: int) -> None:
        """Let the warm-up's last gradients take what its algorithm has kept: no one would add to it later."""
        is_ending = schedule.has_ddp and step >= schedule.warmup.steps - 1
        if is_ending and self.gradients.algorithm != EXACT:
            self.gradients.check_between_steps("use()")
            self.gradients.buckets.use(EXACT)


def engines_of(
    model: AveragedModel,
    schedule: Schedule,
    algorithm: Algorithm,
    group: Transport,
    health_group: Transport | None,
    within: Transport | None = None,
) -> Engines:
    """Return the engines of a model and its schedule, over a group and perhaps a subgroup."""
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
        # A separate one: `gradients` remembers those, not the parameters averaged when the warm-up ends.
        warmup = Engine(EXACT, group, specs, settings, **counts)
    subgroup = None if within is None else Engine(EXACT, within, specs, settings)
    # The processes of a machine have one change.
    together = model.replica.shards if main.partition is None else None
    return Engines(main, warmup, gradients, subgroup, together)
