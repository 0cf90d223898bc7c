"""Members of one process that come and go: how they run, what strikes them, and what they wait for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from hypothesis import strategies as st

from thinwire.channel import Message, Work, run_members
from thinwire.channel.in_process import wait_for
from thinwire.channel.metered import Wrapped
from thinwire.elastic import InProcessGroup, InProcessLighthouse
from thinwire.errors import CommunicationError
from thinwire.localsgd.member import Member

Front = TypeVar("Front", bound=Member)


class Reached:
    """Waits until a member has made so many steps."""

    def __init__(self, fronts: Callable[[], Iterable[Member]], steps: int) -> None:
        self._fronts, self._steps = fronts, steps

    @property
    def is_complete(self) -> bool:
        return any(front.steps >= self._steps for front in self._fronts())

    def who_is_missing(self) -> str:
        return f"step {self._steps} is waited for"


class Turn:
    """Lets all others run once."""

    is_over = False

    @property
    def is_complete(self) -> bool:
        was_over, self.is_over = self.is_over, True
        return was_over

    def who_is_missing(self) -> str:
        return "nobody"


class Faulty(Wrapped):
    """Fails what a member waits for, once, the nth time that a message's purpose has some words in it."""

    def __init__(
        self, inner: Wrapped, words: str, place: int, error: type[Exception] = CommunicationError
    ) -> None:
        super().__init__(inner.transport)
        self.words, self.place, self.error = words, place, error

    def start(self, message: Message) -> Work:
        work = super().start(message)
        self.place -= self.words in message.purpose
        return Cut(work, self.error) if self.words in message.purpose and self.place == 0 else work


class Cut:
    """A message that has come for the others, and not for this member."""

    def __init__(self, work: Work, error: type[Exception]) -> None:
        self.work, self.error = work, error

    def wait(self) -> None:
        self.work.wait()
        raise self.error("the link was cut")


class Killed(Exception):  # noqa: N818
    pass


class InTurns(ABC, Generic[Front]):
    """Members that train in one process, each till it is killed, fails, or returns how it ended.

    `joins_at`: at which step of the others each joins; those at 0 wait for each other. `ends`: at which step
    something befalls some, and what. `faults`: words of a message's purpose, which of these messages fails,
    counted from 1, and with what error. What a run notes must be there before this runs it.
    """

    def __init__(
        self,
        lighthouse: InProcessLighthouse,
        joins_at: list[int],
        ends: dict[int, tuple[int, str]] | None,
        faults: dict[int, tuple[Any, ...]] | None,
    ) -> None:
        self.lighthouse, self.joins_at = lighthouse, joins_at
        self.ends, self.faults = ends or {}, faults or {}
        self.fronts: dict[int, Front] = {}
        self.errors: dict[int, BaseException] = {}
        self.groups = {member: InProcessGroup(lighthouse) for member, step in enumerate(joins_at) if not step}
        self.results = run_members(len(joins_at), self._live)

    def _live(self, member: int) -> str:
        if self.joins_at[member]:
            wait_for(Reached(self.fronts.values, self.joins_at[member]))
            self.groups[member] = InProcessGroup(self.lighthouse)
        if member in self.faults:
            self.groups[member].transport = Faulty(self.groups[member].transport, *self.faults[member])
        try:
            return self.train(member)
        except Killed:
            return "killed"
        except Exception as error:
            self.errors[member] = error
            return type(error).__name__

    @abstractmethod
    def train(self, member: int) -> str:
        """Train with a front of its own, put into `fronts`; how that ended."""


@st.composite
def clean_lives(draw: st.DrawFn, every_steps: int, steps: int) -> dict[str, Any]:
    """When members join, and in which of so many steps some of them leave in order."""
    joins_at = [0, *draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))]
    leaving = draw(st.sets(st.integers(1, len(joins_at) - 1)))
    # Not before it has joined: at the end of the turn in which it asks.
    first = [-(-(at + 1) // every_steps) * every_steps for at in joins_at]
    ends = {member: (draw(st.integers(first[member], steps)), "leave") for member in leaving}
    return {"joins_at": joins_at, "ends": ends, "steps": steps}
