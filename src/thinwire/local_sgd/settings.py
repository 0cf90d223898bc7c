"""Settings of a `LocalSGD` that belong together: how a model travels, its warm-up, its outer step."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from thinwire.algorithms import Algorithm
from thinwire.checks import number, true_or_false, whole_count
from thinwire.errors import ConfigError
from thinwire.sync.settings import OnNonfinite


def _written(settings: Any) -> str:
    """Return how settings are written in code, without what has its default."""
    values = [(field, getattr(settings, field.name)) for field in fields(settings)]
    texts = [f"{field.name}={value!r}" for field, value in values if value != field.default]
    return f"{type(settings).__name__}({', '.join(texts)})"


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """How a model travels when it is averaged: in how many parts, for how long, and whether with its buffers.

    Source: Douillard et al., "Streaming DiLoCo" (arXiv 2501.18512, algorithm 2).

    Args:
        fragments: Into how many parts the model is divided: by layers, of about equal bytes, each with layers
            from all depths. Each is averaged every `every_steps` steps, each after a different step, so that
            a message is that much shorter.
        delay_steps: Steps from sending a fragment's change to applying what became of it. Training goes on
            meanwhile, and waits for the link only if that takes longer. Less than `every_steps / fragments`.
            An algorithm with several rounds waits for each after its share of the delay.
        local_weight: With a delay, α of Streaming DiLoCo: the share that each process's model keeps, when an
            average arrives, of what it holds by then; the rest is of the average. 0 drops what it has learnt
            on its way; None is 0.5, and 0 with an algorithm that sends few entries (`TopK`), whose residual
            holds most of that already. (torchft calls it `fragment_update_alpha`.)
        average_buffers: Whether to average floating buffers that the model saves (BatchNorm's statistics),
            sent as they are, whatever the algorithm. Integer ones, and those of 8 bits, are left alone.

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

    __repr__ = _written


@dataclass(frozen=True)
class Warmup:
    """Steps at the start that are plain data-parallel training, and how a DDP model's gradients are averaged.

    Args:
        steps: How many.
        algorithm: How a DDP model's gradients, or a plain module's changes, become their mean in them; None
            for exactly. What it has not transmitted goes, uncompressed, with the last of these steps.
        on_nonfinite: What becomes of a DDP model's gradients that are averaged in these steps, and in all
            steps within a subgroup, and that are not finite: see `thinwire.attach`. What no group averages is
            left alone; parameters that are not finite raise `StepError` at the next averaging.

    Raises:
        ConfigError: `steps` is no number of steps, or there is an algorithm for none.
    """

    steps: int = 0
    algorithm: Algorithm | None = None
    on_nonfinite: OnNonfinite = "nan"

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole_count("steps", self.steps, minimum=0))
        if self.algorithm is not None and not self.steps:
            raise ConfigError(
                f"algorithm={self.algorithm} is for the warm-up, which has 0 steps; say how many it has, or "
                "leave it out"
            )

    __repr__ = _written


@dataclass(frozen=True)
class Nesterov:
    """The outer step of DiLoCo: SGD with Nesterov's momentum on the last averaged parameters.

    Without momentum and with a learning rate of 1 it is the mean itself.

    Args:
        lr: Learning rate; None to choose by the number of members (0.4 with one, 0.5 from two on, 0.6 from
            four, 0.8 from eight); with an algorithm that sends few entries (`TopK`: that is SparseLoCo) 1.0,
            and 0.5 from eight members on.
        momentum: From 0 to below 1; None to choose by `every_steps` (0.9 from 30 on, 0.5 below), or 0.0 with
            an algorithm that sends few entries.
        device: The device that keeps the last averages and the momentum: "cpu" to spare an accelerator's
            memory. None for the model's device.

    Cost: the momentum is one more copy of the parameters.

    Raises:
        ConfigError: A number is none, or out of range, or `device` is no device.
    """

    lr: float | None = None
    momentum: float | None = None
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        if self.lr is not None:
            object.__setattr__(self, "lr", float(number("lr", self.lr, minimum=0)))
            if math.isinf(self.lr):
                raise ConfigError(f"lr must be finite, got {self.lr!r}")
        if self.momentum is not None:
            object.__setattr__(self, "momentum", number("momentum", self.momentum, minimum=0))
            if self.momentum >= 1:
                raise ConfigError(f"momentum must be from 0 to below 1, got {self.momentum!r}")
        try:
            _ = self.device is None or torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f'device must be a device such as "cpu", or None, got {self.device!r}'
            ) from error

    __repr__ = _written
