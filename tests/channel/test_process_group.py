"""The transport of a real process group, over Gloo: every collective, and what fails is named."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

from pool import Pool
from thinwire.channel import ProcessGroupTransport, checked_group, process_group
from thinwire.channel.process_group import ProcessGroupWork, named_failure, own_subgroup
from thinwire.errors import AttachError, CommunicationError, ConfigError

FLOATING = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGER = [torch.uint8, torch.int32, torch.int64]
# Zero-length: parameters without elements, members without a share.
LENGTHS = [0, 1, 5]


def tensor_of(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def test_every_collective_carries_every_type(pool2: Pool) -> None:
    for process_id, world_size in pool2.run(_every_collective):
        assert process_id != os.getpid()
        assert world_size == 2


def test_between_two_processes_long_messages_travel_in_pieces(pool2: Pool) -> None:
    assert pool2.run(_in_pieces) == [(2, True, 8, 8)] * 2


def _in_pieces() -> tuple[int, bool, int, int]:
    """Pieces of two bytes carry what whole messages do, and make one future."""
    with patch.object(process_group, "PIECE_BYTES", 2):
        _, world_size = _every_collective()
        transport, own = ProcessGroupTransport(), torch.full((9,), dist.get_rank())
        rows = torch.empty(2, 9, dtype=torch.int64)
        with patch.object(dist, "all_gather", wraps=dist.all_gather) as gathered:
            future = transport.all_gather(rows, own, "a gather").then(lambda: rows.sum().item())
        is_there = future.wait() == 9
        with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchanged:
            transport.all_to_all(rows, rows.clone(), "an exchange").wait()
    return world_size, is_there, gathered.call_count, exchanged.call_count


def test_among_four(pool4: Pool) -> None:
    assert [world_size for _, world_size in pool4.run(_every_collective)] == [4] * 4


def _every_collective() -> tuple[int, int]:
    transport = ProcessGroupTransport()
    rank, size = transport.rank, transport.size
    assert (rank, size) == (dist.get_rank(), dist.get_world_size())
    assert transport.control_device == torch.device("cpu")
    for numel in LENGTHS:
        for dtype in [*FLOATING, *INTEGER]:
            brought = torch.stack([tensor_of(other, dtype, numel) for other in range(size)])
            total, largest = brought[rank].clone(), brought[rank].clone()
            transport.all_reduce(total, "a sum").wait()
            transport.all_reduce(largest, "a maximum", operation="max").wait()
            assert torch.equal(total, brought.double().sum(0).to(dtype)), (dtype, numel)
            assert torch.equal(largest, brought.double().amax(0).to(dtype)), (dtype, numel)
            if dtype in FLOATING:
                mean = brought[rank].clone()
                transport.mean(mean, "a mean").wait()
                torch.testing.assert_close(mean, brought.double().mean(0).to(dtype))
        for dtype in [*FLOATING, *INTEGER, torch.bool]:
            own = tensor_of(rank, dtype, numel)
            rows = torch.empty(size, numel, dtype=dtype)
            transport.all_gather(rows, own, "a gather").wait()
            expected = torch.stack([tensor_of(other, dtype, numel) for other in range(size)])
            assert torch.equal(rows, expected), (dtype, numel)

            exchanged = torch.empty(size, numel, dtype=dtype)
            transport.all_to_all(exchanged, tensor_of(rank, dtype, size, numel), "an exchange").wait()
            expected = torch.stack([tensor_of(other, dtype, size, numel)[rank] for other in range(size)])
            assert torch.equal(exchanged, expected), (dtype, numel)

            copied = own.clone()
            transport.broadcast(copied, size - 1, "a copy").wait()
            assert torch.equal(copied, tensor_of(size - 1, dtype, numel)), (dtype, numel)
    return os.getpid(), size


def test_the_mean_does_not_overflow_where_the_sum_would(pool2: Pool) -> None:
    assert pool2.run(_large_mean) == [[60_000.0], [60_000.0]]


def _large_mean() -> list[float]:
    tensor = torch.full((1,), 60_000.0, dtype=torch.float16)
    ProcessGroupTransport().mean(tensor, "a test").wait()
    return tensor.tolist()


def test_ranks_are_those_of_the_group(pool4: Pool) -> None:
    """Of processes 1 and 3: the source is the group's rank, not the world's."""
    assert pool4.run(_in_a_group_of_two) == [None, (0, 2, [3, 3], [1, 3]), None, (1, 2, [3, 3], [1, 3])]


def _in_a_group_of_two() -> tuple[int, int, list[int], list[int]] | None:
    group = dist.new_group([1, 3])
    if dist.get_rank() % 2 == 0:
        return None
    transport = ProcessGroupTransport(group)
    copied, rows = torch.full((2,), dist.get_rank()), torch.empty(2, 1, dtype=torch.int64)
    transport.broadcast(copied, 1, "a copy").wait()
    transport.all_gather(rows, torch.tensor([dist.get_rank()]), "a gather").wait()
    return transport.rank, transport.size, copied.tolist(), rows.view(-1).tolist()


def test_several_are_under_way_and_end_in_any_order(pool2: Pool) -> None:
    assert pool2.run(_several_under_way) == [[1.0, 11.0, 21.0]] * 2


def _several_under_way() -> list[float]:
    transport = ProcessGroupTransport()
    tensors = [torch.tensor([10.0 * number + transport.rank]) for number in range(3)]
    works = [transport.all_reduce(tensor, f"message {n}") for n, tensor in enumerate(tensors)]
    for work in reversed(works):
        work.wait()
    return [(tensor.item() + 1) / 2 for tensor in tensors]


def test_then_gives_a_future_of_what_is_made_of_the_result(pool2: Pool) -> None:
    assert pool2.run(_then) == [7.0, 7.0]


def _then() -> float:
    transport = ProcessGroupTransport()
    tensor = torch.tensor([float(transport.rank)])
    return transport.all_reduce(tensor, "a test").then(lambda: tensor.item() + 6).wait()


def failing_work(words: str) -> ProcessGroupWork:
    """As of a backend whose peer has gone."""
    future: Future[object] = Future()
    future.set_exception(RuntimeError(words))
    work = SimpleNamespace(get_future=lambda: future, wait=future.wait)
    return ProcessGroupWork(cast("dist.Work", work), "step 3, round 2")


def test_a_failure_is_named_with_what_was_under_way() -> None:
    words = "step 3, round 2 failed: connection closed by peer. A process has died"
    with pytest.raises(CommunicationError, match=words) as caught:
        failing_work("connection closed by peer").wait()
    assert isinstance(caught.value.__cause__, RuntimeError)
    future = failing_work("connection closed by peer").then(lambda: pytest.fail("there is no result"))
    with pytest.raises(Exception, match=words):  # torch hands on what a callback raises in a type of its own
        future.wait()


def test_only_what_a_backend_raises_is_renamed() -> None:
    with pytest.raises(CommunicationError, match="a gather failed: reset by peer"), named_failure("a gather"):
        raise RuntimeError("reset by peer")
    for error in (ValueError("a bug"), KeyboardInterrupt()):
        with pytest.raises(type(error)), named_failure("a gather"):
            raise error


def test_a_message_that_the_backend_refuses_is_named(pool2: Pool) -> None:
    for told in pool2.run(_refused):
        assert told.startswith("step 3: the average of 2 × torch.int16 failed: Invalid scalar type. ")
        assert "the backend can't carry this type" in told


def _refused() -> str:
    failing = patch.object(dist, "all_reduce", side_effect=RuntimeError("Invalid scalar type"))
    with failing, pytest.raises(CommunicationError) as caught:
        ProcessGroupTransport().all_reduce(torch.zeros(2, dtype=torch.int16), "step 3")
    return str(caught.value)


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
    group = SimpleNamespace(bound_device_id=bound, rank=lambda: 1, size=lambda: size)
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert transport.fast_device == torch.device("cpu")


def test_the_gpu_that_a_group_was_made_for_comes_before_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound = torch.device("cuda", 1)
    transport = on_a_machine_with_gpus(monkeypatch, "cuda:nccl", local_rank="1", bound=bound)
    assert transport.fast_device == transport.control_device == bound


@pytest.mark.parametrize("which", ["fast_device", "control_device"])
def test_two_processes_on_one_gpu_are_refused(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = on_a_machine_with_gpus(monkeypatch, "cuda:nccl", local_rank="1")
    with pytest.raises(ConfigError, match=r"has local rank 1, .* call torch\.cuda\.set_device\(local_rank\)"):
        getattr(transport, which)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each process sees its own only
    assert getattr(transport, which) == torch.device("cuda", 0)


@pytest.mark.parametrize(("size", "operation"), [(1, dist.ReduceOp.SUM), (2, dist.ReduceOp.AVG)])
def test_nccl_divides_by_itself(
    size: int, operation: dist.ReduceOp.RedOpType, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = on_a_machine_with_gpus(monkeypatch, "cpu:nccl", size=size)
    with patch.object(dist, "all_reduce") as called:
        transport.mean(message := torch.full((3,), 6.0), "a mean")
    assert called.call_args.args[1] == operation
    assert torch.equal(message, torch.full((3,), 6.0))


def test_what_nccl_gathers_comes_to_its_place_at_once(pool2: Pool) -> None:
    """By the collective that takes one tensor; Gloo has it as well."""
    assert pool2.run(_gathered_as_by_nccl) == [2, 2]


def _gathered_as_by_nccl() -> int:
    transport = ProcessGroupTransport()
    brought = torch.stack([tensor_of(rank, torch.bfloat16, 5) for rank in range(transport.size)])
    rows = torch.empty_like(brought)
    with (
        patch.object(ProcessGroupTransport, "backend_for", lambda self, device: "nccl"),
        patch.object(dist, "all_gather", None),
    ):
        transport.all_gather(rows, brought[transport.rank].clone(), "a gather").wait()
    assert torch.equal(rows, brought)
    return transport.size


def test_subgroups_of_neighbours(pool4: Pool) -> None:
    assert pool4.run(_neighbours) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def _neighbours() -> list[int]:
    return dist.get_process_group_ranks(own_subgroup(2, None))


def test_a_size_that_does_not_divide_the_group_is_refused(pool2: Pool) -> None:
    for told in pool2.run(_uneven_subgroups):
        assert "pass subgroup=, this process's group of processes on one machine" in told


def _uneven_subgroups() -> str:
    with pytest.raises(ConfigError) as caught:
        own_subgroup(3, None)
    return str(caught.value)


def test_without_a_process_group_it_says_what_to_call() -> None:
    assert not dist.is_initialized()
    for refused in (checked_group, ProcessGroupTransport):
        with pytest.raises(AttachError, match=r"call torch\.distributed\.init_process_group\(\) first"):
            refused(None)


def test_what_is_no_group_is_refused(pool2: Pool) -> None:
    for not_a_group, not_a_member in pool2.run(_no_groups):
        assert "process_group must be a torch.distributed process group or None, got 'gloo'" in not_a_group
        assert not_a_member is None or "not a member" in not_a_member
    assert [told is None for _, told in pool2.run(_no_groups)] == [True, False]


def _no_groups() -> tuple[str, str | None]:
    only_first: Any = dist.new_group([0])
    with pytest.raises(AttachError) as caught:
        checked_group("gloo")
    try:
        ProcessGroupTransport(only_first)
    except AttachError as error:
        return str(caught.value), str(error)
    return str(caught.value), None
