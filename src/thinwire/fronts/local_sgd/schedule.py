"""When what is averaged over whom: a function of the number of attempted steps, and of nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Members", "Schedule"]

Members: TypeAlias = Literal["group", "subgroup"]


@dataclass(frozen=True)
class Schedule:
    """The table in the docstring of `LocalSGD`, of its arguments and whether the model is a DDP model."""

    every_steps: int
    warmup_steps: int
    has_ddp: bool
    has_subgroup: bool
    num_fragments: int = 1
    delay_steps: int = 0

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
        if self.is_warm_up(step):
            # Of a DDP model only at the end, so that all start the local phase from the same bits.
            return "group" if not self.has_ddp or step == self.warmup_steps else None
        if self.fragment_after(step) is not None:
            return "group"
        return "subgroup" if self.meets_in_subgroups else None

    def fragment_after(self, step: int) -> int | None:
        """Return which fragment's change is sent to the group after `step` steps, past the warm-up.

        They take turns, evenly spread over `every_steps`; the last one is sent at its multiples.
        """
        if self.is_warm_up(step):
            return None
        # From 1 to every_steps: the last place is that of the multiples.
        place = (step - self.warmup_steps - 1) % self.every_steps + 1
        turn, rest = divmod(place * self.num_fragments, self.every_steps)
        # The first step at which turn + 1 fragments are due: place = ⌈turn · every_steps / fragments⌉.
        return turn - 1 if turn and rest < self.num_fragments else None

    def rounds_sent(self, age: int, num_rounds: int) -> int:
        """Return how many rounds of an averaging are to be on their way, or back, some steps after its start.

        Evenly spread over the delay, and always the first one. When a round is waited for must not depend on
        when it comes, which differs between processes: each would send the next one in another order.

        Args:
            age: Steps since the change was sent.
            num_rounds: That the averaging takes.
        """
        return min(num_rounds, 1 + age * num_rounds // max(1, self.delay_steps))
