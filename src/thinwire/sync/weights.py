"""Weighted means: each process scales its gradients by its share of all samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

from thinwire.comm import Transport
from thinwire.errors import ConfigError, StepError
from thinwire.tensors.accelerators import to_device_async

Weight: TypeAlias = "float | Callable[[], float]"
"""This process's weight in a mean: a fixed number, or a function called once a step."""


def number_of(weight: object) -> float:
    """Return a weight as a number; NaN if it is not one, or below 0."""
    try:
        # Exclude strings and bools, which float() accepts.
        number = math.nan if isinstance(weight, str | bool) else float(weight)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan
    return number if 0 <= number < math.inf else math.nan


def checked_weight(weight: object) -> Weight | None:
    """Return a user's weight; raise if it can't be one."""
    if weight is not None and not callable(weight) and math.isnan(number_of(weight)):
        raise ConfigError(f"weight must be a number of at least 0, or a function of one, got {weight!r}")
    return weight  # type: ignore[return-value]


def multiply(flat: torch.Tensor, scale: torch.Tensor) -> None:
    """Multiply gradients in place by a scale of one element, in their dtype or fp32 if that is wider."""
    flat.mul_(scale.to(torch.promote_types(flat.dtype, torch.float32)))


Share: TypeAlias = tuple[bool, torch.Tensor]
"""Whether this process has samples, and the factor for its gradients before a step's means; shape ()."""


class Weights:
    """Computes the factor for this process's gradients in a step: weight · processes / sum of weights.

    Scaling the input, not the mean, keeps the residual in one unit while weights change.
    """

    def __init__(self, weight: Weight, inter_node: Transport, intra_node: Transport | None) -> None:
        self._weight = weight
        self._groups = [inter_node] if intra_node is None else [intra_node, inter_node]
        self._size = math.prod(group.size for group in self._groups)
        self._fixed: Share | None = None  # if the weight is a number, which is exchanged once

    def share(self, step: str) -> Share:
        """Return this process's share in a step. Collective, unless weights are numbers and known."""
        if self._fixed is not None:
            return self._fixed
        value = self._weight() if callable(self._weight) else self._weight
        number = number_of(value)
        device = self._groups[-1].data_device
        total = to_device_async(device, torch.tensor(number, dtype=torch.float64, device="cpu"))
        # Send an invalid weight, too: the others would wait for a process that raised. NaN reaches all.
        for group in self._groups:
            group.all_reduce(total, f"{step}, the sum of weights").wait()
        if math.isnan(number):
            raise ConfigError(f"{step}: weight must return a number of at least 0, got {value!r}")
        # On accelerators the host would wait in each step: there the means become NaN, and don't commit.
        if (device.type == "cpu" or not callable(self._weight)) and not total.item() > 0:
            got = "all are 0" if total.item() == 0 else "another process's is not a number of at least 0"
            raise StepError(f"{step}: the weights can't be used, {got}; nothing was averaged")
        share = number > 0, (number or 1.0) * self._size / total
        if not callable(self._weight):
            self._fixed = share
        return share
