"""What the approximations of the last step missed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch

from thinwire.algorithms import Memory
from thinwire.plan import Plan

__all__ = ["Missed", "missed"]


class Missed(NamedTuple):
    """By route; see `Stats`."""

    relative_error: dict[str, float]
    error_norm: dict[str, float]


def missed(plan: Plan, memory: Memory) -> Missed | None:
    """Of all routes that memory has errors of; None if of none.

    P̂ has orthonormal columns, so ‖M‖² = ‖M − P̂P̂ᵀM‖² + ‖P̂ᵀM‖²: the error and what was sent tell it.

    Cost: one norm a compressed parameter and one host synchronisation.
    """
    routes = [r for r in plan.routes if r.label in memory.sent and memory.error.keys() >= set(r.names)]
    if not routes:
        return None
    device = memory.sent[routes[0].label].device
    owed = torch.stack([_norm(memory.error[name] for name in route.names).to(device) for route in routes])
    sent = torch.stack([_norm([memory.sent[route.label]]).to(device) for route in routes])
    relative = torch.where(owed > 0, owed / torch.hypot(owed, sent), 0.0)
    both = torch.stack([relative, owed]).tolist()
    return Missed(*[dict(zip([route.label for route in routes], each, strict=True)) for each in both])


def _norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(tensor) for tensor in tensors]
    return cast(torch.Tensor, torch.linalg.vector_norm(torch.stack(norms).double()))
