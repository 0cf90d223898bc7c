"""The channel of a real process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch.futures import Future

from thinwire.channel.base import Channel
from thinwire.errors import AttachError, CommunicationError

__all__ = ["ProcessGroupChannel", "checked_group"]


class ProcessGroupChannel(Channel):
    """Averages over a process group of `torch.distributed`, on any backend.

    Args:
        group: The process group, None for the default one.

    Raises:
        AttachError: `torch.distributed` is not initialised, or this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = checked_group(group)

    @property
    def size(self) -> int:
        """Processes in the group."""
        return self.group.size()

    def average_later(self, message: torch.Tensor) -> Future[torch.Tensor]:
        """Like `average`, as a future of the mean, for code that never comes back to wait."""
        future = self._average(message).work.get_future()
        return cast("Future[torch.Tensor]", future.then(lambda done: done.value()[0]))

    def _average(self, message: torch.Tensor) -> _Collective:
        # Divided before the sum: half precision would overflow after it.
        message.div_(self.size)
        where = f"the average of message {self._place} ({message.numel()} × {message.dtype})"
        try:
            work = dist.all_reduce(message, group=self.group, async_op=True)
        except RuntimeError as error:
            raise _failed(where, error) from error
        return _Collective(message, cast(dist.Work, work), where)


@dataclass(frozen=True)
class _Collective:
    message: torch.Tensor
    work: dist.Work
    where: str

    def wait(self) -> torch.Tensor:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise _failed(self.where, error) from error
        return self.message


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


def _failed(where: str, error: RuntimeError) -> CommunicationError:
    return CommunicationError(
        f"{where} failed: {error}. A process has died, stalled or sent another message, or the backend "
        "can't carry this type; look for the first error among all processes"
    )
