"""A bucket, opened once: agreed upon, planned, its memory in order."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.algorithms import BucketPlan
from thinwire.plan import ParameterSpec
from thinwire.sync.parts import BucketParts


@dataclass(eq=False)
class Lane:
    """The route of one bucket's gradients, step by step.

    It lives from the bucket's first step until its engine closes it. Its front keeps it that long: what is
    done once for a bucket (processes compared, plan made, memory put in order) is in no later step's way.

    Attributes:
        specs: The bucket's parameters, in the order of their gradients.
        plan: How they travel; on a machine of several processes, the part that this one averages.
        parts: How they divide the bucket there, else None.
        is_current: Whether it may be started. An engine closes its lanes when its algorithm, its members or
            its memory change; they are opened again then.
        is_in_flight: Whether a step is under way in it.
    """

    specs: tuple[ParameterSpec, ...]
    plan: BucketPlan
    parts: BucketParts | None = None
    is_current: bool = True
    is_in_flight: bool = False
