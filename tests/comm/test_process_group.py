"""The transport of a real process group, over Gloo: every collective, and what fails is named."""

from __future__ import annotations

import gc
from itertools import product
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from comm.every_collective import check_every_collective, tensor_of
from processes import in_each_process
from thinwire import wire
from thinwire.comm import ProcessGroupTransport, checked_group, p2p, process_group
from thinwire.comm.process_group import DistWork, own_subgroup
from thinwire.comm.transport import Operation
from thinwire.errors import AttachError, CommunicationError, ConfigError


@in_each_process(2)
def test_between_two_every_message_goes_p2p() -> None:
    """And carries what Gloo's own collectives do, to the bit."""
    transport, of_backend = ProcessGroupTransport(), ProcessGroupTransport(p2p=False)
    for carrier in (transport, of_backend):
        check_every_collective(carrier)
    assert transport.backend_for(torch.device("cpu")) == "gloo"
    transport.group = group = Mock(wraps=transport.group)
    own, rows = torch.full((9,), transport.rank), torch.empty(2, 9, dtype=torch.int64)
    gathered = transport.all_gather(rows, own, "a gather")
    gathered.wait()
    gathered.wait()  # which must not wait for a second message
    assert rows.sum() == 9
    transport.all_to_all(rows, rows.clone(), "an exchange").wait()
    sums = []
    for carrier in (transport, of_backend):
        numbers = torch.randn(1000, generator=torch.Generator().manual_seed(transport.rank))
        sums.append(numbers.to(torch.bfloat16))
        carrier.mean(sums[-1], "a mean").wait()
    assert torch.equal(*sums)
    assert (group.send.call_count, group.recv.call_count) == (3, 3)
    for collective in (group.allgather, group.alltoall_base, group.allreduce):
        assert not collective.called


@in_each_process(2)
def test_a_message_of_a_different_length_is_refused() -> None:
    transport, lengths = ProcessGroupTransport(dist.new_group()), [4, 12]
    rows = torch.empty(2, lengths[transport.rank], dtype=torch.uint8)
    words = (
        f"a gather: .* failed: expected a message of {lengths.pop(transport.rank)} bytes, got {lengths[0]}"
    )
    with pytest.raises(CommunicationError, match=words):
        transport.all_gather(rows, rows[0].clone(), "a gather").wait()


@pytest.mark.parametrize("is_p2p", [True, False], ids=["p2p", "backend"])
@in_each_process(2)
def test_what_ends_after_a_profiler_has_is_not_recorded(is_p2p: bool) -> None:
    """Torch would write the end of a receive that was posted ahead to freed memory, and crash later."""
    transport = ProcessGroupTransport(dist.new_group(), p2p=is_p2p)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        transport.mean(torch.ones(2).neg(), "a mean").wait()
        transport.all_gather(torch.empty(2, 3), torch.ones(3), "a gather").wait()
        transport.all_to_all(torch.empty(2, 3), torch.ones(2, 3), "an exchange").wait()
    names = {event.key for event in profiler.key_averages()}
    assert "aten::neg" in names  # the user's own operations are
    assert not [name for name in names if name.startswith("gloo:")]


@in_each_process(2)
def test_a_message_that_no_one_waits_for_breaks_nothing() -> None:
    """An exception has ended the step that sent it; others send theirs, and the group is used again."""
    transport, others = ProcessGroupTransport(dist.new_group()), dist.new_group()
    rows = torch.empty(2, 1 << 19)
    for first in (0, 1):
        if transport.rank != first:
            dist.barrier(others)
        transport.all_gather(rows, torch.ones(1 << 19), "a gather")
        gc.collect()
        if transport.rank == first:
            dist.barrier(others)
    works = [transport.all_gather(rows, torch.ones(1 << 19), "a gather") for _ in range(p2p.NUM_TAGS + 1)]
    works[-1].wait()
    # On another of several connections it may not have ended. The rest of a message is on that of its head.
    assert 0 in transport._peers._under_way["all_gather"]
    assert not any(p2p.REST % connections for connections in range(1, 17))
    for work in works:
        work.wait()
    assert not any(transport._peers._under_way.values())  # its memory is freed, too
    dist.all_reduce(rows, group=transport.group)
    assert (rows == 2).all()


@in_each_process(4)
def test_among_four_short_gathers_go_p2p() -> None:
    rows = torch.empty(4, 1)
    for most, calls in ((4, (3, 0)), (3, (0, 1))):
        with patch.object(wire, "MAX_P2P_BYTES", most):
            transport = ProcessGroupTransport()
        check_every_collective(transport)
        assert transport.backend_for(rows.device) == "gloo"
        transport.group = group = Mock(wraps=transport.group)
        transport.all_gather(rows, torch.ones(1), "a gather").wait()
        assert (group.send.call_count, group.allgather.call_count) == calls


@in_each_process(3)
def test_among_three_sums_go_p2p() -> None:
    """Short ones whole, longer ones in parts, which each member sums: many at once, to the same bits."""
    transport = ProcessGroupTransport(dist.new_group())
    check_every_collective(transport)
    transport.group = group = Mock(wraps=transport.group)
    operations: list[Operation] = ["mean", "max"]
    for operation, (numel, messages) in product(operations, ((1, 1), (8000, 1), (20_000, 2))):
        group.reset_mock()
        own = [tensor_of(transport.rank + 3 * number, torch.bfloat16, numel) for number in range(12)]
        sums = [tensor.clone() for tensor in own]
        for work in [transport.all_reduce(total, "a sum", operation=operation) for total in sums]:
            work.wait()
        # Not `call_count`, which loses calls of two threads: one is sending the second messages.
        assert len(group.send.call_args_list) == 12 * 2 * messages
        assert not group.allreduce.called
        for number, total in enumerate(sums):
            rows = torch.stack([tensor_of(rank + 3 * number, torch.bfloat16, numel) for rank in range(3)])
            expected = rows.amax(0) if operation == "max" else (rows / 3).float().sum(0).bfloat16()
            torch.testing.assert_close(total, expected, rtol=0.01, atol=0.01)
            everyone = torch.empty(3, numel, dtype=total.dtype)
            transport.all_gather(everyone, total, "a check").wait()
            assert torch.equal(everyone, total.expand_as(everyone))


@in_each_process(3)
def test_a_sum_whose_second_message_fails_says_so() -> None:
    """It is sent by a thread; who waits gets the error."""
    transport, exchange = ProcessGroupTransport(dist.new_group()), p2p.PeerExchange.start

    def failing(peers: p2p.PeerExchange, group: Any, kind: str, *rest: Any) -> p2p.PeerWork:
        if kind == "sums":
            raise RuntimeError("no way")
        return exchange(peers, group, kind, *rest)

    with (
        patch.object(p2p.PeerExchange, "start", failing),
        pytest.raises(CommunicationError, match=r"a sum: the average of 20000 .* failed: no way"),
    ):
        transport.mean(torch.ones(20_000), "a sum").wait()
    assert transport.size == 3


@in_each_process(4)
def test_ranks_are_those_of_the_group() -> None:
    """Of processes 1 and 3: the source is the group's rank, not the world's."""
    # Torch names later groups by the number that a process is in: that must be the same for all.
    group = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][dist.get_rank() % 2]
    if dist.get_rank() % 2 == 0:
        return
    transport = ProcessGroupTransport(group)
    copied, rows = torch.full((2,), dist.get_rank()), torch.empty(2, 1, dtype=torch.int64)
    transport.broadcast(copied, 1, "a copy").wait()
    transport.all_gather(rows, torch.tensor([dist.get_rank()]), "a gather").wait()
    assert (transport.rank, transport.size) == (dist.get_rank() // 2, 2)
    assert (copied.tolist(), rows.view(-1).tolist()) == ([3, 3], [1, 3])


def test_only_what_a_backend_raises_is_renamed() -> None:
    for error in (ValueError("a bug"), KeyboardInterrupt()):
        work = DistWork(Mock(wait=Mock(side_effect=error)), "a gather")
        with pytest.raises(type(error)):
            work.wait()


def test_a_message_that_the_backend_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = on_a_machine_with_gpus(monkeypatch, "cpu:gloo")
    group: Any = transport.group
    group.recv.side_effect = RuntimeError("Invalid scalar type")
    words = "step 3: the average of 2 × torch.int16 failed: Invalid scalar type. .* lacks this dtype"
    with pytest.raises(CommunicationError, match=words):
        transport.all_reduce(torch.zeros(2, dtype=torch.int16), "step 3")


# Groups with GPUs, of which there is none here


def on_a_machine_with_gpus(
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    *,
    local_rank: str | None = None,
    bound: torch.device | None = None,
    size: int = 2,
) -> ProcessGroupTransport:
    """A process that has not called `torch.cuda.set_device`, in a group of some backends."""
    group = Mock(bound_device_id=bound)
    group.rank.return_value, group.size.return_value = 1, size
    monkeypatch.setattr(process_group, "checked_group", lambda given: group)
    monkeypatch.setattr(dist, "get_backend_config", lambda given: config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    return ProcessGroupTransport()


@pytest.mark.parametrize(
    ("config", "device", "backend"),
    [
        ("cuda:nccl", "cuda:0", "nccl"),
        ("cpu:gloo,cuda:nccl", "cuda:0", "nccl"),  # also what torch chooses where no backend is named
        ("cuda:nccl-legacy", "cuda:0", "nccl"),
        ("cpu:gloo,cuda:nccl2", "cuda:0", "nccl"),
        ("cpu:gloo,cuda:gloo", "cpu", "gloo"),
        ("cpu:gloo", "cpu", "gloo"),
    ],
)
def test_messages_lie_where_the_fastest_backend_carries_them(
    config: str, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = on_a_machine_with_gpus(monkeypatch, config)
    assert transport.fast_device == torch.device(device)
    assert transport.backend_for(transport.fast_device) == backend
    assert transport.control_device.type == ("cpu" if "cpu" in config else "cuda")
    assert transport.data_device == transport.control_device  # whoever has no gradients, such as the probe
    transport.gradient_device = torch.device("cuda", 0)
    assert transport.data_device.type == ("cuda" if "cuda" in config else "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert transport.fast_device == torch.device("cpu")


@pytest.mark.parametrize("device", ["mps", "xla:0"])
def test_devices_that_have_no_way_here_are_refused(device: str) -> None:
    with pytest.raises(AttachError, match=f"^gradients on {device} can't be averaged: "):
        ProcessGroupTransport(None, torch.device(device))


@pytest.mark.parametrize("which", ["fast_device", "control_device"])
def test_two_processes_on_one_gpu_are_refused(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = on_a_machine_with_gpus(monkeypatch, "cuda:nccl", local_rank="1")
    with pytest.raises(
        ConfigError, match=r"local rank 1 uses GPU 0, .* call torch\.cuda\.set_device\(local_rank\)"
    ):
        getattr(transport, which)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each process sees its own only
    assert getattr(transport, which) == torch.device("cuda", 0)
    bound = torch.device("cuda", 1)  # what the group was made for comes before the current one
    transport = on_a_machine_with_gpus(monkeypatch, "cuda:nccl", local_rank="1", bound=bound)
    assert getattr(transport, which) == bound


@pytest.mark.parametrize(("size", "operation"), [(1, dist.ReduceOp.SUM), (2, dist.ReduceOp.AVG)])
def test_nccl_divides_by_itself(
    size: int, operation: dist.ReduceOp.RedOpType, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = on_a_machine_with_gpus(monkeypatch, "cpu:nccl", size=size)
    transport.mean(message := torch.full((3,), 6.0), "a mean")
    group: Any = transport.group
    assert group.allreduce.call_args.args[1].reduceOp == operation
    assert torch.equal(message, torch.full((3,), 6.0))


@in_each_process(2)
def test_what_nccl_gathers_comes_to_its_place_at_once() -> None:
    """By the collective that takes one tensor; Gloo has it as well."""
    transport = ProcessGroupTransport(p2p=False)
    brought = torch.stack([tensor_of(rank, torch.bfloat16, 5) for rank in range(transport.size)])
    rows = torch.empty_like(brought)
    with (
        patch.object(ProcessGroupTransport, "backend_for", lambda self, device: "nccl"),
        patch.object(process_group, "AllgatherOptions", None),
    ):
        transport.all_gather(rows, brought[transport.rank].clone(), "a gather").wait()
    assert torch.equal(rows, brought)


@in_each_process(4)
def test_subgroups_of_neighbours() -> None:
    first = dist.get_rank() // 2 * 2
    assert dist.get_process_group_ranks(own_subgroup(2, None)) == [first, first + 1]
    with pytest.raises(ConfigError, match="pass subgroup=, this process's group of processes on one machine"):
        own_subgroup(3, None)


def test_without_a_process_group_it_says_what_to_call() -> None:
    with pytest.raises(AttachError, match=r"call torch\.distributed\.init_process_group\(\) first"):
        ProcessGroupTransport(None)


@in_each_process(2)
def test_what_is_no_group_is_refused() -> None:
    words = "process_group must be a torch.distributed process group or None, got 'gloo'"
    with pytest.raises(AttachError, match=words):
        checked_group("gloo")
    only_first: Any = dist.new_group([0])
    if dist.get_rank():
        with pytest.raises(AttachError, match="this process is not a member of process_group"):
            ProcessGroupTransport(only_first)
