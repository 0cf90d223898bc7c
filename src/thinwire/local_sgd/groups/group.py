"""One member's end of a group whose members come and go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from thinwire.checks import number, true_or_false, whole_count
from thinwire.comm import InProcessTransport, Transport
from thinwire.comm.metered import Wrapped
from thinwire.errors import CommunicationError, ConfigError


class NoQuorumError(CommunicationError):
    """No quorum was formed within `wait_seconds`."""


class Group(ABC):
    """One member's end of a group whose members may come and go between averagings.

    An averaging is a transaction: `start_quorum`, messages over `transport`, `commit`. If it is not
    committed, it is repeated with the members present then.

    Args:
        min_members: An averaging needs at least this many; fewer wait for others.
        wait_seconds: How long a member waits for enough others, and for an averaging that succeeds.
        weigh_by: The weight of a member's change in `LocalSGD` and `DiLoCo`: the "steps" that it made, or the
            "work" given to `count_work`.
        send_optimizer: Whether a joining member receives the state and settings of all optimizers from one of
            the others; these must then hold every trainable parameter. Otherwise it starts with its own.
            `Steps` needs it.

    Attributes:
        transport: Connects the members of the last quorum; always the same object. Before the first quorum,
            this member is alone. If each process of a member has a part, connects those of its local rank.
        control: Carries the members' statuses: those of the first process, if a member has several.
        inside: Connects the processes of this member.
        has_parts: Whether each process of a member has a part of the model, instead of the whole.
        quorum_id: The last quorum's number, the same on all its members.
        num_changes: How often this member was connected to others so far: each time the members have changed
            or an averaging has failed.
        kind: The name of what finds the members, the same on all of them.
        leaves_on_sigterm: Whether this member leaves after the averaging that follows a SIGTERM.
        is_leaving: Returns whether this member was asked to leave; it then waits for no others.

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
        self.is_leaving: Callable[[], bool] = bool

    @property
    def control(self) -> Transport:
        """See `Group`; `transport` if a member is one process."""
        return self.transport

    def broadcast_scalar(self, value: float) -> float:
        """Broadcast a number from the member's rank 0, such as elapsed time. Collective."""
        return value

    def abort(self) -> None:
        """Make this process's messages fail, and so those of the others."""
        self.commit(False)

    @abstractmethod
    def start_quorum(self, commits: int) -> None:
        """Wait for the quorum of the next averaging, and connect `transport` to its members.

        Args:
            commits: The number of averagings behind this member's model.

        Raises:
            CommunicationError: Members were found but not connected; a `NoQuorumError` if none were found.
            LeftError: No members can be found, and this one was asked to leave.
        """

    @abstractmethod
    def commit(self, committed: bool) -> None:
        """End the averaging. If it was not committed, abort the messages of all other members."""

    @abstractmethod
    def join(self, state: Callable[[], Mapping[str, Any]], source: int, newcomers: Sequence[int]) -> Any:
        """Connect to changed members; send one's state to newcomers, and return it on these. Collective.

        Args:
            state: Returns this member's state.
            source: The rank of the member that sends its own.
            newcomers: The ranks of those that receive it.
        """

    @abstractmethod
    def leave(self) -> None:
        """Leave; the others no longer wait for this member."""
