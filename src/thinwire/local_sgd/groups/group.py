"""A group whose members come and go: who is there, and what joins them; and one within a process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from thinwire.checks import number, true_or_false, whole_count
from thinwire.comm import InProcessTransport, Transport
from thinwire.comm.in_process import Awaited, wait_for
from thinwire.comm.metered import Wrapped
from thinwire.errors import CommunicationError, ConfigError
from thinwire.local_sgd.groups.state_transfer import packed, unpacked

MAX_STANDSTILLS = 8


class Group(ABC):
    """One member's end of a group whose members come and go between averagings.

    An averaging is a transaction: `meet`, messages over `transport`, `conclude`. One that is not committed is
    repeated, with all who are there then.

    Args:
        min_members: An averaging needs at least this many; fewer wait for others.
        wait_seconds: How long a member waits, for enough others and for an averaging that succeeds.
        weigh_by: What a member's change weighs in `LocalSGD` and `DiLoCo`: "steps" that it made, or "work",
            as given to `count_work`.
        send_optimizer: Whether a member that joins gets the state and settings of all optimizers as one of
            the others has them; then these must hold every trainable parameter. Else it starts with its own.
            `Steps` needs it.

    Attributes:
        transport: Over the members of the last quorum; always the same object. Before the first, this member
            is alone. If each process of a member has a part of the model, over those of the same place.
        control: Carries what members say of themselves; of several processes, the first one's word.
        inside: Joins the processes of this member.
        has_parts: Whether each process of a member has a part of the model, and not all have the whole one.
        quorum_id: Of the last quorum, the same on all its members.
        num_changes: How often this member was joined to others so far: whenever the members have changed, or
            an averaging has failed.
        received: What the others have sent this member to start from, until it is taken; None if it is
            where they are.
        kind: What finds the members, the same on all of them.
        leaves_on_sigterm: Whether SIGTERM on the main thread lets this member leave after its next averaging.
        is_leaving: Returns whether this member has been asked to leave: it waits for no one any more.
        provide: Returns what a newcomer starts from. It is called inside `meet`, on any thread.

    Raises:
        ConfigError: An argument is wrong.
    """

    kind: str
    leaves_on_sigterm = True

    def __init__(
        self,
        min_members: int,
        wait_seconds: float,
        *,
        weigh_by: Literal["steps", "work"] = "steps",
        send_optimizer: bool = True,
    ) -> None:
        self.min_members = whole_count("min_members", min_members, minimum=1)
        self.wait_seconds = float(number("wait_seconds", wait_seconds, minimum=0))
        if weigh_by not in ("steps", "work"):
            raise ConfigError(f'weigh_by must be "steps" or "work", got {weigh_by!r}')
        self.weigh_by, self.send_optimizer = weigh_by, true_or_false("send_optimizer", send_optimizer)
        self.transport = Wrapped(InProcessTransport.group(1)[0])
        self.inside: Transport = InProcessTransport.group(1)[0]
        self.has_parts = False
        self.quorum_id = -1
        self.num_changes = 0
        self.received: Mapping[str, Any] | None = None
        self.is_leaving: Callable[[], bool] = bool
        self.provide: Callable[[], Mapping[str, Any]] = dict

    @property
    def control(self) -> Transport:
        """See above; `transport` if a member is one process."""
        return self.transport

    def decided(self, value: float) -> float:
        """Return the first process's value on all processes of this member, as of a clock. Collective."""
        return value

    def join(self, are_new: Sequence[bool]) -> None:
        """Let all processes of this member have what its first one has: the others, and `received`."""
        assert self.inside.size == 1, "a member of several processes has a MachineGroup"

    def break_off(self) -> None:
        """Let this process's messages fail, and so those of the others."""
        self.conclude(False)

    @abstractmethod
    def meet(self) -> None:
        """Wait until it is decided who takes part in the next averaging; `transport` joins them.

        Raises:
            CommunicationError: They were found, and then could not be joined, or no one was found in time.
            LeftError: No one can be found, and this member is asked to leave.
        """

    @abstractmethod
    def conclude(self, committed: bool) -> None:
        """Say how the averaging has ended. What was not committed breaks the messages of all others off."""

    @abstractmethod
    def start_over(self, commits: int = 0) -> None:
        """Go to the state after this many averagings; at 0, the next `meet` brings what the others hold."""

    @abstractmethod
    def leave(self) -> None:
        """Leave; no one waits for this member any more."""


class InProcessLighthouse:
    """Knows who is there, and forms quorums as torchft's lighthouse does. Members: `InProcessGroup(this)`.

    A quorum is formed once all who are there ask for one. If all wait and no one can go on, those
    who have not asked count as gone, like processes whose heartbeat stops.

    Args:
        min_members: As of `Group`, for all its members.
        wait_seconds: As of `Group`, for all its members.
        options: `weigh_by` and `send_optimizer`, as of `Group`, for all its members.
    """

    def __init__(self, min_members: int = 1, wait_seconds: float = 5.0, **options: Any) -> None:
        self.min_members, self.wait_seconds, self.options = min_members, wait_seconds, options
        self.quorum_id = 0
        self.members: list[InProcessGroup] = []  # that ever were, in the order in which they joined
        self.there: list[InProcessGroup] = []
        self.asking: list[InProcessGroup] = []

    def form_if_all_ask(self) -> None:
        """Make a quorum if all who are there ask for one, and are enough."""
        if not len(self.there) == len(self.asking) >= self.min_members:
            return
        self.quorum_id += 1
        self.asking.sort(key=self.members.index)
        furthest = max(member.commits for member in self.asking)
        source = next(member for member in self.asking if member.commits == furthest)
        others = [member for member in self.asking if member is not source]
        behind = [member for member in others if member.commits < furthest or furthest == 0]
        state = packed(source.provide() if behind else None)
        members = InProcessTransport.group(len(self.asking))
        for member, transport in zip(self.asking, members, strict=True):
            member.transport.transport, member.quorum_id = transport, self.quorum_id
            member.num_changes += 1
        for member in behind:
            member.received, member.commits = unpacked(state), furthest
        self.there, self.asking = list(self.asking), []


class _Quorum(Awaited):
    def __init__(self, lighthouse: InProcessLighthouse, member: InProcessGroup) -> None:
        self.lighthouse, self.member, self.before = lighthouse, member, member.quorum_id

    @property
    def is_complete(self) -> bool:
        return self.member.quorum_id != self.before

    def who_is_missing(self) -> str:
        return f"a quorum of {self.lighthouse.min_members} members is waited for"


class InProcessGroup(Group):
    """A member of a group in this process; the others wait for it from now on.

    Args:
        lighthouse: The same object for all members.
    """

    def __init__(self, lighthouse: InProcessLighthouse) -> None:
        super().__init__(lighthouse.min_members, lighthouse.wait_seconds, **lighthouse.options)
        self.kind = "in one process"
        self.leaves_on_sigterm = False  # it would be for the process, and no one knows for which member
        self.commits = 0
        self._lighthouse = lighthouse
        lighthouse.members.append(self)
        lighthouse.there.append(self)

    def meet(self) -> None:
        lighthouse = self._lighthouse
        if self not in lighthouse.there:
            lighthouse.there.append(self)
        lighthouse.asking.append(self)
        awaited = _Quorum(lighthouse, self)
        # When no one can go on for the first time, those in the middle of an averaging learn of it; when that
        # happens again, all who are left have come.
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

    def conclude(self, committed: bool) -> None:
        if not committed and isinstance(self.transport.transport, InProcessTransport):
            self.transport.transport.abort()
        self.commits += committed

    def start_over(self, commits: int = 0) -> None:
        self.commits = commits

    def leave(self) -> None:
        if self in self._lighthouse.there:
            self._lighthouse.there.remove(self)
            self._lighthouse.form_if_all_ask()
