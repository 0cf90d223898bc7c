"""Keeping the factors in memory in step with the plan."""

from __future__ import annotations

from thinwire.algorithms import Memory
from thinwire.algorithms.matrices import fitted
from thinwire.plan import BUCKET_SEPARATOR, Plan

__all__ = ["fit_factors", "forget_stale_factors"]


def fit_factors(memory: Memory, plan: Plan) -> None:
    """Cut factors to the matrix ranks of the plan, or extend them: so a saved state tells the plan."""
    for route in plan.routes:
        factor = memory.factor.get(route.label)
        if factor is not None and route.matrix_rank is not None:
            memory.factor[route.label] = fitted(factor, factor.new_empty(route.matrix_rank, factor.shape[1]))


def forget_stale_factors(memory: Memory, plan: Plan) -> None:
    """Drop the factors that no route has any more: of other buckets, or of an algorithm before."""
    labels = {route.label for route in plan.routes}
    here = {name for route in plan.routes for name in route.names}
    for kept in (memory.factor, memory.sent):
        for label in kept.keys() - labels:
            if here.issuperset(label.split(BUCKET_SEPARATOR)):  # else of a parameter not used just now
                del kept[label]
