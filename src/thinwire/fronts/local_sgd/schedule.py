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

    @property
    def meets_in_subgroups(self) -> bool:
        """Whether parameters are averaged within subgroups."""
        return self.has_subgroup and not self.has_ddp

    def is_warm_up(self, step: int) -> bool:
        """Return whether an averaging after `step` steps is exact and without outer optimizer."""
        return step <= self.warmup_steps

    def gradients_in(self, step: int) -> Members | None:
        """Return over whom the gradients of the step after `step` steps are averaged."""
        if not self.has_ddp:
            return None
        if step < self.warmup_steps:
            return "group"
        return "subgroup" if self.has_subgroup else None

    def after(self, step: int) -> Members | None:
        """Return over whom the parameters are averaged after `step` steps."""
        if self.is_warm_up(step):
            # Of a DDP model only at the end, so that all start the local phase from the same bits.
            return "group" if not self.has_ddp or step == self.warmup_steps else None
        if (step - self.warmup_steps) % self.every_steps == 0:
            return "group"
        return "subgroup" if self.meets_in_subgroups else None
