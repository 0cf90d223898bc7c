"""The names users already type: torch's signatures and defaults, registered with plain DDP."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as stock_default
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as stock_local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock_power
from torch.nn.parallel import DistributedDataParallel

import thinwire
from algorithms.test_conformance import assert_same_state
from processes import in_each_process
from thinwire import PowerSGD, hooks
from thinwire.algorithms.error_feedback import ERROR
from thinwire.comm import ProcessGroupTransport
from thinwire.plan import ParameterSpec
from thinwire.powersgd import AlgorithmAggregator
from thinwire.simulation import Simulation
from training import are_alike, gathered

STATELESS = ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"]
POWER = ["powerSGD_hook", "batched_powerSGD_hook"]


def test_the_state_has_torchs_parameters_and_defaults() -> None:
    theirs = inspect.signature(stock_power.PowerSGDState).parameters
    ours = dict(inspect.signature(hooks.PowerSGDState).parameters)
    options = ours.pop("options")  # what `thinwire.attach` takes, by name
    assert options.kind == inspect.Parameter.VAR_KEYWORD
    assert [(n, p.default) for n, p in ours.items()] == [(n, p.default) for n, p in theirs.items()]
    with pytest.raises(TypeError, match="'hostcheck'"):
        hooks.PowerSGDState(None, hostcheck=False)  # type: ignore[call-arg]


def new_model(bucket_cap_mb: float = 0.01) -> DistributedDataParallel:
    torch.manual_seed(7)
    return DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), bucket_cap_mb=bucket_cap_mb
    )


def new_state(rank: int = 1, group: dist.ProcessGroup | None = None) -> hooks.PowerSGDState:
    return hooks.PowerSGDState(group, rank, start_powerSGD_iter=0)


def hooked(
    state: object, hook: hooks.Hook = hooks.powerSGD_hook, bucket_cap_mb: float = 0.01
) -> DistributedDataParallel:
    model = new_model(bucket_cap_mb)
    model.register_comm_hook(state, hook)
    return model


def gradients_of(ddp_model: DistributedDataParallel, steps: range) -> list[Tensor]:
    for step in steps:
        ddp_model.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        ddp_model(torch.randn(8, 64)).square().mean().backward()
    return [p.grad.clone() for p in ddp_model.parameters() if p.grad is not None]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


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
        ("fp16_compress_wrapper(bf16_compress_hook)", 1e-4, 1e-2),
        ("quantization_pertensor_hook", 1e-4, 0.1),
        ("bf16_compress_wrapper(quantization_perchannel_hook)", 1e-4, 0.1),
    ],
)
@in_each_process(2)
def test_hooks_without_state(name: str, least_gap: float, most_gap: float) -> None:
    """16 and 8 bits leave their mark on the gradient, and no more than that. FACTS 12: bf16 on Gloo."""
    models = new_model(), hooked(None, hook_named(name))
    expected, got = (torch.cat([g.view(-1) for g in gradients_of(m, range(3))]) for m in models)
    assert least_gap <= (expected - got).norm() / expected.norm() <= most_gap
    assert are_alike([got])


@pytest.mark.parametrize(
    "name",
    [
        *POWER,
        "fp16_compress_wrapper(powerSGD_hook)",
        "bf16_compress_wrapper(powerSGD_hook)",
        "fp16_compress_wrapper(batched_powerSGD_hook)",
    ],
)
@in_each_process(2)
def test_hooks_with_state(name: str) -> None:
    """In several buckets on Gloo, and with memory in fp32 whatever the wrapper (FACTS 1, 2 and 10)."""
    state = new_state()
    assert are_alike(gradients_of(hooked(state, hook_named(name)), range(4)))
    assert state.stats().steps == 4
    assert state.stats().messages >= 4 * 2  # a message for each bucket
    saved = state.state_dict()
    assert all(tensor.dtype == torch.float32 for kind in ("error", "factor") for _, tensor in saved[kind])
    assert state.stats().compression_ratio > (16 if "16" in name else 8)
    assert any(cast(Any, route).matrix_rank == 1 for route in state.plan.routes)


@in_each_process(2)
def test_eight_bits_are_off_by_half_a_step_and_show_what_is_not_finite() -> None:
    """One layer of odd size, whose gradient is known: of 100 elements with a scale, the last ones of 53."""
    own = torch.linspace(-1, 3, 63 * 31) * (dist.get_rank() + 1)
    types, all_gather = set(), ProcessGroupTransport.all_gather

    def looked_at(transport: ProcessGroupTransport, output: Tensor, message: Tensor, purpose: str) -> Any:
        if "gradients" in purpose:
            types.add(message.dtype)
        return all_gather(transport, output, message, purpose)

    with patch.object(ProcessGroupTransport, "all_gather", looked_at):
        got = [_gradient_through(hook, own) for hook in (hooks.quantization_pertensor_hook, _per_100)]
        for value in (torch.inf, torch.nan):
            spoiled = _gradient_through(_per_100, own.index_fill(0, torch.tensor([7]), value))
            assert [spoiled[:100].isfinite().any(), spoiled[100:].isfinite().all()] == [False, True]
    off = max((gradient - torch.linspace(-1, 3, 63 * 31) * 1.5).abs().max().item() for gradient in got)
    assert 0 < off <= (4 / 255 / 2 + 8 / 255 / 2) / 2 * 1.0001
    assert types == {torch.uint8}
    hook = _per_100 if dist.get_rank() else hooks.allreduce_hook  # of which only one gathers
    with pytest.raises(thinwire.AgreementError, match="process 1 has algorithm 8 bits"):
        _gradient_through(hook, own)


def _per_100(state, bucket):  # type: ignore[no-untyped-def]
    return hooks.quantization_perchannel_hook(state, bucket, 100)


def _gradient_through(hook: hooks.Hook, gradient: Tensor) -> Tensor:
    model = DistributedDataParallel(nn.Linear(63, 31, bias=False))
    model.register_comm_hook(None, hook)
    model(torch.eye(63)).backward(gradient.view(31, 63).t())
    assert model.module.weight.grad is not None
    return cast(Tensor, model.module.weight.grad).flatten()


@pytest.mark.parametrize("name", ["powerSGD_hook", "allreduce_hook", "post_localSGD_hook"])
@in_each_process(4)
def test_a_process_group_of_some(name: str) -> None:
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    module = nn.Linear(64, 64)
    torch.nn.init.ones_(module.weight)
    ddp_model = DistributedDataParallel(module, process_group=group)
    power, post_local = new_state(group=group), hooks.PostLocalSGDState(group, None, 9, False)
    states: dict[str, Any] = {"powerSGD_hook": power, "post_localSGD_hook": post_local}
    ddp_model.register_comm_hook(states.get(name, group), hook_named(name))
    first, second, third, fourth = gathered(gradients_of(ddp_model, range(2))[0])
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert not torch.equal(first, third)
    assert (power.stats().compression_ratio > 8) == (name in POWER)


@in_each_process(2)
def test_saved_with_torch_and_resumed_with_other_buckets() -> None:
    """FACTS 7: torch's state is keyed by bucket, pickled, and differs between processes."""
    state, again = new_state(), new_state()
    straight = hooked(state)
    gradients_of(straight, range(4))
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    saved = gathered(torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8))
    assert torch.equal(saved[0], saved[1])
    again.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    resumed = hooked(again, bucket_cap_mb=25)
    assert_same(gradients_of(straight, range(4, 7)), gradients_of(resumed, range(4, 7)))
    assert again.stats().compression_ratio > 8


@pytest.mark.parametrize("other_hook", POWER)
@pytest.mark.parametrize("is_hidden", [False, True], ids=["registered", "inside a hook of one's own"])
@in_each_process(2)
def test_a_state_used_on_two_models_is_refused(other_hook: str, is_hidden: bool) -> None:
    state = new_state()
    models = []
    for name in ("powerSGD_hook", other_hook):
        hook = hook_named(name)
        models.append(hooked(None, _hiding(state, hook)) if is_hidden else hooked(state, hook))
    with pytest.raises(thinwire.ConfigError, match="make one state for each model"):
        _ = [gradients_of(model, range(1)) for model in models]


def _hiding(state: hooks.PowerSGDState, hook: hooks.Hook = hooks.powerSGD_hook) -> hooks.Hook:
    """A user's own hook around ours: the state can't find the model."""

    def of_ones_own(own_state, bucket):  # type: ignore[no-untyped-def]
        return hook(state, bucket)

    return of_ones_own


class EqualLayers(nn.ModuleDict):
    """Layers of one shape, used in a different order than they are declared in."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self["b"](self["a"](self["c"](inputs).tanh()).tanh())
        return outputs


@in_each_process(2)
def test_registered_after_the_rebuild_every_layer_gets_its_own_memory() -> None:
    """DDP reorders its buckets after the first step: positions would give layers each other's error."""
    models, states = [], [new_state(), new_state()]
    for _ in range(2):
        torch.manual_seed(7)
        layers = EqualLayers({name: nn.Linear(64, 64) for name in "abc"})
        models.append(DistributedDataParallel(layers, bucket_cap_mb=0.01))
    straight, late = models
    straight.register_comm_hook(states[0], hooks.powerSGD_hook)
    # As fast loops do before their first step: the hook finds its model's names all the same. For good: with
    # a million more objects to look at, each later test of this process would take seconds.
    gc.freeze()
    gradients_of(straight, range(4))
    assert gc.get_freeze_count() > 0
    saved = states[0].state_dict()
    assert set(dict(saved["error"])) == {"a.weight", "b.weight", "c.weight"}
    gradients_of(late, range(3))
    states[1].load_state_dict(saved)
    late.register_comm_hook(states[1], hooks.powerSGD_hook)
    assert_same(gradients_of(straight, range(4, 6)), gradients_of(late, range(4, 6)))


@in_each_process(2)
def test_inside_a_hook_of_ones_own_parameters_have_their_names() -> None:
    states = [new_state() for _ in range(4)]
    straight = hooked(None, _hiding(states[0]))
    gradients_of(straight, range(3))
    saved = states[0].state_dict()
    assert set(dict(saved["parameters"])) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert set(dict(saved["error"])) == {"0.weight", "1.weight"}
    by_position = {"0.weight": "parameter[-4]", "0.bias": "parameter[-3]", "1.weight": "parameter[-2]"}
    for state in states[1:3]:
        state.load_state_dict(saved)
    # As 0.2 named them.
    states[3].load_state_dict(renamed(saved, {**by_position, "1.bias": "parameter[-1]"}))
    resumed, frozen = hooked(None, _hiding(states[1])), new_model()
    assert states[1].state_dict().keys() == saved.keys()
    frozen.module[0].bias.requires_grad_(False)
    frozen = DistributedDataParallel(frozen.module)
    frozen.register_comm_hook(None, _hiding(states[2]))
    with pytest.raises(thinwire.StateError, match=r"this model does not train 0\.bias"):
        gradients_of(frozen, range(1))
    with pytest.raises(thinwire.StateError, match=r"not train parameter\[-1\].*state has no 0\.bias"):
        gradients_of(hooked(None, _hiding(states[3])), range(1))
    assert_same(gradients_of(resumed, range(3, 5)), gradients_of(straight, range(3, 5)))


def renamed(value: Any, names: dict[str, str]) -> Any:
    """Return a saved state in which the parameters have other names."""
    if isinstance(value, tuple):
        return tuple(renamed(item, names) for item in value)
    if isinstance(value, dict):
        return {key: renamed(item, names) for key, item in value.items()}
    return names.get(value, value) if isinstance(value, str) else value


@in_each_process(2)
def test_a_hook_of_ones_own_may_average_some_buckets_itself() -> None:
    state = new_state()

    def of_ones_own(own_state, bucket):  # type: ignore[no-untyped-def]
        return hooks.powerSGD_hook(state, bucket) if bucket.index() else hooks.allreduce_hook(None, bucket)

    gradients_of(hooked(None, of_ones_own), range(3))  # the first pass has a single bucket
    assert (state.stats().steps, set(dict(state.state_dict()["error"]))) == (2, {"0.weight"})


@in_each_process(2)
def test_a_hook_of_ones_own_may_step_when_a_bucket_is_averaged() -> None:
    state, before = new_state(), new_model()

    def of_ones_own(own_state, bucket):  # type: ignore[no-untyped-def]
        optimizer = torch.optim.SGD(bucket.parameters(), lr=1.0)

        def step(future):  # type: ignore[no-untyped-def]
            for parameter, mean in zip(bucket.parameters(), bucket.gradients(), strict=True):
                parameter.grad = mean.clone()
            optimizer.step()
            return future.value()

        return hooks.powerSGD_hook(state, bucket).then(step)

    model = hooked(None, of_ones_own)
    means = gradients_of(model, range(1))
    for after, first, mean in zip(model.parameters(), before.parameters(), means, strict=True):
        torch.testing.assert_close(after, first - mean)


@in_each_process(2)
def test_inside_a_hook_of_ones_own_one_module_must_hold_the_parameters() -> None:
    module = new_model().module
    # Two models of one module, as when a notebook's cell has run again, count as one.
    for second in (module, nn.Sequential(module)):
        twins, state = [DistributedDataParallel(module), DistributedDataParallel(second)], new_state()
        for twin in twins:
            twin.register_comm_hook(None, _hiding(state))
        if second is module:
            gradients_of(twins[1], range(1))
    with pytest.raises(thinwire.ConfigError, match="DDP models for this PowerSGDState"):
        gradients_of(twins[1], range(1))


@in_each_process(2)
def test_a_state_of_the_wrong_kind_is_told() -> None:
    wrapped = [f"fp16_compress_wrapper({name})" for name in ("powerSGD_hook", "post_localSGD_hook")]
    for name in (*STATELESS, *POWER, *wrapped, "post_localSGD_hook", "quantization_pertensor_hook"):
        with pytest.raises((thinwire.ConfigError, thinwire.AttachError), match="StockState"):
            gradients_of(hooked(StockState(), hook_named(name)), range(1))


class StockState:
    """A foreign state."""


@in_each_process(2)
def test_sparse_gradients_are_refused_at_once() -> None:
    model = DistributedDataParallel(nn.Embedding(32, 32, sparse=True))
    model.register_comm_hook(new_state(), hooks.powerSGD_hook)
    with pytest.raises(thinwire.GradientError, match="sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


def test_a_hook_is_wrapped_once_and_a_foreign_one_not_at_all() -> None:
    for hook in (hooks.powerSGD_hook, hooks.batched_powerSGD_hook, hooks.post_localSGD_hook):
        wrapped = hooks.bf16_compress_wrapper(hook)
        assert wrapped is not hook
        assert hooks.fp16_compress_wrapper(wrapped) is wrapped
    for other in (stock_power.powerSGD_hook, stock_default.fp16_compress_hook, None, "powerSGD_hook"):
        with pytest.raises(thinwire.ConfigError, match="use torch's own wrapper"):
            hooks.fp16_compress_wrapper(other)  # type: ignore[arg-type]


BAD_SETTINGS: dict[str, tuple[Any, ...]] = {
    "matrix_approximation_rank": (0, "4"),
    "start_powerSGD_iter": (-1,),
    "warm_start": (None,),
    "batch_tensors_with_same_shape": ("yes",),
    "process_group": ("gloo",),
}


@pytest.mark.parametrize("setting", BAD_SETTINGS)
def test_bad_settings_are_refused_at_once(setting: str) -> None:
    """By the name that was typed, when the state is made; the algorithm's when they are set later, too."""
    state = hooks.PowerSGDState(None)
    for value in BAD_SETTINGS[setting]:
        refused = rf"^{setting} must be .*, got {value!r}$"
        with pytest.raises(thinwire.ConfigError, match=refused):
            hooks.PowerSGDState(**{"process_group": None} | {setting: value})
        if isinstance(getattr(hooks.PowerSGDState, setting, None), property):
            with pytest.raises(thinwire.ConfigError, match=refused):
                setattr(state, setting, value)
    assert state.algorithm(PowerSGD) == PowerSGD(matrix_rank=1, warmup_steps=1000)


@in_each_process(2)
def test_settings_of_a_state_can_be_set_from_the_next_step_on() -> None:
    """Before the first step and after; the residual is kept, and what `sync.use` has set is told."""
    state = hooks.PowerSGDState(None, 1, 1)
    state.matrix_approximation_rank, state.start_powerSGD_iter = 2, 0
    ddp_model = hooked(state)

    def assert_next_step_has_rank(matrix_rank: int) -> None:
        gradients_of(ddp_model, range(state.iter, state.iter + 1))
        memory = state.state_dict()
        assert len(dict(memory["factor"])["0.weight"]) == matrix_rank
        assert dict(memory["error"])["0.weight"].norm() > 0

    assert_next_step_has_rank(2)
    state.matrix_approximation_rank = 8
    assert_next_step_has_rank(8)
    if dist.get_rank() == 0:  # no change: nothing is compared again, for which the others would be needed
        state.matrix_approximation_rank = 8
    assert_next_step_has_rank(8)
    state.sync.use(PowerSGD(matrix_rank=1))
    assert_next_step_has_rank(1)
    assert state.matrix_approximation_rank == 1
    state.matrix_approximation_rank = 3
    state.warm_start, state.min_compression_rate = False, 2.0
    assert_next_step_has_rank(3)
    state.use_error_feedback = False
    assert (state.matrix_approximation_rank, state.min_compression_rate) == (3, 2)
    assert (state.start_powerSGD_iter, state.use_error_feedback, state.warm_start) == (0, False, False)
    state.matrix_approximation_rank = 4 + dist.get_rank()
    words = "process 0 has matrix_approximation_rank 4, process 1 has matrix_approximation_rank 5"
    with pytest.raises(thinwire.AgreementError, match=words):
        gradients_of(ddp_model, range(5, 6))
    state.abandon()
    state.sync.use(thinwire.AllReduce())
    with pytest.raises(
        thinwire.ConfigError, match=r"_rank can't be set: sync.use\(\) has replaced PowerSGD by AllReduce\(\)"
    ):
        state.matrix_approximation_rank = 2


def test_what_else_torchs_states_have_is_there_or_told() -> None:
    """All can be read and set, or a sentence says where they are."""
    power, local = hooks.PowerSGDState(None), hooks.PostLocalSGDState(None, None, 4)
    elsewhere = set()
    for stock, state in ((stock_power.PowerSGDState, power), (stock_local.PostLocalSGDState, local)):
        for name in stock.__slots__:
            if hasattr(state, name):
                setattr(state, name, getattr(state, name))
            else:
                elsewhere.add(name)
    assert "error_dict" in elsewhere
    for name in ("compression_stats", *elsewhere):
        with pytest.raises(
            AttributeError, match=f"a PowerSGDState has no {name}; its memory is in state_dict"
        ):
            getattr(power, name)
    for name in ("matrix_rank", *elsewhere):
        with pytest.raises(AttributeError, match=f"^{name} can't be set on a PowerSGDState; its settings"):
            setattr(power, name, 4)


@in_each_process(2)
def test_the_steps_of_a_state_are_counted_from_where_the_user_says() -> None:
    """As scripts for torch's hook do it when they resume."""
    state = hooks.PowerSGDState(None, start_powerSGD_iter=5)
    for wrong in (-1, 1.5):
        with pytest.raises(thinwire.ConfigError, match="iter must be"):
            state.iter = wrong  # type: ignore[assignment]
    state.iter = 4
    assert state.iter == 4
    model = hooked(state)
    gradients_of(model, range(1))
    assert state.stats().compression_ratio == 1
    gradients_of(model, range(1))
    assert state.iter == 6
    assert state.stats().compression_ratio > 1
    with pytest.raises(thinwire.ConfigError, match="iter can't be set after the first step"):
        state.iter = 0


def test_before_the_first_step_a_state_can_be_saved_loaded_copied_and_sent() -> None:
    state = hooks.PowerSGDState(None)
    assert (state.stats().steps, state.plan.routes) == (0, ())
    empty = state.state_dict()
    state.load_state_dict(empty)
    assert state.state_dict() == empty
    specs = (ParameterSpec.of("0", torch.empty(48, 32)),)
    simulation = Simulation(PowerSGD(matrix_rank=1), [specs], num_workers=1)
    simulation.step([[torch.randn(48 * 32)]])
    (saved,) = simulation.state_dicts()
    state.load_state_dict(saved)
    for copied in (state, copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert_same_state(copied.state_dict(), saved)


@in_each_process(2)
def test_what_sends_messages_is_not_pickled() -> None:
    attached, state = new_model(), new_state()
    sync, model = thinwire.attach(attached, PowerSGD(matrix_rank=1)), hooked(state)
    gradients_of(model, range(2))
    copied_state = cast(hooks.PowerSGDState, copy.deepcopy(model)._comm_hooks[0][1])
    assert [used_state.stats().steps for used_state in (state, copied_state)] == [2, 0]
    optimizer = torch.optim.SGD(attached.module.parameters(), lr=0.1)
    local = thinwire.LocalSGD(attached.module, optimizer, every_steps=2)
    aggregator = AlgorithmAggregator(attached.parameters(), PowerSGD(matrix_rank=1))
    for unpicklable in (attached, model, sync, local, aggregator):
        with pytest.raises(thinwire.StateError, match=r"state_dict\(\)"):
            pickle.dumps(unpicklable)


@in_each_process(2)
def test_statistics_are_logged() -> None:
    state = hooks.PowerSGDState(None, start_powerSGD_iter=0, compression_stats_logging_frequency=2)
    with patch("thinwire.hooks.powersgd_hook.logger") as logger:
        gradients_of(hooked(state), range(5))
    lines = [call.args[0] % call.args[1:] for call in logger.info.call_args_list]
    assert len(lines) == 2
    assert "step 4: compression ratio" in lines[1]


def test_facts_11_the_error_memory_stays_bounded() -> None:
    """Torch's grows as √steps, since differences between processes never leave it."""

    def gradient(step: int, worker: int) -> Tensor:
        """Of low rank, which all share, and noise of its own."""
        shared = torch.randn(48, 2, generator=torch.Generator().manual_seed(step)) @ torch.ones(2, 32)
        own = torch.randn(48, 32, generator=torch.Generator().manual_seed(7_000 + 2 * step + worker))
        return (shared + own).reshape(-1)

    specs = (ParameterSpec.of("0", torch.empty(48, 32)),)
    simulation = Simulation(PowerSGD(matrix_rank=2), [specs], num_workers=2)
    norms = []
    for step in range(150):
        simulation.step([[gradient(step, worker)] for worker in range(2)])
        norms.append(simulation.engines[0].state.memory[ERROR]["0"].norm().item())
    assert simulation.syncs[0].stats().compression_ratio > 5
    assert norms[-1] < 1.15 * norms[49]
