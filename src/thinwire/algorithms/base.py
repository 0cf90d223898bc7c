"""The protocol of an algorithm: a frozen config whose `exchange` is a generator of messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, TypeAlias

import torch

from thinwire.plan import ParameterSpec, Plan

__all__ = ["Algorithm", "Bucket", "Memory", "Replanning", "Rounds"]

LONGEST_SETTING = 60

Rounds: TypeAlias = Generator["torch.Tensor | None", torch.Tensor, None]
"""Yields a message and receives its mean; `yield None` is the gate before memory is written."""


Replanning: TypeAlias = Generator["torch.Tensor", torch.Tensor, "Algorithm"]
"""Yields one message, receives its mean, and returns an algorithm."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that become ready together.

    Attributes:
        specs: The parameters, in the order their gradients lie in `flat`.
        flat: Their gradients one after the other, shape (sum of elements,), each in its parameter's
            order of memory. The exchange turns it into the mean, in place.
        loss_scale: What the loss was multiplied by, a tensor of one element; None if it was not.
    """

    specs: tuple[ParameterSpec, ...]
    flat: torch.Tensor
    loss_scale: torch.Tensor | None = None

    def gradients(self) -> Sequence[torch.Tensor]:
        """One flat view into the bucket a parameter."""
        return self._gradients

    @cached_property
    def _gradients(self) -> Sequence[torch.Tensor]:
        return self.split(self.flat)

    def split(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """One view a parameter into a tensor of the bucket's length."""
        return flat.split_with_sizes([spec.numel for spec in self.specs])


@dataclass
class Memory:
    """What an algorithm keeps between steps, by parameter name.

    Attributes:
        step: Committed steps so far; those that were not finite do not count.
        error: What this process still owes: fp32 (fp64 of fp64 gradients), shape (elements,), in the
            parameter's order of memory, in units of the unscaled loss. Differs between processes.
        factor: The last mean factors, of the same type, shape (matrix rank, columns); of the left ones, after
            a turn of `alternating`, (matrix rank, rows). The same on all processes.
        sent: This process's own part of them, from which the relative error is told. Not saved.
    """

    step: int = 0
    error: dict[str, torch.Tensor] = field(default_factory=dict)
    factor: dict[str, torch.Tensor] = field(default_factory=dict)
    sent: dict[str, torch.Tensor] = field(default_factory=dict)


class Algorithm(ABC):
    """How gradients become their mean over the group: a frozen config and pure tensor code."""

    # Settings that are told even where they have their default.
    always_told: ClassVar[tuple[str, ...]] = ()

    # Whether results depend on which parameters share a bucket.
    sees_buckets: ClassVar[bool] = False

    def __str__(self) -> str:
        """As it is written in code, mostly without what has its default."""
        told = [
            f"{name}={_short(value)}"
            for name, value in vars(self).items()
            if name in self.always_told or value != getattr(type(self), name, None)
        ]
        return f"{type(self).__name__}({', '.join(told)})"

    @abstractmethod
    def plan(self, specs: Sequence[ParameterSpec]) -> Plan:
        """How each of a bucket's parameters travels. Cost: arithmetic on shapes only."""

    def check_model(self, specs: Sequence[ParameterSpec]) -> None:
        """Refuse a model that can't be averaged as asked for.

        Raises:
            GradientError: A parameter's gradient can't be averaged.
            ConfigError: A setting does not fit the model.
        """
        self.plan(specs)

    def starting(self, specs: Sequence[ParameterSpec]) -> Algorithm:
        """The algorithm as it starts on a model it does not refuse: itself, if all settings are given."""
        return self

    def replans_after(self, step: int) -> bool:
        """Whether `replanning` is due after so many committed steps."""
        return False

    def replanning(self, specs: Mapping[str, ParameterSpec], memory: Memory) -> Replanning:
        """How to go on, by what was measured: a generator of one message or none that returns an algorithm.

        Memory is only read.
        """
        raise NotImplementedError(f"{type(self).__name__} has nothing to plan anew")

    def resumed(self, factors: Mapping[str, torch.Tensor], specs: Mapping[str, ParameterSpec]) -> Algorithm:
        """The algorithm that goes on with loaded factors, by parameter: itself, if all settings are given."""
        return self

    @abstractmethod
    def exchange(self, bucket: Bucket, memory: Memory) -> Rounds:
        """Turn `bucket.flat` into the mean over the group, in place.

        A generator. Each message it yields is a flat tensor that it gives away; it receives the
        mean over the group, to read. Before it writes to `memory` it passes the gate, `yield None`: it is
        resumed only when every mean of the step, in all buckets, is known and finite, and closed
        otherwise. Until then it only reads `memory`, and may use `bucket.flat` as it likes.
        """


def _short(value: object) -> str:
    told = repr(value)
    return told if len(told) <= LONGEST_SETTING else "…"
