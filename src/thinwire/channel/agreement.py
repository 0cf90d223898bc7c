"""Telling processes that are configured differently who differs in what."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

from thinwire.errors import AgreementError

__all__ = ["CALL", "Told", "check_same", "digest", "packed", "unpacked"]

Told = Mapping[str, str]
"""What a process tells of itself, by subject."""

ALGORITHM = "algorithm"  # what follows of an algorithm are its settings, which others do not have
CALL = "call"  # the subject of what a process is about to do; where that differs, all else may
MOST_SUBJECTS = 4
MOST_PROCESSES = 8


def packed(told: Told) -> bytes:
    """As bytes; equal if and only if the same is told."""
    return json.dumps(told, sort_keys=True).encode()


def unpacked(data: bytes) -> Told:
    """What `packed` was given."""
    return dict(json.loads(data))


def digest(data: bytes) -> bytes:
    """32 bytes that differ wherever `data` does."""
    return hashlib.sha256(data).digest()


def check_same(everyone: Sequence[Told], purpose: str) -> None:
    """Refuse what differs between processes.

    Args:
        everyone: What each process tells, by process rank.
        purpose: What they were about to do.

    Raises:
        AgreementError: Some subject differs; the message names it and the processes.

    Examples:
        >>> check_same([{"matrix_rank": "2"}, {"matrix_rank": "4"}], "step 0")
        Traceback (most recent call last):
        thinwire.errors.AgreementError: step 0: process 0 has matrix_rank 2, process 1 has matrix_rank 4. ...
    """
    subjects = list(dict.fromkeys(subject for told in everyone for subject in told))
    differing = [s for s in subjects if len({told.get(s) for told in everyone}) > 1]
    if not differing:
        return
    if CALL in differing:
        raise AgreementError(
            f"{purpose}: {_who_has_what(everyone, CALL)} under way. Make the same calls on every process, "
            "in the same order; nothing was changed"
        )
    if ALGORITHM in differing:
        differing = differing[: differing.index(ALGORITHM) + 1]
    listed = [_who_has_what(everyone, subject) for subject in differing[:MOST_SUBJECTS]]
    if len(differing) > MOST_SUBJECTS:
        listed.append(f"and {len(differing) - MOST_SUBJECTS} differences more")
    raise AgreementError(
        f"{purpose}: {'; '.join(listed)}. "
        "Give all processes the same model, algorithm and state; nothing was changed"
    )


def _who_has_what(everyone: Sequence[Told], subject: str) -> str:
    holders: dict[str | None, list[int]] = defaultdict(list)
    for process, told in enumerate(everyone):
        holders[told.get(subject)].append(process)
    return ", ".join(
        f"{_named(who)} no {subject}" if what is None else f"{_named(who)} {subject} {what}"
        for what, who in holders.items()
    )


def _named(processes: Sequence[int]) -> str:
    shown = ", ".join(map(str, processes[:MOST_PROCESSES]))
    if len(processes) == 1:
        return f"process {shown} has"
    rest = len(processes) - MOST_PROCESSES
    return f"processes {shown} and {rest} more have" if rest > 0 else f"processes {shown} have"
