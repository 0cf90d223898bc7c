"""The channel of a real process group."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch.futures import Future

from thinwire.channel.agreement import Told, check_same, digest, packed, unpacked
from thinwire.channel.base import Channel
from thinwire.errors import AttachError, CommunicationError

__all__ = ["ProcessGroupChannel", "checked_group", "told_where"]

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
GLANCE_SECONDS = 0.001


class ProcessGroupChannel(Channel):
    """Averages over a process group of `torch.distributed`, on any backend.

    Args:
        group: The process group, None for the default one.
        device: That of the gradients, for backends that can't send from the CPU.

    Raises:
        AttachError: `torch.distributed` is not initialised, or this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        super().__init__()
        self.group = checked_group(group)
        self._gradient_device = device

    @property
    def size(self) -> int:
        """Processes in the group."""
        return self.group.size()

    @property
    def process_rank(self) -> int:
        """This process's rank in the group."""
        return self.group.rank()

    def average_later(self, message: torch.Tensor, purpose: str) -> Future[torch.Tensor]:
        """Like `average`, as a future of the mean, for code that never comes back to wait."""
        collective = self._average(message, purpose)

        def mean(done: Future[list[torch.Tensor]]) -> torch.Tensor:
            with told_where(collective.where):
                return done.value()[0]

        return cast("Future[torch.Tensor]", collective.work.get_future().then(mean))

    def gather_later(self, message: torch.Tensor, purpose: str) -> Future[list[torch.Tensor]]:
        """Gather `message`, of one shape and type on all processes, as a future of a list by process rank.

        Raises:
            CommunicationError: The collective failed; from the call or from the future.
        """
        gathered = [torch.empty_like(message) for _ in range(self.size)]
        where = f"{purpose}: the gather of {message.numel()} × {message.dtype}"
        with told_where(where):
            work = cast(dist.Work, dist.all_gather(gathered, message, group=self.group, async_op=True))

        def arrived(done: Future[object]) -> list[torch.Tensor]:
            with told_where(where):
                done.value()
            return gathered

        return cast("Future[list[torch.Tensor]]", work.get_future().then(arrived))

    def agree(self, told: Told, purpose: str) -> None:
        """Compare digests, and only where they differ what they are of.

        Cost: a gather of 32 bytes a process, and a host synchronisation.
        """
        data, device = packed(told), self._device
        own = torch.frombuffer(bytearray(digest(data)), dtype=torch.uint8).to(device)
        digests = self._gathered(own, purpose)
        if all(torch.equal(each, own) for each in digests):
            return
        lengths = self._gathered(torch.tensor([len(data)], device=device), purpose)
        padded = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8, device=device)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = zip(self._gathered(padded, purpose), lengths, strict=True)
        check_same([unpacked(bytes(each[: int(length)].tolist())) for each, length in everyone], purpose)

    @property
    def _device(self) -> torch.device:
        """Where small messages are cheapest: the CPU, if the backend can send from there."""
        kinds = [each.split(":")[0] for each in dist.get_backend_config(self.group).split(",")]
        if "cpu" in kinds:
            return torch.device("cpu")
        return torch.device(kinds[0]) if self._gradient_device is None else self._gradient_device

    def _gathered(self, own: torch.Tensor, purpose: str) -> list[torch.Tensor]:
        """The tensors of all processes; says so if they are long in coming."""
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        with told_where(f"{purpose}: the comparison of what the processes are about to do"):
            work = cast(dist.Work, dist.all_gather(gathered, own, group=self.group, async_op=True))
            start = time.monotonic()
            while not work.is_completed() and time.monotonic() < start + PATIENCE_SECONDS:
                time.sleep(GLANCE_SECONDS)
            if not work.is_completed():
                logger.warning(
                    "%s: process %d has waited %g s for the others: make the same calls on every process "
                    "(attach or register_comm_hook, use, state_dict, load_state_dict)",
                    purpose,
                    self.process_rank,
                    PATIENCE_SECONDS,
                )
            work.wait()
        return gathered

    def _average(self, message: torch.Tensor, purpose: str) -> _Collective:
        # Divided before the sum: half precision would overflow after it.
        message.div_(self.size)
        where = f"{purpose}: the average of {message.numel()} × {message.dtype}"
        with told_where(where):
            work = dist.all_reduce(message, group=self.group, async_op=True)
        return _Collective(message, cast(dist.Work, work), where)


@dataclass(frozen=True)
class _Collective:
    message: torch.Tensor
    work: dist.Work
    where: str

    def wait(self) -> torch.Tensor:
        with told_where(self.where):
            self.work.wait()
        return self.message


@contextmanager
def told_where(where: str) -> Iterator[None]:
    """Turn a backend's error into Thinwire's.

    Raises:
        CommunicationError: The backend failed, which is the cause.
    """
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(
            f"{where} failed: {error}. A process has died, stalled or sent another message; or it had fewer "
            "batches (uneven batches: train inside thinwire.join); or a call that must be made on every "
            "process (attach, use, state_dict, load_state_dict) was not; or the backend can't carry this "
            "type. Look for the first error among all processes"
        ) from error


def checked_group(group: object) -> dist.ProcessGroup:
    """The group to use, after refusing what can't be one."""
    if not dist.is_available() or not dist.is_initialized():
        raise AttachError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group() first"
        )
    chosen = dist.group.WORLD if group is None else group
    if chosen is dist.GroupMember.NON_GROUP_MEMBER:
        raise AttachError(
            "this process is not a member of the process group; create and use it on members only"
        )
    if not isinstance(chosen, dist.ProcessGroup):
        raise AttachError(f"expected a torch.distributed process group or None, got {chosen!r}")
    return chosen
