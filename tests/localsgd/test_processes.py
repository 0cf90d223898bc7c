"""What only real processes show: groups of `torch.distributed`, and DDP models that are driven."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from members import Member, run
from pool import Pool, Pools
from thinwire import Streaming, Warmup
from thinwire.algorithms import Algorithm, AllReduce, PowerSGD, Quantize, TopK
from thinwire.errors import StateError
from thinwire.localsgd import LocalSGD
from training import agreed, flat, gathered, halves, new_model, new_optimizer, pairs, train

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("algorithm", [AllReduce(), PowerSGD(matrix_rank=48, min_compression_ratio=0.01)])
def test_averaging_every_step_is_what_ddp_does(pool2: Pool, algorithm: AllReduce | PowerSGD) -> None:
    for world_size, gap, moved, equal in pool2.run(_every_step, algorithm):
        assert world_size == 2
        assert moved > 0.1
        assert gap < (1e-12 if algorithm == AllReduce() else 1e-4) * moved
        assert equal


def _every_step(algorithm: AllReduce | PowerSGD) -> tuple[int, float, float, bool]:
    dtype = torch.float64 if algorithm == AllReduce() else torch.float32
    ours, ddp_model = new_model(dtype=dtype), DistributedDataParallel(new_model(dtype=dtype))
    start = flat(ours)
    train(ddp_model, new_optimizer(ddp_model), range(10))
    optimizer = new_optimizer(ours)
    with LocalSGD(ours, optimizer, every_steps=1, algorithm=algorithm):
        train(ours, optimizer, range(10))
    gap, moved = ((flat(ours) - other).norm().item() for other in (flat(ddp_model), start))
    return dist.get_world_size(), gap, moved, agreed(ours)


@pytest.mark.parametrize("in_ddp", [False, True], ids=["plain", "DDP"])
def test_hierarchical_averaging(pool4: Pool, in_ddp: bool) -> None:
    """The subgroup every step, all processes in the warm-up and every third step after it."""
    for world_size, seen, message_bytes, parameter_bytes in pool4.run(_hierarchical, in_ddp):
        assert world_size == 4
        everywhere, within = (True, True), (True, False)
        assert seen == [everywhere] * 2 + [within, within, everywhere] * 2
        assert message_bytes == (2 + in_ddp + 2) * parameter_bytes


def _hierarchical(in_ddp: bool) -> tuple[int, list[tuple[bool, bool]], int, int]:
    subgroup = pairs()
    model = DistributedDataParallel(new_model(), bucket_cap_mb=0.005) if in_ddp else new_model()
    optimizer = new_optimizer(model)
    seen = []
    with LocalSGD(model, optimizer, every_steps=3, warmup=Warmup(2), subgroup=subgroup) as local:
        for step in range(8):
            train(model, optimizer, range(step, step + 1))
            seen.append(halves(model))
    return dist.get_world_size(), seen, local.stats().message_bytes, 4 * flat(model).numel()


def test_a_ddp_model_within_a_subgroup_trains_data_parallel(pool4: Pool) -> None:
    for gap, moved, seen in pool4.run(_within):
        assert seen == (True, False)
        assert gap < 1e-12 * moved


def _within() -> tuple[float, float, tuple[bool, bool]]:
    subgroup = pairs()
    reference = DistributedDataParallel(new_model(dtype=torch.float64), process_group=subgroup)
    start = flat(reference)
    train(reference, new_optimizer(reference), range(6))
    model = DistributedDataParallel(new_model(dtype=torch.float64))
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, every_steps=100, subgroup=subgroup):
        train(model, optimizer, range(6))
        gap, moved = ((flat(model) - other).norm().item() for other in (flat(reference), start))
        return gap, moved, halves(model)


def test_a_ddp_model_has_one_counter_for_gradients_and_parameters(pool2: Pool) -> None:
    """Torch has two, in two objects, and is silently wrong where they differ."""
    for warm, local_bytes, averaged, parameter_bytes, plain_again in pool2.run(_one_counter):
        assert warm
        assert local_bytes == [0, 0, parameter_bytes]
        assert averaged
        assert plain_again


def _one_counter() -> tuple[bool, list[int], bool, int, bool]:
    model, reference = (DistributedDataParallel(new_model(), bucket_cap_mb=0.005) for _ in range(2))
    optimizer, plain = new_optimizer(model), new_optimizer(reference)
    sent = []
    with LocalSGD(model, optimizer, every_steps=3, warmup=Warmup(4)) as local:
        train(reference, plain, range(3))
        train(model, optimizer, range(3))
        warm = torch.equal(flat(model), flat(reference))
        train(model, optimizer, range(3, 4))
        for step in range(4, 7):
            before = local.stats().message_bytes
            train(model, optimizer, range(step, step + 1))
            sent.append(local.stats().message_bytes - before)
        averaged = agreed(model)
    train(model, optimizer, range(7, 8))
    gradients = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    everyone = gathered(gradients)
    return warm, sent, averaged, 4 * flat(model).numel(), torch.equal(everyone[0], everyone[1])


@pytest.mark.parametrize(
    "algorithm",
    [Quantize(bits=2, error_feedback=True), PowerSGD(matrix_rank=1), TopK(merge="members", error_decay=1.0)],
    ids=["few bits", "low rank", "few entries"],
)
def test_what_the_warm_up_has_not_transmitted_goes_with_its_last_step(
    pool2: Pool, algorithm: Algorithm
) -> None:
    for world_size, gap, moved, before_last, sent, exact_bytes in pool2.run(_compressed_warmup, algorithm):
        assert world_size == 2
        # Gradients that do not depend on the parameters, so residuals and means add up to what exact gives.
        assert gap < 1e-5 * moved < 0.1 * before_last
        first, *_, last, at_end = sent
        assert first < exact_bytes / 3
        assert (last, at_end) == (2 * exact_bytes, 0)  # gradients, then the parameters


def _compressed_warmup(algorithm: Algorithm) -> tuple[int, float, float, float, list[int], int]:
    def model() -> DistributedDataParallel:
        torch.manual_seed(3)
        return DistributedDataParallel(nn.Linear(256, 64))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        inputs = torch.randn(8, 256, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        outputs = model(inputs)
        torch.autograd.backward((outputs * outputs.detach().new_tensor(range(64)).cos()).sum())
        optimizer.step()

    ours, exact = model(), model()
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (ours, exact))
    start, sent, gaps = flat(exact), [], []
    with LocalSGD(
        ours, optimizer, every_steps=10, warmup=Warmup(5, algorithm=algorithm), algorithm=TopK()
    ) as local:
        for number in range(6):
            before = local.stats().message_bytes
            step(ours, optimizer, number)
            sent.append(local.stats().message_bytes - before)
            if number < 5:
                step(exact, plain, number)
                gaps.append((flat(ours) - flat(exact)).norm().item())
    moved = (flat(exact) - start).norm().item()
    return dist.get_world_size(), gaps[-1], moved, gaps[-2], sent, 4 * flat(exact).numel()


def test_a_warm_up_is_resumed_to_the_bit(pool2: Pool) -> None:
    for is_equal, kept, refusal, steps_of_refused in pool2.run(_resumed_warmup):
        assert is_equal
        assert kept
        assert refusal.startswith("the state was saved in a warm-up with its own algorithm")
        assert steps_of_refused == 0


def _resumed_warmup() -> tuple[bool, bool, str, int]:
    warmup = PowerSGD(matrix_rank=1, alternating=True)
    settings: dict[str, Any] = {"every_steps": 2, "algorithm": Quantize(bits=4)}

    def ends(first: int) -> tuple[Tensor, dict[str, Any]]:
        model = DistributedDataParallel(new_model())
        optimizer = new_optimizer(model)
        local = LocalSGD(model, optimizer, warmup=Warmup(6, algorithm=warmup), **settings)
        with local:
            train(model, optimizer, range(first))
            saved = {
                "local": local.state_dict(),
                "model": copy.deepcopy(model.state_dict()),
                "optimizer": copy.deepcopy(optimizer.state_dict()),
            }
            train(model, optimizer, range(first, 9))
        return flat(model), saved

    through, saved = ends(3)
    model = DistributedDataParallel(new_model(seed=1))
    optimizer = new_optimizer(model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    local = LocalSGD(model, optimizer, warmup=Warmup(6, algorithm=warmup), **settings)
    local.load_state_dict(saved["local"])
    with local:
        train(model, optimizer, range(3, 9))
    without = LocalSGD(model, optimizer, warmup=Warmup(6), **settings)
    with pytest.raises(StateError) as refused:
        without.load_state_dict(saved["local"])
    # Where the warm-up's part is refused, the other part is not loaded either.
    torn = saved["local"] | {"warmup": {}, "checksum": None}
    torn["sync"] = torn["sync"] | {"step": 5, "checksum": None}
    refusing = LocalSGD(model, optimizer, warmup=Warmup(6, algorithm=warmup), **settings)
    with pytest.raises(StateError, match="expected a state made by state_dict"):
        refusing.load_state_dict(torn)
    return (
        torch.equal(through, flat(model)),
        "warmup" in saved["local"],
        str(refused.value),
        refusing.sync.steps,
    )


def test_a_ddp_model_can_be_used_again(pool2: Pool) -> None:
    """DDP keeps a hook for good; ours is switched over, and a copied model has none."""
    for first, second, copied in pool2.run(_again):
        assert first == second == [False, True]
        assert copied


def _again() -> tuple[list[bool], list[bool], bool]:
    model = DistributedDataParallel(new_model())
    optimizer = new_optimizer(model)
    seen = []
    for _ in range(2):
        with LocalSGD(model, optimizer, every_steps=2):
            for step in range(2):
                train(model, optimizer, range(step, step + 1))
                seen.append(agreed(model))
    copied = copy.deepcopy(model)
    copied_optimizer = new_optimizer(copied)
    with LocalSGD(copied, copied_optimizer, every_steps=2):
        train(copied, copied_optimizer, range(2))
    return seen[:2], seen[2:], agreed(copied)


def test_a_tied_parameter_that_ddp_ignores_under_its_first_name_is_averaged(pool2: Pool) -> None:
    """DDP sends it all the same, and between averagings it is trained: it must not drift apart."""
    for world_size, planned, moved, equal in pool2.run(_tied):
        assert world_size == 2
        assert {name for name in planned if "weight" in name} == {"2.weight"}
        assert moved > 1e-3
        assert equal == [True, False, False, True]


def _tied() -> tuple[int, list[str], float, list[bool]]:
    torch.manual_seed(7)
    first, second = nn.Linear(24, 24), nn.Linear(24, 24)
    second.weight = first.weight
    module = nn.Sequential(first, nn.Tanh(), second)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])  # type: ignore[no-untyped-call]
    model = DistributedDataParallel(module)
    optimizer, start = new_optimizer(model), flat(model)
    equal = []
    with LocalSGD(model, optimizer, every_steps=3, warmup=Warmup(1)) as local:
        for step in range(4):
            train(model, optimizer, range(step, step + 1))
            equal.append(agreed(model))
    planned = [name for route in local.sync.plan.routes for name in route.names]
    return dist.get_world_size(), planned, (flat(model) - start).norm().item(), equal


def test_a_process_group_of_some(pool4: Pool) -> None:
    results = pool4.run(_of_some)
    assert [size for size, *_ in results] == [2] * 4
    assert all(seen == (True, False) for _, seen, _ in results)
    assert all(ratio == 2 for _, _, ratio in results)


def _of_some() -> tuple[int, tuple[bool, bool], float]:
    group = pairs()
    model = new_model(seed=dist.get_rank() // 2)
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, every_steps=2, replicas=group) as local:
        train(model, optimizer, range(4))
    return group.size(), halves(model), local.stats().compression_ratio


def test_a_run_resumes_in_other_processes(pool2: Pool, pool4: Pool) -> None:
    """What two processes have saved, four go on with."""
    saved = pool2.run(_save_one)[0]
    for world_size, same_start, equal, steps, errors in pool4.run(_resume_on_more, saved):
        assert world_size == 4
        assert same_start
        assert equal
        assert steps == 12
        assert errors


def _save_one() -> tuple[dict[str, object], ...]:
    model = new_model()
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, every_steps=4, algorithm=PowerSGD(), outer=NESTEROV) as local:
        train(model, optimizer, range(6))
        local.average()
        return local.state_dict(), model.state_dict(), optimizer.state_dict()


def _resume_on_more(saved: tuple[dict[str, Tensor], ...]) -> tuple[int, bool, bool, int, int]:
    model = new_model(seed=dist.get_rank())
    optimizer = new_optimizer(model)
    local = LocalSGD(model, optimizer, every_steps=4, algorithm=PowerSGD(), outer=NESTEROV)
    local.load_state_dict(saved[0])
    model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    with local:
        same_start = agreed(model)
        train(model, optimizer, range(6, 12))
    errors = dict(local.state_dict()["sync"]["error"])
    return dist.get_world_size(), same_start, agreed(model), local.stats().steps, len(errors)


@pytest.mark.parametrize("delay_steps", [0, 2])
def test_three_processes_that_resume_again_and_again_go_on_to_the_bit(pools: Pools, delay_steps: int) -> None:
    """Saved once more before all fragments were sent again: those that were not stay as they were loaded."""
    results = pools.of(3).run(_resume_again, delay_steps)
    assert len(results) == 3
    for straight, resumed, ratio in results:
        assert torch.equal(straight, resumed)
        assert ratio > 10


def _resume_again(delay_steps: int) -> tuple[Tensor, Tensor, float]:
    """The parameters of a run that only saves, and of one that begins again from each of its states."""

    def trained(saved: Any, *parts: range) -> tuple[Any, Tensor, float]:
        model = new_model()
        optimizer = new_optimizer(model)
        local = LocalSGD(
            model,
            optimizer,
            every_steps=6,
            streaming=Streaming(fragments=2, delay_steps=delay_steps),
            algorithm=PowerSGD(),
            outer=NESTEROV,
        )
        if saved:
            local.load_state_dict(saved[0])
            model.load_state_dict(saved[1])
            optimizer.load_state_dict(saved[2])
        with local:
            for steps in parts:
                train(model, optimizer, steps)
                saved = copy.deepcopy((local.state_dict(), model.state_dict(), optimizer.state_dict()))
            return saved, flat(model), local.stats().compression_ratio

    parts = [range(9), range(9, 12), range(12, 20)]
    _, straight, _ = trained((), *parts)
    saved: Any = ()
    for part in parts:
        saved, resumed, ratio = trained(saved, part)
    return straight, resumed, ratio


def test_fragments_in_flight_over_a_process_group(pool2: Pool) -> None:
    """While training goes on; the same as in one process."""
    expected = [flat(member) for member in run(2, _stream_alone)]
    for world_size, parameters, ratio, equal in pool2.run(_stream):
        assert world_size == 2
        assert equal
        assert ratio > 20
        assert (parameters - expected[0]).norm() < 1e-4 * expected[0].norm()


STREAMING: dict[str, Any] = {
    "every_steps": 6,
    "streaming": Streaming(fragments=2, delay_steps=4),
    "algorithm": Quantize(bits=4),
    "outer": NESTEROV,
}


def _stream_alone(member: Member) -> nn.Module:
    with member.local(**STREAMING):
        member.train(20)
    return member.model


def _stream() -> tuple[int, Tensor, float, bool]:
    model = new_model()
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, **STREAMING) as local:
        train(model, optimizer, range(20))
    return dist.get_world_size(), flat(model), local.stats().compression_ratio, agreed(model)
