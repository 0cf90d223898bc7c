"""Measure a lab's link before the command runs: the round trip, and the rate at which a machine sends.

The lab runs this file on two machines: `link_check.py serve`, and `link_check.py measure ADDRESS SECONDS`.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from statistics import quantiles
from threading import Thread

PORT = 29490
CONNECTIONS = 8  # a single one may be slower than its link, because its window is limited
DATAGRAMS, BETWEEN_DATAGRAMS_SECONDS, PATIENCE_SECONDS = 15, 0.01, 3.0
MIN_RAMP_SECONDS, RAMP_ROUND_TRIPS = 0.5, 12  # while connections find their rate


def serve() -> None:
    """Send datagrams back, and read from connections."""
    server, echo = socket.create_server(("", PORT)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    echo.bind(("", PORT))
    print("ready", flush=True)
    _repeat(lambda: echo.sendto(*echo.recvfrom(64)))
    while True:
        _repeat(partial(server.accept()[0].recv, 2**20))


def measure(address: str, seconds: float) -> tuple[float, float]:
    """Return a round trip's seconds, and the bits per second that this machine's interface sends."""
    round_trip = _round_trip_seconds(address)
    connections = [socket.create_connection((address, PORT)) for _ in range(CONNECTIONS)]
    for connection in connections:
        # Drop unsent bytes when this process ends: they would delay the command's.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        _repeat(partial(connection.send, bytes(2**18)))
    time.sleep(max(MIN_RAMP_SECONDS, RAMP_ROUND_TRIPS * round_trip))
    start, sent_bytes = time.monotonic(), _sent_bytes()
    time.sleep(seconds)
    return round_trip, 8 * (_sent_bytes() - sent_bytes) / (time.monotonic() - start)


def _repeat(call: Callable[[], int | bytes]) -> None:
    """Call it repeatedly in a thread, as long as bytes are sent or received."""

    def run() -> None:
        with suppress(ConnectionError):  # the other end resets its connections after measuring
            while call():
                pass

    Thread(target=run, daemon=True).start()


def _round_trip_seconds(address: str) -> float:
    """Measure with datagrams: a connection would resend lost bytes, which would count as late."""
    seconds: list[float] = []

    def send_times() -> None:
        for _ in range(DATAGRAMS):
            peer.send(str(time.monotonic()).encode())
            time.sleep(BETWEEN_DATAGRAMS_SECONDS)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.connect((address, PORT))
        peer.settimeout(PATIENCE_SECONDS)
        Thread(target=send_times, daemon=True).start()
        with suppress(TimeoutError):
            while len(seconds) < DATAGRAMS:
                sent = float(peer.recv(64))
                seconds.append(time.monotonic() - sent)
    # The lower quartile: a busy computer delays some, which is not the link's delay.
    return quantiles(seconds, n=4)[0] if len(seconds) > 1 else PATIENCE_SECONDS


def _sent_bytes() -> int:
    with open("/proc/self/net/dev") as counters:
        (eth0,) = (line.split(":")[1].split() for line in counters if line.strip().startswith("eth0:"))
    return int(eth0[8])


if __name__ == "__main__":
    with suppress(PermissionError):  # only root may raise its priority
        os.nice(-20)
    if sys.argv[1] == "serve":
        serve()
    else:
        print(json.dumps(measure(sys.argv[2], float(sys.argv[3]))), flush=True)
