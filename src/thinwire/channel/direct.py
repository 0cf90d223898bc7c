"""Messages that go over Gloo from each member to each other one, faster than by its own collectives."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinwire.channel.transport import Collective

# Gloo sends nothing that was not asked for, and its collectives ask when they are called: a round trip for
# each of 2 (members - 1) hops. A message that was asked for before it is sent takes half of one. So this many
# messages are asked for ahead, whatever they will be; of a longer one the first bytes, and the link is busy
# with those until the question for the rest has come.
ASKED_AHEAD = 4
HEAD_BYTES = 1 << 19  # of all that a member sends at once: 40 ms at 100 Mbit/s
# Messages of one tag match in the order in which they are sent; no one else's have these tags. Gloo chooses
# by the tag which of its connections carries a message, if it has several (GLOO_SOCKET_IFNAME=eth0,eth0).
NUM_TAGS = 8
TAGS: dict[str, int] = {"all_reduce": 0x7D00, "all_gather": 0x7D10, "all_to_all": 0x7D20}
LENGTH_BYTES = 8


class Asked(NamedTuple):
    """The head of the next message of one member, behind the length of the whole."""

    room: torch.Tensor
    work: dist.Work


class Post:
    """What one member of a group sends to, and has asked of, each of the others."""

    def __init__(self, rank: int, size: int, ahead: int = 0) -> None:
        self._others = [(rank + distance) % size for distance in range(1, size)]
        self._head_bytes = HEAD_BYTES // max(1, size - 1)
        self._ahead = ahead
        # Kinds apart: a message never fills the room of one of another kind, and so ends in a timeout.
        self._asked: dict[Collective, deque[list[Asked]]] = defaultdict(deque)
        self._asking, self._sending = (defaultdict[Collective, Any](count) for _ in range(2))

    def exchange(
        self,
        group: Any,
        collective: Collective,
        received: Sequence[torch.Tensor],
        sent: Sequence[torch.Tensor],
        finish: Callable[[], object],
    ) -> Direct:
        """Send a row of bytes to each other member, and receive the rows that they send."""
        # The group is not kept: it would never end, since it is known by what belongs to it.
        while len(self._asked[collective]) <= self._ahead:
            self._asked[collective].append(self._ask(group, collective))
        tag = TAGS[collective] + next(self._sending[collective]) % NUM_TAGS
        rests = [received[each][self._head_bytes :] for each in self._others]
        works = [
            group.recv([rest], each, tag + NUM_TAGS)
            for each, rest in zip(self._others, rests, strict=True)
            if len(rest)
        ]
        for each in self._others:
            length = torch.tensor([len(sent[each])]).view(torch.uint8)
            head, rest = sent[each][: self._head_bytes], sent[each][self._head_bytes :]
            works.append(group.send([torch.cat([length, head])], each, tag))
            works += [group.send([rest], each, tag + NUM_TAGS)] if len(rest) else []
        rows = [received[each] for each in self._others]
        return Direct(self._asked[collective].popleft(), rows, works, finish)

    def _ask(self, group: Any, collective: Collective) -> list[Asked]:
        """Ask each other member for the head of its next message but those that were asked for."""
        tag = TAGS[collective] + next(self._asking[collective]) % NUM_TAGS
        rooms = [torch.empty(LENGTH_BYTES + self._head_bytes, dtype=torch.uint8) for _ in self._others]
        return [
            Asked(room, group.recv([room], each, tag)) for each, room in zip(self._others, rooms, strict=True)
        ]


class Direct:
    """An exchange under way, as one `dist.Work`; `finish` makes the result of what has come."""

    def __init__(
        self,
        heads: Sequence[Asked],
        rows: Sequence[torch.Tensor],
        works: Sequence[dist.Work],
        finish: Callable[[], object],
    ) -> None:
        self._heads, self._rows, self._works, self._finish = heads, rows, works, finish

    def wait(self) -> None:
        """As `dist.Work.wait`."""
        # Taken out first: waiting for one of Gloo's again would never end.
        heads, self._heads, works, self._works = self._heads, (), self._works, ()
        for each, row in zip(heads, self._rows, strict=False):
            each.work.wait()
            length = int(each.room[:LENGTH_BYTES].view(torch.int64))
            if length != len(row):
                # As what a backend raises: who waits for it knows what the message was.
                raise RuntimeError(f"expected a message of {len(row)} bytes, got {length}")
            head = each.room[LENGTH_BYTES:][:length]
            row[: len(head)].copy_(head)
        for work in works:
            work.wait()
        if heads:
            self._finish()
