"""What members ask each other before they average: at which step they are, and whether they are finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from thinwire.channel import Transport
from thinwire.errors import StepError

MAX_LISTED = 8


class Answer(NamedTuple):
    """What a process says of itself.

    Attributes:
        step: Attempted steps.
        is_finite: Whether what it has to average is.
        contributes: Whether it had input since the last averaging.
        has_changed: Whether its parameters have changed since the last averaging without a step that counts.
        outer: Digest of the outer optimizer's settings, which a schedule changes; below 2**32.
    """

    step: int
    is_finite: bool
    contributes: bool
    has_changed: bool
    outer: int


class Consensus:
    """The answers of all members of a group, under way until they are read. Collective.

    Cost: a message of 24 bytes from each process and, when they are read, a host synchronisation.
    """

    def __init__(self, own: Answer, transport: Transport) -> None:
        # In one type, which holds any count of steps exactly. Kept: a backend may read it meanwhile.
        numbers = [own.step, own.is_finite + 2 * own.contributes + 4 * own.has_changed, own.outer]
        self._own = torch.tensor(numbers, dtype=torch.float64, device=transport.control_device)
        self._rows = self._own.new_empty(transport.size, len(numbers))
        purpose = f"step {own.step}, the consensus check before an averaging"
        self._work = transport.all_gather(self._rows, self._own, purpose)

    def answers(self) -> list[Answer]:
        """Return the answers, by rank. Blocks until all have come."""
        self._work.wait()
        rows = [[int(number) for number in row] for row in self._rows.tolist()]
        return [
            Answer(step, bool(flags & 1), bool(flags & 2), bool(flags & 4), outer)
            for step, flags, outer in rows
        ]

    def checked(self) -> list[Answer]:
        """Return the answers, by rank, or refuse on all members alike. Blocks until all have come."""
        answers = self.answers()
        broken = [place for place, answer in enumerate(answers) if not answer.is_finite]
        if broken:
            raise StepError(
                f"the parameters or buffers of process {_listed(broken)} are not finite (inf or NaN); "
                "nothing was averaged, and every process has kept its own. Find what diverged there "
                "(learning rate, loss, overflow in fp16 without a GradScaler) and restart all processes from "
                "a checkpoint; the last average is in state_dict()['last_average']. Buffers that may be "
                "infinite: average_buffers=False"
            )
        if len({answer.step for answer in answers}) > 1:
            steps = _listed([f"{place}: {answer.step}" for place, answer in enumerate(answers)])
            raise StepError(
                f"processes are at different steps ({steps}), so their parameters can't be averaged. If a "
                "GradScaler skips steps, pass it: LocalSGD(…, grad_scaler=scaler). If processes have uneven "
                "batches (different numbers of them), train inside thinwire.join as well: with local, "
                "thinwire.join(local): … Call average() on all processes or on none"
            )
        if not do_agree(answers):
            usual = Counter(answer.outer for answer in answers).most_common(1)[0][0]
            others = [place for place, answer in enumerate(answers) if answer.outer != usual]
            raise StepError(
                f"the outer optimizer's settings on process {_listed(others)} differ from the other "
                "processes', so models would differ; nothing was averaged. Step a schedule of local.outer on "
                "all processes alike, not by what differs between them, such as their own losses"
            )
        return answers


def do_agree(answers: Sequence[Answer]) -> bool:
    """Return whether all are at one step, finite, and average alike."""
    courses = {(answer.step, answer.outer) for answer in answers}
    return len(courses) == 1 and all(answer.is_finite for answer in answers)


def _listed(values: Sequence[object]) -> str:
    listed = ", ".join(map(str, values[:MAX_LISTED]))
    return listed if len(values) <= MAX_LISTED else f"{listed} and {len(values) - MAX_LISTED} more"
