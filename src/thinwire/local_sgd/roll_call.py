"""Before an averaging: are all processes at the same step, with finite parameters?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from thinwire.channel import ProcessGroupChannel
from thinwire.errors import StepError

__all__ = ["Answer", "check_agreement", "do_agree", "roll_call"]

MOST_TOLD = 8


class Answer(NamedTuple):
    """What a process says of itself.

    Attributes:
        step: Steps it has attempted.
        is_finite: Whether its parameters and buffers are.
        contributes: Whether it has had input since the last averaging.
    """

    step: int
    is_finite: bool
    contributes: bool


def roll_call(channel: ProcessGroupChannel, own: Answer, device: torch.device) -> list[Answer]:
    """The answers of all processes, by process rank in the channel's group.

    Each process writes its own line of a table of zeros; the mean of the tables has every line.

    Cost: one message of 24 bytes a process, and a host synchronisation.

    Raises:
        CommunicationError: The collective failed.
    """
    table = torch.zeros(channel.size, len(own), dtype=torch.float64, device=device)
    table[channel.group.rank()] = torch.tensor(own, dtype=torch.float64)
    purpose = f"step {own.step}, the roll call before an averaging"
    mean = channel.average(table.view(-1), purpose, is_gradient=False).wait()
    lines = (mean * channel.size).round().view(channel.size, len(own)).tolist()
    return [Answer(int(step), bool(finite), bool(contributes)) for step, finite, contributes in lines]


def do_agree(answers: Sequence[Answer]) -> bool:
    """Whether all are at one step, with finite parameters and buffers."""
    return len({answer.step for answer in answers}) == 1 and all(answer.is_finite for answer in answers)


def check_agreement(answers: Sequence[Answer]) -> None:
    """Refuse to average if processes disagree; all of them refuse alike.

    Raises:
        StepError: They are at different steps, or one has parameters or buffers that are not finite.
    """
    broken = [place for place, answer in enumerate(answers) if not answer.is_finite]
    if broken:
        raise StepError(
            f"the parameters or buffers of process {_told(broken)} are not finite (inf or NaN); nothing was "
            "averaged, and every process has kept its own. Find what diverged there (learning rate, loss, "
            "overflow in fp16 without a GradScaler) and restart all processes from a checkpoint; the last "
            "average is in state_dict()['last_average']. Buffers that may be infinite: average_buffers=False"
        )
    if not do_agree(answers):
        steps = _told([f"{place}: {answer.step}" for place, answer in enumerate(answers)])
        raise StepError(
            f"processes are at different steps ({steps}), so their parameters can't be averaged. If a "
            "GradScaler skips steps, pass it: LocalSGD(…, grad_scaler=scaler). If processes have uneven "
            "batches (different numbers of them), train inside thinwire.join as well: with local, "
            "thinwire.join(local): … Call average() on all processes or on none"
        )


def _told(values: Sequence[object]) -> str:
    told = ", ".join(map(str, values[:MOST_TOLD]))
    return told if len(values) <= MOST_TOLD else f"{told} and {len(values) - MOST_TOLD} more"
