"""Means that travel during the next forward pass: the numbers of `attach`, and no stale read."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import thinwire
from processes import in_each_process
from thinwire import Quantize
from thinwire.adapters.forward_overlap import OverlappedSync
from thinwire.errors import AgreementError, AttachError, CommunicationError, ConfigError, StepError
from thinwire.sync.step import Step
from training import are_alike, ddp_of, flat

STEPS = 4


class Everything(nn.Module):
    """Layers that are called, and parameters that are read in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 24)
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)  # reads out_proj without a call
        self.lstm = nn.LSTM(24, 24, batch_first=True)  # reads a list of its own
        self.norm = nn.LayerNorm(24)
        self.mlp = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 24))
        self.scale = nn.Parameter(torch.ones(()))
        self.norm.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.lstm(x)[0]
        x = x + self.mlp(self.norm(x)) * self.scale
        logits: Tensor = x @ self.embed.weight.t()  # tied
        return logits


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False),
}


def new_model(seed: int = 0) -> DistributedDataParallel:
    torch.manual_seed(seed)
    return ddp_of(Everything(), gradient_as_bucket_view=bool(seed % 2))


def loss_of(model: nn.Module, step: int) -> Tensor:
    draws = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(30, (4, 9), generator=draws)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: DistributedDataParallel, optimizer: Optimizer, micro_batches: int, also: str = "") -> None:
    """Train with the gradients of some passes, of which only the last is outside `no_sync`."""
    for step in range(STEPS):
        for number in range(1, micro_batches):
            with nullcontext() if also == "average each" else model.no_sync():
                torch.autograd.backward(loss_of(model, step + 50 * number))
            if also == "a forward pass between":
                loss_of(model, 99)
        torch.autograd.backward(loss_of(model, step))
        if also == "a forward pass before the step":
            loss_of(model, 99)
        optimizer.step()
        optimizer.zero_grad()


Start = Callable[..., thinwire.GradientSync]


def by_both(
    run: Callable[[DistributedDataParallel, Start], object], steps: int, bits: int = 4, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the weights after `run(model, start)`, where `start(optimizers)` attaches, and overlaps."""
    syncs: list[thinwire.GradientSync] = []

    def start(model: DistributedDataParallel, optimizers: Any, **options: Any) -> thinwire.GradientSync:
        algorithm = Quantize(bits=bits)
        if not syncs:
            syncs.append(thinwire.attach(model, algorithm, machines=False))
        else:
            options = {"poison": True, **options}
            syncs.append(thinwire.overlap_forward(model, algorithm, optimizers, **options))
        return syncs[-1]

    models = [new_model(seed), new_model(seed)]
    for model in models:
        run(model, partial(start, model))
    weights, other = map(flat, models)
    assert (are_alike([other]), syncs[1].steps) == (True, steps)
    assert all(sync.stats().compression_ratio > 32 / (bits + 2) for sync in syncs)
    return weights, other


@pytest.mark.parametrize(
    ("optimizer", "bits", "seed", "micro_batches"),
    [*((name, 4, 0, 1) for name in OPTIMIZERS), ("adamw", 2, 1, 3)],
)
@in_each_process(2)
def test_numbers_are_those_of_attach(optimizer: str, bits: int, seed: int, micro_batches: int) -> None:
    def run(model: DistributedDataParallel, start: Start) -> None:
        parameters = list(model.parameters())
        steps = OPTIMIZERS[optimizer]([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-2}])
        # A scheduler that was there before what it schedules was wrapped; warnings are errors here.
        schedule = torch.optim.lr_scheduler.LambdaLR(steps, lambda step: 1 / (1 + step))
        start(steps)
        train(model, steps, micro_batches)
        schedule.step()
        train(model, steps, micro_batches)

    assert torch.equal(*by_both(run, 2 * STEPS, bits, seed))


def overlapped(
    model: DistributedDataParallel | None = None, **options: Any
) -> tuple[DistributedDataParallel, Optimizer, OverlappedSync]:
    model = new_model() if model is None else model
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    sync = thinwire.overlap_forward(model, Quantize(bits=4), optimizer, poison=True, **options)
    assert sync.plan.compression_ratio > 1
    return model, optimizer, sync


def one_step(model: nn.Module, optimizer: Optimizer, step: int = 0) -> None:
    torch.autograd.backward(loss_of(model, step))
    optimizer.step()


@pytest.mark.parametrize("also", ["average each", "a forward pass between", "a forward pass before the step"])
@in_each_process(2)
def test_gradients_that_accumulate_are_averaged_once(also: str) -> None:
    """DDP calls its hook outside `no_sync`, and inside if a forward pass outside came before."""
    attached = new_model()
    thinwire.attach(attached, Quantize(bits=4), machines=False)
    train(attached, OPTIMIZERS["adamw"](attached.parameters()), 3)
    model, optimizer, sync = overlapped()
    train(model, optimizer, 3, also)
    assert (torch.equal(flat(model), flat(attached)), sync.steps) == (True, STEPS)


@in_each_process(2)
def test_gradients_are_clipped_by_the_norm_of_all_means() -> None:
    def run(model: DistributedDataParallel, start: Start) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = start(optimizer, clip_norm=0.1)
        torch.autograd.backward(loss_of(model, 0))
        if not isinstance(sync, OverlappedSync):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    before, (attached, overlapped) = flat(new_model()), by_both(run, 1)
    assert (attached - before).norm() == pytest.approx(0.1, rel=1e-4)
    assert (attached - overlapped).norm() < 1e-6


@in_each_process(2)
def test_two_optimizers_share_a_model() -> None:
    def run(model: DistributedDataParallel, start: Start) -> None:
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        rest = [parameter for parameter in model.parameters() if parameter.dim() != 2]
        # Like Muon, which old versions of torch lack, the first one says that its module is "torch.optim".
        optimizers = [torch.optim.Adafactor(matrices, lr=0.1), torch.optim.AdamW(rest, lr=0.01)]
        sync = start(optimizers)
        for step in range(STEPS):
            torch.autograd.backward(loss_of(model, step))
            optimizers[0].step()
            if isinstance(sync, OverlappedSync):
                with pytest.raises(StepError, match="AdamW"):
                    loss_of(model, 0)
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()

    assert torch.equal(*by_both(run, STEPS))


TOKENS = torch.arange(5).view(1, -1)
READS: dict[str, Callable[[DistributedDataParallel, Optimizer], Tensor]] = {
    "parameters": lambda model, _: flat(model),
    "state_dict": lambda model, _: torch.cat([t.flatten() for t in model.module.state_dict().values()]),
    "copy": lambda model, _: flat(copy.deepcopy(model.module)),
    "average": lambda model, _: torch.optim.swa_utils.AveragedModel(model.module)(TOKENS).detach(),
    "evaluation": lambda model, _: model.module.eval()(TOKENS).detach(),
    "inference": torch.inference_mode()(lambda model, _: model.module(TOKENS)),
    "attribute": lambda model, _: model.module.mlp[0].weight.detach(),
    "optimizer": lambda model, optimizer: torch.cat(
        [state["exp_avg"].flatten() for state in optimizer.state_dict()["state"].values()]
    ),
}


@in_each_process(2)
def test_what_is_read_between_steps_is_new() -> None:
    attached = new_model()
    thinwire.attach(attached, Quantize(bits=4), machines=False)
    steps = OPTIMIZERS["adamw"](attached.parameters())
    model, optimizer, _ = overlapped()
    for step, read in enumerate(READS.values()):
        for trained, its in ((attached, steps), (model, optimizer)):
            its.zero_grad()
            one_step(trained, its, step)
        if dist.get_rank() == 0:  # reads send nothing: here the other process makes none
            assert torch.equal(read(model, optimizer), read(attached, steps))


@in_each_process(2)
def test_a_tensor_that_is_held_is_new_after_flush() -> None:
    model, optimizer, sync = overlapped()
    held = next(model.parameters())
    before = held.detach().clone()
    one_step(model, optimizer)
    assert held.isnan().all()  # poisoned: nobody has read it through its module
    sync.flush()
    assert held.isfinite().all()
    assert not torch.equal(held, before)


@in_each_process(2)
def test_an_exception_in_the_forward_pass_loses_nothing() -> None:
    model, optimizer, sync = overlapped()
    one_step(model, optimizer)
    if dist.get_rank() == 0:
        with pytest.raises(IndexError):
            model(torch.tensor([[99]]))
    one_step(model, optimizer, 1)
    assert (are_alike([flat(model)]), sync.steps) == (True, 2)


@in_each_process(2)
def test_a_step_is_abandoned_before_its_means_are_sent_or_when_one_did_not_come() -> None:
    model, optimizer, sync = overlapped()
    for _ in range(2):
        torch.autograd.backward(loss_of(model, 0))
        sync.abandon()
        optimizer.zero_grad()
    before = flat(model)
    one_step(model, optimizer)
    with patch.object(Step, "take", side_effect=CommunicationError), pytest.raises(CommunicationError):
        loss_of(model, 1)
    with pytest.raises(StepError, match="abandon"):
        model.state_dict()
    sync.abandon()
    assert torch.equal(flat(model), before)
    sent = sync.stats().messages
    torch.autograd.backward(loss_of(model, 0))
    sent_meanwhile = sync.stats().messages - sent
    optimizer.step()
    num_buckets = (sync.stats().messages - sent) // 2
    assert num_buckets < sent_meanwhile < 2 * num_buckets  # some means, too
    assert (are_alike([flat(model)]), sync.steps) == (True, 1)


@in_each_process(2)
def test_calls_that_have_nothing_to_step() -> None:
    model, optimizer, sync = overlapped()
    optimizer.step()
    get_optimizer_state_dict(model, optimizer)  # makes a step without gradients, to make state
    for optimizer.param_groups[0]["lr"] in (0.0, 0.01):  # as a warm-up begins
        torch.autograd.backward(loss_of(model, 0))
        optimizer.step(closure=None)
    optimizer.step()  # again: there are no new gradients
    assert are_alike([flat(model)])
    with model.no_sync():
        torch.autograd.backward(loss_of(model, 1))
    with pytest.raises(StepError, match="no_sync"):
        optimizer.step()
    assert sync.steps == 2


@in_each_process(2)
def test_dry_steps_end_inside_and_states_are_of_whole_steps() -> None:
    model, optimizer, sync = overlapped()
    one_step(model, optimizer)
    state = sync.state_dict()
    for error in (None, KeyError()):
        with suppress(KeyError), sync.dry():
            one_step(model, optimizer, 1)
            if error is not None:
                raise error
        assert (are_alike([flat(model)]), sync.steps) == (True, 1)
    interrupted = patch.object(Step, "take", side_effect=KeyboardInterrupt)
    with interrupted, suppress(KeyboardInterrupt), sync.dry():  # no StepError, which it would lead to
        one_step(model, optimizer, 1)
        sync.flush()
    sync.abandon()
    one_step(model, optimizer, 1)
    sync.load_state_dict(state)
    assert sync.steps == 1


@in_each_process(2)
def test_a_pass_without_a_step_is_part_of_the_next_one_or_dropped() -> None:
    def run(model: DistributedDataParallel, start: Start) -> None:
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        start(optimizer, poison=False)
        torch.autograd.backward(loss_of(model, 0))
        optimizer.zero_grad()  # dropped
        one_step(model, optimizer, 1)
        optimizer.zero_grad()
        one_step(model, optimizer, 2)

    assert torch.equal(*by_both(run, 2, 8))


@in_each_process(2)
def test_detaching_gives_the_optimizer_back() -> None:
    model, optimizer, sync = overlapped()
    one_step(model, optimizer)
    sync.detach()
    after = flat(model)
    assert after.isfinite().all()
    assert type(model.module._parameters) is dict
    assert "step" not in vars(optimizer)
    optimizer.zero_grad()
    one_step(model, optimizer, 1)
    assert not torch.equal(flat(model), after)
    assert (are_alike([flat(model)]), sync.steps) == (True, 1)
    adapter = weakref.ref(sync._adapter)
    del sync
    assert adapter() is None  # freed at once, with its copy of the gradients


@in_each_process(2)
def test_changed_gradients_are_refused() -> None:
    model, optimizer, _ = overlapped()
    torch.autograd.backward(loss_of(model, 0))
    model.module.embed.weight.grad[0] += 1  # only a part of all gradients changes
    with pytest.raises(StepError, match="clip_norm"):
        optimizer.step()
    optimizer.zero_grad()
    torch.autograd.backward(loss_of(model, 0))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(StepError, match="clip_norm"):
        optimizer.step()
    scaler = GradScaler("cpu")
    optimizer.zero_grad()
    torch.autograd.backward(scaler.scale(loss_of(model, 0)))
    with pytest.raises(StepError, match="GradScaler"):
        scaler.step(optimizer)
    torch.autograd.backward(loss_of(model, 0))
    with pytest.raises(StepError, match="closure"):
        optimizer.step(lambda: 0.0)
    with (
        thinwire.LocalSGD(model.module, optimizer, every_steps=2),
        pytest.raises(StepError, match="step hooks"),
    ):
        optimizer.step()


class Held(nn.Module):
    """Uses a parameter that it does not read in the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.held = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x @ self.held[0] + self.layer.bias
        return out


@in_each_process(2)
def test_a_parameter_that_was_used_past_its_module_is_refused() -> None:
    model = DistributedDataParallel(Held(), bucket_cap_mb=1e-5)
    model, optimizer, _ = overlapped(model)
    for step in range(2):  # in the first one all are in one bucket
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if step == 0:
            flat(model)
    with pytest.raises(StepError, match=r"layer\.weight"):
        model(torch.ones(2, 4)).sum().backward()


class Foreign(Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


def hooked(parameters: Any) -> Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def attempt(
    algorithm: thinwire.algorithms.Algorithm = Quantize(bits=4),  # noqa: B008 - frozen
    optimizer: Callable[[Any], Optimizer] = OPTIMIZERS["sgd"],
    wrap: Callable[[Any], Any] = lambda module: module,
    clip_norm: float | None = None,
    **options: Any,
) -> None:
    model = DistributedDataParallel(wrap(nn.Linear(4, 4)), **options)
    deferred = optimizer(model.parameters())
    thinwire.overlap_forward(model, algorithm, deferred, clip_norm=clip_norm)
    model(torch.ones(4)).sum().backward()
    deferred.step()


@in_each_process(2)
def test_what_can_not_wait_is_refused() -> None:
    attempts: list[tuple[type[Exception], dict[str, Any]]] = [
        (ConfigError, {"algorithm": thinwire.PowerSGD()}),
        (ConfigError, {"algorithm": Foreign([torch.ones(1)]), "optimizer": lambda _: Quantize()}),
        (ConfigError, {"algorithm": Quantize(bits=2, error_feedback=True)}),
        (ConfigError, {"clip_norm": 0.0}),
        (AgreementError, {"clip_norm": 1.0 + dist.get_rank()}),
        *((ConfigError, {option: True}) for option in ("find_unused_parameters", "static_graph")),
        *((AttachError, {"optimizer": kind}) for kind in (Foreign, hooked, torch.optim.LBFGS)),
        (AttachError, {"optimizer": lambda p: torch.optim.SGD(list(p)[1:], lr=0.1)}),
        (AttachError, {"optimizer": lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(1))], lr=0.1)}),
        (AttachError, {"wrap": partial(torch.compile, backend="eager")}),
        (AttachError, {"wrap": lambda module: module.compile(backend="eager") or module}),
    ]
    for error, options in attempts:
        with pytest.raises(error):
            attempt(**options)
    with pytest.raises(AttachError):
        thinwire.overlap_forward(Held(), Quantize(), Foreign([torch.ones(1)]))
