"""Check that all members are configured the same; the error says which differ in what."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

from thinwire.checks import listed
from thinwire.comm.collectives import gather_bytes, gather_values
from thinwire.comm.transport import Transport
from thinwire.errors import AgreementError

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

Description: TypeAlias = Mapping[str, str]
"""What a member has, by subject: an error reads "process 0 has {subject} {text}", or "has no {subject}"."""

ALGORITHM = "algorithm"
CALL = "call"  # the subject for the call that a member makes; if it differs, all else may differ
MAX_SUBJECTS = 4

PATIENCE_SECONDS = 10.0


def agree(transport: Transport, description: Description, purpose: str) -> None:
    """Raise on all members unless their descriptions are equal. Collective; blocks for all members.

    Cost: a gather of 32 bytes from each member and a host synchronisation; nothing in a group of one. If
    others do not call it as well, it logs that after 10 s, and fails after the group's timeout.
    """
    if transport.size == 1:
        return
    where = f"{purpose}: the comparison of what the processes are about to do"
    # Compare a digest, since there may be thousands of parameters; send names only to report a difference.
    # The digest does not depend on the order of subjects, which `check_same` uses.
    fingerprint = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).digest()
    warning = (
        f"{purpose}: process {transport.rank} has waited {PATIENCE_SECONDS:g} s for the others: make the "
        "same calls on every process (attach or register_comm_hook, use, state_dict, load_state_dict)"
    )
    with said_if_slow(PATIENCE_SECONDS, logger.warning, warning):
        # A gather, not an all-reduce: it must not be matched with another member's all-reduce.
        digests = set(gather_bytes(fingerprint, transport, where))
    if len(digests) == 1:
        return
    # All members see the same digests, so all get here or none does.
    check_same(gather_values(description, transport, where), purpose)


@contextmanager
def said_if_slow(seconds: float, say: Callable[..., object], *warning: object) -> Iterator[None]:
    """Say a warning if this context takes longer than some seconds."""
    # A separate timer, which says what is happening: a group's timeout may be half an hour. A daemon thread:
    # a process that ends meanwhile must not wait for it.
    alarm = threading.Timer(seconds, say, warning)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


def alike_on_all_shards(
    shards: Transport, purpose: str, described: Description, action: Callable[[], Result]
) -> Result:
    """Run an action with the replicas of this shard; raise on all shards if it fails on any."""
    refusal = None
    try:
        result = action()
    except AgreementError as error:
        refusal = error
    replicas = "of one kind" if refusal is None else f"unlike each other ({refusal})"
    try:
        agree(shards, {CALL: purpose, "replicas": replicas, **described}, purpose)
    except AgreementError as error:
        raise (refusal or error) from None
    if refusal is not None:
        raise refusal
    return result


def check_same(everyone: Sequence[Description], purpose: str) -> None:
    """Raise if descriptions of processes differ.

    Examples:
        >>> check_same([{"matrix_rank": "2"}, {"matrix_rank": "4"}], "step 0")
        Traceback (most recent call last):
        thinwire.errors.AgreementError: step 0: process 0 has matrix_rank 2, process 1 has matrix_rank 4. ...
    """
    # In the order in which members list them, most important first: only the first few are reported.
    subjects = list(dict.fromkeys(subject for description in everyone for subject in description))
    differing = [s for s in subjects if len({description.get(s) for description in everyone}) > 1]
    if not differing:
        return
    # A member in a different call differs in everything else too: report only the call.
    if CALL in differing:
        holders = _holders(everyone, CALL).items()
        calls = ", ".join(f"{call or 'another call'} on {_named(who)}" for call, who in holders)
        raise AgreementError(
            f"{purpose}: calls differ: {calls}. Make the same calls on every process, in the same order; "
            "nothing was changed"
        )
    if ALGORITHM in differing:  # its settings follow, which other algorithms do not have
        differing = differing[: differing.index(ALGORITHM) + 1]
    differences = [_who_has_what(everyone, subject) for subject in differing[:MAX_SUBJECTS]]
    if len(differing) > MAX_SUBJECTS:
        differences.append(f"and {len(differing) - MAX_SUBJECTS} more differences")
    raise AgreementError(
        f"{purpose}: {'; '.join(differences)}. "
        "Give all processes the same model, algorithm, state and packages; nothing was changed"
    )


def _who_has_what(everyone: Sequence[Description], subject: str) -> str:
    return ", ".join(
        f"{_named(who)} {'has' if len(who) == 1 else 'have'} "
        + (f"no {subject}" if what is None else f"{subject} {what}")
        for what, who in _holders(everyone, subject).items()
    )


def _holders(everyone: Sequence[Description], subject: str) -> dict[str | None, list[int]]:
    """Return the processes by what they say of a subject."""
    holders: dict[str | None, list[int]] = defaultdict(list)
    for process, description in enumerate(everyone):
        holders[description.get(subject)].append(process)
    return holders


def _named(processes: Sequence[int]) -> str:
    return f"process{'es' * (len(processes) > 1)} {listed(processes)}"
