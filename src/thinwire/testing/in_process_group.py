"""A group whose members come and go inside one process, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thinwire.comm import InProcessTransport
from thinwire.comm.in_process import Awaited, wait_for
from thinwire.errors import CommunicationError
from thinwire.local_sgd.groups.group import Group
from thinwire.local_sgd.groups.state_transfer import broadcast_state

MAX_STANDSTILLS = 8


class InProcessLighthouse:
    """Tracks members, and forms quorums as torchft's lighthouse does. Members: `InProcessGroup(this)`.

    A quorum is formed once all present members ask for one. If all wait and none can continue, members that
    have not asked count as gone, like processes whose heartbeat stops. The arguments, and `options`
    (`weigh_by` and `send_optimizer`), are those of `Group`, for all its members.
    """

    def __init__(self, min_members: int = 1, wait_seconds: float = 5.0, **options: Any) -> None:
        self.min_members, self.wait_seconds, self.options = min_members, wait_seconds, options
        self.quorum_id = 0
        self.members: list[InProcessGroup] = []  # all members ever, in the order in which they joined
        self.there: list[InProcessGroup] = []
        self.asking: list[InProcessGroup] = []

    def form_if_all_ask(self) -> None:
        if not len(self.there) == len(self.asking) >= self.min_members:
            return
        self.quorum_id += 1
        self.asking.sort(key=self.members.index)
        members = InProcessTransport.group(len(self.asking))
        for member, transport in zip(self.asking, members, strict=True):
            member.transport.transport, member.quorum_id = transport, self.quorum_id
            member.num_changes += 1
        self.there, self.asking = list(self.asking), []


class _Quorum(Awaited):
    def __init__(self, lighthouse: InProcessLighthouse, member: InProcessGroup) -> None:
        self.lighthouse, self.member, self.before = lighthouse, member, member.quorum_id

    @property
    def is_complete(self) -> bool:
        return self.member.quorum_id != self.before

    def who_is_missing(self) -> str:
        return f"waiting for a quorum of {self.lighthouse.min_members} members"


class InProcessGroup(Group):
    """A member of a lighthouse's group in this process; the others wait for it from now on."""

    def __init__(self, lighthouse: InProcessLighthouse) -> None:
        super().__init__(lighthouse.min_members, lighthouse.wait_seconds, **lighthouse.options)
        self.kind = "in one process"
        self.leaves_on_sigterm = False  # a signal to the process does not say for which member it is
        self._lighthouse = lighthouse
        lighthouse.members.append(self)
        lighthouse.there.append(self)

    def start_quorum(self, commits: int) -> None:
        lighthouse = self._lighthouse
        if self not in lighthouse.there:
            lighthouse.there.append(self)
        lighthouse.asking.append(self)
        awaited = _Quorum(lighthouse, self)
        # The first time that no member can continue, those in the middle of an averaging get an error. The
        # second time, all remaining members have asked.
        for standstills in range(MAX_STANDSTILLS):
            if standstills > 1:
                lighthouse.there = [group for group in lighthouse.there if group in lighthouse.asking]
            lighthouse.form_if_all_ask()
            try:
                wait_for(awaited)
                return
            except CommunicationError:
                continue
        lighthouse.there.remove(self)
        lighthouse.asking.remove(self)
        raise CommunicationError(awaited.who_is_missing())

    def commit(self, committed: bool) -> None:
        if not committed and isinstance(self.transport.transport, InProcessTransport):
            self.transport.transport.abort()

    def join(self, state: Callable[[], Mapping[str, Any]], source: int, newcomers: Sequence[int]) -> Any:
        if not newcomers:
            return None
        rank = self.transport.rank
        received = broadcast_state(state() if rank == source else None, self.transport, source)
        return received if rank in newcomers else None

    def leave(self) -> None:
        if self in self._lighthouse.there:
            self._lighthouse.there.remove(self)
            self._lighthouse.form_if_all_ask()
