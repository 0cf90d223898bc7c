"""The schedule: what is averaged when, and over which processes, as a function of attempted steps."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from thinwire.algorithms import Algorithm, AllReduce
from thinwire.checks import number, positive, shown, true_or_false, whole_count
from thinwire.errors import ConfigError
from thinwire.sync.settings import OnNonfinite, checked_on_nonfinite, checked_scaler


def written(settings: Any) -> str:
    """Return settings as written in code, without those that have their default."""
    values = [(field, getattr(settings, field.name)) for field in fields(settings)]
    texts = [f"{field.name}={value!r}" for field, value in values if value != field.default]
    return f"{type(settings).__name__}({', '.join(texts)})"


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """How a model is sent when it is averaged: in how many parts, for how long, with or without buffers.

    Source: Douillard et al., "Streaming DiLoCo" (arXiv 2501.18512, algorithm 2).

    Args:
        fragments: The number of parts that the model is divided into: by layers, of about equal bytes, each
            with layers from all depths. Each is averaged every `every_steps` steps, at a different step than
            the others, so that messages are shorter.
        delay_steps: Steps from sending a fragment's change to applying its mean. Training continues
            meanwhile, and waits for the link only if that takes longer. Less than `every_steps / fragments`.
            An algorithm with several rounds waits for each after its share of the delay.
        local_weight: With a delay, α of Streaming DiLoCo: when an average arrives, each process's model keeps
            this share of its own values, and takes the rest from the average. 0 drops what it has learnt
            during the delay. None is 0.5, or 0 with an algorithm that sends few entries (`TopK`): its
            residual has most of that already. (torchft calls it `fragment_update_alpha`.)
        average_buffers: Whether to average floating buffers that the model saves (BatchNorm's statistics).
            Every algorithm sends them uncompressed. Integer and 8-bit buffers are left alone.

    Raises:
        ConfigError: A number is of the wrong type or out of range, or there is a weight without a delay.
    """

    fragments: int = 1
    delay_steps: int = 0
    local_weight: float | None = None
    average_buffers: bool = True

    def __post_init__(self) -> None:
        checked: dict[str, float] = {
            "fragments": whole_count("fragments", self.fragments, minimum=1),
            "delay_steps": whole_count("delay_steps", self.delay_steps, minimum=0),
            "average_buffers": true_or_false("average_buffers", self.average_buffers),
        }
        if self.local_weight is not None:
            weight = checked["local_weight"] = float(number("local_weight", self.local_weight, minimum=0))
            if not checked["delay_steps"] or weight >= 1:
                raise ConfigError(
                    f"local_weight must be in [0, 1), and 0 without delay_steps; got {weight!r} with "
                    f"delay_steps={self.delay_steps}"
                )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    __repr__ = written


@dataclass(frozen=True)
class Warmup:
    """Steps at the start that are plain data-parallel training, and how a DDP model's gradients are averaged.

    Args:
        steps: The number of steps.
        algorithm: How a DDP model's gradients, or a plain module's changes, become their mean in these steps;
            None for exactly. The last of them sends, uncompressed, what the algorithm has not transmitted.
        on_nonfinite: What happens if a DDP model's gradients, averaged in these steps or within a subgroup in
            any step, are not finite: see `thinwire.attach`. Gradients that no group averages are left alone;
            parameters that are not finite raise `StepError` at the next averaging.

    Raises:
        ConfigError: `steps` is not a number of steps, or it is 0 and there is an algorithm.
    """

    steps: int = 0
    algorithm: Algorithm | None = None
    on_nonfinite: OnNonfinite = "nan"

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole_count("steps", self.steps, minimum=0))
        if self.algorithm is not None and not self.steps:
            raise ConfigError(
                f"algorithm={self.algorithm} is for the warm-up, which has 0 steps; set its number of "
                "steps, or leave algorithm out"
            )

    __repr__ = written


EXACT, WHOLE, NO_WARMUP = AllReduce(), Streaming(), Warmup()
USUAL_LOCAL_WEIGHT = 0.5  # of Streaming DiLoCo (arXiv 2501.18512)


@dataclass(frozen=True)
class Schedule:
    """The table in docs/local-sgd.md, for given arguments and with or without a DDP model."""

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
            positive("every_seconds", self.every_seconds)
            if delay_steps:
                raise ConfigError(
                    f"delay_steps={delay_steps} can't be combined with every_seconds, in which members make "
                    "different numbers of steps; use fragments for shorter messages"
                )
        if fragments > every_steps:
            raise ConfigError(
                f"fragments={fragments} is more than every_steps={every_steps}; each fragment is averaged "
                f"after a separate step, so take at most {every_steps}"
            )
        # At most one average is pending.
        if delay_steps * fragments >= every_steps:
            longest = (every_steps - 1) // fragments
            raise ConfigError(
                f"delay_steps={delay_steps} can't be combined with every_steps={every_steps} / "
                f"fragments={fragments}: an average must arrive before the next one is sent; take "
                f"delay_steps={longest} or less"
            )

    def check_gradient_settings(self, grad_scaler: object) -> None:
        """Refuse settings for gradients if no gradients are averaged, or not over all processes."""
        checked_scaler(grad_scaler)
        on_nonfinite = checked_on_nonfinite(self.warmup.on_nonfinite, grad_scaler)
        if on_nonfinite != "nan" and not self.has_ddp:
            raise ConfigError(
                f'on_nonfinite="{on_nonfinite}" is for gradients that a DDP model averages, but this model '
                "is a plain module, whose parameters are averaged; leave it out"
            )
        if on_nonfinite == "raise" and self.has_subgroup:
            raise ConfigError(
                'on_nonfinite="raise" can\'t be combined with a subgroup: processes of other subgroups '
                'would not raise; use "zero"'
            )

    def __str__(self) -> str:
        seconds = self.every_seconds
        every = f"every_steps={self.every_steps}" if seconds is None else f"every_seconds={seconds:g}"
        return every if self.streaming == WHOLE else f"{every}, streaming={self.streaming}"

    def local_weight(self, algorithm: Algorithm) -> float:
        """Return the share of a model's local change that is kept when a delayed average arrives."""
        if self.streaming.local_weight is not None:
            return self.streaming.local_weight
        # The kept share is part of the next change: what the residual holds would be sent twice.
        return USUAL_LOCAL_WEIGHT if self.streaming.delay_steps and not algorithm.sends_few_entries else 0.0

    @property
    def averages_within(self) -> bool:
        """Whether parameters are averaged within subgroups; for a DDP model, gradients are."""
        return self.has_subgroup and not self.has_ddp

    def is_warm_up(self, step: int) -> bool:
        """Return whether an averaging after `step` steps belongs to the warm-up."""
        return 0 < step <= self.warmup.steps

    def is_delayed(self, step: int) -> bool:
        """Return whether an averaging after `step` steps runs while training continues."""
        return self.streaming.delay_steps > 0 and not self.is_warm_up(step)

    def gradients_in(self, step: int) -> str:
        """Return which processes average the gradients of the step after `step` steps; "" for none."""
        if self.has_ddp and step < self.warmup.steps:
            return "group"
        return "subgroup" if self.has_ddp and self.has_subgroup else ""

    def is_due(self, step: int, turn: int, steps_since: int, seconds_since: float = 0.0) -> bool:
        """Return whether members average after `step` steps.

        In the warm-up they average all fragments after each step. Then fragments take turns, evenly spread
        over `every_steps`: this is turn `turn`, and so many steps and seconds have passed since the last one.
        """
        if self.is_warm_up(step):
            # A DDP model only at the end, so that all start the local phase from the same bits.
            return not self.has_ddp or step == self.warmup.steps
        if self.every_seconds is None:
            return steps_since >= self._turn_ends(turn + 1) - self._turn_ends(turn)
        # At the step that ends closest to the time, so that others wait at most half a slow member's step.
        step_seconds = seconds_since / max(1, steps_since)
        return seconds_since + step_seconds / 2 >= self.every_seconds / self.streaming.fragments

    def position(self, step: int) -> tuple[int, int]:
        """Return the number of turns after `step` steps, and the step after which the last one came."""
        local_steps = step - self.warmup.steps
        if local_steps < 0:
            return 0, step
        turns = local_steps * self.streaming.fragments // self.every_steps
        return turns, self.warmup.steps + self._turn_ends(turns)

    def _turn_ends(self, turns: int) -> int:
        """Return the step of the local phase after which this many turns have ended."""
        return -(-turns * self.every_steps // self.streaming.fragments)

    def rounds_sent(self, age: int, num_rounds: int) -> int:
        """Return how many rounds of an averaging must have been sent `age` steps after its start.

        They are evenly spread over the delay; the first is always sent. This must not depend on when a round
        arrives, which differs between processes: they would send later rounds in different orders.
        """
        return min(num_rounds, 1 + age * num_rounds // max(1, self.streaming.delay_steps))
