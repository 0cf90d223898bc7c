"""The consensus check before an averaging: are all processes at the same step, with finite parameters?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from thinwire.channel import Transport, gather_numbers
from thinwire.errors import StepError

__all__ = ["Answer", "consensus"]

MAX_LISTED = 8


class Answer(NamedTuple):
    """What a process says of itself: its steps, and whether it had input since the last averaging."""

    step: int
    is_finite: bool
    contributes: bool


def consensus(own: Answer, group: Transport, subgroup: Transport | None, *, asks_group: bool) -> list[Answer]:
    """Return the answers of those who are about to average, by rank, or refuse on all alike. Collective.

    Args:
        own: This process's answer.
        group: The group.
        subgroup: This process's part of it, where parts average by themselves. It is asked first each time,
            so that members at different steps meet there, and not in different groups. If they disagree,
            they ask the group at once, where the others, at their next averaging over it, refuse with them.
        asks_group: Whether the group is about to average, and not the subgroup alone.

    Cost: a message of 24 bytes from each process and a host synchronisation for each of the two that is
    asked.

    Raises:
        StepError: Processes are at different steps, or one has parameters or buffers that are not finite.
        CommunicationError: A collective failed.
    """
    answers = [] if subgroup is None else _gathered(own, subgroup)
    if asks_group or not _do_agree(answers):
        answers = _gathered(own, group)
    broken = [place for place, answer in enumerate(answers) if not answer.is_finite]
    if broken:
        raise StepError(
            f"the parameters or buffers of process {_listed(broken)} are not finite (inf or NaN); nothing "
            "was averaged, and every process has kept its own. Find what diverged there (learning rate, "
            "loss, overflow in fp16 without a GradScaler) and restart all processes from a checkpoint; the "
            "last average is in state_dict()['last_average']. Buffers that may be infinite: "
            "average_buffers=False"
        )
    if not _do_agree(answers):
        steps = _listed([f"{place}: {answer.step}" for place, answer in enumerate(answers)])
        raise StepError(
            f"processes are at different steps ({steps}), so their parameters can't be averaged. If a "
            "GradScaler skips steps, pass it: LocalSGD(…, grad_scaler=scaler). If processes have uneven "
            "batches (different numbers of them), train inside thinwire.join as well: with local, "
            "thinwire.join(local): … Call average() on all processes or on none"
        )
    return answers


def _gathered(own: Answer, transport: Transport) -> list[Answer]:
    rows = gather_numbers(own, transport, f"step {own.step}, the consensus check before an averaging")
    return [Answer(int(step), bool(is_finite), bool(contributes)) for step, is_finite, contributes in rows]


def _do_agree(answers: Sequence[Answer]) -> bool:
    return len({answer.step for answer in answers}) == 1 and all(answer.is_finite for answer in answers)


def _listed(values: Sequence[object]) -> str:
    listed = ", ".join(map(str, values[:MAX_LISTED]))
    return listed if len(values) <= MAX_LISTED else f"{listed} and {len(values) - MAX_LISTED} more"
