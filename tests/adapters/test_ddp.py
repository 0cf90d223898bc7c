"""The DDP adapter in real processes: every kind of model, and what a state holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import thinwire
from processes import Spawn, in_each_process
from thinwire import AllReduce, Cast, GradientSync, PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm
from thinwire.errors import GradientError
from thinwire.testing import InjectedError, fail_at, faults
from training import are_alike, batch_of, ddp_of, gradient_of, new_model, residual_of

POWER = PowerSGD(matrix_rank=2)


class Tied(nn.Module):
    """Embedding and head share one weight, as in a language model; the temperature is a scalar (CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 32)
        self.body = nn.Linear(32, 32)
        self.head = nn.Linear(32, 60, bias=False)
        self.head.weight = self.embed.weight
        self.logit_scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.body(self.embed(tokens)))) * self.logit_scale.exp()
        return logits + self.nothing.sum()


def channels_last_model() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.Flatten(), nn.Linear(24 * 16, 8)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def transposed_model() -> nn.Module:
    model: Any = new_model()
    model[0].weight = nn.Parameter(torch.randn(24, 48).t())
    return cast(nn.Module, model)


def drawn(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000 * step + dist.get_rank())


def tokens(step: int) -> Tensor:
    return torch.randint(60, (4, 12), generator=drawn(step))


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "linear": (new_model, batch_of),
    "channels-last": (channels_last_model, lambda step: torch.randn(4, 3, 8, 8, generator=drawn(step))),
    "transposed": (transposed_model, batch_of),
    "tied, scalar, empty": (Tied, tokens),
    "scripted": (lambda: nn.Sequential(torch.jit.script(new_model())), batch_of),
}


def train(kind: str, algorithm: Algorithm) -> tuple[dict[str, Tensor], GradientSync]:
    """Train; the final parameters, the same on all processes, and what averaged."""
    make, batch = KINDS[kind]
    torch.manual_seed(7)
    ddp_model = ddp_of(make())
    sync = thinwire.attach(ddp_model, algorithm)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)
    for step in range(4):
        before = sync.stats().message_bytes
        optimizer.zero_grad()
        ddp_model(batch(step)).square().mean().backward()
        optimizer.step()
    parameters = {n: p.detach() for n, p in ddp_model.module.named_parameters()}
    # After the first ones, a step sends what the plan says.
    assert sync.stats().message_bytes - before == sync.plan.message_bytes
    assert are_alike(parameters.values())
    return parameters, sync


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "linear"])
@in_each_process(2)
def test_every_kind_of_model(kind: str) -> None:
    _, sync = train(kind, POWER)
    assert sync.plan.compression_ratio > 1.5
    assert sync.stats().relative_error


class Recomputed(nn.Module):
    """The small model, whose layers are computed again in the backward pass (activation checkpointing)."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = cast(nn.Sequential, new_model()), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()  # reentrant ones need it
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


# DDP itself fails in a static graph whose first step has several passes.
@pytest.mark.parametrize(
    ("reentrant", "static_graph", "passes"), [(False, False, 2), (True, False, 2), (True, True, 1)]
)
@in_each_process(2)
def test_layers_that_are_computed_again_change_nothing(
    reentrant: bool, static_graph: bool, passes: int
) -> None:
    found = []
    for module in (new_model(), Recomputed(reentrant=reentrant)):
        model = ddp_of(module, static_graph=static_graph)
        sync = thinwire.attach(model, POWER)
        for step in range(4):
            model.zero_grad()
            for number in range(passes):
                model.require_backward_grad_sync = number == passes - 1  # as no_sync() does
                torch.autograd.backward(model(batch_of(step + 10 * number)).square().mean())
        found.append([cast(Tensor, p.grad) for p in model.parameters()])
        assert sync.stats().steps == 4
        assert sync.stats().compression_ratio > 1.5
        assert are_alike(found[-1])
    assert all(map(torch.equal, *found))


@in_each_process(2)
def test_the_same_model_as_plain_ddp() -> None:
    """Exact averaging gives plain DDP's model; full rank gives nearly the same."""
    plain = ddp_of()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for step in range(4):
        gradient_of(plain, step)
        optimizer.step()
    exact, _ = train("linear", AllReduce())
    full, sync = train("linear", PowerSGD(matrix_rank=48, min_compression_ratio=0.01))
    for name, parameter in plain.module.named_parameters():
        assert torch.equal(parameter, exact[name])
        torch.testing.assert_close(parameter.detach(), full[name], rtol=1e-4, atol=1e-5)
    assert dict(sync.state_dict()["error"])


def test_complex_parameters(spawn: Spawn) -> None:
    """DDP's buckets hold them as real numbers, twice as many."""
    if any(refusals := spawn(2, _refusal_of_complex)):
        assert set(refusals) <= {"Invalid scalar type", "pairs of real numbers"}
        pytest.skip(f"complex parameters need a later torch: {refusals[0]}")
    spawn(2, _complex, AllReduce(), 1e-6, False)
    spawn(2, _complex, POWER, 2.0, True)


class Spectral(nn.Module):
    """A complex filter, as in a Fourier layer."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(32, 48, dtype=torch.complex64))
        self.body = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body((x.to(torch.complex64) @ self.filter).abs())
        return out


def _refusal_of_complex() -> str:
    """DDP's own by torch 2.6 on Gloo, then Thinwire's; "" for none."""
    try:
        ddp_model = DistributedDataParallel(Spectral())
        thinwire.attach(ddp_model, AllReduce())
        torch.autograd.backward(ddp_model(torch.ones(8, 32)).square().mean())
    except GradientError as error:
        return "pairs of real numbers" if "pairs of real numbers" in str(error) else str(error)
    except RuntimeError as error:
        return str(error)
    return ""


def _complex(algorithm: Algorithm, most_gap: float, find_unused: bool) -> None:
    torch.manual_seed(0)
    plain, ours = (DistributedDataParallel(Spectral(), find_unused_parameters=find_unused) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    sync = thinwire.attach(ours, algorithm)
    for step in range(4):
        batch = torch.randn(8, 32, generator=drawn(step))
        for ddp_model in (plain, ours):
            ddp_model.zero_grad()
            torch.autograd.backward(ddp_model(batch).square().mean())
    expected, got = (model.module.filter.grad for model in (plain, ours))
    sync.load_state_dict(sync.state_dict())
    assert (expected - got).norm() / expected.norm() < most_gap
    assert (sync.stats().compression_ratio > 1.5) == (algorithm == POWER)
    assert got.is_complex()
    assert are_alike([got])


@in_each_process(2)
def test_two_models_in_one_backward_pass() -> None:
    """A generator and a discriminator, whose buckets become ready interleaved."""
    torch.manual_seed(3)
    modules = [nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 24)) for _ in range(2)]
    plain, ours = ([ddp_of(copy.deepcopy(m), bucket_cap_mb=0.001) for m in modules] for _ in range(2))
    syncs = [thinwire.attach(model, POWER) for model in ours]
    sums = {True: torch.zeros(()), False: torch.zeros(())}
    for step in range(4):
        for is_ours, chain in ((False, plain), (True, ours)):
            outputs = batch_of(step)
            for model in chain:
                model.zero_grad()
                outputs = model(outputs)
            torch.autograd.backward(outputs.square().mean())
            gradients = [cast(Tensor, p.grad).flatten() for model in chain for p in model.parameters()]
            sums[is_ours] = sums[is_ours] + torch.cat(gradients)
    assert are_alike(gradients)
    owed = [residual_of(sync.state_dict(), m) for sync, m in zip(syncs, modules, strict=True)]
    torch.testing.assert_close(sums[True] + torch.cat(owed), sums[False], rtol=1e-4, atol=1e-5)
    assert all(residual.any() for residual in owed)
    assert all(sync.stats().compression_ratio > 1.5 for sync in syncs)


@in_each_process(2)
def test_resume_into_a_new_ddp_with_other_buckets() -> None:
    """Bit-equal though DDP's buckets are different at first: state is by parameter."""
    for algorithm in (
        PowerSGD(matrix_rank=2, alternating=True),
        TopK(density=1 / 20, chunk=100),
        Quantize(bits=4),
    ):
        assert torch.equal(*_resume(algorithm, 0.02))


@in_each_process(3)
def test_three_processes_resume_up_to_rounding_where_the_backend_adds_up() -> None:
    """The order of the sum depends on the place in a message, and DDP's first buckets are different."""
    for algorithm, tolerance in ((Quantize(bits=4), 0.0), (Cast("bf16"), 2**-7), (POWER, 1e-5)):
        straight, resumed = _resume(algorithm, 0.005)
        for before, after in zip(straight, resumed, strict=True):
            assert (before - after).norm() <= tolerance * before.norm()
        if algorithm != POWER:  # it has no memory of what was rounded
            assert torch.equal(straight[1:], resumed[1:])


def _resume(algorithm: Algorithm, bucket_cap_mb: float) -> tuple[Tensor, Tensor]:
    """Gradients of three steps, a row each, of the run that went on and of the one that resumed."""
    straight, resumed = ddp_of(), ddp_of(bucket_cap_mb=bucket_cap_mb)
    sync, resumed_sync = thinwire.attach(straight, algorithm), thinwire.attach(resumed, algorithm)
    for step in range(4):
        gradient_of(straight, step)
    resumed_sync.load_state_dict(copy.deepcopy(sync.state_dict()))
    rows = [[gradient_of(model, step) for step in range(4, 7)] for model in (straight, resumed)]
    assert resumed_sync.stats().compression_ratio > 1.5
    return torch.stack(rows[0]), torch.stack(rows[1])


@pytest.mark.parametrize(
    ("kind", "ignored", "sent"),
    [("linear", "0.weight", "2.weight"), ("tied, scalar, empty", "embed.weight", "head.weight")],
)
@in_each_process(2)
def test_parameters_that_ddp_ignores_are_not_planned(kind: str, ignored: str, sent: str) -> None:
    """A tied one that is ignored under one name only has the other."""
    module, batch = KINDS[kind][0](), KINDS[kind][1]
    # TorchRL's losses have a method that takes fewer arguments than Module's.
    module.named_parameters = lambda recurse=True: nn.Module.named_parameters(module, recurse=recurse)  # type: ignore[assignment,method-assign,misc]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [ignored])  # type: ignore[no-untyped-call]
    ddp_model = DistributedDataParallel(module)
    sync = thinwire.attach(ddp_model, POWER)
    for step in range(2):
        torch.autograd.backward(ddp_model(batch(step)).square().mean())
    assert {sent, ignored} & {name for route in sync.plan.routes for name in route.names} == {sent}
    assert sync.stats().compression_ratio > 1.5


@in_each_process(2)
def test_state_has_the_names_of_the_users_own_module() -> None:
    """Tied, frozen after wrapping, compiled before wrapping: never a position, never torch's prefix."""
    module = Tied()
    compiled = cast(nn.Module, torch.compile(module, backend="eager"))
    ddp_model = DistributedDataParallel(compiled, find_unused_parameters=True)
    module.logit_scale.requires_grad_(False)  # DDP's bucket has a place for its gradient all the same
    sync = thinwire.attach(ddp_model, POWER)
    planned = {name for route in sync.plan.routes for name in route.names}
    for step in range(3):
        torch.autograd.backward(ddp_model(tokens(step)).square().mean())
    saved = sync.state_dict()
    assert planned == {"embed.weight", "body.weight", "body.bias", "nothing"}
    assert set(dict(saved["parameters"])) == {*planned, "logit_scale"}
    assert set(dict(saved["error"])) == {"embed.weight", "body.weight"}
    assert sync.stats().compression_ratio > 1.5


@in_each_process(2)
def test_an_exception_in_the_backward_pass_leaves_the_state_savable() -> None:
    ddp_model = ddp_of(bucket_cap_mb=0.001)
    sync = thinwire.attach(ddp_model, POWER)
    for step in range(2):
        gradient_of(ddp_model, step)
    before = dict(sync.state_dict()["error"])
    own_fault = fail_at(dist.get_rank(), 2, "raise", after_messages=1)
    with faults(sync, [own_fault]), pytest.raises(InjectedError):
        gradient_of(ddp_model, 2)
    after = dict(sync.state_dict()["error"])
    assert sync.steps == 2
    assert sync.stats().compression_ratio > 1.5
    assert before
    assert all(torch.equal(error, after[name]) for name, error in before.items())
