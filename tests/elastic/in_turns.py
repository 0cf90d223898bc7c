"""Members of one process that come and go: how they run, what strikes them, and what they wait for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch
from hypothesis import strategies as st

from thinwire.algorithms import Quantize
from thinwire.algorithms.error_feedback import ERROR
from thinwire.comm import Message, Work, run_members
from thinwire.comm.in_process import wait_for
from thinwire.comm.metered import Wrapped
from thinwire.elastic import InProcessGroup, InProcessLighthouse
from thinwire.errors import CommunicationError
from thinwire.local_sgd.elastic_members import Member

Averageable = TypeVar("Averageable", bound=Member)

FEW_BITS = Quantize(bits=2, block=16, error_feedback=True)
VOTE = "whether all have received everything"


def alone(lighthouse: InProcessLighthouse | None = None) -> InProcessGroup:
    """A group of one member, by default without anything that it waits for."""
    return InProcessGroup(lighthouse or InProcessLighthouse())


class Reached:
    """Waits until a member has made so many steps."""

    def __init__(self, adapters: Callable[[], Iterable[Member]], steps: int) -> None:
        self._adapters, self._steps = adapters, steps

    @property
    def is_complete(self) -> bool:
        return any(adapter.steps >= self._steps for adapter in self._adapters())

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


class InTurns(ABC, Generic[Averageable]):
    """Members that train in one process, each till it is killed, fails, or returns how it ended.

    `joins_at`: at which step of the others each joins; those at 0 wait for each other. `ends`: at which step
    something befalls some, and what. `faults`: words of a message's purpose, which of these messages fails,
    counted from 1, and with what error. What a run notes must be there before this runs it.
    """

    def __init__(
        self,
        joins_at: list[int],
        *,
        lighthouse: InProcessLighthouse | None = None,
        ends: dict[int, tuple[int, str]] | None = None,
        faults: dict[int, tuple[Any, ...]] | None = None,
    ) -> None:
        self.lighthouse, self.joins_at = lighthouse or InProcessLighthouse(1, 60.0), joins_at
        self.ends, self.faults = ends or {}, faults or {}
        self.adapters: dict[int, Averageable] = {}
        self.errors: dict[int, BaseException] = {}
        self.models: dict[tuple[int, int], torch.Tensor] = {}  # what `train` notes, by step and member
        self.groups = {
            member: InProcessGroup(self.lighthouse) for member, step in enumerate(joins_at) if not step
        }
        self.results = run_members(len(joins_at), self._live)

    def _live(self, member: int) -> Any:
        if self.joins_at[member]:
            self.wait_until(self.joins_at[member])
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
    def train(self, member: int) -> Any:
        """Train with an adapter of its own, put into `adapters`; how that ended."""

    def end(self, how: str, member: int) -> None:
        """Let a member leave, or kill it."""
        if how == "leave":
            self.adapters[member].leave()
        else:
            self.groups[member].leave = lambda: None  # type: ignore[method-assign]
            raise Killed

    def wait_until(self, steps: int) -> None:
        """Wait until a member has made so many steps."""
        reached = Reached(self.adapters.values, steps)
        while not reached.is_complete:
            with suppress(CommunicationError):  # all wait for one that has been struck, and go on without it
                wait_for(reached)

    def check_equal(self, *, since: int = 0) -> None:
        """Check that all who have noted a model after the same step have noted the same."""
        for step in {step for step, _ in self.models if step >= since}:
            held = [model for (at, _), model in self.models.items() if at == step]
            assert all(torch.equal(each, held[0]) for each in held), f"step {step}"

    def owed(self, member: int) -> torch.Tensor:
        """Return a member's residual, in the order of its parameters."""
        adapter = self.adapters[member]
        errors, named = adapter._engine.state.memory[ERROR], adapter.module.named_parameters()
        return torch.cat([errors.get(name, torch.zeros_like(each)).flatten() for name, each in named])

    def lasts(self, member: int) -> torch.Tensor:
        """Return a member's last averages, in the order of its parameters."""
        adapter: Any = self.adapters[member]
        lasts = {each.name: last for each, last in adapter._model.lasts}
        return torch.cat([lasts[name].flatten() for name, _ in adapter.module.named_parameters()])


@st.composite
def clean_lives(draw: st.DrawFn, every_steps: int, steps: int) -> dict[str, Any]:
    """When members join, and in which of so many steps some of them leave in order."""
    joins_at = [0, *draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))]
    leaving = draw(st.sets(st.integers(1, len(joins_at) - 1)))
    # Not before it has joined: at the end of the turn in which it asks.
    first = [-(-(at + 1) // every_steps) * every_steps for at in joins_at]
    ends = {member: (draw(st.integers(first[member], steps)), "leave") for member in leaving}
    return {"joins_at": joins_at, "ends": ends, "steps": steps}
