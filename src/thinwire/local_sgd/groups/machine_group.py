"""A member of several processes: the first one is in the quorum of members, and speaks for all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from thinwire.comm import Description, Message, Transport, Work, gather_bytes, gather_numbers
from thinwire.comm.metered import Wrapped
from thinwire.comm.transport import CombinedWork
from thinwire.errors import CommunicationError, LeftError, StateError
from thinwire.local_sgd.groups.group import Group
from thinwire.local_sgd.groups.state_transfer import deserialize, serialize

PURPOSE = "the processes of a member telling each other"
FORWARDED_ERRORS = (CommunicationError, LeftError, StateError)  # of the first process, which all raise


class BrokenMemberError(CommunicationError):
    """The processes of a member have lost each other: it ends, and no averaging is tried again."""


class MachineGroup(Group):
    """One process's end of a member that is several processes.

    What members say of themselves, and their verdict on an averaging, is said and heard by the first process
    of each. If all processes of a member hold the whole model (DDP), the first one sends and receives that,
    too. If each holds a part (`has_parts`), it averages that with those of its local rank in other members.
    """

    def __init__(self, group: Any, *, has_parts: bool) -> None:
        settings = {"weigh_by": group.weigh_by, "send_optimizer": group.send_optimizer}
        super().__init__(group.min_members, group.wait_seconds, **settings)
        self.inside, self.has_parts, self.kind = _Inside(group.inside), has_parts, group.kind
        self._group, self._is_first = group, self.inside.rank == 0
        self._leader = _LeaderTransport(group.transport if self._is_first else None, self.inside)
        self.transport = group.transport if has_parts else Wrapped(self._leader)
        self._address = ""  # at which the processes of one local rank find each other
        group.is_leaving = lambda: self.is_leaving()  # noqa: PLW0108 - it is set after this
        group.provide = lambda: self.provide()  # noqa: PLW0108

    @property
    def control(self) -> Transport:
        return self._leader

    def broadcast_scalar(self, value: float) -> float:
        return gather_numbers([value], self.inside, PURPOSE)[0][0]

    def start_quorum(self) -> None:
        quorum = broadcast_outcome(self._start_first_quorum, self.inside)
        self._leader.rank, self._leader.size = quorum["rank"], quorum["size"]
        self.quorum_id, self.num_changes = quorum["quorum"], quorum["changes"]
        self._address = quorum["address"]
        if quorum["received"] is None:
            self.received = None
        elif not self._is_first:
            self.received = quorum["received"]  # until `join` brings the rest

    def _start_first_quorum(self) -> dict[str, Any]:
        group = self._group
        group.start_quorum()
        if group.received is not None:
            self.received, group.received = group.received, None
        outline: dict[str, Any] | None = None
        if self.received is not None:
            # The entries that must be known before the state is there; without them all refuse it alike.
            try:
                lineage = self.received["members"]["lineage"]
                outline = {"step": self.received["step"], "members": {"lineage": lineage}}
            except (KeyError, TypeError):
                outline = {}
        return {
            "rank": group.transport.rank,
            "size": group.transport.size,
            "quorum": group.quorum_id,
            "changes": group.num_changes,
            "address": group.address,
            "received": outline,
        }

    def join(self, are_new: Sequence[bool]) -> None:
        if self.has_parts and not self._is_first:  # whose quorum has joined it to those of its local rank
            leader, address = self._leader, f"{self._address}/{self.inside.rank}"
            received = self._group.join_local_rank(address, leader.rank, leader.size, are_new)
            self.received = None if self.received is None else received
        elif not self.has_parts and self.received is not None:
            data = serialize(self.received) if self._is_first else torch.empty(0, dtype=torch.uint8)
            length = int(self.broadcast_scalar(len(data)))
            if not self._is_first:
                data = torch.empty(length, dtype=torch.uint8)
            data = data.to(self.inside.control_device)
            self.inside.broadcast(data, 0, PURPOSE).wait()
            if not self._is_first:
                self.received = deserialize(data.cpu())

    def break_off(self) -> None:
        self._group.break_off()

    def commit(self, committed: bool) -> None:
        if self._is_first:
            self._group.commit(committed)
        elif not committed:
            self._group.break_off()

    def reset(self, commits: int = 0) -> None:
        if self._is_first:
            self._group.reset(commits)

    def leave(self) -> None:
        self._group.leave()


def broadcast_outcome(action: Callable[[], Any], inside: Transport) -> Any:
    """Let the first process of a member act; return its plain result, or raise its failure, on all."""
    result, failure = None, None
    if inside.rank == 0:
        try:
            result = action()
        except BaseException as error:  # whatever it is, the others of this member wait to hear
            failure = error
    data = _encoded(failure, FORWARDED_ERRORS) or json.dumps({"result": result}).encode()
    data = gather_bytes(data, inside, PURPOSE)[0]
    if failure is not None:
        raise failure
    if "result" not in (outcome := json.loads(data)):
        _raise(data, FORWARDED_ERRORS, 0)
    return outcome["result"]


def in_all_processes(action: Callable[[], Any], group: Group, retried: Sequence[type[Exception]]) -> Any:
    """Do what all processes of a member must be able to do; if one can't, all raise. Collective inside."""
    if group.inside.size == 1:
        return action()
    result = failure = None
    try:
        result = action()
    except BrokenMemberError:
        raise
    except BaseException as error:
        # Before the others of this member know: those of this local rank wait for this process's messages.
        group.break_off()
        failure = error
    everyone = gather_bytes(_encoded(failure, retried), group.inside, PURPOSE)
    if failure is not None:
        raise failure
    for rank, data in enumerate(everyone):
        if data:
            _raise(data, [CommunicationError] * len(retried), rank)
    return result


def _encoded(failure: BaseException | None, foreseen: Sequence[type[Exception]]) -> bytes:
    """Encode a failure for the other processes of this member; empty if there is none."""
    if failure is None:
        return b""
    is_foreseen = not isinstance(failure, BrokenMemberError)
    numbers = (n for n, known in enumerate(foreseen) if is_foreseen and isinstance(failure, known))
    number = next(numbers, None)
    message = str(failure) if number is not None else f"{type(failure).__name__}: {failure}"
    return json.dumps({"error": [number, message]}).encode()


def _raise(data: bytes, foreseen: Sequence[type[Exception]], rank: int) -> None:
    """Raise the failure of a process of this member; one that was not foreseen ends the member."""
    number, message = json.loads(data)["error"]
    error = BrokenMemberError if number is None else foreseen[number]
    raise error(f"process {rank} of this member: {message}")


def described_together(own: Description, group: Group) -> Description:
    """Return the description of all processes of this member, to compare with others. Collective inside."""
    inside = group.inside
    if inside.size == 1:
        return {"processes of a member": "1", **own}
    kind = "each with a part of the model" if group.has_parts else "each with the whole model"
    everyone = gather_bytes(json.dumps(own).encode(), inside, "what the processes of a member hold")
    described = {"processes of a member": f"{inside.size}, {kind}", **json.loads(everyone[0])}
    for rank, data in enumerate(everyone):
        of_one = json.loads(data).items()
        described |= {f"{key} (process {rank})": said for key, said in of_one if described.get(key) != said}
    return described


class _LeaderTransport(Transport):
    """The members' group to each process of one member: its first process sends and receives for all.

    Every result, and every failure, is the first one's on all of them.
    """

    def __init__(self, first: Transport | None, inside: Transport) -> None:
        self.rank, self.size = 0, 1
        self._first, self._inside = first, inside

    def start(self, message: Message) -> Work:
        work: Work | None = None
        failure: BaseException | None = None
        if self._first is not None:
            try:
                work = self._first.start(message)
            except BaseException as error:
                failure = error  # raised when it is waited for, on all alike

        def wait_first() -> None:
            if failure is not None:
                raise failure
            if work is not None:
                work.wait()

        has_waited = False

        def wait() -> None:
            nonlocal has_waited
            if has_waited:
                return
            has_waited = True
            broadcast_outcome(wait_first, self._inside)
            self._inside.broadcast(message.output, 0, PURPOSE).wait()

        return CombinedWork(wait)


class _Inside(Wrapped):
    """Joins the processes of a member; if that breaks, the member ends."""

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
            f"a process of this member has ended, or stands still, and so this one ends: {error}"
        ) from error
