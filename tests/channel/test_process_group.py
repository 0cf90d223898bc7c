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

from channel.every_collective import check_every_collective, tensor_of
from pool import Pool
from thinwire.channel import ProcessGroupTransport, checked_group, process_group
from thinwire.channel.process_group import ProcessGroupWork, future_of, named_failure, own_subgroup
from thinwire.errors import AttachError, CommunicationError, ConfigError
from training import error_of


def test_every_collective_carries_every_type(pool2: Pool) -> None:
    for process_id, world_size in pool2.run(_every_collective):
        assert process_id != os.getpid()
        assert world_size == 2


def test_messages_that_go_directly_carry_what_gloos_own_collectives_do(pool2: Pool, pool4: Pool) -> None:
    for pool in (pool2, pool4):
        for is_there, sums_are_equal, own_gathers, gathers in pool.run(_directly):
            assert is_there
            assert sums_are_equal
            assert (own_gathers, gathers) == (0, 1)
    for pool in (pool2, pool4):
        assert pool.run(_not_directly) == pool.run(_every_collective_of_size)


def _directly() -> tuple[bool, bool, int, int]:
    transport = ProcessGroupTransport()
    own, rows = torch.full((9,), transport.rank), torch.empty(transport.size, 9, dtype=torch.int64)
    with patch.object(dist, "all_gather", wraps=dist.all_gather) as gathered:
        work = transport.all_gather(rows, own, "a gather")
        work.wait()
        work.wait()  # which must not wait for a second message
        is_there = rows.sum().item() == 9 * sum(range(transport.size))
        num_direct = gathered.call_count
        with patch.object(process_group, "MAX_DIRECT_MEMBERS", 1):
            transport.all_gather(rows, own, "a gather").wait()
    sums = []
    for most in (16, 1):
        generator = torch.Generator().manual_seed(transport.rank)
        numbers = torch.randn(1000, generator=generator).to(torch.bfloat16)
        numbers[0] = torch.nan if transport.rank else torch.inf
        with patch.object(process_group, "MAX_DIRECT_MEMBERS", most):
            transport.mean(numbers, "a mean").wait()
        sums.append(numbers.view(torch.int16)[1:])
    return is_there, torch.equal(*sums), num_direct, gathered.call_count


def _not_directly() -> int:
    with patch.object(process_group, "MAX_DIRECT_MEMBERS", 1):
        return _every_collective()[1]


def _every_collective_of_size() -> int:
    return _every_collective()[1]


def test_among_four(pool4: Pool) -> None:
    assert [world_size for _, world_size in pool4.run(_every_collective)] == [4] * 4


def _every_collective() -> tuple[int, int]:
    transport = ProcessGroupTransport()
    assert (transport.rank, transport.size) == (dist.get_rank(), dist.get_world_size())
    check_every_collective(transport)
    return os.getpid(), transport.size


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


def test_then_gives_a_future_of_what_is_made_of_the_result(pool2: Pool) -> None:
    assert pool2.run(_then) == [7.0, 7.0]


def _then() -> float:
    transport = ProcessGroupTransport()
    transport.directly = False
    tensor = torch.tensor([float(transport.rank)])
    return future_of(transport.all_reduce(tensor, "a test"), lambda: tensor.item() + 6).wait()


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
    work = failing_work("connection closed by peer")
    future = future_of(work, lambda: pytest.fail("there is no result"))
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
        assert "Error: step 3: the average of 2 × torch.int16 failed: Invalid scalar type. " in told
        assert "the backend can't carry this type" in told


def _refused() -> str:
    message, failure = torch.zeros(2, dtype=torch.int16), RuntimeError("Invalid scalar type")
    with patch.object(ProcessGroupTransport, "_receive", side_effect=failure):
        return error_of(lambda: ProcessGroupTransport().all_reduce(message, "step 3"))


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
    return error_of(lambda: own_subgroup(3, None))


def test_without_a_process_group_it_says_what_to_call() -> None:
    assert not dist.is_initialized()
    for refused in (checked_group, ProcessGroupTransport):
        with pytest.raises(AttachError, match=r"call torch\.distributed\.init_process_group\(\) first"):
            refused(None)


def test_what_is_no_group_is_refused(pool2: Pool) -> None:
    told = pool2.run(_no_groups)
    for not_a_group, _ in told:
        assert "process_group must be a torch.distributed process group or None, got 'gloo'" in not_a_group
    assert told[0][1] == ""
    assert "not a member" in told[1][1]


def _no_groups() -> tuple[str, str]:
    only_first: Any = dist.new_group([0])
    return error_of(lambda: checked_group("gloo")), error_of(lambda: ProcessGroupTransport(only_first))
