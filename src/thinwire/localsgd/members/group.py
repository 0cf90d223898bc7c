"""What a group is whose members come and go: who is there, what joins them, and what newcomers are given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from thinwire.channel import InProcessTransport
from thinwire.channel.metered import Wrapped
from thinwire.checks import number, whole_count


class Group(ABC):
    """One member's end of a group whose members come and go between averagings.

    An averaging is a transaction: `meet`, messages over `transport`, `conclude`. One that is not committed is
    repeated, with whoever is there then.

    Args:
        min_members: An averaging needs at least so many; fewer wait for others.
        wait_seconds: How long a member waits, for enough others and for an averaging that succeeds.

    Attributes:
        transport: Over the members of the last quorum; always the same object. Before the first, this member
            is alone.
        quorum_id: Of the last quorum, the same on all its members.
        num_changes: How often this member was joined to others so far: whenever the members have changed, or
            an averaging has failed.
        received: What the others have sent this member to start from, until it is taken; None if it is
            where they are.
        kind: What finds the members, the same on all of them.
        leaves_on_sigterm: Whether SIGTERM on the main thread lets this member leave after its next averaging.
        is_leaving: Returns whether this member has been asked to leave: nobody is waited for any more.
        provide: Returns what a newcomer starts from. It is called inside `meet`, on any thread.

    Raises:
        ConfigError: An argument is wrong.
    """

    kind: str
    leaves_on_sigterm = True

    def __init__(self, min_members: int, wait_seconds: float) -> None:
        self.min_members = whole_count("min_members", min_members, minimum=1)
        self.wait_seconds = float(number("wait_seconds", wait_seconds, minimum=0))
        self.transport = Wrapped(InProcessTransport.group(1)[0])
        self.quorum_id = -1
        self.num_changes = 0
        self.received: Mapping[str, Any] | None = None
        self.is_leaving: Callable[[], bool] = bool
        self.provide: Callable[[], Mapping[str, Any]] = dict

    @abstractmethod
    def meet(self) -> None:
        """Wait until it is decided who takes part in the next averaging; `transport` joins them.

        Raises:
            CommunicationError: They were found, and then could not be joined, or nobody was found in time.
            LeftError: Nobody can be found, and this member is asked to leave.
        """

    @abstractmethod
    def conclude(self, committed: bool) -> None:
        """Say how the averaging has ended. What was not committed breaks the messages of all others off."""

    @abstractmethod
    def start_over(self, commits: int = 0) -> None:
        """Stand where so many averagings have led; at 0, the next `meet` brings what the others hold."""

    @abstractmethod
    def leave(self) -> None:
        """Go; nobody waits for this member any more."""
