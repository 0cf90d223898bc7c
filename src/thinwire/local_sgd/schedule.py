"""When what is averaged over whom: a function of the number of attempted steps, and of nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.algorithms import Algorithm, AllReduce
from thinwire.checks import checked_scaler, number, shown, whole_count
from thinwire.errors import ConfigError
from thinwire.local_sgd.settings import Streaming, Warmup
from thinwire.sync.settings import checked_on_nonfinite

EXACT, WHOLE, NO_WARMUP = AllReduce(), Streaming(), Warmup()
USUAL_LOCAL_WEIGHT = 0.5  # of Streaming DiLoCo (arXiv 2501.18512)


@dataclass(frozen=True)
class Schedule:
    """The table in docs/local-sgd.md, of the arguments and whether the model is a DDP model."""

    every_steps: int
    warmup: Warmup = NO_WARMUP
    has_ddp: bool = False
    has_subgroup: bool = False
    streaming: Streaming = WHOLE
    every_seconds: float | None = None

    def __post_init__(self) -> None:
        every_steps = whole_count("every_steps", self.every_steps, minimum=1)
        object.__setattr__(self, "every_steps", every_steps)
        for name, kind, example in (
            ("warmup", Warmup, "Warmup(100)"),
            ("streaming", Streaming, "Streaming(fragments=2)"),
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise ConfigError(
                    f"{name} must be a thinwire.{kind.__name__}, got {shown(value)}; such as {example}"
                )
        fragments, delay_steps = self.streaming.fragments, self.streaming.delay_steps
        if self.every_seconds is not None:
            if not 0 < number("every_seconds", self.every_seconds, minimum=0) < math.inf:
                raise ConfigError(f"every_seconds must be above 0 and finite, got {self.every_seconds!r}")
            if delay_steps:
                raise ConfigError(
                    f"delay_steps={delay_steps} counts steps, of which members make different numbers in "
                    "every_seconds; use fragments for shorter messages"
                )
        if fragments > every_steps:
            raise ConfigError(
                f"fragments={fragments} is more than every_steps={every_steps}; each is averaged after a "
                "separate step, so take at most as many"
            )
        # At most one average is pending.
        if delay_steps * fragments >= every_steps:
            longest = (every_steps - 1) // fragments
            raise ConfigError(
                f"delay_steps={delay_steps} does not go with every_steps={every_steps} / "
                f"fragments={fragments}: an average must be there before the next one is sent; take "
                f"delay_steps={longest} or less"
            )

    def check_gradient_settings(self, grad_scaler: object) -> None:
        """Refuse settings of gradients if none are averaged, or not by all."""
        checked_scaler(grad_scaler)
        on_nonfinite = checked_on_nonfinite(self.warmup.on_nonfinite, grad_scaler)
        if on_nonfinite != "nan" and not self.has_ddp:
            raise ConfigError(
                f'on_nonfinite="{on_nonfinite}" is about gradients that a DDP model averages, and this model '
                "is a plain module, whose parameters are averaged; leave it out"
            )
        if on_nonfinite == "raise" and self.has_subgroup:
            raise ConfigError(
                'on_nonfinite="raise" does not go with a subgroup: processes of other subgroups would not '
                'raise; use "zero"'
            )

    def __str__(self) -> str:
        seconds = self.every_seconds
        every = f"every_steps={self.every_steps}" if seconds is None else f"every_seconds={seconds:g}"
        return every if self.streaming == WHOLE else f"{every}, streaming={self.streaming}"

    def local_weight(self, algorithm: Algorithm) -> float:
        """Return the share of a model's local change that stays when a delayed average arrives."""
        if self.streaming.local_weight is not None:
            return self.streaming.local_weight
        # The kept share of a change is part of the next one. If the residual holds most of that change
        # already, it would be sent twice.
        return USUAL_LOCAL_WEIGHT if self.streaming.delay_steps and not algorithm.sends_few_entries else 0.0

    @property
    def averages_within(self) -> bool:
        """Whether parameters are averaged within subgroups; of a DDP model the gradients are."""
        return self.has_subgroup and not self.has_ddp

    def is_warm_up(self, step: int) -> bool:
        """Return whether an averaging after `step` steps is exact, of all fragments, at once and inside."""
        return 0 < step <= self.warmup.steps

    def is_delayed(self, step: int) -> bool:
        """Return whether an averaging after `step` steps goes on while training does."""
        return self.streaming.delay_steps > 0 and not self.is_warm_up(step)

    def gradients_in(self, step: int) -> str:
        """Return over whom the gradients of the step after `step` steps are averaged; "" for no one."""
        if self.has_ddp and step < self.warmup.steps:
            return "group"
        return "subgroup" if self.has_ddp and self.has_subgroup else ""

    def is_due(self, step: int, turn: int, steps: int, seconds: float = 0.0) -> bool:
        """Return whether members average after `step` steps.

        In the warm-up all fragments, after each step. Then fragments take turns, evenly spread over
        `every_steps`: at `turn`, if so many steps and seconds lie between it and the last one.
        """
        if self.is_warm_up(step):
            # A DDP model only at the end, so that all start the local phase from the same bits.
            return not self.has_ddp or step == self.warmup.steps
        if self.every_seconds is None:
            return steps >= self._turn_ends(turn + 1) - self._turn_ends(turn)
        # At the step that ends next to the time: who is slow is waited for by half of its step.
        return seconds + seconds / max(1, steps) / 2 >= self.every_seconds / self.streaming.fragments

    def position(self, step: int) -> tuple[int, int]:
        """Return how many turns there have been after `step` steps, and after which step the last one."""
        local_steps = step - self.warmup.steps
        if local_steps < 0:
            return 0, step
        turns = local_steps * self.streaming.fragments // self.every_steps
        return turns, self.warmup.steps + self._turn_ends(turns)

    def _turn_ends(self, turns: int) -> int:
        """Return behind which step of the local phase so many turns have ended."""
        return -(-turns * self.every_steps // self.streaming.fragments)

    def rounds_sent(self, age: int, num_rounds: int) -> int:
        """Return how many rounds of an averaging are to be on their way, or back, some steps after its start.

        Evenly spread over the delay, and always the first one. When a round is waited for must not depend on
        when it comes, which differs between processes: each would send the next ones in a different order.
        """
        return min(num_rounds, 1 + age * num_rounds // max(1, self.streaming.delay_steps))
