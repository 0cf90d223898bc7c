"""A member of several processes: the first one is in the quorum of members, and represents all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from thinwire.comm import Description, Message, Transport, Work, gather_numbers, gather_values
from thinwire.comm.metered import Wrapped
from thinwire.comm.transport import CombinedWork
from thinwire.errors import CommunicationError, LeftError, StateError
from thinwire.local_sgd.groups.group import Group, NoQuorumError
from thinwire.local_sgd.groups.state_transfer import broadcast_state
from thinwire.local_sgd.member_status import MemberStatus, StatusGather

PURPOSE = "the processes of a member telling each other"
# If one process of a member raises one of these, all do; any other error ends the member.
FORWARDED = {kind.__name__: kind for kind in (CommunicationError, LeftError, NoQuorumError, StateError)}


class BrokenMemberError(CommunicationError):
    """The processes of a member have lost each other: it ends, and no averaging is repeated."""


class MachineGroup(Group):
    """One process's end of a member that is several processes.

    The first process of each member exchanges statuses, and the decisions to commit. If all processes of a
    member hold the whole model (DDP), the first one also sends and receives the model. If each holds a part
    (`has_parts`), it averages that part with the processes of its local rank in other members.
    """

    def __init__(self, group: Any, *, has_parts: bool) -> None:
        options = {"weigh_by": group.weigh_by, "send_optimizer": group.send_optimizer}
        super().__init__(group.min_members, group.wait_seconds, **options)
        self.inside, self.has_parts, self.kind = _Inside(group.inside), has_parts, group.kind
        self._group, self._is_first = group, self.inside.rank == 0
        self._control = _FirstProcessTransport(group.transport if self._is_first else None, self.inside)
        self.transport = group.transport if has_parts else Wrapped(self._control)
        self._address = ""  # where the processes of one local rank find each other
        self._connected_at = 0  # the `num_changes` when this process was last connected to these
        group.is_leaving = lambda: self.is_leaving()  # noqa: PLW0108 - it is set later

    @property
    def control(self) -> Transport:
        return self._control

    def broadcast_scalar(self, value: float) -> float:
        return gather_numbers([value], self.inside, PURPOSE)[0][0]

    def start_quorum(self, commits: int) -> None:
        def start() -> list[Any]:
            group, transport = self._group, self._group.transport
            group.start_quorum(commits)
            return [transport.rank, transport.size, group.quorum_id, group.num_changes, group.address]

        connection = broadcast_outcome(start, self.inside)
        self._control.rank, self._control.size, self.quorum_id, self.num_changes, self._address = connection

    def join(self, state: Callable[[], Mapping[str, Any]], source: int, newcomers: Sequence[int]) -> Any:
        inside, members, group = self.inside, self._control, self._group
        if self.has_parts:
            # The quorum has already connected the first processes.
            if not self._is_first and self._connected_at != self.num_changes:
                group.connect(f"{self._address}/{inside.rank}", members.rank, members.size)
                self._connected_at = self.num_changes
            return group.join(state, source, newcomers)
        received = None

        def join_first() -> None:
            nonlocal received
            received = group.join(state, source, newcomers)

        broadcast_outcome(join_first, inside)
        return broadcast_state(received, inside, 0) if members.rank in newcomers else None

    def abort(self) -> None:
        self._group.abort()

    def commit(self, committed: bool) -> None:
        if self._is_first:
            self._group.commit(committed)
        elif not committed:
            self._group.abort()

    def leave(self) -> None:
        self._group.leave()


def broadcast_outcome(action: Callable[[], Any], inside: Transport) -> Any:
    """Run an action on a member's first process; return its plain result, or raise its error, on all."""
    result = failure = None
    if inside.rank == 0:
        try:
            result = action()
        except BaseException as error:  # any error: the other processes of this member wait for the outcome
            failure = error
    return _results(result, failure, inside)[0]


def in_all_processes(action: Callable[[], Any], group: Group) -> Any:
    """Run an action on all processes of a member; if it fails on one, all raise. Collective inside."""
    if group.inside.size == 1:
        return action()
    result = failure = None
    try:
        result = action()
    except BrokenMemberError:
        raise
    except BaseException as error:
        # Before telling this member's other processes: this local rank's peers wait for our messages.
        group.abort()
        failure = error
    _results(None, failure, group.inside)
    return result


def _results(result: Any, failure: BaseException | None, inside: Transport) -> list[Any]:
    """Return the plain results of all processes of a member, or raise one's error. Collective."""
    own = [result] if failure is None else [type(failure).__name__, str(failure)]
    everyone = gather_values(own, inside, PURPOSE)
    if failure is not None:
        raise failure
    for rank, (kind, *message) in enumerate(everyone):
        if message:
            text = message[0] if kind in FORWARDED else f"{kind}: {message[0]}"
            raise FORWARDED.get(kind, BrokenMemberError)(f"process {rank} of this member: {text}")
    return [result for (result,) in everyone]


def described_together(own: Description, group: Group) -> Description:
    """Return one description of all processes of this member, to compare. Collective inside."""
    inside = group.inside
    if inside.size == 1:
        return {"a member": "of 1 process", **own}
    kind = "each with a part of the model" if group.has_parts else "each with the whole model"
    everyone = gather_values(own, inside, "what the processes of a member hold")
    described = {"a member": f"of {inside.size} processes, {kind}", **everyone[0]}
    for rank, description in enumerate(everyone):
        for key, text in description.items():
            if described.get(key) != text:
                described[f"{key} (on its process {rank})"] = text
    return described


def reduced_over_local_processes(status: MemberStatus, group: Group) -> MemberStatus:
    """Return a member's status: work and health over all its processes, the rest from rank 0. Collective."""
    if group.inside.size == 1:
        return status
    everyone = StatusGather(status, group.inside, "the status of each process of a member").read()
    norms = [status.error_norm for status in everyone]
    return everyone[0]._replace(
        weight=sum(status.weight for status in everyone),
        error_norm=math.hypot(*norms) if group.has_parts else norms[0],
        is_finite=all(status.is_finite for status in everyone),
        is_leaving=any(status.is_leaving for status in everyone),
        is_saving=any(status.is_saving for status in everyone),
    )


class _FirstProcessTransport(Transport):
    """The members' group, for every process of a member: its first process sends and receives for all.

    Every result and every error of the first process is that of all.
    """

    def __init__(self, first: Transport | None, inside: Transport) -> None:
        self.rank, self.size = 0, 1
        self._first, self._inside = first, inside

    def start(self, message: Message) -> Work:
        wait_first = CombinedWork(lambda: None).wait
        if self._first is not None:
            try:
                wait_first = self._first.start(message).wait
            except BaseException as error:
                wait_first = partial(_raise, error)  # raise in `wait`, on all processes
        is_over = False

        def wait() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                broadcast_outcome(wait_first, self._inside)
                self._inside.broadcast(message.output, 0, PURPOSE).wait()

        return CombinedWork(wait)


def _raise(error: BaseException) -> NoReturn:
    raise error


class _Inside(Wrapped):
    """Connects the processes of a member; if that fails, the member ends."""

    def start(self, message: Message) -> Work:
        with _ending():
            work = super().start(message)
        return CombinedWork(_ending()(work.wait))


@contextmanager
def _ending() -> Iterator[None]:
    try:
        yield
    except CommunicationError as error:
        raise BrokenMemberError(
            f"a process of this member has ended or does not respond, so this process ends too: {error}"
        ) from error
