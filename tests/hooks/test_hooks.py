"""The names users already type: torch's signatures and defaults, registered with plain DDP."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as stock_default
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock_power
from torch.nn.parallel import DistributedDataParallel

import thinwire
from pool import Pool
from thinwire import hooks
from thinwire.algorithms import Algorithm
from thinwire.channel import ProcessGroupTransport
from thinwire.hooks import powersgd as powersgd_hooks
from thinwire.hooks import stateless
from thinwire.powersgd import AlgorithmAggregator

STATELESS = ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"]
WRAPPERS = ["fp16_compress_wrapper", "bf16_compress_wrapper"]
POWER = ["powerSGD_hook", "batched_powerSGD_hook"]


@pytest.mark.parametrize("name", [*STATELESS, *WRAPPERS, *POWER])
def test_signatures_are_torchs(name: str) -> None:
    theirs = getattr(stock_power if name in POWER else stock_default, name)
    ours = getattr(hooks, name)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


def test_the_state_has_torchs_parameters_and_defaults() -> None:
    theirs = inspect.signature(stock_power.PowerSGDState).parameters
    ours = inspect.signature(hooks.PowerSGDState).parameters
    assert list(ours) == [*theirs, "options"]  # what `thinwire.attach` takes, by name
    assert {n: p.default for n, p in ours.items() if n != "options"} == {
        n: p.default for n, p in theirs.items()
    }
    with pytest.raises(TypeError, match="'hostcheck'"):
        hooks.PowerSGDState(None, hostcheck=False)  # type: ignore[call-arg]


def new_model(bucket_cap_mb: float = 0.01) -> DistributedDataParallel:
    torch.manual_seed(7)
    return DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), bucket_cap_mb=bucket_cap_mb
    )


def gradients_of(ddp_model: DistributedDataParallel, steps: range) -> list[Tensor]:
    for step in steps:
        ddp_model.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        ddp_model(torch.randn(8, 64)).square().mean().backward()
    return [p.grad.clone() for p in ddp_model.parameters() if p.grad is not None]


def hook_named(name: str) -> Callable[..., Any]:
    wrapper, _, inner = name.rstrip(")").partition("(")
    found = getattr(hooks, wrapper)
    return found(hook_named(inner)) if inner else found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "least_gap", "most_gap"),
    [
        ("allreduce_hook", 0, 0),
        ("fp16_compress_hook", 1e-6, 1e-3),
        ("bf16_compress_hook", 1e-4, 1e-2),
        ("fp16_compress_wrapper(allreduce_hook)", 1e-6, 1e-3),
        ("bf16_compress_wrapper(allreduce_hook)", 1e-4, 1e-2),
        ("fp16_compress_wrapper(fp16_compress_hook)", 1e-6, 1e-3),
        ("fp16_compress_wrapper(bf16_compress_hook)", 1e-4, 1e-2),
        ("quantization_pertensor_hook", 1e-4, 0.1),
        ("bf16_compress_wrapper(quantization_perchannel_hook)", 1e-4, 0.1),
    ],
)
def test_hooks_without_state(pool2: Pool, name: str, least_gap: float, most_gap: float) -> None:
    """16 and 8 bits leave their mark on the gradient, and no more than that."""
    results = pool2.run(_gap_to_plain, name)
    assert len(results) == 2
    for gap, gradient in results:
        assert least_gap <= gap <= most_gap
        assert torch.equal(gradient, results[0][1])


def _gap_to_plain(name: str) -> tuple[float, Tensor]:
    plain, ours = new_model(), new_model()
    ours.register_comm_hook(None, hook_named(name))
    expected, got = (torch.cat([g.view(-1) for g in gradients_of(m, range(3))]) for m in (plain, ours))
    return ((expected - got).norm() / expected.norm()).item(), got


@pytest.mark.parametrize(
    "name",
    [
        "powerSGD_hook",
        "batched_powerSGD_hook",
        "fp16_compress_wrapper(powerSGD_hook)",
        "bf16_compress_wrapper(powerSGD_hook)",
        "fp16_compress_wrapper(batched_powerSGD_hook)",
    ],
)
def test_hooks_with_state(pool2: Pool, name: str) -> None:
    results = pool2.run(_power, name)
    assert len(results) == 2
    for ratio, plan, gradients, steps in results:
        assert steps == 4
        assert ratio > (16 if "16" in name else 8)
        assert any(route.matrix_rank == 1 for route in plan.routes)
        for mine, theirs in zip(gradients, results[0][2], strict=True):
            assert torch.equal(mine, theirs)
            assert mine.isfinite().all()


def _power(name: str) -> tuple[float, thinwire.Plan, list[Tensor], int]:
    ddp_model = new_model()
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    ddp_model.register_comm_hook(state, hook_named(name))
    gradients = gradients_of(ddp_model, range(4))
    return state.stats().compression_ratio, state.plan, gradients, state.stats().steps


def test_eight_bits_are_off_by_half_a_step_and_show_what_is_not_finite(pool2: Pool) -> None:
    for off, most, types, not_finite in pool2.run(_in_8_bits):
        assert 0 < off <= most
        assert types == {torch.uint8}
        assert not_finite == [True, True]


def _in_8_bits() -> tuple[float, float, set[torch.dtype], list[bool]]:
    """One layer of odd size, whose gradient is known: of 100 elements with a scale, the last ones of 53."""
    own = torch.linspace(-1, 3, 63 * 31) * (dist.get_rank() + 1)
    types = set()
    all_gather = ProcessGroupTransport.all_gather

    def looked_at(transport: ProcessGroupTransport, output: Tensor, message: Tensor, purpose: str) -> Any:
        if "gradients" in purpose:
            types.add(message.dtype)
        return all_gather(transport, output, message, purpose)

    with patch.object(ProcessGroupTransport, "all_gather", looked_at):
        got = [_gradient_through(hook, own) for hook in (hooks.quantization_pertensor_hook, _per_100)]
        infinite, not_a_number = own.clone(), own.clone()
        infinite[7], not_a_number[7] = torch.inf, torch.nan
        spoiled = [_gradient_through(_per_100, each) for each in (infinite, not_a_number)]
    expected = torch.linspace(-1, 3, 63 * 31) * 1.5
    off = max((each - expected).abs().max().item() for each in got)
    not_finite = [not each[:100].isfinite().any() and bool(each[100:].isfinite().all()) for each in spoiled]
    return off, (4 / 255 / 2 + 8 / 255 / 2) / 2 * 1.0001, types, not_finite


def _per_100(state, bucket):  # type: ignore[no-untyped-def]
    return hooks.quantization_perchannel_hook(state, bucket, 100)


def _gradient_through(hook: hooks.Hook, gradient: Tensor) -> Tensor:
    model = DistributedDataParallel(nn.Linear(63, 31, bias=False))
    model.register_comm_hook(None, hook)
    model(torch.eye(63)).backward(gradient.view(31, 63).t())
    assert model.module.weight.grad is not None
    return cast(Tensor, model.module.weight.grad).flatten()


def test_the_settings_as_an_algorithm() -> None:
    state = hooks.PowerSGDState(None, 3, 1, random_seed=7)
    expected = thinwire.algorithms.BatchedPowerSGD(matrix_rank=3, warmup_steps=1, seed=7, wire_dtype="fp16")
    assert state.algorithm(thinwire.algorithms.BatchedPowerSGD, "fp16") == expected


def test_the_settings_reach_the_algorithm(pool2: Pool) -> None:
    expected = thinwire.PowerSGD(
        matrix_rank=3,
        warmup_steps=1,
        min_compression_ratio=1.5,
        error_feedback=False,
        warm_start=False,
        seed=7,
    )
    assert pool2.run(_settings) == [expected] * 2


def _settings() -> Algorithm:
    ddp_model = new_model()
    state = hooks.PowerSGDState(None, 3, 1, 1.5, False, False, 0, 7)
    ddp_model.register_comm_hook(state, hooks.powerSGD_hook)
    gradients_of(ddp_model, range(1))
    assert state._front is not None
    return state._front.sync.algorithm


@pytest.mark.parametrize("name", ["powerSGD_hook", "allreduce_hook", "fp16_compress_hook"])
def test_a_process_group_of_some(pool4: Pool, name: str) -> None:
    results = pool4.run(_group_of_two, name)
    for a, b in ((0, 1), (2, 3)):
        assert torch.equal(results[a][0], results[b][0])
    assert not torch.equal(results[0][0], results[2][0])
    assert all((ratio > 8) == (name == "powerSGD_hook") for _, ratio in results)


def _group_of_two(name: str) -> tuple[Tensor, float]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[dist.get_rank() // 2]
    module = nn.Linear(64, 64)
    torch.nn.init.ones_(module.weight)
    ddp_model = DistributedDataParallel(module, process_group=group)
    state = hooks.PowerSGDState(group, start_powerSGD_iter=0) if name == "powerSGD_hook" else group
    ddp_model.register_comm_hook(state, hook_named(name))
    gradient = gradients_of(ddp_model, range(2))[0]
    return gradient, state.stats().compression_ratio if isinstance(state, hooks.PowerSGDState) else 1.0


def test_hook_and_attach_do_the_same(pool2: Pool) -> None:
    for by_hook, by_attach, ratios in pool2.run(_both_ways):
        assert min(ratios) > 3
        for mine, theirs in zip(by_hook, by_attach, strict=True):
            assert torch.equal(mine, theirs)


def _both_ways() -> tuple[list[Tensor], list[Tensor], list[float]]:
    hooked, attached = new_model(), new_model()
    state = hooks.PowerSGDState(None, 2, start_powerSGD_iter=1)
    hooked.register_comm_hook(state, hooks.powerSGD_hook)
    sync = thinwire.attach(attached, thinwire.PowerSGD(matrix_rank=2, warmup_steps=1))
    gradients = gradients_of(hooked, range(4)), gradients_of(attached, range(4))
    return *gradients, [state.stats().compression_ratio, sync.stats().compression_ratio]


def test_saved_with_torch_and_resumed_with_other_buckets(pool2: Pool) -> None:
    """FACTS 7: torch's state is keyed by bucket, pickled, and differs between processes."""
    results = pool2.run(_resume)
    for straight, resumed, saved, ratio in results:
        assert ratio > 8
        assert saved == results[0][2]
        for mine, theirs in zip(straight, resumed, strict=True):
            assert torch.equal(mine, theirs)


def _resume() -> tuple[list[Tensor], list[Tensor], bytes, float]:
    straight = new_model()
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    straight.register_comm_hook(state, hooks.powerSGD_hook)
    gradients_of(straight, range(4))
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    saved = file.getvalue()

    resumed = new_model(bucket_cap_mb=25)
    resumed_state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    resumed_state.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
    resumed.register_comm_hook(resumed_state, hooks.powerSGD_hook)
    steps = range(4, 7)
    return (
        gradients_of(straight, steps),
        gradients_of(resumed, steps),
        saved,
        resumed_state.stats().compression_ratio,
    )


def test_state_of_another_model_is_refused_at_the_first_step(pool2: Pool) -> None:
    for name, message in pool2.run(_other_model):
        assert name == "StateError"
        assert "1.weight has shape (64, 64) in the state and (32, 64) in the model" in message


def _other_model() -> tuple[str, str]:
    ddp_model = new_model()
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    ddp_model.register_comm_hook(state, hooks.powerSGD_hook)
    gradients_of(ddp_model, range(2))
    other = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)))
    other_state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    other_state.load_state_dict(state.state_dict())
    other.register_comm_hook(other_state, hooks.powerSGD_hook)
    return error_of(lambda: gradients_of(other, range(1)))


def error_of(action: Callable[[], Any]) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("other_hook", ["powerSGD_hook", "batched_powerSGD_hook"])
@pytest.mark.parametrize("hidden", [False, True], ids=["registered", "inside a hook of one's own"])
def test_a_state_used_on_two_models_is_refused(pool2: Pool, other_hook: str, hidden: bool) -> None:
    for name, message in pool2.run(_two_models, other_hook, hidden):
        assert name == "ConfigError"
        assert "make one state for each model" in message


def _two_models(other_hook: str, hidden: bool) -> tuple[str, str]:
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    first, second = new_model(), new_model()
    for model, name in ((first, "powerSGD_hook"), (second, other_hook)):
        if hidden:
            model.register_comm_hook(None, _hiding(state, hook_named(name)))
        else:
            model.register_comm_hook(state, hook_named(name))

    def train() -> None:
        gradients_of(first, range(1))
        gradients_of(second, range(1))

    return error_of(train)


def _hiding(state: hooks.PowerSGDState, hook: hooks.Hook) -> hooks.Hook:
    """A user's own hook around ours: the state can't find the model."""

    def of_ones_own(own_state, bucket):  # type: ignore[no-untyped-def]
        return hook(state, bucket)

    return of_ones_own


class EqualLayers(nn.Module):
    """Layers of one shape, used in another order than they are declared in."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.b(self.a(self.c(inputs).tanh()).tanh())
        return outputs


def test_registered_after_the_rebuild_every_layer_gets_its_own_memory(pool2: Pool) -> None:
    """DDP reorders its buckets after the first step: positions would give layers each other's error."""
    for names, straight, resumed in pool2.run(_registered_late):
        assert names == {"a.weight", "b.weight", "c.weight"}
        for mine, theirs in zip(straight, resumed, strict=True):
            assert torch.equal(mine, theirs)


def _registered_late() -> tuple[set[str], list[Tensor], list[Tensor]]:
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        models.append(DistributedDataParallel(EqualLayers(), bucket_cap_mb=0.01))
    straight, late = models
    states = [hooks.PowerSGDState(None, start_powerSGD_iter=0) for _ in range(2)]
    straight.register_comm_hook(states[0], hooks.powerSGD_hook)
    gradients_of(straight, range(4))
    saved = states[0].state_dict()
    gradients_of(late, range(3))
    states[1].load_state_dict(saved)
    late.register_comm_hook(states[1], hooks.powerSGD_hook)
    return set(dict(saved["error"])), gradients_of(straight, range(4, 6)), gradients_of(late, range(4, 6))


def test_inside_a_hook_of_ones_own_names_are_positions(pool2: Pool) -> None:
    for saved, refused, resumed, straight in pool2.run(_hidden):
        assert set(dict(saved["parameters"])) == {f"parameter[-{n}]" for n in range(1, 5)}
        assert set(dict(saved["error"])) == {"parameter[-4]", "parameter[-2]"}  # the matrices
        assert refused[0] == "StateError"
        assert "parameter[-4]" in refused[1]
        for mine, theirs in zip(straight, resumed, strict=True):
            assert torch.equal(mine, theirs)


def _hidden() -> tuple[dict[str, Any], tuple[str, str], list[Tensor], list[Tensor]]:
    states = [hooks.PowerSGDState(None, start_powerSGD_iter=0) for _ in range(3)]
    straight, resumed, frozen = new_model(), new_model(), new_model()
    straight.register_comm_hook(None, _hiding(states[0], hooks.powerSGD_hook))
    gradients_of(straight, range(3))
    saved = states[0].state_dict()
    for state in states[1:]:
        state.load_state_dict(saved)
    resumed.register_comm_hook(None, _hiding(states[1], hooks.powerSGD_hook))
    assert states[1].state_dict().keys() == saved.keys()
    frozen.module[0].bias.requires_grad_(False)
    frozen = DistributedDataParallel(frozen.module)
    frozen.register_comm_hook(None, _hiding(states[2], hooks.powerSGD_hook))
    refused = error_of(lambda: gradients_of(frozen, range(1)))
    return saved, refused, gradients_of(resumed, range(3, 5)), gradients_of(straight, range(3, 5))


class Heads(nn.Module):
    """One head a task."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, inputs: Tensor, task: int) -> Tensor:
        outputs: Tensor = self.heads[task](inputs)
        return outputs


def test_inside_a_hook_of_ones_own_an_unused_layer_keeps_what_it_is_owed(pool2: Pool) -> None:
    for owed, kept, gradient in pool2.run(_hidden_unused):
        assert owed.norm() > 0
        torch.testing.assert_close(owed, kept, rtol=1e-4, atol=1e-7)
        assert gradient is None or not gradient.any()


def _hidden_unused() -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(7)
    model = DistributedDataParallel(Heads(), find_unused_parameters=True)
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    model.register_comm_hook(None, _hiding(state, hooks.powerSGD_hook))
    errors = []
    for task in (0, 1, 0):
        model.zero_grad()
        torch.autograd.backward(model(torch.randn(8, 64), task).square().mean())
        errors.append(dict(state.state_dict()["error"])["parameter[-1]"])
    return errors[1], errors[2], model.module.heads[1].weight.grad


def test_a_loaded_state_is_a_copy_and_can_be_copied_and_sent_before_its_first_use(pool2: Pool) -> None:
    for states in pool2.run(_copies_of_a_loaded_state):
        reference, *others = states
        assert len(others) == 3
        assert dict(reference["factor"])
        for other in others:
            assert other["step"] == 2
            for kind in ("error", "factor"):
                mine, theirs = dict(other[kind]), dict(reference[kind])
                assert mine.keys() == theirs.keys()
                assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def _copies_of_a_loaded_state() -> list[dict[str, Any]]:
    model = new_model()
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    model.register_comm_hook(state, hooks.powerSGD_hook)
    gradients_of(model, range(2))
    saved, given = state.state_dict(), state.state_dict()
    loaded = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    loaded.load_state_dict(given)
    for tensors in (dict(given["error"]), dict(given["factor"]), dict(loaded.state_dict()["error"])):
        for tensor in tensors.values():
            tensor.zero_()
    return [
        each.state_dict() for each in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded)))
    ] + [saved]


@pytest.mark.parametrize(
    "name",
    [
        *STATELESS,
        *POWER,
        "fp16_compress_wrapper(powerSGD_hook)",
        "bf16_compress_wrapper(allreduce_hook)",
        "post_localSGD_hook",
        "fp16_compress_wrapper(post_localSGD_hook)",
        "quantization_pertensor_hook",
    ],
)
def test_a_state_of_the_wrong_kind_is_told(pool2: Pool, name: str) -> None:
    for error, message in pool2.run(_wrong_kind, name):
        assert error in {"ConfigError", "AttachError"}
        assert "StockState" in message


class StockState:
    """Some other state."""


def _wrong_kind(name: str) -> tuple[str, str]:
    ddp_model = new_model()
    ddp_model.register_comm_hook(StockState(), hook_named(name))
    return error_of(lambda: gradients_of(ddp_model, range(1)))


def test_sparse_gradients_are_refused_at_once(pool2: Pool) -> None:
    for by_attach, by_hook in pool2.run(_sparse):
        assert by_attach[0] == "AttachError"
        assert by_hook[0] == "GradientError"
        assert "sparse=False" in by_attach[1]
        assert "sparse=False" in by_hook[1]


def _sparse() -> tuple[tuple[str, str], tuple[str, str]]:
    attached, hooked = (DistributedDataParallel(nn.Embedding(32, 32, sparse=True)) for _ in range(2))
    by_attach = error_of(lambda: thinwire.attach(attached, thinwire.PowerSGD()))
    hooked.register_comm_hook(hooks.PowerSGDState(None, start_powerSGD_iter=0), hooks.powerSGD_hook)
    return by_attach, error_of(lambda: hooked(torch.tensor([1, 2])).sum().backward())


@pytest.mark.parametrize("hook", [hooks.powerSGD_hook, hooks.batched_powerSGD_hook, hooks.post_localSGD_hook])
def test_what_is_wrapped_already_can_be_wrapped_again(hook: hooks.Hook) -> None:
    wrapped = hooks.bf16_compress_wrapper(hook)
    assert hooks.fp16_compress_wrapper(wrapped) is wrapped


def test_a_setting_that_stays_as_it_is_can_be_set_by_one_process(pool2: Pool) -> None:
    """Nothing is compared anew, for which the others would have to be there."""
    assert pool2.run(_set_unchanged) == [2, 2]


def _set_unchanged() -> int:
    ddp_model = new_model()
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    ddp_model.register_comm_hook(state, hooks.powerSGD_hook)
    gradients_of(ddp_model, range(1))
    if dist.get_rank() == 0:
        state.matrix_approximation_rank = 1
    gradients_of(ddp_model, range(1, 2))
    return state.stats().steps


def test_wrapping_another_hook_is_refused() -> None:
    for wrapper in (hooks.fp16_compress_wrapper, hooks.bf16_compress_wrapper):
        for other in (stock_power.powerSGD_hook, stock_default.fp16_compress_hook, None, "powerSGD_hook"):
            with pytest.raises(thinwire.ConfigError, match="use torch's own wrapper"):
                wrapper(other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("matrix_approximation_rank", 0),
        ("matrix_approximation_rank", "4"),
        ("start_powerSGD_iter", -1),
        ("min_compression_rate", -1),
        ("use_error_feedback", 2),
        ("warm_start", None),
        ("orthogonalization_epsilon", -1e-8),
        ("random_seed", -1),
        ("random_seed", 0.5),
        ("compression_stats_logging_frequency", -1),
        ("batch_tensors_with_same_shape", "yes"),
        ("process_group", "gloo"),
    ],
)
def test_bad_settings_are_refused_at_once(setting: str, value: Any) -> None:
    """By the name that was typed, when the state is made and when it is set later."""
    with pytest.raises(thinwire.ConfigError, match=rf"^{setting} must be .*, got {value!r}$"):
        hooks.PowerSGDState(**{"process_group": None} | {setting: value})
    state = hooks.PowerSGDState(None)
    with pytest.raises(thinwire.ConfigError, match=setting):
        setattr(state, setting, value)
    assert state.algorithm(thinwire.PowerSGD) == thinwire.PowerSGD(matrix_rank=1, warmup_steps=1000)


def test_torchs_attributes_can_all_be_read(pool2: Pool) -> None:
    for missing, before, after, stats in pool2.run(_attributes):
        assert missing == []
        assert before == {
            "matrix_approximation_rank": 2,
            "start_powerSGD_iter": 1,
            "min_compression_rate": 3,
            "use_error_feedback": True,
            "warm_start": True,
            "orthogonalization_epsilon": 1e-8,
            "batch_tensors_with_same_shape": True,
            "compression_stats_logging_frequency": 10_000,
            "next_stats_report": 10_000,
            "iter": 0,
            "total_numel_before_compression": 0,
            "total_numel_after_compression": 0,
            "error": [],
            "q": [],
            "rng": np.random.RandomState(5).randint(1000),
        }
        whole, factors = 2 * 64 * 64, 2 * 2 * (64 + 64)
        expected = (3 * (whole + 128), 3 * (factors + 128))  # three steps past the warm-up, biases whole
        changed = {
            "iter": 4,
            "total_numel_before_compression": expected[0],
            "total_numel_after_compression": expected[1],
            "error": ["0.weight", "1.weight"],
            "q": ["0.weight", "1.weight"],
        }
        assert after == before | changed
        assert stats == (expected[0] / expected[1], *expected)


def _attributes() -> tuple[list[str], dict[str, Any], dict[str, Any], tuple[float, int, int]]:
    state = hooks.PowerSGDState(
        None, 2, 1, 3, orthogonalization_epsilon=1e-8, random_seed=5, batch_tensors_with_same_shape=True
    )
    assert state.compression_stats() == (0, 0, 0)
    missing = [name for name in stock_power.PowerSGDState.__slots__ if not hasattr(state, name)]
    before = _read(state)
    ddp_model = new_model()
    ddp_model.register_comm_hook(state, hooks.powerSGD_hook)
    gradients_of(ddp_model, range(4))
    return missing, before, _read(state), state.compression_stats()


def _read(state: hooks.PowerSGDState) -> dict[str, Any]:
    names = set(stock_power.PowerSGDState.__slots__) - {"process_group", "error_dict", "rng"}
    told = {name: getattr(state, name) for name in names if "memory" not in name}
    dicts = {"error": sorted(state.error_dict), "q": sorted(state.q_memory_dict)}
    assert state.process_group is None
    assert not state.p_memory_dict
    return told | dicts | {"rng": state.rng.randint(1000)}


def test_settings_of_a_state_can_be_set_from_the_next_step_on(pool2: Pool) -> None:
    """Before the first step and after; what is owed is kept, and what `sync.use` has set is told."""
    for ranks, owed, told, differing, refused in pool2.run(_set):
        assert ranks == [2, 8, 1, 3]
        assert min(owed) > 0
        assert told == (3, 2, 0, False, False)
        assert differing[0] == "AgreementError"
        assert (
            "process 0 has matrix_approximation_rank 4, process 1 has matrix_approximation_rank 5"
            in differing[1]
        )
        assert refused[0] == "ConfigError"
        assert refused[1].startswith("matrix_approximation_rank can't be set: sync.use() has put AllReduce()")


def _set() -> tuple[list[int], list[float], tuple[Any, ...], tuple[str, str], tuple[str, str]]:
    ddp_model = new_model()
    state = hooks.PowerSGDState(None, 1, 1)
    state.matrix_approximation_rank = 2
    state.start_powerSGD_iter = 0
    ddp_model.register_comm_hook(state, hooks.powerSGD_hook)
    ranks, owed = [], []

    def step(number: int) -> None:
        gradients_of(ddp_model, range(number, number + 1))
        ranks.append(len(state.q_memory_dict["0.weight"]))
        owed.append(state.error_dict["0.weight"].norm().item())

    step(0)
    state.matrix_approximation_rank = 8
    step(1)
    state.sync.use(thinwire.PowerSGD(matrix_rank=1))
    step(2)
    assert state.matrix_approximation_rank == 1
    state.matrix_approximation_rank = 3
    state.warm_start = False
    state.min_compression_rate = 2.0
    step(3)
    state.use_error_feedback = False
    told = (
        state.matrix_approximation_rank,
        state.min_compression_rate,
        state.start_powerSGD_iter,
        state.use_error_feedback,
        state.warm_start,
    )
    state.matrix_approximation_rank = 4 + dist.get_rank()
    differing = error_of(lambda: gradients_of(ddp_model, range(4, 5)))
    state.sync.abandon()
    state.sync.use(thinwire.AllReduce())
    refused = error_of(lambda: setattr(state, "matrix_approximation_rank", 2))
    return ranks, owed, told, differing, refused


def test_a_setting_is_not_set_during_a_backward_pass(pool2: Pool) -> None:
    for refused, rank in pool2.run(_set_in_backward):
        assert refused == "StepError"
        assert rank == 1


def _set_in_backward() -> tuple[str, int]:
    ddp_model, refused = new_model(bucket_cap_mb=0.0001), []
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    ddp_model.register_comm_hook(state, hooks.powerSGD_hook)
    gradients_of(ddp_model, range(1))

    def set_rank(gradient: Tensor) -> None:
        refused.append(error_of(lambda: setattr(state, "matrix_approximation_rank", 2))[0])

    ddp_model.module[0].weight.register_hook(set_rank)
    gradients_of(ddp_model, range(1, 2))
    return refused[0], state.matrix_approximation_rank


@pytest.mark.parametrize("wrapper", ["", "fp16_compress_wrapper"])
def test_a_states_algorithm_can_be_switched(pool2: Pool, wrapper: str) -> None:
    """To any other, several buckets, and back."""
    for kinds, ratio, equal in pool2.run(_switched, wrapper):
        assert kinds == ["PowerSGD", "AllReduce", "BatchedPowerSGD", "PowerSGD"]
        assert ratio > 2
        assert equal


def _switched(wrapper: str) -> tuple[list[str], float, bool]:
    ddp_model = new_model()
    state = hooks.PowerSGDState(None, 2, start_powerSGD_iter=0)
    hook = hook_named(f"{wrapper}(powerSGD_hook)" if wrapper else "powerSGD_hook")
    ddp_model.register_comm_hook(state, hook)
    gradients_of(ddp_model, range(2))
    kinds = [type(state.sync.algorithm).__name__]
    others = (thinwire.AllReduce(), thinwire.algorithms.BatchedPowerSGD(), thinwire.PowerSGD(matrix_rank=1))
    for number, algorithm in enumerate(others):
        state.sync.use(algorithm)
        gradients = gradients_of(ddp_model, range(2 + number, 3 + number))
        kinds.append(type(state.sync.algorithm).__name__)
    mine = torch.cat([each.flatten() for each in gradients])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return kinds, state.stats().compression_ratio, torch.equal(everyone[0], everyone[1])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("iter", 3, "load_state_dict"),
        ("rng", None, "random_seed="),
        ("orthogonalization_epsilon", 1e-8, "does not use it"),
        ("error_dict", {}, "load_state_dict"),
        ("matrix_rank", 4, "no setting 'matrix_rank'"),
        ("matrix_approximation_rank", 0, "got 0"),
        ("compression_stats_logging_frequency", -1, "got -1"),
        ("process_group", "gloo", "got 'gloo'"),
    ],
)
def test_an_attribute_that_would_have_no_effect_is_not_set(name: str, value: Any, message: str) -> None:
    state = hooks.PowerSGDState(None, 2)
    with pytest.raises(thinwire.ConfigError, match=message):
        setattr(state, name, value)
    assert state.matrix_approximation_rank == 2


@pytest.mark.parametrize(
    ("setting", "value", "kept"),
    [
        ("matrix_approximation_rank", np.int64(2), {"matrix_rank": 2}),
        ("start_powerSGD_iter", 1e3, {"warmup_steps": 1000}),
        ("start_powerSGD_iter", np.float32(7), {"warmup_steps": 7}),
        ("min_compression_rate", 0, {"min_compression_ratio": 0}),
        ("min_compression_rate", np.float32(1.5), {"min_compression_ratio": 1.5}),
        ("use_error_feedback", 0, {"error_feedback": False}),
        ("warm_start", np.True_, {"warm_start": True}),
        ("random_seed", np.int32(3), {"seed": 3}),
        ("orthogonalization_epsilon", np.float32(1e-8), {}),
        ("compression_stats_logging_frequency", 0, {}),
        ("compression_stats_logging_frequency", 1e4, {}),
        ("batch_tensors_with_same_shape", np.False_, {}),
    ],
)
def test_settings_of_the_types_that_torch_takes(setting: str, value: Any, kept: dict[str, Any]) -> None:
    """Told to the other processes as Python's own, so one that was given an int agrees."""
    stock_power.PowerSGDState(None, **{setting: value})
    algorithm = hooks.PowerSGDState(None, **{setting: value}).algorithm(thinwire.PowerSGD)
    defaults = {"matrix_rank": 1, "warmup_steps": 1000}
    assert repr(algorithm) == repr(thinwire.PowerSGD(**(defaults | kept)))


def test_before_the_first_step_a_state_is_empty_and_can_be_saved() -> None:
    state = hooks.PowerSGDState(None)
    assert state.stats().steps == 0
    assert state.plan.routes == ()
    saved = state.state_dict()
    other = hooks.PowerSGDState(None)
    other.load_state_dict(saved)
    assert other.state_dict() == saved


def test_a_model_can_be_copied_but_not_pickled_whole(pool2: Pool) -> None:
    """Weight averaging (`torch.optim.swa_utils.AveragedModel`) copies the model it is given."""
    for errors, steps, ratio, gradients in (results := pool2.run(_copied)):
        assert errors == [("StateError", True)] * 5
        assert steps == [2, 2, 0]
        assert ratio > 3
        for mine, theirs in zip(gradients, results[0][3], strict=True):
            assert torch.equal(mine, theirs)


def _copied() -> tuple[list[tuple[str, bool]], list[int], float, list[Tensor]]:
    attached, hooked = new_model(), new_model()
    sync = thinwire.attach(attached, thinwire.PowerSGD(matrix_rank=1))
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    hooked.register_comm_hook(state, hooks.powerSGD_hook)
    gradients_of(attached, range(2))
    gradients_of(hooked, range(2))
    copies = [copy.deepcopy(model) for model in (attached, hooked)]
    again = thinwire.attach(copies[0], thinwire.PowerSGD(matrix_rank=1))
    gradients = gradients_of(copies[0], range(3))
    thinwire.attach(copies[1], thinwire.PowerSGD(matrix_rank=1))
    optimizer = torch.optim.SGD(attached.module.parameters(), lr=0.1)
    local = thinwire.LocalSGD(attached.module, optimizer, every_steps=2)
    aggregator = AlgorithmAggregator(attached.parameters(), thinwire.PowerSGD(matrix_rank=1))
    unpicklable = (attached, hooked, sync, local, aggregator)
    pickled = [error_of(partial(pickle.dumps, each)) for each in unpicklable]
    errors = [(name, "state_dict()" in message) for name, message in pickled]
    copied_state = cast(hooks.PowerSGDState, copies[1]._comm_hooks[0][1])
    steps = [sync.stats().steps, state.stats().steps, copied_state.stats().steps]
    return errors, steps, again.stats().compression_ratio, gradients


class Failing(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise MemoryError("out of memory in the backward pass")


def test_a_backward_pass_that_fails_leaves_a_state_that_can_be_saved(pool2: Pool) -> None:
    for told, before, after in pool2.run(_failing_backward):
        assert "call abandon() first" in told[1]
        assert told[0] == "StepError"
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def _failing_backward() -> tuple[tuple[str, str], dict[str, Tensor], dict[str, Tensor]]:
    ddp_model = new_model(bucket_cap_mb=0.0001)
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    ddp_model.register_comm_hook(state, hooks.powerSGD_hook)
    gradients_of(ddp_model, range(3))
    before = dict(state.state_dict()["error"])
    ddp_model.module[0].register_forward_hook(lambda module, inputs, output: Failing.apply(output))  # type: ignore[no-untyped-call]
    with pytest.raises(MemoryError):
        gradients_of(ddp_model, range(3, 4))
    told = error_of(state.state_dict)
    state.abandon()
    return told, before, dict(state.state_dict()["error"])


def test_statistics_are_logged(pool2: Pool) -> None:
    for lines in pool2.run(_logged):
        assert len(lines) == 2
        assert "step 4: compression ratio" in lines[1]


def _logged() -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    powersgd_hooks.logger.addHandler(handler)
    powersgd_hooks.logger.setLevel(logging.INFO)
    ddp_model = new_model()
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0, compression_stats_logging_frequency=2)
    ddp_model.register_comm_hook(state, hooks.powerSGD_hook)
    gradients_of(ddp_model, range(5))
    powersgd_hooks.logger.removeHandler(handler)
    return lines


def test_hooks_without_state_compare_again_in_a_new_group_and_where_a_bucket_has_other_parameters() -> None:
    """The next group may have the name of the one before."""
    compared: list[str] = []
    first, second, third = (torch.zeros(size) for size in (3, 4, 5))
    with patch.object(stateless, "agree", lambda *given: compared.append(given[1]["parameters"])):
        for _ in range(2):
            dist.init_process_group(store=HashStore(), rank=0, world_size=1)
            try:
                transport = ProcessGroupTransport()
                for parameters in ([first, second], [first, second], [first, third], [first]):
                    stateless._agree("16 bits", transport, parameters)
            finally:
                dist.destroy_process_group()
    assert compared == ["(3, 4)", "(3, 5)", "(3,)"] * 2
