"""What goes through a member's first process, what a newcomer is sent, and what a step looks at."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch

from thinwire.comm import InProcessTransport, run_members
from thinwire.elastic import InProcessGroup, InProcessLighthouse
from thinwire.errors import StateError
from thinwire.local_sgd.groups import state_transfer
from thinwire.local_sgd.groups.group import NoQuorumError
from thinwire.local_sgd.groups.machine_group import BrokenMemberError, MachineGroup
from thinwire.local_sgd.groups.state_transfer import serialize


class FirstOnly(InProcessGroup):
    """What meets the others for a member of several processes, and fails."""

    def __init__(self, inside: InProcessTransport, error: BaseException) -> None:
        super().__init__(InProcessLighthouse())
        self.inside, self.error = inside, error

    def start_quorum(self, commits: int) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "of_others"),
    [
        (MemoryError("no more"), BrokenMemberError),
        (KeyboardInterrupt(), BrokenMemberError),
        (StateError("damaged"), StateError),
        (NoQuorumError("no one there"), NoQuorumError),
    ],
)
def test_whatever_ends_the_first_process_of_a_member_reaches_the_others(
    error: BaseException, of_others: type[Exception]
) -> None:
    inside = InProcessTransport.group(3)

    def met(rank: int) -> BaseException:
        with pytest.raises(BaseException) as raised:  # noqa: PT011
            MachineGroup(FirstOnly(inside[rank], error), has_parts=False).start_quorum(0)
        return raised.value

    first, *others = run_members(3, met)
    assert first is error
    assert [type(each) for each in others] == [of_others] * 2
    assert all(str(error) in str(each) for each in others)


class Slow:
    """Sends a state at 1 MB a second, by a clock of its own."""

    def __init__(self, state: Any) -> None:
        self.parts, self.now = [serialize(state)], 0.0

    def receive(self, tensor: torch.Tensor, source: int, purpose: str) -> Mock:
        if tensor.dtype == torch.int64:
            tensor.fill_(len(self.parts[0]))
        else:
            tensor.copy_(self.parts[0][: len(tensor)])
            self.parts[0] = self.parts[0][len(tensor) :]
            self.now += len(tensor) / 1e6
        return Mock()


@pytest.mark.parametrize(("timeout_seconds", "comes"), [(60.0, True), (30.0, False)])
def test_a_state_that_takes_longer_than_the_others_wait_is_refused_early(
    timeout_seconds: float, comes: bool
) -> None:
    transport = Slow({"weight": torch.zeros(40_000_000, dtype=torch.uint8)})
    with patch("thinwire.local_sgd.groups.state_transfer.time.monotonic", lambda: transport.now):
        if comes:
            state = state_transfer.receive_state(cast(Any, transport), 0, timeout_seconds)
            assert len(state["weight"]) == 40_000_000
            return
        with pytest.raises(StateError, match=r"^a newcomer's state of 40 MB takes about 40 s at 8.0 Mbit/s"):
            state_transfer.receive_state(cast(Any, transport), 0, timeout_seconds)
    assert transport.now < 0.5 * timeout_seconds  # before the others give up
