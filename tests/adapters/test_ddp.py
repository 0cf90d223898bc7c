"""The DDP adapter in real processes: every kind of model and gradient, every option of DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from processes import Spawn, in_each_process
from thinwire import AllReduce, Cast, GradientSync, PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.errors import GradientError
from thinwire.sync.step import Step
from training import are_alike

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


class Branching(nn.Module):
    """Each process uses its own branch; a third is used by none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(24, 32)
        self.branches = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.branches[dist.get_rank() % 2](self.stem(x))
        return out


def linear_model() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 8))


def frozen_model() -> nn.Module:
    model = linear_model()
    next(iter(model.parameters())).requires_grad_(False)
    return model


def conv_model() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.Flatten(), nn.LazyLinear(8)]
    model = nn.Sequential(*layers)
    model(torch.zeros(1, 3, 8, 8))
    return model


def channels_last_model() -> nn.Module:
    return conv_model().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def transposed_model() -> nn.Module:
    model = linear_model()
    model[0].weight = nn.Parameter(torch.randn(24, 48).t())  # type: ignore[index]
    return model


def vectors(generator: torch.Generator) -> Tensor:
    return torch.randn(16, 24, generator=generator)


def images(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=generator)


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(60, (4, 12), generator=generator)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "linear": (linear_model, vectors),
    "frozen layer": (frozen_model, vectors),
    "conv": (conv_model, images),
    "channels-last": (channels_last_model, images),
    "transposed": (transposed_model, vectors),
    "tied, scalar, empty": (Tied, tokens),
    "unused": (Branching, vectors),
}


def build(kind: str, dtype: torch.dtype = torch.float32, **ddp_options: Any) -> DistributedDataParallel:
    torch.manual_seed(7)
    model = KINDS[kind][0]().to(dtype)
    return DistributedDataParallel(model, **{"bucket_cap_mb": 0.005, **ddp_options})


def batch_of(kind: str, step: int, process_rank: int, dtype: torch.dtype) -> Tensor:
    batch = KINDS[kind][1](torch.Generator().manual_seed(1_000 * step + process_rank))
    return batch.to(dtype) if batch.is_floating_point() else batch


def train(
    kind: str, algorithm: Algorithm, *, steps: int = 5, dtype: torch.dtype = torch.float32, **ddp_options: Any
) -> tuple[dict[str, Tensor], GradientSync]:
    """Train; the final parameters, the same on all processes, and what averaged."""
    ddp_model = build(kind, dtype, **ddp_options)
    sync = thinwire.attach(ddp_model, algorithm)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        before = sync.stats().message_bytes
        optimizer.zero_grad()
        ddp_model(batch_of(kind, step, dist.get_rank(), dtype)).square().mean().backward()
        optimizer.step()
    parameters = {n: p.detach() for n, p in ddp_model.module.named_parameters()}
    flags_bytes = 4 * len(parameters) if ddp_model.find_unused_parameters else 0
    if steps > 3:  # after the first ones, a step sends what the plan says
        assert sync.stats().message_bytes - before == sync.plan.message_bytes + flags_bytes
    assert are_alike(parameters.values())
    return parameters, sync


def check_compressed(
    kind: str, algorithm: Algorithm, **options: Any
) -> tuple[dict[str, Tensor], GradientSync]:
    parameters, sync = train(kind, algorithm, **options)
    assert sync.plan.compression_ratio > 1.5
    assert sync.stats().relative_error
    return parameters, sync


@pytest.mark.parametrize("algorithm", [POWER, BatchedPowerSGD()], ids=["PowerSGD", "BatchedPowerSGD"])
@pytest.mark.parametrize("kind", KINDS)
@in_each_process(2)
def test_every_kind_of_model(kind: str, algorithm: Algorithm) -> None:
    check_compressed(kind, algorithm, **({"find_unused_parameters": True} if kind == "unused" else {}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@in_each_process(2)
def test_every_type_of_gradient(dtype: torch.dtype) -> None:
    parameters, sync = check_compressed("linear", POWER, dtype=dtype)
    assert {p.dtype for p in parameters.values()} == {dtype}
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    assert {error.dtype for error in dict(sync.state_dict()["error"]).values()} == {kept}


@pytest.mark.parametrize(
    "options",
    [
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 25},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
@in_each_process(2)
def test_every_option_of_ddp(options: dict[str, Any]) -> None:
    check_compressed("linear", POWER, **options)


@in_each_process(2)
def test_the_same_model_as_plain_ddp() -> None:
    """Exact averaging gives plain DDP's model; full rank gives nearly the same."""
    plain = build("linear")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        plain(batch_of("linear", step, dist.get_rank(), torch.float32)).square().mean().backward()
        optimizer.step()
    exact, _ = train("linear", AllReduce())
    full, sync = train("linear", PowerSGD(matrix_rank=48, min_compression_ratio=0.01))
    for name, parameter in plain.module.named_parameters():
        assert torch.equal(parameter, exact[name])
        torch.testing.assert_close(parameter.detach(), full[name], rtol=1e-4, atol=1e-5)
    assert dict(sync.state_dict()["error"])


@pytest.mark.parametrize(
    ("algorithm", "most_gap", "compressed"),
    [
        (AllReduce(), 1e-6, False),
        (Cast("bf16"), 1e-2, True),
        (PowerSGD(matrix_rank=96, min_compression_ratio=0.1), 1e-4, False),
        (POWER, 2.0, True),
        (BatchedPowerSGD(), 2.0, True),
    ],
    ids=str,
)
def test_complex_parameters(spawn: Spawn, algorithm: Algorithm, most_gap: float, compressed: bool) -> None:
    """DDP's buckets hold them as real numbers, twice as many."""
    if any(refusals := spawn(2, _refusal_of_complex)):
        assert set(refusals) <= {"Invalid scalar type", "pairs of real numbers"}
        pytest.skip(f"complex parameters need a later torch: {refusals[0]}")
    for find_unused in (False, True):
        spawn(2, _complex, algorithm, most_gap, compressed, find_unused)


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


def _complex(algorithm: Algorithm, most_gap: float, compressed: bool, find_unused: bool) -> None:
    torch.manual_seed(0)
    plain, ours = (DistributedDataParallel(Spectral(), find_unused_parameters=find_unused) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    sync = thinwire.attach(ours, algorithm)
    for step in range(4):
        batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for ddp_model in (plain, ours):
            ddp_model.zero_grad()
            torch.autograd.backward(ddp_model(batch).square().mean())
    expected, got = (model.module.filter.grad for model in (plain, ours))
    sync.load_state_dict(sync.state_dict())
    assert (expected - got).norm() / expected.norm() < most_gap
    assert (sync.stats().compression_ratio > 1.5) == compressed
    assert got.is_complex()
    assert are_alike([got])


@in_each_process(2)
def test_two_models_in_one_backward_pass() -> None:
    """A generator and a discriminator, whose buckets become ready interleaved."""
    torch.manual_seed(3)
    modules = [nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 24)) for _ in range(2)]
    plain, ours = (
        [DistributedDataParallel(copy.deepcopy(module), bucket_cap_mb=0.001) for module in modules]
        for _ in range(2)
    )
    syncs = [thinwire.attach(model, POWER) for model in ours]
    sums = [[torch.zeros_like(p) for model in chain for p in model.parameters()] for chain in (plain, ours)]
    for step in range(4):
        for chain, totals in zip((plain, ours), sums, strict=True):
            outputs = batch_of("linear", step, dist.get_rank(), torch.float32)
            for model in chain:
                model.zero_grad()
                outputs = model(outputs)
            torch.autograd.backward(outputs.square().mean())
            gradients = [cast(Tensor, p.grad) for model in chain for p in model.parameters()]
            for total, gradient in zip(totals, gradients, strict=True):
                total.add_(gradient)
    assert are_alike(gradients)
    owed = [dict(sync.state_dict()["error"]) for sync in syncs]
    names = [
        (number, name) for number, model in enumerate(ours) for name, _ in model.module.named_parameters()
    ]
    for (number, name), true, given in zip(names, *sums, strict=True):
        torch.testing.assert_close(given + owed[number].get(name, 0), true, rtol=1e-4, atol=1e-5)
    assert all(map(len, owed))
    assert all(sync.stats().compression_ratio > 1.5 for sync in syncs)


@pytest.mark.parametrize(
    "algorithm",
    [
        POWER,
        PowerSGD(matrix_rank=2, alternating=True),
        TopK(density=1 / 20, chunk=100),
        Quantize(bits=4, rounding="stochastic"),
    ],
    ids=str,
)
@in_each_process(2)
def test_resume_into_a_new_ddp_with_other_buckets(algorithm: Algorithm) -> None:
    """Bit-equal though DDP's buckets are different at first: state is by parameter."""
    assert torch.equal(*_resume(algorithm, 0.02))


@pytest.mark.parametrize(
    ("algorithm", "tolerance"),
    [
        (Quantize(bits=4), 0.0),
        (TopK(density=1 / 16), 0.0),
        (AllReduce(), 1e-6),
        (Cast("bf16"), 2**-7),
        (POWER, 1e-5),
    ],
    ids=lambda value: type(value).__name__,
)
@in_each_process(3)
def test_three_processes_resume_up_to_rounding_where_the_backend_adds_up(
    algorithm: Algorithm, tolerance: float
) -> None:
    """The order of the sum depends on the place in a message, and DDP's first buckets are different."""
    straight, resumed = _resume(algorithm, 0.005)
    for before, after in zip(straight, resumed, strict=True):
        assert (before - after).norm() <= tolerance * before.norm()
    if algorithm != POWER:  # it has no memory of what was rounded, or nothing was
        assert torch.equal(straight[1:], resumed[1:])


def _gradients_of(ddp_model: DistributedDataParallel, steps: range) -> list[Tensor]:
    for step in steps:
        ddp_model.zero_grad()
        ddp_model(batch_of("linear", step, dist.get_rank(), torch.float32)).square().mean().backward()
    return [p.grad.clone() for p in ddp_model.parameters() if p.grad is not None]


def _resume(algorithm: Algorithm, bucket_cap_mb: float) -> tuple[Tensor, Tensor]:
    """Gradients of three steps, a row each, of the run that went on and of the one that resumed."""
    straight = build("linear")
    sync = thinwire.attach(straight, algorithm)
    _gradients_of(straight, range(4))
    state = copy.deepcopy(sync.state_dict())
    resumed = build("linear", bucket_cap_mb=bucket_cap_mb)
    resumed_sync: GradientSync = thinwire.attach(resumed, algorithm)
    resumed_sync.load_state_dict(state)
    rows = [
        [torch.cat([each.view(-1) for each in _gradients_of(model, range(n, n + 1))]) for n in range(4, 7)]
        for model in (straight, resumed)
    ]
    assert resumed_sync.stats().compression_ratio > 1.5 or algorithm == AllReduce()
    return torch.stack(rows[0]), torch.stack(rows[1])


@pytest.mark.parametrize(
    ("kind", "ignored", "sent"),
    [("linear", "0.weight", "2.weight"), ("tied, scalar, empty", "embed.weight", "head.weight")],
)
@in_each_process(2)
def test_parameters_that_ddp_ignores_are_not_planned(kind: str, ignored: str, sent: str) -> None:
    """A tied one that is ignored under one name only has the other."""
    module = KINDS[kind][0]()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [ignored])  # type: ignore[no-untyped-call]
    ddp_model = DistributedDataParallel(module)
    sync = thinwire.attach(ddp_model, POWER)
    for step in range(2):
        batch = batch_of(kind, step, dist.get_rank(), torch.float32)
        torch.autograd.backward(ddp_model(batch).square().mean())
    planned = [name for route in sync.plan.routes for name in route.names]
    assert sent in planned
    assert ignored not in planned
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
        batch = batch_of("tied, scalar, empty", step, dist.get_rank(), torch.float32)
        torch.autograd.backward(ddp_model(batch).square().mean())
    saved = sync.state_dict()
    assert planned == {"embed.weight", "body.weight", "body.bias", "nothing"}
    assert set(dict(saved["parameters"])) == {*planned, "logit_scale"}
    assert set(dict(saved["error"])) == {"embed.weight", "body.weight"}
    assert sync.stats().compression_ratio > 1.5


@in_each_process(2)
def test_an_exception_in_the_backward_pass_leaves_the_state_savable() -> None:
    ddp_model = build("linear", bucket_cap_mb=0.001)
    sync = thinwire.attach(ddp_model, POWER)
    for step in range(2):
        torch.autograd.backward(ddp_model(batch_of("linear", step, 0, torch.float32)).square().mean())
    before = sync.state_dict()
    calls, start = [], Step.start

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError("out of memory at the second bucket")
        start(*arguments)

    with patch.object(Step, "start", failing), pytest.raises(MemoryError):
        torch.autograd.backward(ddp_model(batch_of("linear", 2, 0, torch.float32)).square().mean())
    after = sync.state_dict()
    steps = sync.stats().steps
    assert steps == 2
    for name in dict(before["error"]):
        assert torch.equal(dict(before["error"])[name], dict(after["error"])[name])


@pytest.mark.parametrize("saved_after", [1, 4])
@pytest.mark.parametrize(
    "algorithm",
    [BatchedPowerSGD(), None, Quantize(bits=4, error_feedback=True)],
    ids=["BatchedPowerSGD", "batched_powerSGD_hook", "Quantize"],
)
@in_each_process(2)
def test_what_depends_on_the_buckets_is_resumed_with_its_residual(
    algorithm: Algorithm | None, saved_after: int
) -> None:
    """Not to the bit, since DDP's first buckets are different; but nothing is lost."""

    def start() -> tuple[DistributedDataParallel, Any]:
        ddp_model = build("linear")
        if algorithm is not None:
            return ddp_model, thinwire.attach(ddp_model, algorithm)
        state = thinwire.hooks.PowerSGDState(None, start_powerSGD_iter=0)
        ddp_model.register_comm_hook(state, thinwire.hooks.batched_powerSGD_hook)
        return ddp_model, state

    def step(ddp_model: DistributedDataParallel, number: int) -> Tensor:
        return torch.cat([each.flatten() for each in _gradients_of(ddp_model, range(number, number + 1))])

    def error_of(state: dict[str, Any]) -> Tensor:
        errors = dict(state["error"])
        return torch.cat(
            [errors.get(n, torch.zeros_like(p)).flatten() for n, p in straight.module.named_parameters()]
        )

    plain = build("linear")
    straight, sync = start()
    sent = sum((step(straight, number) for number in range(saved_after)), start=torch.zeros(()))
    saved = sync.state_dict()
    resumed, resumed_sync = start()
    resumed_sync.load_state_dict(saved)
    layouts = []
    for number in range(saved_after, saved_after + 3):
        sent = sent + step(resumed, number)
        buckets = resumed.reducer._get_zeros_like_grad_buckets()
        layouts.append([bucket.buffer().numel() for bucket in buckets])
    true = sum((step(plain, number) for number in range(saved_after + 3)), start=torch.zeros(()))
    owed = error_of(resumed_sync.state_dict())
    assert [len(layout) > 1 for layout in layouts] == [False, True, True]
    assert resumed_sync.stats().compression_ratio > 5
    assert error_of(saved).norm() > 0.01
    assert are_alike([sent])
    assert (sent + owed - true).norm() < 1e-5 * true.norm()
