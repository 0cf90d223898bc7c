"""Messages over Gloo directly from each rank to each other rank, in half a round trip.

Gloo sends only what the receiver has requested, and its collectives request when they are called. In this
module each rank posts the receives of the next few messages ahead, so a message is sent immediately:

    Gloo's own: a round trip a hop, 2 (size - 1) hops      here: half a round trip
      rank 0                        rank 1                   rank 0                     rank 1
      send  <──────── "ready" ────────  recv                 post recv 0..3             post recv 0..3
            ═════════ data ══════════>                       send 0 ═════ data ═════>   recv 0 is posted
                                                             post recv 4                post recv 4

The length of the next message is not known ahead. A posted receive has room for a head, preceded by the total
length. The rest of a longer message is requested as Gloo does, while its head keeps the link busy.

Gloo matches the messages of a tag in FIFO order; these tags are reserved for this module. Each kind of
collective has its own tag. If rank 0 started a gather and then an exchange, and rank 1, due to a bug, first
the exchange, then with one tag each would read the other's gather as an exchange. With separate tags, neither
finds its message, and both end in the group's timeout.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinwire.comm.transport import Operation
from thinwire.wire import HEAD_BYTES

POSTED_AHEAD = 4
LENGTH_BYTES = 8
# If Gloo has several connections (GLOO_SOCKET_IFNAME=eth0,eth0), the tag selects which one carries a message:
# modulo their number. The rest of a long message follows its head on the same one, of up to 16.
NUM_TAGS, REST = 8, 720720
TAGS = {"all_reduce": 0x7D00, "all_gather": 0x7D10, "all_to_all": 0x7D20, "sums": 0x7D30}


class PostedRecv(NamedTuple):
    """A receive posted ahead, for the length and the head of a rank's next message."""

    room: torch.Tensor
    work: dist.Work


class PeerExchange:
    """Sends rows of bytes to each other rank of a group, and receives theirs."""

    # It keeps no reference to the group, which owns it: the group would never be freed.

    def __init__(self, rank: int, size: int, ahead: int = 0) -> None:
        self.rank, self.size = rank, size
        self._peers = [(rank + distance) % size for distance in range(1, size)]
        self._head_bytes = HEAD_BYTES // max(1, size - 1)
        self._ahead = ahead
        self._posted: dict[str, deque[list[PostedRecv]]] = defaultdict(deque)
        self._num_started: dict[str, int] = defaultdict(int)  # of each kind
        # Of each kind, by number; abandoned ones too: Gloo closes a connection if a message's buffer is gone.
        self._under_way: dict[str, dict[int, PeerWork]] = defaultdict(dict)

    def start(
        self,
        group: Any,
        kind: str,
        received: Sequence[torch.Tensor],
        sent: Sequence[torch.Tensor],
        finish: Callable[[], object] = lambda: None,
    ) -> PeerWork:
        """Send row i of bytes to rank i, and receive its row into row i of `received`."""
        posted, head_bytes = self._posted[kind], self._head_bytes
        number, under_way = self._num_started[kind], self._under_way[kind]
        while len(posted) <= self._ahead:
            posted.append(self._post_recvs(group, TAGS[kind] + (number + len(posted)) % NUM_TAGS))
        self._num_started[kind] += 1
        tag = TAGS[kind] + number % NUM_TAGS
        works: list[dist.Work] = []
        for peer in self._peers:
            if received[peer].numel() > head_bytes:
                works.append(group.recv([received[peer][head_bytes:]], peer, tag + REST))
        for peer in self._peers:
            length = torch.tensor([sent[peer].numel()], device="cpu").view(torch.uint8)
            head, rest = sent[peer][:head_bytes], sent[peer][head_bytes:]
            works.append(group.send([torch.cat([length, head])], peer, tag))
            if rest.numel():
                works.append(group.send([rest], peer, tag + REST))
        rows = list(map(received.__getitem__, self._peers))
        under_way[number] = work = PeerWork(posted.popleft(), rows, works, finish, under_way, number)
        return work

    def _post_recvs(self, group: Any, tag: int) -> list[PostedRecv]:
        """Post a receive for each peer's next message, after those already posted."""
        posted = []
        for peer in self._peers:
            room = torch.empty(LENGTH_BYTES + self._head_bytes, dtype=torch.uint8, device="cpu")
            posted.append(PostedRecv(room, group.recv([room], peer, tag)))
        return posted

    @cached_property
    def second_sends(self) -> SimpleQueue[Callable[[], None] | None]:
        """Queue of second-phase sends, run in order by one thread."""
        calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_run_all, args=(calls,), daemon=True, name="thinwire sums").start()
        weakref.finalize(self, calls.put, None)
        return calls


def _run_all(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it references the group, which would never be freed


@dataclass(eq=False)
class PeerWork:
    """The messages of one collective to and from all peers."""

    posted: Sequence[PostedRecv]
    rows: Sequence[torch.Tensor]  # bytes into which messages are received
    works: Sequence[dist.Work]  # the sends, and the rests of long messages
    finish: Callable[[], object]  # computes the result from the received rows
    under_way: dict[int, PeerWork]  # all of this kind that may not have ended
    number: int

    def wait(self) -> None:
        # Clear them first: waiting twice for one of Gloo's works would never end.
        posted, self.posted, works, self.works = self.posted, (), self.works, ()
        for recv, row in zip(posted, self.rows, strict=False):
            recv.work.wait()
            length = int(recv.room[:LENGTH_BYTES].view(torch.int64))
            if length != row.numel():
                # A RuntimeError, as backends raise: the caller adds the message's name.
                raise RuntimeError(f"expected a message of {row.numel()} bytes, got {length}")
            head = recv.room[LENGTH_BYTES:][:length]
            row[: head.numel()].copy_(head)
        for work in works:
            work.wait()
        # Drop those before it with its tag, too, for which nobody may wait: a connection is FIFO, and a
        # receive is posted less than `NUM_TAGS` messages ahead, so they have ended.
        for number in list(self.under_way):
            if number <= self.number and number % NUM_TAGS == self.number % NUM_TAGS:
                self.under_way.pop(number, None)  # another thread may have dropped it
        if posted:
            self.finish()


class TwoStepAllReduce:
    """An all-reduce among more than two ranks: each reduces its part of the tensor, and sends it to all.

        step 1   rank r receives part r from every peer, and sums          (reduce-scatter)
        step 2   rank r sends the sum of part r to every peer              (all-gather)

    As many bytes as a ring, in two consecutive messages instead of 2 (size - 1). A thread sends step 2: when
    all rows of step 1 have arrived, rank 0 may be deep in its backward pass, and without the thread rank 1
    would wait until its end for rank 0's sum.
    """

    def __init__(
        self, exchange: PeerExchange, group: Any, tensor: torch.Tensor, operation: Operation
    ) -> None:
        parts = tensor.view(-1).tensor_split(exchange.size)
        own = parts[exchange.rank]
        rows = [own if part is own else torch.empty_like(own) for part in parts]
        received, sent = list(map(as_bytes, rows)), list(map(as_bytes, parts))
        first = exchange.start(
            group, "all_reduce", received, sent, partial(reduce_rows, rows, operation, own)
        )
        self._second: Future[PeerWork] = Future()

        def send_sums() -> None:
            try:
                first.wait()
                self._second.set_result(exchange.start(group, "sums", sent, [as_bytes(own)] * exchange.size))
            except Exception as error:  # pass the backend's error to the waiting thread
                self._second.set_exception(error)

        exchange.second_sends.put(send_sums)

    def wait(self) -> None:
        self._second.result().wait()


def reduce_rows(rows: Sequence[torch.Tensor], operation: Operation, output: torch.Tensor) -> None:
    """Write the sum or maximum of rows, in rank order: the same bits on all."""
    function = torch.maximum if operation == "max" else torch.add
    # 16-bit dtypes are rounded once, not after each rank.
    wide = torch.promote_types(output.dtype, torch.float32) if output.is_floating_point() else output.dtype
    output.copy_(reduce(function, rows[1:], rows[0].to(wide)))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as bytes: every backend carries bytes exactly, whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)
