"""A switch with latency, jitter and loss, between the network interfaces of a lab's machines.

The lab runs this file as a separate process, because many kernels lack netem.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from heapq import heappop, heappush

EVERY_PROTOCOL = socket.htons(3)
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
# With this header each frame says which checksum it lacks and how to cut it into packets. So frames of 64 KiB
# pass as one, and no interface has to compute checksums.
VNET_HEADER_BYTES = 10
TO, SENDER, KIND = slice(10, 16), slice(16, 22), slice(22, 24)  # after that header
ADDRESS_RESOLUTION = b"\x08\x06"
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
FRAME_BYTES = VNET_HEADER_BYTES + 2**16 + 64
BUFFER_BYTES = 64 * 2**20  # a busy computer may delay the relay for a while
FRAMES_IN_A_ROW = 64  # from one interface, before the next one


@dataclass(frozen=True)
class Delays:
    """The delays and losses of a frame between two machines."""

    seconds: float = 0.0
    jitter_seconds: float = 0.0  # at most this much longer or shorter; frames of one machine keep their order
    loss: float = 0.0  # probability

    def command(self, interfaces: list[str]) -> list[str]:
        """Return the command line of a relay between interfaces of the namespace in which it runs."""
        return [sys.executable, "-S", __file__, json.dumps({**asdict(self), "interfaces": interfaces})]


def relay(delays: Delays, interfaces: list[str]) -> None:
    """Forward frames until this process is ended."""
    ports = [_opened(name) for name in interfaces]
    with suppress(PermissionError):  # only root may raise its priority
        os.nice(-20)
    print("ready", flush=True)
    draws = random.Random(0)
    port_of: dict[bytes, int] = {}  # by hardware address, learned from sent frames
    due_frames: list[tuple[float, int, list[int], bytes]] = []
    last_due = [0.0] * len(ports)
    count = 0
    while True:
        now = time.monotonic()
        while due_frames and due_frames[0][0] <= now:
            _, _, targets, frame = heappop(due_frames)
            for target in targets:
                # If the queue is full or the machine has ended, the frame is lost, as on a real link.
                with suppress(OSError):
                    ports[target].send(frame)
        wait_seconds = max(0.0, due_frames[0][0] - time.monotonic()) if due_frames else None
        for port in select.select(ports, (), (), wait_seconds)[0]:
            source = ports.index(port)
            for frame in _received(port):
                to, sender = frame[TO], frame[SENDER]
                port_of[sender] = source
                # Address requests are never lost: they stay in this network, and a real link has none.
                is_question = frame[KIND] == ADDRESS_RESOLUTION
                if delays.loss and not is_question and draws.random() < delays.loss:
                    continue
                seconds = delays.seconds + delays.jitter_seconds * draws.uniform(-1, 1)
                seconds = 0.0 if is_question else seconds
                last_due[source] = max(last_due[source], time.monotonic() + seconds)
                count += 1  # frames due at the same time keep their order
                others = [index for index in range(len(ports)) if index != source]
                targets = [port_of[to]] if to in port_of else others
                heappush(due_frames, (last_due[source], count, targets, frame))


def _opened(interface: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, EVERY_PROTOCOL)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)  # what the relay itself sends; since Linux 4.20
    for forced, plain in ((SO_RCVBUFFORCE, socket.SO_RCVBUF), (SO_SNDBUFFORCE, socket.SO_SNDBUF)):
        try:
            port.setsockopt(socket.SOL_SOCKET, forced, BUFFER_BYTES)
        except PermissionError:  # not root outside of the lab: use as much as the system allows
            port.setsockopt(socket.SOL_SOCKET, plain, BUFFER_BYTES)
    port.bind((interface, 0))
    port.setblocking(False)
    return port


def _received(port: socket.socket) -> list[bytes]:
    frames = list[bytes]()
    with suppress(BlockingIOError):
        while len(frames) < FRAMES_IN_A_ROW:
            frames.append(port.recv(FRAME_BYTES))
    return frames


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the lab ends it
    settings = json.loads(sys.argv[1])
    names = settings.pop("interfaces")
    relay(Delays(**settings), names)
