"""Measures a lab's link before the command runs: the round trip, and what leaves a machine in a second.

The lab runs this file on two machines: `link_check.py serve`, and `link_check.py measure ADDRESS SECONDS`.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from statistics import quantiles
from threading import Thread

READY = "listening"
PORT = 29490
CONNECTIONS = 8  # one alone may be slower than its link: its window is limited
DATAGRAMS, BETWEEN_DATAGRAMS_SECONDS, PATIENCE_SECONDS = 15, 0.01, 3.0
MIN_RAMP_SECONDS, RAMP_ROUND_TRIPS = 0.5, 12  # while connections find out how fast they can go


def serve() -> None:
    """Send datagrams back, and read what comes on connections."""
    server, echo = socket.create_server(("", PORT)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    echo.bind(("", PORT))
    print(READY, flush=True)
    Thread(target=_send_back, args=(echo,), daemon=True).start()
    while True:
        Thread(target=_drain, args=(server.accept()[0],), daemon=True).start()


def measure(address: str, seconds: float) -> dict[str, float]:
    """Return a round trip's seconds, and the bits per second that leave this machine's interface."""
    round_trip = _round_trip_seconds(address)
    connections = [socket.create_connection((address, PORT)) for _ in range(CONNECTIONS)]
    for connection in connections:
        # What is not sent when this process ends is dropped, or it would be in the way of the command.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        Thread(target=_flood, args=(connection,), daemon=True).start()
    time.sleep(max(MIN_RAMP_SECONDS, RAMP_ROUND_TRIPS * round_trip))
    start, sent_bytes = time.monotonic(), _sent_bytes()
    time.sleep(seconds)
    rate = 8 * (_sent_bytes() - sent_bytes) / (time.monotonic() - start)
    return {"round_trip_seconds": round_trip, "bits_per_second": rate}


def _round_trip_seconds(address: str) -> float:
    """Datagrams: of a connection's bytes those that are lost would be sent again, and count as late."""
    found: list[float] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.connect((address, PORT))
        peer.settimeout(PATIENCE_SECONDS)
        Thread(target=_send_times, args=(peer,), daemon=True).start()
        try:
            while len(found) < DATAGRAMS:
                sent = float(peer.recv(64))
                found.append(time.monotonic() - sent)
        except TimeoutError:
            pass
    # The lower quartile: a busy computer is late with some, and that is not the link's.
    return quantiles(found, n=4)[0] if len(found) > 1 else PATIENCE_SECONDS


def _send_times(peer: socket.socket) -> None:
    for _ in range(DATAGRAMS):
        peer.send(str(time.monotonic()).encode())
        time.sleep(BETWEEN_DATAGRAMS_SECONDS)


def _send_back(echo: socket.socket) -> None:
    while True:
        echo.sendto(*echo.recvfrom(64))


def _drain(connection: socket.socket) -> None:
    while connection.recv(2**20):
        pass


def _flood(connection: socket.socket) -> None:
    while True:
        connection.sendall(bytes(2**18))


def _sent_bytes() -> int:
    with open("/proc/self/net/dev") as counters:
        (eth0,) = (line.split(":")[1].split() for line in counters if line.strip().startswith("eth0:"))
    return int(eth0[8])


if __name__ == "__main__":
    with suppress(PermissionError):  # only root may go before others on a busy computer
        os.nice(-20)
    if sys.argv[1] == "serve":
        serve()
    else:
        print(json.dumps(measure(sys.argv[2], float(sys.argv[3]))), flush=True)
