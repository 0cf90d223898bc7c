"""The transports of real process groups: all of Thinwire's calls to `torch.distributed`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, BroadcastOptions
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.constants import default_pg_timeout
from torch.futures import Future

from thinwire.comm.in_process import InProcessTransport
from thinwire.comm.p2p import POSTED_AHEAD, TAGS, PeerExchange, TwoStepAllReduce, as_bytes, reduce_rows
from thinwire.comm.transport import CombinedWork, Message, Transport, Work
from thinwire.errors import AttachError, CommunicationError, ConfigError
from thinwire.tensors import accelerators
from thinwire.torch_private import default_store, is_profiling, release_default_group, timeout_of, unrecorded
from thinwire.wire import Collective, p2p_limits

Result = TypeVar("Result")
BackendWork: TypeAlias = "dist.Work | Work"
Route: TypeAlias = Literal["p2p", "reduce_scatter_p2p", "backend"]

OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

WHY_IN_A_FIXED_GROUP = (
    "A process died, stalled or sent a different message; it had fewer batches (use thinwire.join), or "
    "missed a call (attach, use, state_dict); or the backend lacks this dtype. Look for the first error"
)
WHY_IN_A_CHANGING_GROUP = (
    "A member died, did not respond within the timeout, lost its connection, or aborted the averaging "
    "because one of its messages failed"
)

GLOO = ("gloo", "torchft-gloo")

# Groups made of a group's processes. Torch does not destroy groups itself, and a handle uses its groups until
# it is detached, so they are made once and live as long as their parent.
_GROUPS_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Any]] = WeakKeyDictionary()
# One per group: Gloo matches by tags that count the group's messages, whichever transport sends them.
_PEERS: WeakKeyDictionary[Any, PeerExchange] = WeakKeyDictionary()

# Unsupported device types, and why. For other types a message or a kernel raises its own error.
NOT_SERVED = {
    "mps": "no backend of torch.distributed carries its tensors; move the model to the CPU: model.cpu()",
    "xla": "its tensors have no memory to cut and pack; leave the averaging to torch_xla, or train on GPUs",
}


class GroupTransport(Transport):
    """Carries tensors over a process group with the group's own methods.

    The group need not be registered with `torch.distributed`. When its members change, make a new transport.
    """

    why = WHY_IN_A_CHANGING_GROUP  # possible reasons for a backend's failure

    def __init__(
        self, group: Any, rank: int, size: int, peers: PeerExchange | None = None, *, p2p: bool = True
    ) -> None:
        self.group, self.rank, self.size = group, rank, size
        self._peers = peers or PeerExchange(rank, size)  # a changed group starts again
        is_p2p = p2p and size > 1 and self.backend_for(torch.device("cpu")) in GLOO
        self._p2p_limits = {kind: p2p_limits(kind, size) if is_p2p else (0, 0) for kind in TAGS}

    def backend_for(self, device: torch.device) -> str:
        """Return the name of the backend that carries a device's tensors."""
        return str(self.group.name())

    def start(self, message: Message) -> DistWork:
        try:
            # Over Gloo a receive ends steps after it was posted, a message when it is waited for.
            on_cpu = message.tensor.device.type == "cpu"
            with unrecorded() if on_cpu and is_profiling() else nullcontext():
                if message.collective == "all_reduce":
                    work = self._all_reduce(message)
                elif message.collective == "all_gather":
                    work = self._all_gather(message)
                elif message.collective == "all_to_all":
                    work = self._all_to_all(message)
                else:
                    options = BroadcastOptions()
                    options.rootRank = message.source
                    work = self.group.broadcast([as_bytes(message.tensor)], options)
        except RuntimeError as error:
            raise failure(message, error, self.why) from error
        return DistWork(work, message, self.why)

    def send(self, tensor: torch.Tensor, to: int, purpose: str) -> DistWork:
        """Send a tensor to one member, which calls `receive`."""
        return self._started(purpose, self.group.send, [as_bytes(tensor)], to, 0)

    def receive(self, tensor: torch.Tensor, source: int, purpose: str) -> DistWork:
        """Receive the tensor that one member sends."""
        return self._started(purpose, self.group.recv, [as_bytes(tensor)], source, 0)

    def _started(
        self, where: str, start: Callable[..., Any], *arguments: object, **options: object
    ) -> DistWork:
        """Return the started work, always asynchronous: callers wait when they need the result."""
        try:
            return DistWork(start(*arguments, **options), where, self.why)
        except RuntimeError as error:
            raise failure(where, error, self.why) from error

    def _route(self, collective: Collective, tensor: torch.Tensor) -> Route:
        whole, most = self._p2p_limits[collective]
        if tensor.device.type != "cpu" or not 0 < tensor.nbytes <= most:
            return "backend"
        return "p2p" if tensor.nbytes <= whole else "reduce_scatter_p2p"

    def _all_reduce(self, message: Message) -> BackendWork:
        tensor, operation = message.tensor, message.operation
        route, options = self._route("all_reduce", tensor), AllreduceOptions()
        options.reduceOp = OPERATIONS[operation]  # type: ignore[assignment]
        # NCCL divides while it reads, which saves a pass over the message. In a group of one, NCCL up to
        # 2.29.6 leaves the last elements of an average unwritten (nccl#1950).
        if operation == "mean" and self.size > 1 and self.backend_for(tensor.device) == "nccl":
            options.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]
        elif operation == "mean":
            tensor.div_(self.size)  # before the sum, which could overflow a 16-bit dtype
        if route == "backend":
            return cast(dist.Work, self.group.allreduce([tensor], options))
        if route == "reduce_scatter_p2p":
            return TwoStepAllReduce(self._peers, self.group, tensor, operation)
        flat = tensor.view(-1)
        theirs = flat.new_empty(self.size - 1, len(flat))
        rows = [*theirs[: self.rank], flat, *theirs[self.rank :]]
        received, sent = list(map(as_bytes, rows)), [as_bytes(flat)] * self.size
        finish = partial(reduce_rows, rows, operation, flat)
        return self._peers.start(self.group, "all_reduce", received, sent, finish)

    def _all_gather(self, message: Message) -> BackendWork:
        # Send bytes: Gloo gathers only some dtypes. Rows are views, so the result is in `output`.
        rows, own = as_bytes(message.output).view(self.size, -1), as_bytes(message.tensor)
        if self._route("all_gather", own) == "p2p":
            rows[self.rank].copy_(own)
            return self._peers.start(self.group, "all_gather", list(rows), [own] * self.size)
        if self.backend_for(own.device) != "nccl":
            return cast(dist.Work, self.group.allgather([list(rows)], [own], AllgatherOptions()))
        # With a list of tensors, NCCL gathers into a separate buffer and copies from there. Use the newer
        # name if it exists, since the older one then warns.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return cast(dist.Work, gather(rows.view(-1), own, self.group, async_op=True))

    def _all_to_all(self, message: Message) -> BackendWork:
        received, sent = as_bytes(message.output), as_bytes(message.tensor)
        if self._route("all_to_all", sent) == "backend":
            return cast(dist.Work, self.group.alltoall_base(received, sent, [], [], AllToAllOptions()))
        to, rows = received.view(self.size, -1), sent.view(self.size, -1)
        to[self.rank].copy_(rows[self.rank])
        return self._peers.start(self.group, "all_to_all", list(to), list(rows))


class ProcessGroupTransport(GroupTransport):
    """Carries tensors over a process group of `torch.distributed`, on any backend."""

    group: dist.ProcessGroup
    why = WHY_IN_A_FIXED_GROUP

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | None = None, *, p2p: bool = True
    ) -> None:
        if device is not None and device.type in NOT_SERVED:
            raise AttachError(f"gradients on {device} can't be averaged: {NOT_SERVED[device.type]}")
        checked = checked_group(group)
        rank, size = checked.rank(), checked.size()
        # `dist.get_backend` does not name several backends, nor torch's default choice.
        pairs = [pair.split(":") for pair in dist.get_backend_config(checked).split(",")]
        # From torch 2.14 on there are nccl2, nccl-legacy and nccl-lazy.
        self._backends = {kind: "nccl" if name.startswith("nccl") else name for kind, name, *_ in pairs}
        # Work sent to each peer has no future, which hooks need (`p2p=False`).
        peers = _PEERS.setdefault(checked, PeerExchange(rank, size, POSTED_AHEAD))
        super().__init__(checked, rank, size, peers, p2p=p2p)
        release_default_group()
        self.gradient_device = device

    @property
    def control_device(self) -> torch.device:
        kinds = [*self._backends]
        # The host reads control messages, so keep them off the accelerator, for which it would have to wait.
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

    def _own_gpu(self) -> torch.device:
        """Return the GPU that the group was made for, or else the current one."""
        if self.group.bound_device_id is not None:
            return self.group.bound_device_id
        # NCCL does not allow two processes on one GPU: raise an error that names the missing call.
        index = torch.cuda.current_device()
        local_rank = os.environ.get("LOCAL_RANK", "0")
        if index == 0 and local_rank != "0" and torch.cuda.device_count() > 1:
            raise ConfigError(
                f"process {self.rank} with local rank {local_rank} uses GPU 0, which is local rank 0's; "
                "first call torch.cuda.set_device(local_rank), or init_process_group(device_id=…)"
            )
        return torch.device("cuda", index)

    def _shares_evenly(self, flat: torch.Tensor, lengths: Sequence[int]) -> bool:
        """Return whether NCCL has a collective for parts of these lengths."""
        return self.backend_for(flat.device) == "nccl" and len(set(lengths)) == 1

    def scatter_mean(self, flat: torch.Tensor, lengths: Sequence[int], purpose: str) -> Work:
        """Use NCCL's reduce-scatter, or an exchange and a sum."""
        where = f"{purpose}: the average of a part of {flat.numel()} × {flat.dtype}"
        own = flat.split_with_sizes(list(lengths))[self.rank]
        if self._shares_evenly(flat, lengths):
            scatter, mean = dist.reduce_scatter_tensor, dist.ReduceOp.AVG
            return self._started(where, scatter, own, flat, mean, self.group, async_op=True)
        received = flat.new_empty(self.size, len(own))
        to_come, to_go = [own.nbytes] * self.size, [flat.itemsize * length for length in lengths]
        # Send bytes, so that Gloo exchanges every dtype.
        buffers, options = (as_bytes(received), as_bytes(flat)), AllToAllOptions()
        exchange = self._started(where, self.group.alltoall_base, *buffers, to_come, to_go, options)

        def wait() -> None:
            exchange.wait()
            # At least in fp32: a sum in half precision could overflow, and would round after each member.
            wide = torch.promote_types(own.dtype, torch.float32)
            own.copy_(torch.sum(received, 0, dtype=wide).div_(self.size))

        return CombinedWork(wait)

    def gather_parts(self, flat: torch.Tensor, lengths: Sequence[int], purpose: str) -> Work:
        """Use NCCL's all-gather if parts have one length, or else copies of each part."""
        if not self._shares_evenly(flat, lengths):
            return super().gather_parts(flat, lengths, purpose)
        own = flat.split_with_sizes(list(lengths))[self.rank]
        where = f"{purpose}: the gather of {flat.numel()} × {flat.dtype}"
        return self._started(where, dist.all_gather_into_tensor, flat, own, self.group, async_op=True)

    def ping_seconds(self, first: int, second: int, message: torch.Tensor) -> float:
        """Send a message to the second member and back; return the one-way seconds, 0 on the second."""
        purpose = f"a message between the processes {first} and {second}"
        if self.rank == second:
            # Receive first: if both sent first, each could wait for the other to receive.
            self.receive(message, first, purpose).wait()
            self.send(message, first, purpose).wait()
            return 0.0
        start = time.perf_counter()
        self.send(message, second, purpose).wait()
        self.receive(message, second, purpose).wait()
        accelerators.wait_for(message.device)  # on an accelerator it was only queued so far
        return (time.perf_counter() - start) / 2


class DistWork(NamedTuple):
    """A backend's work for one message; `where` and `why` are texts for a `CommunicationError`."""

    work: BackendWork
    where: object
    why: str = WHY_IN_A_FIXED_GROUP

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise failure(self.where, error, self.why) from error


def future_of(work: Work, result: Callable[[], Result]) -> Future[Result]:
    """Return a future of `result()` after a collective has finished; for transports without p2p."""
    assert isinstance(work, DistWork)
    future = cast(dist.Work, work.work).get_future()

    def finish(_: Future[object]) -> Result:
        # Torch calls back after a failure, too; `value` raises it.
        try:
            future.value()
        except RuntimeError as error:
            raise failure(work.where, error, work.why) from error
        return result()

    return cast("Future[Result]", future.then(finish))


def failure(where: object, error: RuntimeError, why: str) -> CommunicationError:
    """Return Thinwire's error for a backend's: a dead peer, a timeout or a refused dtype."""
    return CommunicationError(f"{where} failed: {error}. {why}")


def checked_group(group: object, name: str = "process_group") -> dist.ProcessGroup:
    """Return the group to use; raise if it can't be one."""
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


def groups_made_for(group: dist.ProcessGroup) -> dict[Hashable, Any]:
    """Return the dictionary of what was made for a group's processes, to add to; keys name the processes."""
    return _GROUPS_MADE.setdefault(group, {})


def processes_of_job(timeout_seconds: float) -> Transport:
    """Return a new group of all processes of the job, or of this one if it is alone. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return InProcessTransport.group(1)[0]
    # Including a backend for host messages.
    backend = "cpu:gloo,cuda:nccl" if "nccl" in dist.get_backend_config() else None
    timeout = timedelta(seconds=timeout_seconds)
    return ProcessGroupTransport(cast(dist.ProcessGroup, dist.new_group(timeout=timeout, backend=backend)))


def own_group() -> dist.ProcessGroup:
    """Return a group of this process alone.

    If the default group is bound to a device, the whole job must call it: torch splits its communicator.
    """
    made, own = groups_made_for(checked_group(None)), dist.get_rank()
    if own not in made:
        # Without this flag torch checks that every process passes the same ranks. Here each passes its own.
        made[own] = dist.new_group([own], use_local_synchronization=True)
    return cast(dist.ProcessGroup, made[own])


def control_transport(ranks: Sequence[int]) -> Transport:
    """Return a transport for small messages between some processes of the job, all of which call this.

    It does not use `dist.new_group`: either the whole job would have to call it, or every process would need
    to be in the same number of groups, by which torch names the new one. If rank 0 had made a group of its
    own, for its logs, ranks 0 and 1 would look for each other under different names, and wait forever.
    """
    group, key = checked_group(None), tuple(ranks)
    made = groups_made_for(group)
    if key not in made:
        rank, timeout = ranks.index(dist.get_rank()), timeout_of(group, torch.device("cpu"))
        store = dist.distributed_c10d.PrefixStore(f"thinwire/{key}", default_store())
        backend = dist.ProcessGroupGloo(store, rank, len(ranks), timeout or default_pg_timeout)
        made[key] = GroupTransport(backend, rank, len(ranks))
    return cast(Transport, made[key])


def over_connections(interface: str, number: int) -> ProcessGroupTransport:
    """Return a new Gloo group of all processes, with `number` connections between any two. Collective."""
    # Gloo reads the variable when a group is made. No other changes: threads may be reading them.
    before = os.environ.get("GLOO_SOCKET_IFNAME", "")
    os.environ["GLOO_SOCKET_IFNAME"] = ",".join([interface] * number)
    try:
        return ProcessGroupTransport(dist.new_group(backend="gloo"))
    finally:
        os.environ["GLOO_SOCKET_IFNAME"] = before


def own_subgroup(
    size: int, group: dist.ProcessGroup | None, device: torch.device | None = None
) -> dist.ProcessGroup:
    """Divide a group into subgroups of neighbours and return this process's. Collective."""
    timeout = None if device is None else timeout_of(checked_group(group), device)  # or half an hour
    try:
        subgroup: dist.ProcessGroup = dist.new_subgroups(size, group, timeout)[0]  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise ConfigError(
            f"{error}; pass subgroup=, this process's group of processes on one machine"
        ) from error
    return subgroup


def members_over_contributors(joinable: Joinable) -> torch.Tensor | None:
    """Notify the join context that this process contributes; return members over contributors: shape (1,).

    None outside a join context, or if a different joinable notifies for this process.
    """
    # This is the step's first message: processes without input take part in it, and shadow what follows.
    work = Join.notify_join_context(joinable)
    if work is None:
        return None
    # Use the join context's own message: another one would not be shadowed.
    (contributors,) = work.get_future().wait()
    # Torch counts in its default dtype, which would round 4/3; gradients may have 64 bits.
    return joinable.join_process_group.size() / contributors.double()  # type: ignore[no-any-return]


def notify_of_step(joinable: Joinable) -> None:
    """Notify the join context, if there is one, that this process has made a step with input."""
    Join.notify_join_context(joinable)
