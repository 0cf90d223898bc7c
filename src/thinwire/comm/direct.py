"""Messages that go over Gloo from each member to each other one, faster than by its own collectives."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property, reduce
from itertools import count
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinwire.comm.transport import Operation

# Gloo sends nothing that was not asked for, and its collectives ask when they are called: a round trip for
# each of 2 (members - 1) hops. A message that was asked for before it is sent takes half of one. So this many
# messages are asked for ahead, whatever they will be; of a longer one the first bytes, and the link is busy
# with those until the question for the rest has come.
ASKED_AHEAD = 4
HEAD_BYTES = 1 << 19  # of all that a member sends at once: 40 ms at 100 Mbit/s
# Messages of one tag match in the order in which they are sent; no one else's have these tags. Gloo chooses
# by the tag which of its connections carries a message, if it has several (GLOO_SOCKET_IFNAME=eth0,eth0).
NUM_TAGS = 8
TAGS = {"all_reduce": 0x7D00, "all_gather": 0x7D10, "all_to_all": 0x7D20, "sums": 0x7D30}
LENGTH_BYTES = 8


class Asked(NamedTuple):
    """The head of the next message of one member, behind the length of the whole."""

    room: torch.Tensor
    work: dist.Work


class Post:
    """Messages that one member of a group sends to, and has asked of, each of the others."""

    def __init__(self, rank: int, size: int, ahead: int = 0) -> None:
        self.rank, self.size = rank, size
        self._others = [(rank + distance) % size for distance in range(1, size)]
        self._head_bytes = HEAD_BYTES // max(1, size - 1)
        self._ahead = ahead
        # Kinds apart: a message never fills the room of one of another kind, and so ends in a timeout.
        self._asked: dict[str, deque[list[Asked]]] = defaultdict(deque)
        self._asking, self._sending = (defaultdict[str, Any](count) for _ in range(2))
        # Also those that no one waits for any more: Gloo breaks a connection off whose message has no room.
        self._under_way: set[Direct] = set()

    def exchange(
        self,
        group: Any,
        kind: str,
        received: Sequence[torch.Tensor],
        sent: Sequence[torch.Tensor],
        finish: Callable[[], object] = lambda: None,
    ) -> Direct:
        """Send a row of bytes to each other member, and receive the rows that they send."""
        # The group is not kept: it would never end, since it is known by what belongs to it.
        while len(self._asked[kind]) <= self._ahead:
            self._asked[kind].append(self._ask(group, kind))
        tag = TAGS[kind] + next(self._sending[kind]) % NUM_TAGS
        rests = [received[other][self._head_bytes :] for other in self._others]
        works = [
            group.recv([rest], other, tag + NUM_TAGS)
            for other, rest in zip(self._others, rests, strict=True)
            if len(rest)
        ]
        for other in self._others:
            length = torch.tensor([len(sent[other])]).view(torch.uint8)
            head, rest = sent[other][: self._head_bytes], sent[other][self._head_bytes :]
            works.append(group.send([torch.cat([length, head])], other, tag))
            works += [group.send([rest], other, tag + NUM_TAGS)] if len(rest) else []
        rows = [received[other] for other in self._others]
        exchange = Direct(self._asked[kind].popleft(), rows, works, finish, self._under_way.discard)
        self._under_way.add(exchange)
        return exchange

    def _ask(self, group: Any, kind: str) -> list[Asked]:
        """Ask each other member for the head of its next message but those that were asked for."""
        tag = TAGS[kind] + next(self._asking[kind]) % NUM_TAGS
        rooms = [torch.empty(LENGTH_BYTES + self._head_bytes, dtype=torch.uint8) for _ in self._others]
        return [
            Asked(room, group.recv([room], other, tag))
            for other, room in zip(self._others, rooms, strict=True)
        ]

    @cached_property
    def later(self) -> SimpleQueue[Callable[[], None] | None]:
        """The queue of a thread's calls: the second messages of sums, in the order of the sums."""
        calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_call_all, args=(calls,), daemon=True, name="thinwire sums").start()
        weakref.finalize(self, calls.put, None)
        return calls


def _call_all(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it knows the group, which would never end


class Sum:
    """A sum among more than two, as one `dist.Work`: each member sums its part, and sends that to the others.

    As many bytes as by a ring, in two messages that follow each other instead of 2 (members - 1).
    """

    def __init__(self, post: Post, group: Any, tensor: torch.Tensor, operation: Operation) -> None:
        parts = tensor.view(-1).tensor_split(post.size)
        own = parts[post.rank]
        rows = [own if part is own else torch.empty_like(own) for part in parts]
        received, sent = list(map(as_bytes, rows)), list(map(as_bytes, parts))
        begun = post.exchange(group, "all_reduce", received, sent, combining(rows, operation, own))
        self._second: Future[Direct] = Future()

        def go_on() -> None:
            try:
                begun.wait()
                self._second.set_result(post.exchange(group, "sums", sent, [as_bytes(own)] * post.size))
            except Exception as error:  # whatever a backend raises is for the one who waits
                self._second.set_exception(error)

        post.later.put(go_on)

    def wait(self) -> None:
        self._second.result().wait()


def combining(rows: Sequence[torch.Tensor], operation: Operation, into: torch.Tensor) -> Callable[[], object]:
    """Return a function that writes the sum or maximum of rows, in one order: of the same bits on all."""
    function = torch.maximum if operation == "max" else torch.add
    # 16-bit types round once, and not after each member.
    wide = torch.promote_types(into.dtype, torch.float32) if into.is_floating_point() else into.dtype
    return lambda: into.copy_(reduce(function, rows[1:], rows[0].to(wide)))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as bytes: every backend carries those, of every type, to the bit."""
    return tensor.view(-1).view(torch.uint8)


class Direct:
    """An exchange under way, as one `dist.Work`; `finish` makes the result of what has come."""

    def __init__(
        self,
        heads: Sequence[Asked],
        rows: Sequence[torch.Tensor],
        works: Sequence[dist.Work],
        finish: Callable[[], object],
        ended: Callable[[Direct], object],
    ) -> None:
        self._heads, self._rows, self._works, self._finish = heads, rows, works, finish
        self._ended = ended

    def wait(self) -> None:
        # Taken out first: waiting for one of Gloo's again would never end.
        heads, self._heads, works, self._works = self._heads, (), self._works, ()
        for asked, row in zip(heads, self._rows, strict=False):
            asked.work.wait()
            length = int(asked.room[:LENGTH_BYTES].view(torch.int64))
            if length != len(row):
                # Raise the type that a backend does: who waits for it knows what the message was.
                raise RuntimeError(f"expected a message of {len(row)} bytes, got {length}")
            head = asked.room[LENGTH_BYTES:][:length]
            row[: len(head)].copy_(head)
        for work in works:
            work.wait()
        self._ended(self)
        if heads:
            self._finish()
