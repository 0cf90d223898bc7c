"""One member's end of a group whose members come and go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from thinwire.checks import number, true_or_false, whole_count
from thinwire.comm import InProcessTransport, Transport
from thinwire.comm.metered import Wrapped
from thinwire.errors import ConfigError


class Group(ABC):
    """One member's end of a group whose members may come and go between averagings.

    An averaging is a transaction: `start_quorum`, messages over `transport`, `commit`. One that is not
    committed is repeated, with all who are there then.

    Args:
        min_members: An averaging needs at least this many; fewer wait for others.
        wait_seconds: How long a member waits, for enough others and for an averaging that succeeds.
        weigh_by: The weight of a member's change in `LocalSGD` and `DiLoCo`: the "steps" that it made, or the
            "work" given to `count_work`.
        send_optimizer: Whether a member that joins gets the state and settings of all optimizers as one of
            the others has them; then these must hold every trainable parameter. Else it starts with its own.
            `Steps` needs it.

    Attributes:
        transport: Over the members of the last quorum; always the same object. Before the first, this member
            is alone. If each process of a member has a part of the model, over those of its local rank.
        control: Carries the members' statuses: those of the first process, if a member has several.
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
        provide: Returns what a newcomer starts from. It is called inside `start_quorum`, on any thread.

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
        self.weigh_by = weigh_by
        self.send_optimizer = true_or_false("send_optimizer", send_optimizer)
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

    def broadcast_scalar(self, value: float) -> float:
        """Broadcast a number from the member's rank 0, such as elapsed time. Collective."""
        return value

    def join(self, are_new: Sequence[bool]) -> None:
        """Let all processes of this member have what its first one has: the others, and `received`."""
        assert self.inside.size == 1, "a member of several processes has a MachineGroup"

    def break_off(self) -> None:
        """Let this process's messages fail, and so those of the others."""
        self.commit(False)

    @abstractmethod
    def start_quorum(self) -> None:
        """Wait until it is decided who takes part in the next averaging; `transport` joins them.

        Raises:
            CommunicationError: They were found, and then could not be joined, or no one was found in time.
            LeftError: No one can be found, and this member is asked to leave.
        """

    @abstractmethod
    def commit(self, committed: bool) -> None:
        """Say how the averaging has ended. What was not committed breaks the messages of all others off."""

    @abstractmethod
    def reset(self, commits: int = 0) -> None:
        """Go to the state after this many averagings; at 0, the next quorum brings what the others hold."""

    @abstractmethod
    def leave(self) -> None:
        """Leave; no one waits for this member any more."""
