"""A member of several processes: the first one meets the other members, and speaks for all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from thinwire.comm import Description, Message, Transport, Work, gather_bytes, gather_numbers
from thinwire.comm.metered import Wrapped
from thinwire.comm.transport import CombinedWork
from thinwire.errors import CommunicationError, LeftError, StateError
from thinwire.local_sgd.groups.group import Group
from thinwire.local_sgd.groups.state_transfer import packed, unpacked

PURPOSE = "the processes of a member telling each other"
TOLD = (CommunicationError, LeftError, StateError)  # what the first process tells the others, who raise it


class BrokenMemberError(CommunicationError):
    """The processes of a member have lost each other: it ends, and no averaging is tried again."""


class MachineGroup(Group):
    """One process's end of a member that is several processes.

    What members say of themselves, and their verdict on an averaging, is said and heard by the first process
    of each. If all processes of a member hold the whole model (DDP), the first one sends and receives that,
    too. If each holds a part (`has_parts`), it averages that with those of its place in the other members.
    """

    def __init__(self, group: Any, *, has_parts: bool) -> None:
        settings = {"weigh_by": group.weigh_by, "send_optimizer": group.send_optimizer}
        super().__init__(group.min_members, group.wait_seconds, **settings)
        self.inside, self.has_parts, self.kind = _Inside(group.inside), has_parts, group.kind
        self._group, self._is_first = group, self.inside.rank == 0
        self._spoken = _Spoken(group.transport if self._is_first else None, self.inside)
        self.transport = group.transport if has_parts else Wrapped(self._spoken)
        self._address = ""  # at which the processes of one place find each other
        group.is_leaving = lambda: self.is_leaving()  # noqa: PLW0108 - it is set after this
        group.provide = lambda: self.provide()  # noqa: PLW0108

    @property
    def control(self) -> Transport:
        return self._spoken

    def decided(self, value: float) -> float:
        return gather_numbers([value], self.inside, PURPOSE)[0][0]

    def meet(self) -> None:
        met: dict[str, Any] = {}
        failure: BaseException | None = None
        if self._is_first:
            try:
                met = self._met()
            except BaseException as error:  # whatever it is, the others of this member wait to hear
                failure = error
        words = told(failure, TOLD) or json.dumps(met).encode()
        words = gather_bytes(words, self.inside, PURPOSE)[0]
        if failure is not None:
            raise failure
        met = json.loads(words)
        heard(words if "error" in met else b"", TOLD)
        self._spoken.rank, self._spoken.size = met["rank"], met["size"]
        self.quorum_id, self.num_changes, self._address = met["quorum"], met["changes"], met["address"]
        if met["received"] is None:
            self.received = None
        elif not self._is_first:
            self.received = met["received"]  # until `join` brings the rest

    def _met(self) -> dict[str, Any]:
        group = self._group
        group.meet()
        if group.received is not None:
            self.received, group.received = group.received, None
        return {
            "rank": group.transport.rank,
            "size": group.transport.size,
            "quorum": group.quorum_id,
            "changes": group.num_changes,
            "address": group.address,
            "received": None if self.received is None else _outline(self.received),
        }

    def join(self, are_new: Sequence[bool]) -> None:
        if self.has_parts and not self._is_first:  # which has met those of its place before
            spoken, place = self._spoken, self.inside.rank
            received = self._group.join_place(f"{self._address}/{place}", spoken.rank, spoken.size, are_new)
            self.received = None if self.received is None else received
        elif not self.has_parts and self.received is not None:
            self._hear_state()

    def _hear_state(self) -> None:
        """Let the first process tell the others of this member what all start from."""
        data = packed(self.received) if self._is_first else torch.empty(0, dtype=torch.uint8)
        length = int(self.decided(len(data)))
        if not self._is_first:
            data = torch.empty(length, dtype=torch.uint8)
        data = data.to(self.inside.control_device)
        self.inside.broadcast(data, 0, PURPOSE).wait()
        if not self._is_first:
            self.received = unpacked(data.cpu())

    def break_off(self) -> None:
        self._group.break_off()

    def conclude(self, committed: bool) -> None:
        if self._is_first:
            self._group.conclude(committed)
        elif not committed:
            self._group.break_off()

    def start_over(self, commits: int = 0) -> None:
        if self._is_first:
            self._group.start_over(commits)

    def leave(self) -> None:
        self._group.leave()


def told(failure: BaseException | None, kinds: Sequence[type[Exception]]) -> bytes:
    """Encode a failure for the other processes of this member; empty if there is none."""
    if failure is None:
        return b""
    is_foreseen = not isinstance(failure, BrokenMemberError)
    places = (place for place, known in enumerate(kinds) if is_foreseen and isinstance(failure, known))
    kind = next(places, None)
    words = str(failure) if kind is not None else f"{type(failure).__name__}: {failure}"
    return json.dumps({"error": [kind, words]}).encode()


def heard(words: bytes, kinds: Sequence[type[Exception]], rank: int = 0) -> None:
    """Raise what a process of this member has told; what was not foreseen ends the member."""
    if words:
        kind, said = json.loads(words)["error"]
        error = BrokenMemberError if kind is None else kinds[kind]
        raise error(f"process {rank} of this member: {said}")


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


class _Spoken(Transport):
    """The members' group to each process of one member: its first process sends and receives for all.

    Every result, and every failure, is the first one's on all of them.
    """

    def __init__(self, first: Transport | None, inside: Transport) -> None:
        self.rank, self.size = 0, 1
        self._first, self._inside = first, inside

    def start(self, message: Message) -> Work:
        work = None
        failure: BaseException | None = None
        if self._first is not None:
            try:
                work = self._first.start(message)
            except BaseException as error:
                failure = error  # raised when it is waited for, on all alike
        return _Heard(message, work, failure, self._inside)


class _Heard:
    """A message of the first process, whose result the others hear."""

    def __init__(
        self, message: Message, work: Work | None, failure: BaseException | None, inside: Transport
    ) -> None:
        self._message, self._work, self._failure, self._inside = message, work, failure, inside
        self._is_done = False

    def wait(self) -> None:
        if not self._is_done:
            self._is_done = True
            self._hear()
        if self._failure is not None:
            raise self._failure

    def _hear(self) -> None:
        if self._work is not None:
            try:
                self._work.wait()
            except BaseException as error:
                self._failure = error
        inside = self._inside
        words = gather_bytes(told(self._failure, TOLD), inside, PURPOSE)[0]
        try:
            heard(words, TOLD)
        except (*TOLD, BrokenMemberError) as error:
            self._failure = self._failure or error
            return
        inside.broadcast(self._message.output, 0, PURPOSE).wait()


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


def _outline(received: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state that must be known before it is there."""
    try:
        return {"step": received["step"], "members": {"lineage": received["members"]["lineage"]}}
    except (KeyError, TypeError):
        return {}  # which all refuse alike
