"""The parts of torchft that a `TorchftGroup` uses: lighthouse client, process group."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import threading
from concurrent.futures import Future, wait
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import urlsplit

from thinwire.comm.process_group import GroupTransport
from thinwire.errors import MissingExtraError

LOOK_SECONDS = 0.2  # between checks that the lighthouse is still alive while a request waits
REACH_SECONDS = 5.0
OLDEST = (0, 2)  # the oldest supported version of torchft: major, minor


class LighthouseGoneError(Exception):
    """The lighthouse's process has ended; an unanswered request is lost."""


class QuorumClient:
    """Asks the lighthouse for torchft's manager; records a quorum's members, not only its number.

    A restarted lighthouse numbers its quorums from 1 again. By number alone, the manager would mistake a
    quorum of other members for its current one, and find in the store, under that number, the addresses of
    processes that have ended.

    Raises:
        LighthouseGoneError: The lighthouse has ended: an idle connection to it has broken.
    """

    has_left = False  # may be set: ends a request, for which Python would wait when it ends

    def __init__(self, inner: Any, manager: Any, group: ConfiguredGroup, lighthouse: str) -> None:
        self._inner, self._manager, self._group = inner, manager, group
        parts = urlsplit(lighthouse)
        default = 443 if parts.scheme == "https" else 80
        self._address = parts.hostname or "", default if parts.port is None else parts.port
        self._connection: socket.socket | None = None
        self.members: list[str] = []  # of the last known quorum, the same on all of its members

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _quorum(self, *arguments: Any, **options: Any) -> Any:
        # Connect before the request, to notice if the lighthouse dies after it.
        self._connect()
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._inner._quorum(*arguments, **options))
            except Exception as error:
                answer.set_exception(error)

        # Nothing can abort that call: it ends at its timeout, or with the next request, whose answer all get.
        # (The manager's own retries, quorum_retries, outlast it: they would join for one that is training.)
        threading.Thread(target=ask, name="thinwire_quorum", daemon=True).start()
        while not wait([answer], LOOK_SECONDS).done:
            if self.has_left or self._is_broken():
                raise LighthouseGoneError("it ended before it answered")
        quorum = answer.result()
        if quorum.replica_ids != self.members:
            self._manager._quorum_id = -1  # so that it configures the group again
        self.members = quorum.replica_ids
        key = repr((quorum.replica_ids, quorum.max_step))
        self._group.prefix = hashlib.sha256(key.encode()).hexdigest()[:16]
        return quorum

    def _connect(self) -> None:
        if self._connection is not None and not self._is_broken():
            return
        self.close()
        try:
            self._connection = socket.create_connection(self._address, REACH_SECONDS)
        except ConnectionRefusedError as error:
            raise LighthouseGoneError("nothing listens at its address") from error
        except OSError:
            return  # unknown: the machine or the network may be down, or only slow
        self._connection.setblocking(False)

    def _is_broken(self) -> bool:
        try:
            return self._connection is not None and not self._connection.recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class ConfiguredGroup:
    """Torchft's process group, which its manager configures again whenever members change."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.rank = self.size = 0
        self.quorum_id = -1
        self.num_configured = 0
        self.address = ""  # the store address where the members of the last quorum have found each other
        self.prefix = ""  # a separate one in the store for each quorum: see `QuorumClient`

    def configure(
        self, store_addr: str, replica_id: str, rank: int, world_size: int, quorum_id: int, *others: Any
    ) -> None:
        self.quorum_id = quorum_id
        self.num_configured += 1
        self.address = f"{store_addr}/{self.prefix}"
        self.connect(self.address, replica_id, rank, world_size, quorum_id, *others)

    def connect(self, address: str, replica_id: str, rank: int, size: int, *others: Any) -> None:
        self.size = 0  # until it is done
        self.inner.configure(address, replica_id, rank, size, *others)
        self.rank, self.size = rank, size

    def transport(self) -> GroupTransport:
        return GroupTransport(self.inner, self.rank, self.size)

    def errored(self) -> Any:
        return self.inner.errored()

    def abort(self) -> None:
        self.inner.abort()
        self.size = 0


class NoCheckpoints:
    """Takes the place of torchft's transport of checkpoints, which would listen at another port."""

    def metadata(self) -> str:
        return "thinwire"

    def disallow_checkpoint(self) -> None:
        pass

    def shutdown(self, wait: bool = True) -> None:
        pass


def checked_version() -> str:
    """Return torchft's version."""
    try:
        found = version("torchft")
    except PackageNotFoundError:
        return "nightly"  # the nightly package has its own name, and is recent
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is not None and tuple(map(int, numbers.groups())) < OLDEST:
        raise MissingExtraError(
            f"elastic members need torchft {OLDEST[0]}.{OLDEST[1]} or later, got {found}; "
            "pip install '.[elastic]' in a clone of Thinwire"
        )
    return found


def _says_something(record: logging.LogRecord) -> bool:
    # This warning comes at every change of members, if there is no NCCL, or one without a flight recorder.
    # (A module-level function: a logger holds it only once, however often it is added.)
    return "NCCL flight recorder" not in record.getMessage()


def torchft_module(name: str) -> Any:
    """Return a module of torchft."""
    # By default it logs every quorum to standard error, in its own format.
    os.environ.setdefault("RUST_LOG", "error")
    logging.getLogger("torchft.manager").addFilter(_says_something)
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"elastic members need torchft ({error}); pip install '.[elastic]' in a clone of Thinwire"
        ) from error
