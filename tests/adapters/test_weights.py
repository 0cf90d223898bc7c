"""Unequal shares: means over samples, not over processes, as if one process had all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import thinwire
from adapters.test_sharded import runs_on_cpus
from processes import in_each_process
from thinwire import AllReduce, PowerSGD, Quantize, TopK, powersgd
from thinwire.algorithms import Algorithm
from thinwire.errors import ConfigError, StepError
from thinwire.powersgd import AlgorithmAggregator
from thinwire.sync import engine_of
from training import are_alike, error_of, new_model

PAIRS = [[0, 1], [2, 3]]


def num_samples(step: int, rank: int) -> int:
    """The first process has most of them; the last one has none, now and then."""
    return (8, 3, 5, step % 2)[rank] if dist.get_world_size() == 4 else (8, 3 * (step % 2))[rank]


def samples(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(num_samples(step, rank), 24, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    # The mean of no samples is NaN.
    return torch.as_tensor(model(batch)).square().mean()


def whole_gradient(step: int) -> Tensor:
    """The gradient of one process that has the samples of all."""
    model = new_model(dtype=torch.float64)
    batch = torch.cat([samples(step, rank) for rank in range(dist.get_world_size())])
    torch.autograd.backward(loss_of(model, batch))
    return gradient_of(model)


def gradient_of(model: nn.Module) -> Tensor:
    gradients = [parameter.grad for parameter in model.parameters()]
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in gradients]
    return torch.cat([grad.flatten() for grad in whole if grad is not None])


class Run:
    """Passes of a model over samples of this process's own, and the weight of each."""

    def __init__(self, algorithm: Algorithm, *, has_ddp: bool = True, **options: Any) -> None:
        self.step = 0
        self.asked: list[int] = []
        self.model: nn.Module = new_model(dtype=torch.float64)
        options = {"weight": self.weight} | options
        self.aggregator: AlgorithmAggregator | None = None
        if has_ddp:
            ddp_model = DistributedDataParallel(self.model, bucket_cap_mb=0.01)
            self.model, self.sync = ddp_model, thinwire.attach(ddp_model, algorithm, **options)
        else:
            self.aggregator = AlgorithmAggregator(self.model.parameters(), algorithm, **options)
            self.sync = self.aggregator.sync

    def weight(self) -> int:
        self.asked.append(self.step)
        return num_samples(self.step, dist.get_rank())

    def gradient(self) -> Tensor:
        self.model.zero_grad()
        torch.autograd.backward(loss_of(self.model, samples(self.step, dist.get_rank())))
        mean = gradient_of(self.model)
        if self.aggregator is not None:
            gradients = [parameter.grad for parameter in self.model.parameters()]
            mean = torch.cat([mean.flatten() for mean in self.aggregator.aggregate(gradients)])
            # Gradients that are added to this are scaled by the next weight.
            assert not any(gradient.any() for gradient in gradients if gradient is not None)
        self.step += 1
        return mean


@pytest.mark.parametrize("has_ddp", [True, False])
@in_each_process(2)
def test_the_mean_is_that_of_one_process_with_all_samples(has_ddp: bool) -> None:
    run = Run(AllReduce(), has_ddp=has_ddp)
    for step in range(5):
        mean = run.gradient()
        torch.testing.assert_close(mean, whole_gradient(step), rtol=1e-10, atol=1e-12)
        assert are_alike([mean])
    assert run.asked == list(range(5))


@pytest.mark.parametrize(
    ("algorithm", "has_ddp", "machines"),
    [
        (Quantize(bits=4, error_feedback=True), True, False),
        (PowerSGD(matrix_rank=2), False, PAIRS),
        (TopK(error_decay=1, merge="members"), True, False),
    ],
    ids=str,
)
@in_each_process(4)
def test_what_a_mean_lacks_is_in_the_residuals(algorithm: Algorithm, has_ddp: bool, machines: Any) -> None:
    """In one unit, while weights change: sums of means and residuals are those of the true means."""
    run = Run(algorithm, has_ddp=has_ddp, machines=machines)
    means = torch.stack([run.gradient() for _ in range(6)]).sum(0)
    assert are_alike([means])
    error = dict(run.sync.state_dict()["error"])
    specs = engine_of(run.sync).specs  # of an aggregator, parameters have no names but these
    residual = torch.cat([error.get(spec.name, torch.zeros(spec.numel)).flatten() for spec in specs])
    true = torch.stack([whole_gradient(step) for step in range(6)]).sum(0)
    torch.testing.assert_close(means + residual, true, rtol=1e-4, atol=1e-5)
    assert (means - true).norm() > 1e-3 * true.norm()
    assert run.sync.stats().compression_ratio > 1.5


@in_each_process(2)
def test_gradients_of_no_samples_may_be_nan() -> None:
    """Such as those of a loss that is divided by the number of samples."""
    rank = dist.get_rank()
    model = DistributedDataParallel(new_model(dtype=torch.float64))
    thinwire.attach(model, AllReduce(), weight=rank)
    torch.autograd.backward(loss_of(model, samples(1, 1)) * (1.0 if rank else float("nan")))
    alone = new_model(dtype=torch.float64)
    torch.autograd.backward(loss_of(alone, samples(1, 1)))
    torch.testing.assert_close(gradient_of(model), gradient_of(alone), rtol=1e-10, atol=1e-12)


@runs_on_cpus
@in_each_process(4)
def test_replicas_of_shards() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(new_model(dtype=torch.float64), mesh=mesh["shard"])
    replica, step = dist.get_rank() // 2, 0
    # PyTorch averages over the shards, which have as many samples each.
    share = (3, 1)
    sync = thinwire.attach(model, AllReduce(), replicas=mesh, weight=lambda: share[(replica + step) % 2])
    for step in range(4):
        if step == 2:
            sync.use(Quantize(bits=8))
        tolerance = 3e-2 if step > 1 else 1e-12
        batches = [
            torch.randn(2, 24, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
            for rank in range(4)
        ]
        model.zero_grad()
        torch.autograd.backward(loss_of(model, batches[dist.get_rank()]))
        mean, plain = gradient_of(model), new_model(dtype=torch.float64)
        total = sum(share[(rank // 2 + step) % 2] for rank in range(4))
        for rank, batch in enumerate(batches):
            torch.autograd.backward(loss_of(plain, batch) * share[(rank // 2 + step) % 2] / total)
        assert (mean - gradient_of(plain)).norm() <= tolerance * mean.norm()
    assert sync.stats().steps == 4
    assert sync.stats().compression_ratio > 1.5


@in_each_process(2)
def test_what_is_no_weight_is_refused() -> None:
    no_weights: tuple[Any, ...] = (-1, float("nan"), float("inf"), "4", True, [1, 2], 10**400)
    for weight in no_weights:
        for make in (powersgd.AllReduce, partial(Run, AllReduce()), partial(Run, AllReduce(), has_ddp=False)):
            with pytest.raises(ConfigError, match=r"^weight must be a number"):
                make(weight=weight)
        run = Run(AllReduce(), weight=lambda weight=weight: weight if dist.get_rank() else 1)
        # On all processes: none waits for the other.
        message = error_of(run.gradient)
        assert message.startswith("ConfigError" if dist.get_rank() else "StepError")
        assert "step 0" in message


@in_each_process(2)
def test_a_step_without_samples_is_refused() -> None:
    weights: list[Callable[[], float] | float] = [0, lambda: 0]
    for weight in weights:
        run = Run(AllReduce(), weight=weight)
        with pytest.raises(StepError, match="all are 0"):
            run.gradient()


@pytest.mark.parametrize("has_ddp", [True, False])
@in_each_process(2)
def test_it_does_not_go_with_dividing_by_contributors(has_ddp: bool) -> None:
    run = Run(AllReduce(), has_ddp=has_ddp)
    with (
        pytest.raises(ConfigError, match="can't be combined with weight"),
        thinwire.join(run.aggregator or run.model, divide_by_initial_world_size=False),
    ):
        pass
    run.gradient()
    assert run.asked == [0]
