"""Steps made with other buckets than those that come, where results depend on them.

DDP makes its buckets anew after the first step of a process. So that a run which resumes is the run that went
on, the first step after a load has the buckets that the state names, and the second step of a run those of
the first: DDP's new ones are not yet known to a run that resumes there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from thinwire.algorithms import Bucket
from thinwire.plan import ParameterSpec

__all__ = ["ExpectedBuckets", "Names", "copy_back", "names_of", "regrouped"]

Names = tuple[tuple[str, ...], ...]
"""The names of each bucket's parameters."""


@dataclass
class ExpectedBuckets:
    """Which buckets the next step is to be made with.

    Attributes:
        names: Theirs; none where it does not matter, or is not known.
        is_resumed: Whether there was no step since a state was loaded.
    """

    names: Names = ()
    is_resumed: bool = False

    def is_known(self, step: int) -> bool:
        """Return whether it matters which buckets the step after so many is made with."""
        return bool(self.names) and (self.is_resumed or step < 2)

    def note(self, came: Iterable[tuple[ParameterSpec, ...]], step: int, *, was_regrouped: bool) -> None:
        """Take note of a step's buckets, for the next.

        Args:
            came: The buckets that came.
            step: Steps before it.
            was_regrouped: Whether it was made with others.
        """
        # A resumed run was made with the buckets of the run before, which it goes on with: those that came in
        # that one step are DDP's first ones, and will not come again.
        if not (was_regrouped and self.is_resumed and step >= 2):
            self.names = names_of(came)
        self.is_resumed = False


def names_of(buckets: Iterable[tuple[ParameterSpec, ...]]) -> Names:
    """Return the names of each bucket's parameters."""
    return tuple(tuple(spec.name for spec in bucket) for bucket in buckets)


def regrouped(held: Sequence[Bucket], planned: Names) -> list[Bucket] | None:
    """Return the gradients of held buckets as planned ones, copied; None if they are of other parameters.

    Args:
        held: As they came.
        planned: What is to be sent.
    """
    came = {
        spec.name: (spec, gradient)
        for bucket in held
        for spec, gradient in zip(bucket.specs, bucket.gradients, strict=True)
    }
    # A bucket is one tensor, so of one type on one device; after a change of the model it may not be.
    fits = sorted(came) == sorted(name for names in planned for name in names) and all(
        len({(came[name][1].dtype, came[name][1].device) for name in names}) == 1 for names in planned
    )
    if not fits:
        return None
    # Copied: DDP holds what came, and applies what it finds there in the end (`copy_back`).
    return [
        Bucket(tuple(came[name][0] for name in names), torch.cat([came[name][1] for name in names]))
        for names in planned
    ]


def copy_back(sent: Iterable[Bucket], came: Sequence[Bucket]) -> None:
    """Copy means to the buckets that their gradients came in.

    Args:
        sent: With the means.
        came: Of the same parameters; written.
    """
    means = {
        spec.name: mean
        for bucket in (sent if came else ())
        for spec, mean in zip(bucket.specs, bucket.gradients, strict=True)
    }
    for bucket in came:
        for spec, gradient in zip(bucket.specs, bucket.gradients, strict=True):
            gradient.copy_(means[spec.name])
