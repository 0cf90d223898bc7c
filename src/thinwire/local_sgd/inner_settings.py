"""The settings of the optimizers inside: schedules change them, for all members alike."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from thinwire.local_sgd.member_status import MemberStatus

# Settings that schedules change. Others are counts or estimates of some optimizers' own.
SCHEDULED = ("lr", "weight_decay", "momentum", "betas")
MAX_GAP = 1e-6  # relative: the same schedule may be rounded otherwise

InnerSettings: TypeAlias = Mapping[str, list[float]]


def inner_settings(optimizers: Sequence[torch.optim.Optimizer]) -> InnerSettings:
    """Return the current settings of optimizers, by the setting's name."""
    settings = {}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for key in SCHEDULED:
                if key in group:
                    place = f" (group {number})" if number else ""
                    settings[f"{key} of {type(optimizer).__name__}{place}"] = _numbers(group[key])
    return settings


def _numbers(value: Any) -> list[float]:
    values = value if isinstance(value, list | tuple) else [value]
    return [float(number) for number in values if isinstance(number, int | float | torch.Tensor)]


def digest(settings: InnerSettings) -> int:
    """Return a CRC-32 of settings, which a float64 holds."""
    return zlib.crc32(json.dumps(settings).encode())


def difference(own: InnerSettings, others: InnerSettings) -> str:
    """Return the first setting that differs, with both values, in words; empty if none does.

    Examples:
        >>> difference({"lr of SGD": [0.057]}, {"lr of SGD": [0.01]})
        'lr of SGD is 0.057 on this member and 0.01 on the others'
    """
    for name in sorted({*own, *others}, key=lambda name: not name.startswith("lr ")):
        mine, theirs = own.get(name, []), others.get(name, [])
        pairs = zip(mine, theirs, strict=False)
        if len(mine) != len(theirs) or not all(math.isclose(*pair, rel_tol=MAX_GAP) for pair in pairs):
            return f"{name} is {_shown(mine)} on this member and {_shown(theirs)} on the others"
    return ""


def set_otherwise(
    everyone: Sequence[InnerSettings], statuses: Sequence[MemberStatus]
) -> tuple[int, list[int]]:
    """Return the rank of whose settings count, most of those here for longest, and the ranks with others."""
    old = [rank for rank, status in enumerate(statuses) if not status.is_new]
    longest = max(statuses[rank].averagings for rank in old)
    oldest = [rank for rank in old if statuses[rank].averagings == longest]
    counts = Counter(statuses[rank].inner_settings for rank in oldest)
    usual = max(oldest, key=lambda rank: counts[statuses[rank].inner_settings])
    # At other steps a schedule has other values.
    alike = [rank for rank in old if statuses[rank].step == statuses[usual].step]
    return usual, [rank for rank in alike if difference(everyone[rank], everyone[usual])]


def _shown(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values) or "not set"
