"""What only real processes show: groups of `torch.distributed`, and DDP models that are driven."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from members import NESTEROV, Member, run
from processes import in_each_process
from thinwire import Streaming, Warmup, check_replicas
from thinwire.algorithms import PowerSGD, Quantize, TopK
from thinwire.errors import StateError
from thinwire.local_sgd import LocalSGD
from training import agreed, flat, gathered, halves, new_model, new_optimizer, pairs, refused, train

EVERYWHERE, WITHIN = (True, True), (True, False)


@pytest.mark.parametrize("in_ddp", [False, True], ids=["plain", "DDP"])
@in_each_process(4)
def test_hierarchical_averaging(in_ddp: bool) -> None:
    """The subgroup every step, all processes in the warm-up and every third step after it."""
    subgroup, seen = pairs(), []
    model = DistributedDataParallel(new_model(), bucket_cap_mb=0.005) if in_ddp else new_model()
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, every_steps=3, warmup=Warmup(2), subgroup=subgroup) as local:
        for step in range(8):
            train(model, optimizer, range(step, step + 1))
            seen.append(halves(model))
    assert seen == [EVERYWHERE] * 2 + [WITHIN, WITHIN, EVERYWHERE] * 2
    assert local.stats().message_bytes == (2 + in_ddp + 2) * flat(model).nbytes


@in_each_process(4)
def test_a_ddp_model_within_a_subgroup_trains_data_parallel() -> None:
    subgroup = pairs()
    reference = DistributedDataParallel(new_model(dtype=torch.float64), process_group=subgroup)
    start = flat(reference)
    train(reference, new_optimizer(reference), range(6))
    model = DistributedDataParallel(new_model(dtype=torch.float64))
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, every_steps=100, subgroup=subgroup):
        train(model, optimizer, range(6))
        assert (flat(model) - flat(reference)).norm() < 1e-12 * (flat(model) - start).norm()
        assert halves(model) == WITHIN


@in_each_process(2)
def test_a_ddp_model_has_one_counter_for_gradients_and_parameters() -> None:
    """Torch has two, in two objects, and is silently wrong where they differ."""
    model, reference = (DistributedDataParallel(new_model(), bucket_cap_mb=0.005) for _ in range(2))
    optimizer, plain = new_optimizer(model), new_optimizer(reference)
    sent = []
    with LocalSGD(model, optimizer, every_steps=3, warmup=Warmup(4)) as local:
        train(reference, plain, range(3))
        train(model, optimizer, range(3))
        assert torch.equal(flat(model), flat(reference))
        train(model, optimizer, range(3, 4))
        for step in range(4, 7):
            before = local.stats().message_bytes
            train(model, optimizer, range(step, step + 1))
            sent.append(local.stats().message_bytes - before)
        assert agreed(model)
    assert sent == [0, 0, flat(model).nbytes]
    train(model, optimizer, range(7, 8))
    first, second = gathered(
        torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    )
    assert torch.equal(first, second)  # DDP averages them again


@in_each_process(2)
def test_what_the_warm_up_has_not_transmitted_goes_with_its_last_step() -> None:
    """Gradients do not depend on the parameters, so residuals and means add up to what exact gives."""

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
    start, sent, gaps, warmup = flat(exact), [], [], Warmup(5, algorithm=PowerSGD(matrix_rank=1))
    with LocalSGD(ours, optimizer, every_steps=10, warmup=warmup, algorithm=TopK()) as local:
        for number in range(6):
            before = local.stats().message_bytes
            step(ours, optimizer, number)
            sent.append(local.stats().message_bytes - before)
            if number < 5:
                step(exact, plain, number)
                gaps.append((flat(ours) - flat(exact)).norm().item())
    moved, exact_bytes = (flat(exact) - start).norm().item(), flat(exact).nbytes
    assert gaps[-1] < 1e-5 * moved < 0.1 * gaps[-2]
    assert sent[0] < exact_bytes / 3
    assert sent[-2:] == [2 * exact_bytes, 0]  # gradients, then the parameters


def in_ddp(**settings: Any) -> tuple[nn.Module, torch.optim.Optimizer, LocalSGD]:
    """A DDP model that has a LocalSGD of these settings."""
    model = DistributedDataParallel(new_model())
    optimizer = new_optimizer(model)
    return model, optimizer, LocalSGD(model, optimizer, **settings)


@in_each_process(2)
def test_a_warm_up_is_resumed_to_the_bit() -> None:
    settings: dict[str, Any] = {"every_steps": 2, "algorithm": Quantize(bits=4)}
    warm = settings | {"warmup": Warmup(6, algorithm=PowerSGD(matrix_rank=1, alternating=True))}
    for steps in (3, 5):  # after five the last step, which is exact, has still to send the residual
        through, optimizer, local = in_ddp(**warm)
        with local:
            train(through, optimizer, range(steps))
            saved = local.state_dict()
            states = copy.deepcopy((through.state_dict(), optimizer.state_dict()))
            train(through, optimizer, range(steps, 9))
        assert "warmup" in saved
        model, optimizer, resumed = in_ddp(**warm)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        resumed.load_state_dict(saved)
        with resumed:
            train(model, optimizer, range(steps, 9))
        assert torch.equal(flat(through), flat(model))
    with refused(StateError, "the state was saved in a warm-up with its own algorithm"):
        LocalSGD(model, optimizer, warmup=Warmup(6), **settings).load_state_dict(saved)
    # Where the warm-up's part is refused, the other part is not loaded either.
    torn = saved | {"warmup": {}}
    torn["sync"] = torn["sync"] | {"step": 5}
    refusing = LocalSGD(model, optimizer, **warm)
    with refused(StateError, "expected a state made by state_dict"):
        refusing.load_state_dict(torn)
    assert refusing.sync.steps == 0


@in_each_process(2)
def test_a_ddp_model_can_be_used_again() -> None:
    """DDP keeps a hook for good; ours is switched over, and a copied model has none."""
    model = DistributedDataParallel(new_model())
    for each in (model, model, copy.deepcopy(model)):
        optimizer = new_optimizer(each)
        with LocalSGD(each, optimizer, every_steps=2):
            for step in range(2):
                train(each, optimizer, range(step, step + 1))
                assert agreed(each) == (step == 1)


@in_each_process(2)
def test_a_tied_parameter_that_ddp_ignores_under_its_first_name_is_averaged() -> None:
    """DDP sends it all the same, and between averagings it is trained. An expert stays as it is."""
    torch.manual_seed(7)
    first, second = nn.Linear(24, 24), nn.Linear(24, 24)
    second.weight = first.weight
    module = nn.Sequential(first, nn.Tanh(), second)
    first.expert = nn.Parameter(torch.full((2,), float(dist.get_rank())))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight", "0.expert"])  # type: ignore[no-untyped-call]
    model = DistributedDataParallel(module)
    optimizer, start = new_optimizer(model), flat(model)
    with LocalSGD(model, optimizer, every_steps=3, warmup=Warmup(1)) as local:
        for step in range(4):
            train(model, optimizer, range(step, step + 1))
            assert agreed(second) == (step in (0, 3))
    check_replicas(model)
    assert (first.expert == dist.get_rank()).all()
    assert [name for it in local.sync.plan.routes for name in it.names if "weight" in name] == ["2.weight"]
    assert (flat(model) - start).norm() > 1e-3


STREAMING: dict[str, Any] = {"every_steps": 6, "streaming": Streaming(fragments=2, delay_steps=2)}
STREAMING |= {"algorithm": Quantize(bits=4), "outer": NESTEROV}


def _stream_alone(member: Member) -> Tensor:
    with member.local(**STREAMING):
        member.train(20)
    return flat(member.model)


@in_each_process(2)
def test_fragments_in_flight_over_a_process_group() -> None:
    """While training goes on; the same as in one process."""
    expected, model = run(2, _stream_alone)[0], new_model()
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, **STREAMING) as local:
        train(model, optimizer, range(20))
    assert agreed(model)
    assert local.stats().compression_ratio > 20
    assert (flat(model) - expected).norm() < 1e-4 * expected.norm()
