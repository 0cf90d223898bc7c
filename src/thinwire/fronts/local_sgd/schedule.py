"""When what is averaged over whom: a function of the number of attempted steps, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Literal, TypeAlias

from thinwire.checks import number, whole_count
from thinwire.errors import ConfigError

Members: TypeAlias = Literal["group", "subgroup"]

# Of Streaming DiLoCo (arXiv 2501.18512).
DEFAULT_MIX = 0.5


@dataclass(frozen=True)
class Schedule:
    """The table in the docstring of `LocalSGD`, of its arguments and whether the model is a DDP model.

    Args:
        sends_few_entries: Whether the changes' algorithm leaves most of a change in its residual.

    Attributes:
        mix_share: What a model keeps of its own when a delayed average arrives: `mix`, or what is usual.

    Raises:
        ConfigError: Numbers are of the wrong type or out of range, or do not fit each other.
    """

    every_steps: int
    warmup_steps: int = 0
    has_ddp: bool = False
    has_subgroup: bool = False
    num_fragments: int = 1
    delay_steps: int = 0
    mix: InitVar[object] = None
    sends_few_entries: InitVar[bool] = False
    mix_share: float = field(init=False)

    def __post_init__(self, mix: object, sends_few_entries: bool) -> None:
        checked = {
            "every_steps": whole_count("every_steps", self.every_steps, minimum=1),
            "warmup_steps": whole_count("warmup_steps", self.warmup_steps, minimum=0),
            "num_fragments": whole_count("fragments", self.num_fragments, minimum=1),
            "delay_steps": whole_count("delay_steps", self.delay_steps, minimum=0),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.num_fragments > self.every_steps:
            raise ConfigError(
                f"fragments={self.num_fragments} is more than every_steps={self.every_steps}; each is "
                "averaged after a step of its own, so take at most as many"
            )
        if self.delay_steps >= self.every_steps:
            raise ConfigError(
                f"delay_steps must be less than every_steps={self.every_steps}, got {self.delay_steps}: a "
                "change is to be there before the next one is sent"
            )
        # What a model keeps of a change is part of its next one. Where the residual holds most of that change
        # already, it would be sent twice.
        share = DEFAULT_MIX if self.delay_steps and not sends_few_entries else 0.0
        if mix is not None:
            share = float(number("mix", mix, minimum=0))
            if not self.delay_steps or share >= 1:
                raise ConfigError(
                    "mix is the share, from 0 to below 1, that the model keeps of what it has become while "
                    f"an average was on its way; got {mix!r} with delay_steps={self.delay_steps}: "
                    + ("take less" if self.delay_steps else "leave it out, or give delay_steps")
                )
        object.__setattr__(self, "mix_share", share)

    @property
    def meets_in_subgroups(self) -> bool:
        """Whether parameters are averaged within subgroups."""
        return self.has_subgroup and not self.has_ddp

    def is_warm_up(self, step: int) -> bool:
        """Return whether an averaging after `step` steps is exact, of all fragments, at once and inside."""
        return step <= self.warmup_steps

    def gradients_in(self, step: int) -> Members | None:
        """Return over whom the gradients of the step after `step` steps are averaged."""
        if not self.has_ddp:
            return None
        if step < self.warmup_steps:
            return "group"
        return "subgroup" if self.has_subgroup else None

    def after(self, step: int) -> Members | None:
        """Return over whom parameters are averaged after `step` steps; not all of them, with fragments."""
        if self.fragments_after(step):
            return "group"
        return "subgroup" if self.meets_in_subgroups and not self.is_warm_up(step) else None

    def fragments_after(self, step: int) -> Sequence[int]:
        """Return which fragments' changes are sent to the group after `step` steps.

        In the warm-up that of all. Then they take turns, evenly spread over `every_steps`; the last one is
        sent at its multiples.
        """
        if self.is_warm_up(step):
            # Of a DDP model only at the end, so that all start the local phase from the same bits.
            return range(self.num_fragments) if not self.has_ddp or step == self.warmup_steps else ()
        # From 1 to every_steps: the last place is that of the multiples.
        place = (step - self.warmup_steps - 1) % self.every_steps + 1
        turn, rest = divmod(place * self.num_fragments, self.every_steps)
        # The first step at which turn + 1 fragments are due: place = ⌈turn · every_steps / fragments⌉.
        return (turn - 1,) if turn and rest < self.num_fragments else ()

    def rounds_sent(self, age: int, num_rounds: int) -> int:
        """Return how many rounds of an averaging are to be on their way, or back, some steps after its start.

        Evenly spread over the delay, and always the first one. When a round is waited for must not depend on
        when it comes, which differs between processes: each would send the next one in another order.

        Args:
            age: Steps since the change was sent.
            num_rounds: That the averaging takes.
        """
        return min(num_rounds, 1 + age * num_rounds // max(1, self.delay_steps))
