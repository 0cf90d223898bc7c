"""What strikes members of one process, and what they wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from thinwire.channel import Work
from thinwire.channel.wrapped import Wrapped
from thinwire.elastic.member import Member
from thinwire.errors import CommunicationError


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

    def send(self, collective: Any, tensor: torch.Tensor, purpose: str, start: Callable[[], Work]) -> Work:
        work = start()
        self.place -= self.words in purpose
        return Cut(work, self.error) if self.words in purpose and self.place == 0 else work


class Cut:
    """A message that has come for the others, and not for this member."""

    def __init__(self, work: Work, error: type[Exception]) -> None:
        self.work, self.error = work, error

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        self.work.wait()
        raise self.error("the link was cut")


class Killed(Exception):  # noqa: N818
    pass
