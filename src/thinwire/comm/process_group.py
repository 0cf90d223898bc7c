"""The transports of real process groups: all that Thinwire calls of `torch.distributed`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, BroadcastOptions
from torch.distributed.algorithms.join import Join, Joinable
from torch.futures import Future

from thinwire.comm.direct import ASKED_AHEAD, HEAD_BYTES, Direct, Post, Sum, as_bytes, combining
from thinwire.comm.in_process import InProcessTransport
from thinwire.comm.transport import Collective, Message, Operation, Transport, Work
from thinwire.errors import AttachError, CommunicationError, ConfigError
from thinwire.tensors import accelerators

Result = TypeVar("Result")
Works: TypeAlias = "Sequence[dist.Work | Direct | Sum]"
Way: TypeAlias = Literal["directly", "in parts", "backend"]

OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

WHY_IN_A_FIXED_GROUP = (
    "A process has died, stalled or sent a different message; or it had fewer batches (uneven batches: train "
    "inside thinwire.join); or a call that must be made on every process (attach, use, state_dict, "
    "load_state_dict) was not; or the backend can't carry this type. Look for the first error among all "
    "processes"
)
WHY_IN_A_CHANGING_GROUP = (
    "A member has died, stood still for longer than the timeout, was cut off, or has broken the "
    "averaging off because one of its messages failed"
)

# Between more than two members, long messages go by Gloo's ring, which was not slower than directly.
MAX_DIRECT_MEMBERS, MAX_DIRECT_BYTES = 16, 1 << 20
# A longer sum is Gloo's own: in its thread, beside the backward pass.
MAX_DIRECT_SUM_OF_TWO_BYTES, MAX_DIRECT_SUM_BYTES = 1 << 22, 1 << 19
# A sum up to this size is sent whole to all others, so that it takes one message: 5 ms at 100 Mbit/s.
MAX_GATHERED_SUM_BYTES = 1 << 16
# Groups that were made of a group's processes. Torch ends none by itself, and a handle still uses its groups
# when it is detached: so they are made once, and belong to the group as well.
_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Sequence[dist.ProcessGroup]]] = WeakKeyDictionary()
# Belongs to the group, as what Gloo's collectives count by does: members may use several transports of it.
_POSTS: WeakKeyDictionary[Any, Post] = WeakKeyDictionary()
GLOO = ("gloo", "torchft-gloo")

# Kinds of device that have no way here, and why: of others a message or a kernel says so by itself.
NOT_SERVED = {
    "mps": "no backend of torch.distributed carries its tensors; move the model to the CPU: model.cpu()",
    "xla": "its tensors have no memory to cut and pack; leave the averaging to torch_xla, or train on GPUs",
}


class GroupTransport(Transport):
    """Carries tensors over a process group by the group's own methods.

    `torch.distributed` need not know the group. When the members change, take a new transport.
    """

    directly = True  # whether Gloo's messages may be sent to each member directly: those have no futures
    why = WHY_IN_A_CHANGING_GROUP  # may have failed what a backend calls failed

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self._post = Post(rank, size)  # a changed group begins again

    def backend_for(self, device: torch.device) -> str:
        """Return the name of the backend that carries a device's tensors."""
        return str(self.group.getBackendName())

    def start(self, message: Message) -> ProcessGroupWork:
        tensor, what = message.tensor, f"{message.tensor.numel()} × {message.tensor.dtype}"
        if message.collective == "all_reduce":
            what = f"the {'maximum' if message.operation == 'max' else 'average'} of {what}"
            return self._started(
                f"{message.purpose}: {what}", partial(self._reduced, tensor, message.operation)
            )
        # Send bytes: Gloo gathers some types only. Rows are views, so the result lies in `output` at once.
        sent, received = as_bytes(tensor), as_bytes(message.output)
        start: Callable[[], Works]
        if message.collective == "all_gather":
            what, start = f"the gather of {what}", partial(self._gather, received.view(self.size, -1), sent)
        elif message.collective == "all_to_all":
            what, start = f"the exchange of {what}", partial(self._exchange, received, sent)
        else:
            what = f"the copy of {what} from process {message.source} of the group"
            start = partial(self._copy, sent, message.source)
        return self._started(f"{message.purpose}: {what}", start)

    def send(self, tensor: torch.Tensor, to: int, purpose: str) -> ProcessGroupWork:
        """Send a tensor to one member, which calls `receive`."""
        return self._started(purpose, lambda: [self.group.send([as_bytes(tensor)], to, 0)])

    def receive(self, tensor: torch.Tensor, source: int, purpose: str) -> ProcessGroupWork:
        """Receive what one member sends."""
        return self._started(purpose, lambda: [self.group.recv([as_bytes(tensor)], source, 0)])

    def _started(self, where: str, start: Callable[[], Works]) -> ProcessGroupWork:
        """Return the started work, always asynchronous: a caller waits where it needs the result."""
        with named_failure(where, self.why):
            return ProcessGroupWork(start(), where, self.why)

    def _reduce(self, tensor: torch.Tensor, operation: Operation) -> Works:
        options = AllreduceOptions()
        options.reduceOp = OPERATIONS[operation]  # type: ignore[assignment]
        # NCCL divides what it reads anyway, which saves a pass over the message.
        # In a group of one, NCCL up to 2.29.6 leaves the last elements of an average unwritten (nccl#1950).
        if operation == "mean" and self.backend_for(tensor.device) == "nccl" and self.size > 1:
            options.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]
        elif operation == "mean":
            tensor.div_(self.size)  # before the sum, which could be beyond a 16-bit type's range
        return [self.group.allreduce([tensor], options)]

    def _copy(self, tensor: torch.Tensor, source: int) -> Works:
        options = BroadcastOptions()
        options.rootRank = source
        return [self.group.broadcast([tensor], options)]

    def _way(self, collective: Collective, tensor: torch.Tensor) -> Way:
        is_on_gloo = tensor.device.type == "cpu" and self.backend_for(tensor.device) in GLOO
        if not (self.directly and is_on_gloo and self.size > 1 and tensor.numel() > 0):
            return "backend"
        return way_over_gloo(collective, tensor.nbytes, self.size)

    def _direct(
        self,
        collective: Collective,
        received: Sequence[torch.Tensor],
        sent: Sequence[torch.Tensor],
        finish: Callable[[], object] = lambda: None,
    ) -> Works:
        """Send a row to each of the other members, and receive the rows of bytes that they send."""
        return [self._post.exchange(self.group, collective, received, sent, finish)]

    def _reduced(self, tensor: torch.Tensor, operation: Operation) -> Works:
        way = self._way("all_reduce", tensor)
        if way == "backend":
            return self._reduce(tensor, operation)
        if operation == "mean":
            tensor.div_(self.size)  # before the sum, as above
        if way == "in parts":
            return [Sum(self._post, self.group, tensor, operation)]
        rows = [tensor if rank == self.rank else torch.empty_like(tensor) for rank in range(self.size)]
        sent, finish = [as_bytes(tensor)] * self.size, combining(rows, operation, tensor)
        return self._direct("all_reduce", list(map(as_bytes, rows)), sent, finish)

    def _gather(self, rows: torch.Tensor, own: torch.Tensor) -> Works:
        if self._way("all_gather", own) == "backend":
            return [self.group.allgather([list(rows)], [own], AllgatherOptions())]
        rows[self.rank].copy_(own)
        return self._direct("all_gather", list(rows), [own] * self.size)

    def _exchange(self, received: torch.Tensor, sent: torch.Tensor) -> Works:
        if self._way("all_to_all", sent) == "backend":
            return [self._exchange_parts(received, sent, [], [])]
        into, rows = received.view(self.size, -1), sent.view(self.size, -1)
        into[self.rank].copy_(rows[self.rank])
        return self._direct("all_to_all", list(into), list(rows))

    def _exchange_parts(
        self, received: torch.Tensor, sent: torch.Tensor, to_come: list[int], to_go: list[int]
    ) -> dist.Work:
        """Start an all-to-all of these byte counts from and to each member; empty lists mean equal parts."""
        work: dist.Work = self.group.alltoall_base(received, sent, to_come, to_go, AllToAllOptions())
        return work


class ProcessGroupTransport(GroupTransport):
    """Carries tensors over a process group of `torch.distributed`, on any backend."""

    group: dist.ProcessGroup
    why = WHY_IN_A_FIXED_GROUP

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        if device is not None and device.type in NOT_SERVED:
            raise AttachError(f"gradients on {device} can't be averaged: {NOT_SERVED[device.type]}")
        checked = checked_group(group)
        super().__init__(checked, checked.rank(), checked.size())
        self._post = _POSTS.setdefault(checked, Post(self.rank, self.size, ASKED_AHEAD))
        self.gradient_device = device

    @property
    def control_device(self) -> torch.device:
        kinds = [*self._backends]
        # The host reads control messages, so keep them off the accelerator, which it would have to wait for.
        if "cpu" in kinds:
            return torch.device("cpu")
        if self.gradient_device is not None:
            return self.gradient_device
        return self._own_gpu() if kinds[0] == "cuda" else torch.device(kinds[0])

    @property
    def data_device(self) -> torch.device:
        """The gradients' device, if a backend carries its tensors."""
        device = self.gradient_device
        return self.control_device if device is None or device.type not in self._backends else device

    @property
    def fast_device(self) -> torch.device:
        """The device of the fastest backend's messages: this process's GPU with NCCL, else the CPU."""
        has_nccl = self._backends.get("cuda") == "nccl" and torch.cuda.is_available()
        return self._own_gpu() if has_nccl else torch.device("cpu")

    def backend_for(self, device: torch.device) -> str:
        return self._backends.get(device.type, "none")

    @cached_property
    def _backends(self) -> dict[str, str]:
        """The backend's name for each kind of device; "nccl" for all of torch's that are NCCL."""
        # `dist.get_backend` has no name for several, nor for torch's own choice.
        pairs = [pair.split(":") for pair in dist.get_backend_config(self.group).split(",")]
        # From torch 2.14 on there are nccl2, nccl-legacy and nccl-lazy.
        return {kind: "nccl" if name.startswith("nccl") else name for kind, name, *_ in pairs}

    def _own_gpu(self) -> torch.device:
        """Return the GPU that the group was made for, or else the current one."""
        if self.group.bound_device_id is not None:
            return self.group.bound_device_id
        # NCCL takes no two processes on one GPU: here it can be said which call is missing.
        index = torch.cuda.current_device()
        local_rank = os.environ.get("LOCAL_RANK", "0")
        if index == 0 and local_rank != "0" and torch.cuda.device_count() > 1:
            raise ConfigError(
                f"process {self.rank} has local rank {local_rank}, and its current GPU is 0, which is that "
                "of local rank 0; call torch.cuda.set_device(local_rank), or "
                "init_process_group(device_id=…), first"
            )
        return torch.device("cuda", index)

    def _gather(self, rows: torch.Tensor, own: torch.Tensor) -> Works:
        if self.backend_for(own.device) != "nccl":
            return super()._gather(rows, own)
        # For a list of tensors NCCL's gathers into a separate buffer, and copies from there. The newer
        # name if there is one, since the older one warns then.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return [cast(dist.Work, gather(rows.view(-1), own, self.group, async_op=True))]

    def _shares_evenly(self, flat: torch.Tensor, lengths: Sequence[int]) -> bool:
        """Return whether NCCL has a collective for parts of these lengths."""
        return self.backend_for(flat.device) == "nccl" and len(set(lengths)) == 1

    def scatter_mean(self, flat: torch.Tensor, lengths: Sequence[int], purpose: str) -> Work:
        """NCCL's, or an exchange and a sum."""
        where = f"{purpose}: the average of a part of {flat.numel()} × {flat.dtype}"
        own = flat.split_with_sizes(list(lengths))[self.rank]
        if self._shares_evenly(flat, lengths):
            scatter = partial(dist.reduce_scatter_tensor, own, flat, dist.ReduceOp.AVG, self.group)
            return self._started(where, lambda: [cast(dist.Work, scatter(async_op=True))])
        received, to_go = flat.new_empty(self.size, len(own)), [flat.itemsize * length for length in lengths]
        # Send bytes, which Gloo exchanges of every type.
        to, sent, to_come = as_bytes(received), as_bytes(flat), [own.nbytes] * self.size
        work = self._started(where, lambda: [self._exchange_parts(to, sent, to_come, to_go)])
        return _MeanOfRows(work, received, own)

    def gather_parts(self, flat: torch.Tensor, lengths: Sequence[int], purpose: str) -> Work:
        """NCCL's if parts are of one length, else copies of each part."""
        if not self._shares_evenly(flat, lengths):
            return super().gather_parts(flat, lengths, purpose)
        gather = partial(dist.all_gather_into_tensor, flat, flat.split_with_sizes(list(lengths))[self.rank])
        where = f"{purpose}: the gather of {flat.numel()} × {flat.dtype}"
        return self._started(where, lambda: [cast(dist.Work, gather(self.group, async_op=True))])

    def ping_seconds(self, first: int, second: int, message: torch.Tensor) -> float | None:
        """Send a message from the first member to the second and back; others need not call this.

        Returns:
            Seconds per direction on the first, None on the second.
        """
        purpose = f"a message between the processes {first} and {second}"
        if self.rank == second:
            # It receives first: if both sent first, each could wait for the other to receive.
            self.receive(message, first, purpose).wait()
            self.send(message, first, purpose).wait()
            return None
        start = time.perf_counter()
        self.send(message, second, purpose).wait()
        self.receive(message, second, purpose).wait()
        if message.device.type != "cpu":  # there it has only been queued so far
            torch.accelerator.synchronize(message.device)
        return (time.perf_counter() - start) / 2


class ProcessGroupWork(NamedTuple):
    """A collective under way that carries one message; `where` and `why` are as of `named_failure`."""

    works: Works
    where: str
    why: str = WHY_IN_A_FIXED_GROUP

    def wait(self) -> None:
        """Block until the result is there: the host, or on CUDA only the current stream."""
        with named_failure(self.where, self.why):
            for work in self.works:
                work.wait()


def way_over_gloo(collective: Collective, handed_bytes: float, members: int) -> Way:
    """Return how a message travels."""
    most, is_sum = math.inf, collective == "all_reduce"
    if is_sum:
        most = MAX_DIRECT_SUM_OF_TWO_BYTES if members == 2 else MAX_DIRECT_SUM_BYTES
    elif collective == "all_gather" and members > 2:
        most = MAX_DIRECT_BYTES
    if members > MAX_DIRECT_MEMBERS or handed_bytes > most:
        return "backend"
    is_short = members == 2 or (members - 1) * handed_bytes <= MAX_GATHERED_SUM_BYTES
    return "directly" if is_short or not is_sum else "in parts"


def round_trips_over_gloo(collective: Collective, handed_bytes: float, members: int) -> tuple[float, int]:
    """Return how many round trips a message waits, and the bytes of its head if its rest is asked for."""
    way = way_over_gloo(collective, handed_bytes, members)
    if way == "backend":
        return (members - 1) * (2 if collective == "all_reduce" else 1), 0
    if way == "in parts":
        return 1.0, 0
    sent_bytes = (members - 1) * handed_bytes / (members if collective == "all_to_all" else 1)
    return 0.5, HEAD_BYTES if sent_bytes > HEAD_BYTES else 0


def future_of(work: Work, result: Callable[[], Result]) -> Future[Result]:
    """Return a future of what `result` makes of a finished collective; of a transport without `directly`."""
    assert isinstance(work, ProcessGroupWork)
    futures = [cast(dist.Work, torch_work).get_future() for torch_work in work.works]

    def finished(_: Future[object]) -> Result:
        # Torch calls back for a failure, too; it is `value` that raises it.
        with named_failure(work.where):
            for future in futures:
                future.value()
        return result()

    ended: Future[Any] = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)
    return cast("Future[Result]", ended.then(finished))


class _MeanOfRows(NamedTuple):
    """An exchange under way, and the room for the mean of what it brings."""

    work: ProcessGroupWork
    received: torch.Tensor
    mean: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        # In fp32 at least: a sum in half precision would overflow, and round after each member.
        wide = torch.promote_types(self.mean.dtype, torch.float32)
        self.mean.copy_(torch.sum(self.received, 0, dtype=wide).div_(len(self.received)))


@contextmanager
def named_failure(where: str, why: str = WHY_IN_A_FIXED_GROUP) -> Iterator[None]:
    """Turn a backend's error into Thinwire's."""
    # Backends raise this for a dead peer, a timeout and a refused type alike.
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(f"{where} failed: {error}. {why}") from error


def checked_group(group: object, name: str = "process_group") -> dist.ProcessGroup:
    """Return the group to use, after refusing what can't be one."""
    # `new_group` returns this number to processes that are not members; None means the default group.
    is_member = group is not dist.GroupMember.NON_GROUP_MEMBER
    if is_member and not isinstance(group, dist.ProcessGroup | None):
        raise AttachError(f"{name} must be a torch.distributed process group or None, got {group!r}")
    if not dist.is_initialized():
        raise AttachError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group() first"
        )
    if not is_member:
        raise AttachError(f"this process is not a member of {name}; create and use it on members only")
    return cast(dist.ProcessGroup, dist.group.WORLD if group is None else group)


def made_of(group: dist.ProcessGroup) -> dict[Hashable, Sequence[dist.ProcessGroup]]:
    """Return the groups that were made of processes of a group, to be added to."""
    return _MADE.setdefault(group, {})


def alone() -> dist.ProcessGroup:
    """Return a process group of this process only. Called on all processes at the same time.

    Collective over them the first time if the default group is bound to a device
    (`init_process_group(device_id=…)`), since torch then splits its communicator.
    """
    return group_of([dist.get_rank()])


def processes_of_job(timeout_seconds: float) -> Transport:
    """Return a new group of all processes of the job, or of this one if it is alone. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return InProcessTransport.group(1)[0]
    # With one backend for messages of the host, too.
    backend = "cpu:gloo,cuda:nccl" if "nccl" in dist.get_backend_config() else None
    timeout = timedelta(seconds=timeout_seconds)
    return ProcessGroupTransport(cast(dist.ProcessGroup, dist.new_group(timeout=timeout, backend=backend)))


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a group of some processes of the job, all of which call this. Collective the first time."""
    made, key = made_of(checked_group(None)), tuple(ranks)
    if key not in made:
        # Without that flag torch would compare the ranks with those of all other processes, which may differ.
        made[key] = [cast(dist.ProcessGroup, dist.new_group(list(ranks), use_local_synchronization=True))]
    return made[key][0]


def over_connections(interface: str, number: int) -> ProcessGroupTransport:
    """Return a new Gloo group of all processes, with `number` connections between any two. Collective."""
    # Gloo reads it when a group is made.
    before = os.environ.get("GLOO_SOCKET_IFNAME", "")
    os.environ["GLOO_SOCKET_IFNAME"] = ",".join([interface] * number)
    try:
        return ProcessGroupTransport(dist.new_group(backend="gloo"))
    finally:
        os.environ["GLOO_SOCKET_IFNAME"] = before


def own_subgroup(size: int, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Divide a group into subgroups of neighbours and return this process's. Collective."""
    try:
        subgroup: dist.ProcessGroup = dist.new_subgroups(size, group)[0]  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise ConfigError(
            f"{error}; pass subgroup=, this process's group of processes on one machine"
        ) from error
    return subgroup


def members_over_contributors(joinable: Joinable) -> torch.Tensor | None:
    """Tell the join context that this process contributes, and learn how many do: shape (1,).

    None outside a join context, and if a different joinable speaks for this process.
    """
    # It begins the step's messages: who has no input comes in with it, and shadows what follows.
    work = Join.notify_join_context(joinable)
    if work is None:
        return None
    # The join context has asked already; to ask once more would send a message that no one shadows.
    (contributors,) = work.get_future().wait()
    # Torch counts in its default type, in which 4/3 would be rounded; gradients may be of 64 bits.
    exact = contributors.to(accelerators.widest_dtype(contributors.device))
    return joinable.join_process_group.size() / exact  # type: ignore[no-any-return]


def notify_of_step(joinable: Joinable) -> None:
    """Tell the join context, if there is one, that this process has made a step with input."""
    Join.notify_join_context(joinable)
