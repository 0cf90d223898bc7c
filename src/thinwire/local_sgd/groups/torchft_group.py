"""Members that find each other through torchft's lighthouse, manager and process group."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from thinwire.checks import listed, number
from thinwire.comm.agreement import said_if_slow
from thinwire.comm.process_group import processes_of_job
from thinwire.errors import CommunicationError, ConfigError, LeftError, MissingExtraError
from thinwire.local_job import LAUNCHER
from thinwire.local_sgd.groups.group import Group, NoQuorumError
from thinwire.local_sgd.groups.state_transfer import receive_state, send_state
from thinwire.local_sgd.groups.torchft_client import (
    OLDEST,
    ConfiguredGroup,
    LighthouseGoneError,
    NoCheckpoints,
    QuorumClient,
    checked_version,
    torchft_module,
)
from thinwire.version import __version__

logger = logging.getLogger(__name__)

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
VERSION = f"thinwire {__version__}"  # a part of a member's name, by which the others know it
MIN_MEMBERS = "THINWIRE_MIN_MEMBERS"
HOSTNAME = "THINWIRE_HOSTNAME"
MEMBER = "THINWIRE_MEMBER"  # this member's number under `thinwire run`, for scripts
ASKED = "THINWIRE_ASKED"  # a folder of `thinwire run` where members that reach the lighthouse leave a file
ASK_AGAIN_AFTER = 1.5  # timeouts of a message: with both defaults, longer than the lighthouse's grace
PAUSE_SECONDS = 1.0
PATIENCE_SECONDS = 10.0  # after this, a waiting member logs that it waits
HEARTBEAT = timedelta(milliseconds=500)
# Private attributes of torchft's Manager that we use: the next version may lack them.
PRIVATE = ("_client", "_quorum_future", "_quorum_id")


class TorchftGroup(Group):
    """A member of a group whose members find each other through a torchft lighthouse.

    The lighthouse knows which members are alive and which take part in an averaging; it carries no tensors.
    Start it with `torchft_lighthouse --min_replicas 1 --join_timeout_ms 60000`. Run everything in a private
    network: `docs/elastic-faults.md` says what the ports of lighthouse and members accept, and from whom.

    After `init_process_group` the processes of that group are one member, and each makes this. Collective.

    Args:
        lighthouse: Its address, such as "http://10.0.0.1:29510"; None for the environment's
            `TORCHFT_LIGHTHOUSE`.
        min_members: An averaging needs at least this many; None for the environment's `THINWIRE_MIN_MEMBERS`,
            or else 1. The lighthouse has its own number, below which it forms no quorum.
        timeout_seconds: How long a message may take, and also a newcomer's whole initial state, which is
            refused if it would take longer. A member that does not respond within this time is dropped.
        wait_seconds: How long a member waits for enough others, and for an averaging that succeeds. Choose
            more than the time from one averaging to the next.
        hostname: The name under which the other members reach this one; None for the environment's
            `THINWIRE_HOSTNAME`, or else this machine's name.
        process_group: A reconfigurable torchft process group, None for Gloo's.
        name: This member's name on the lighthouse's page.
        options: `weigh_by` and `send_optimizer`, as in `Group`.

    Raises:
        ConfigError: An argument is wrong, or there is no address.
        MissingExtraError: torchft is not installed, is older than 0.2, or is too new for this.
    """

    def __init__(
        self,
        lighthouse: str | None = None,
        *,
        min_members: int | None = None,
        timeout_seconds: float = 60.0,
        wait_seconds: float = 3600.0,
        hostname: str | None = None,
        process_group: Any = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        if min_members is None:
            given = os.environ.get(MIN_MEMBERS, "1")
            if not given.isdecimal():
                raise ConfigError(f"{MIN_MEMBERS} must be a whole number from 1, such as 2, got {given!r}")
            min_members = int(given)
        super().__init__(min_members, wait_seconds, **options)
        if lighthouse is None:
            lighthouse = os.environ.get(LIGHTHOUSE)
        if not isinstance(lighthouse, str) or not lighthouse.startswith(("http://", "https://")):
            raise ConfigError(
                f'expected the address of a torchft lighthouse, such as "http://10.0.0.1:29510", got '
                f"{lighthouse!r}; start one with torchft_lighthouse, and pass lighthouse= or set {LIGHTHOUSE}"
            )
        torchft = torchft_module("torchft")
        # In this group the member's other processes wait for the first one, which may wait long for members.
        self.inside = processes_of_job(self.wait_seconds + float(timeout_seconds))
        self.kind = f"torchft {checked_version()}"
        self._timeout = timedelta(seconds=float(number("timeout_seconds", timeout_seconds, minimum=0.1)))
        self._lighthouse = lighthouse
        inner = torchft.ProcessGroupGloo(timeout=self._timeout) if process_group is None else process_group
        self._group = ConfiguredGroup(inner)
        host = hostname or os.environ.get(HOSTNAME) or socket.gethostname()
        launcher = os.environ.get(LAUNCHER)
        # `thinwire run` ends its own children, but not those of a program in between: they check themselves.
        try:
            with suppress(PermissionError):  # the launcher runs, but belongs to a different user
                if launcher is not None:
                    os.kill(int(launcher), 0)
        except ProcessLookupError:
            raise CommunicationError(
                f"process {launcher}, which started this member ({LAUNCHER}), has ended, so this member "
                "ends too. Start thinwire run again"
            ) from None
        self._manager: Any = None
        self.address = ""  # the store address where the members of the last quorum have found each other
        if self.inside.rank == 0:
            self._open(torchft, host, f"{host}-{os.getpid()}" if name is None else name)

    def _open(self, torchft: Any, host: str, name: str) -> None:
        """Start torchft's manager, which finds the other members."""
        # Torchft publishes this member's address in it, and connects a quorum's members through one's store.
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        try:
            self._manager = torchft.Manager(
                pg=self._group,
                # Members send states themselves, after they have agreed on whose.
                load_state_dict=None,
                state_dict=None,
                checkpoint_transport=NoCheckpoints(),
                min_replica_size=1,
                use_async_quorum=False,
                timeout=self._timeout,
                quorum_timeout=timedelta(seconds=self.wait_seconds),
                connect_timeout=min(self._timeout, timedelta(seconds=10)),
                rank=0,
                world_size=1,
                store_addr=host,
                store_port=self._store.port,
                lighthouse_addr=self._lighthouse,
                replica_id=f"{name} ({VERSION})",
                hostname=host,
                heartbeat_interval=HEARTBEAT,
            )
        except RuntimeError as error:
            raise CommunicationError(
                f"there is no lighthouse at {self._lighthouse}: {error}. Start torchft_lighthouse there, or "
                "check that this machine can reach it"
            ) from error
        missing = [name for name in PRIVATE if not hasattr(self._manager, name)]
        if missing:
            self._manager.shutdown(wait=False)
            raise MissingExtraError(
                f"elastic members need torchft {OLDEST[0]}.{OLDEST[1]}, got {self.kind}, whose Manager "
                f"lacks {', '.join(missing)}; pip install '.[elastic]' in a clone of Thinwire"
            )
        if folder := os.environ.get(ASKED):
            with suppress(OSError):  # `thinwire run` has ended and no longer looks
                Path(folder, name).touch()
        client = QuorumClient(self._manager._client, self._manager, self._group, self._lighthouse)
        self._client = self._manager._client = client

    def start_quorum(self, commits: int) -> None:
        self._manager.load_state_dict({"step": commits, "batches_committed": commits})
        give_up_at = time.monotonic() + self.wait_seconds
        words = "has waited %g s for the other members at the lighthouse %s, whose page lists who has joined"
        with said_if_slow(PATIENCE_SECONDS, logger.warning, words, PATIENCE_SECONDS, self._lighthouse):
            self._ask(give_up_at)
        # Before any message, whose format another version may not know. Retried: it may leave.
        if others := [member for member in self._client.members if VERSION not in member]:
            raise CommunicationError(
                f"found members that do not run {VERSION}: {listed(others)}; install one version on "
                "all, or give other programs another lighthouse"
            )
        failed = self._manager.errored()
        if failed is not None or self._group.size == 0:
            cause = None if failed is None else failed.original_exception
            raise CommunicationError(
                f"could not connect to the members of quorum {self._group.quorum_id}: "
                f"{cause or 'the group was aborted and not rejoined'}; retrying"
            ) from cause
        self.quorum_id, self.num_changes = self._group.quorum_id, self._group.num_configured
        self.address = self._group.address
        self.transport.transport = self._group.transport()

    def _ask(self, give_up_at: float) -> None:
        """Ask the lighthouse for a quorum until it answers; torchft's manager connects its members."""
        # If a lighthouse dies during a request, torchft's manager never reports it. So ask again immediately
        # if the connection breaks, and after a while: it does not break if the machine or network is down.
        # But each request restarts the lighthouse's grace period for stragglers, so the time until the next
        # one doubles, until it exceeds any grace period.
        patience, logged = ASK_AGAIN_AFTER * self._timeout, ""
        while True:
            limit = min(patience, timedelta(seconds=max(0.1, give_up_at - time.monotonic())))
            try:
                self._manager.start_quorum(allow_heal=False, timeout=limit)
                return
            except (RuntimeError, TimeoutError, LighthouseGoneError) as error:
                # Otherwise the next call would raise the same error before it asks.
                self._manager._quorum_future = None
                # It may wait for other members; torchft's own text does not say so.
                late = f"no quorum in {round(limit.total_seconds(), 1):g} s"
                why = late if isinstance(error, TimeoutError) else error
                if time.monotonic() >= give_up_at:
                    raise NoQuorumError(
                        f"no quorum of at least {self.min_members} members within {self.wait_seconds:g} s "
                        f"(last: {why}). See on the page of the lighthouse {self._lighthouse} who has joined"
                    ) from error
                if self.is_leaving():
                    raise LeftError(
                        "this member has left the group, and its unsent changes are lost: the lighthouse "
                        f"{self._lighthouse} does not answer ({why}), so no member can be found"
                    ) from error
                if str(why) != logged:  # a lighthouse that is gone gives the same reason every second
                    logged = str(why)
                    logger.warning("the lighthouse %s has not answered: %s; retrying", self._lighthouse, why)
                time.sleep(PAUSE_SECONDS)
                patience *= 1 if isinstance(error, LighthouseGoneError) else 2

    def commit(self, committed: bool) -> None:
        if not committed:
            # Immediately, so that the others' messages fail as well, instead of timing out.
            self._group.abort()
            self._manager.report_error(CommunicationError("the averaging failed"))
        try:
            self._manager.should_commit()
        except (RuntimeError, TimeoutError) as error:
            logger.warning("torchft's manager did not record an averaging: %s", error)

    def abort(self) -> None:
        self._group.abort()

    def connect(self, address: str, rank: int, size: int) -> None:
        """Connect a member's process, not its first, to those of its local rank in other members."""
        try:
            self._group.connect(address, "", rank, size)
        except Exception as error:  # torchft raises all kinds of errors
            raise CommunicationError(
                f"could not connect to the processes of this local rank in other members: {error}"
            ) from error
        self.transport.transport = self._group.transport()

    def join(self, state: Callable[[], Mapping[str, Any]], source: int, newcomers: Sequence[int]) -> Any:
        transport = self._group.transport()
        if transport.rank == source and newcomers:
            send_state(state(), transport, newcomers)
        if transport.rank not in newcomers:
            return None
        return receive_state(transport, source, self._timeout.total_seconds())

    def leave(self) -> None:
        if self._manager is None:
            self._group.abort()
            return
        # The manager first: once its heartbeat has stopped, no member expects messages from this one.
        # Aborting the group ends Gloo's threads, which could abort Python's end.
        self._client.has_left = True
        self._manager.shutdown(wait=False)
        self._group.abort()
        self._client.close()
