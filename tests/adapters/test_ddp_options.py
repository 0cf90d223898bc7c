"""Options of DDP that change what a hook is called for; copies of a model; models that are none of DDP's."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import thinwire
from processes import in_each_process
from thinwire import GradientSync, PowerSGD, hooks
from thinwire.adapters import ddp, ddp_model
from thinwire.sync import engine_of
from training import are_alike, batch_of, ddp_of, raised_by, refused

DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
POWER = PowerSGD(matrix_rank=2)


class OfTypes(nn.Sequential):
    """Layers of different types; DDP puts each type of parameter into buckets of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x.to(next(layer.parameters()).dtype))
        return x


def two_types() -> OfTypes:
    return OfTypes(nn.Linear(24, 48), nn.Linear(48, 24).double())


class TwoOutputs(nn.Module):
    """Layers that share nothing, so that each may have a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 48), nn.Linear(24, 40)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


class OneOfTwo(TwoOutputs):
    """Only the later layer is used; DDP hands over the earlier one's bucket last."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = self.second(x)
        return out


def loss_of(model: nn.Module, step: int) -> Tensor:
    outputs = model(batch_of(step))
    both = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.stack([output.square().mean().float() for output in both]).sum()


def train(model: nn.Module, steps: range, finalize: Callable[[], object] = lambda: None) -> list[Tensor]:
    """Train, and return the parameters at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, step))
        finalize()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def registered(model: DistributedDataParallel, way: str) -> GradientSync | hooks.PowerSGDState:
    """Average with PowerSGD of matrix rank 2."""
    if way == "attach":
        return thinwire.attach(model, POWER)
    state = hooks.PowerSGDState(None, 2, start_powerSGD_iter=0)
    if way == "hook":
        model.register_comm_hook(state, hooks.powerSGD_hook)
    else:
        model.register_comm_hook(None, lambda _, bucket: hooks.powerSGD_hook(state, bucket))
    return state


WAYS = ["attach", "hook", "hook in a hook of one's own"]  # the last one can't find its model


# A static graph


@pytest.mark.parametrize("way", ["attach", WAYS[-1]])
@in_each_process(2)
def test_a_static_graph_of_two_types(way: str) -> None:
    """DDP calls both buckets of the first step its first, and neither its last."""
    lists: list[dict[str, Any]] = [{"bucket_cap_mb_list": [1, 1]}] * ("bucket_cap_mb_list" in DDP_OPTIONS)
    for options in ({}, *lists):
        model = DistributedDataParallel(two_types(), static_graph=True, **options)
        state = registered(model, way)
        assert are_alike(train(model, range(3)))
        check_trained(state)


def check_trained(state: GradientSync | hooks.PowerSGDState, steps: int = 3) -> None:
    assert state.stats().steps == steps
    assert state.stats().compression_ratio > 1.5


NEW_OPTIONS = {
    "batched_grad_copy": "batched_grad_copy" in DDP_OPTIONS,
    "lazy_bucket_allocation": "lazy_bucket_allocation" in DDP_OPTIONS,
    "finalize_backward": hasattr(DistributedDataParallel, "finalize_backward"),
}


@pytest.mark.parametrize(
    "option",
    [
        pytest.param(option, marks=pytest.mark.skipif(not is_there, reason=f"DDP has no {option} yet"))
        for option, is_there in NEW_OPTIONS.items()
    ],
)
@in_each_process(2)
def test_an_option_that_torch_2_6_has_not_changes_no_result(option: str) -> None:
    results = []
    for options in ({}, {option: True}):
        torch.manual_seed(0)
        by_hand = options.pop("finalize_backward", False)
        model: Any = ddp_of(two_types(), **options)
        model.require_manual_backward_finalization = by_hand
        sync = thinwire.attach(model, POWER)
        finalize = model.finalize_backward if by_hand else lambda: None
        results.append(train(model, range(3), finalize))
    check_trained(sync)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
@in_each_process(2)
def test_a_layer_is_frozen_after_the_model_was_wrapped(option: str) -> None:
    """DDP still hands over its bucket, wherever it stands; a step is one step."""
    for layer in range(3):
        torch.manual_seed(0)
        layers = OfTypes(nn.Linear(24, 24), nn.Linear(24, 24).double(), nn.Linear(24, 24).half())
        model = ddp_of(layers, **{option: True})
        layers[layer].requires_grad_(False)
        sync = thinwire.attach(model, POWER)
        for step in range(3):
            train(model, range(step, step + 1))
            check_trained(sync, step + 1)
        assert len(engine_of(sync).buckets.plans) > 1


@pytest.mark.parametrize("way", WAYS[:2])
@in_each_process(2)
def test_parameters_of_which_ddp_has_no_gradient_are_refused(way: str) -> None:
    """DDP makes buckets once: what is unfrozen or added later would drift apart without a word."""
    for is_added in (False, True):
        module = TwoOutputs()
        module.first.bias.requires_grad_(is_added)
        model = DistributedDataParallel(module)
        if is_added:
            module.second.register_parameter("added", nn.Parameter(torch.zeros(3)))
        registered(model, way)
        if not is_added:
            train(model, range(1))
        module.first.bias.requires_grad_(True)
        name = "second.added" if is_added else "first.bias"
        with pytest.raises(thinwire.StepError, match=f"{name} is trained, but DDP"):
            train(model, range(1, 2))


# Steps that never finish


@pytest.mark.parametrize("way", ["attach", WAYS[-1]])
@in_each_process(2)
def test_a_model_that_skips_or_delays_buckets_is_refused(way: str) -> None:
    module = TwoOutputs()
    skipping = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    delayed = [("second.weight", module.second.weight)]
    delaying = {"delay_all_reduce_named_params": delayed, "param_to_hook_all_reduce": module.first.weight}
    models: list[tuple[nn.Module, dict[str, Any]]] = [(module, delaying)]
    if "skip_all_reduce_unused_params" in DDP_OPTIONS:
        models.append((OneOfTwo(), skipping))
    for inner, options in models:
        model = DistributedDataParallel(inner, **options)
        with refused(thinwire.AttachError, "build the DDP model without it"):
            registered(model, way)
            train(model, range(1))


@pytest.mark.skipif("skip_all_reduce_unused_params" not in DDP_OPTIONS, reason="DDP can't skip buckets yet")
@in_each_process(2)
def test_a_step_that_ddp_ends_too_early_raises() -> None:
    """An option that nobody knows yet may leave a bucket out; DDP would wait for ever."""
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    model = ddp_of(OneOfTwo(), bucket_cap_mb=0.001, **options)
    model.skip_all_reduce_unused_params = False  # DDP itself has noted it already
    sync = thinwire.attach(model, POWER)
    early = pytest.raises(thinwire.StepError, match="DDP ended a step after")
    with patch.object(ddp, "PATIENCE_SECONDS", 0.1), early:
        train(model, range(1))
    assert sync.state_dict()


@in_each_process(2)
def test_two_backward_passes_of_one_step() -> None:
    """After the first DDP still waits for gradients, and so do we."""
    torch.manual_seed(0)
    plain, ours = (ddp_of(TwoOutputs(), bucket_cap_mb=0.001) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    sync, totals = thinwire.attach(ours, POWER), []
    for model in (plain, ours):
        model.zero_grad()
        total = torch.zeros(48, 24)
        for step in range(2):
            model.zero_grad()
            for output in reversed(model(batch_of(step))):
                torch.autograd.backward(output.square().mean())
            total += model.module.first.weight.grad
        totals.append(total)
    totals[1] += dict(sync.state_dict()["error"])["first.weight"]
    check_trained(sync, 2)
    assert (totals[0] - totals[1]).norm() < 1e-5 * totals[0].norm()


@contextmanager
def python_reducer() -> Iterator[None]:
    """DDP's reducer in Python; afterwards all that DDP switches on with it is off again."""
    inductor = torch._inductor.config.patch(_fuse_ddp_communication=False, _fuse_ddp_bucket_size=25)
    rules = torch._dynamo.trace_rules
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"), inductor:
        try:
            yield
        finally:
            rules.LEGACY_MOD_INLINELIST.discard("torch.nn.parallel.distributed")
            rules.get_legacy_mod_inlinelist.cache_clear()


@in_each_process(2)
def test_the_reducer_in_python_is_refused() -> None:
    with python_reducer():
        models = [DistributedDataParallel(nn.Linear(24, 24)) for _ in range(3)]
    errors = [raised_by(lambda: thinwire.attach(models[0], POWER))]
    # If nothing is compiled, torch 2.6 takes the usual one after all, and hooks are called with buckets.
    if not hasattr(DistributedDataParallel, "_should_disable_cpp_reducer"):
        models[1].register_comm_hook(None, hooks.fp16_compress_hook)
        models[2].register_comm_hook(hooks.PowerSGDState(None), hooks.powerSGD_hook)
        errors += [raised_by(partial(train, model, range(1))) for model in models[1:]]
    for kind, message in errors:
        assert kind == "AttachError"
        assert 'torch._dynamo.config.optimize_ddp="python_reducer"' in message


# Copies


@pytest.mark.parametrize("way", ["attach", "hook"])
@in_each_process(2)
def test_a_copy_refuses_to_train_until_it_is_attached(way: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24)))
    state = registered(model, way)
    train(model, range(2))
    follower = AveragedModel(model)
    follower.update_parameters(model)
    assert torch.equal(follower(batch_of(0)), model(batch_of(0)))
    with pytest.raises(thinwire.AttachError, match="copied_model"):
        train(copy.deepcopy(copy.deepcopy(model)), range(1))
    attached = copy.deepcopy(model)
    train(model, range(2, 3))
    check_trained(state)
    sync = thinwire.attach(attached, POWER)
    assert are_alike(train(attached, range(2)))
    check_trained(sync, 2)


@in_each_process(2)
def test_a_copy_is_refused_from_registering_on_and_says_what_to_do() -> None:
    """Before the first step, of a model with a hook without memory, and attached after a forward pass."""
    model, hooked = (DistributedDataParallel(nn.Linear(24, 24)) for _ in range(2))
    thinwire.attach(model, POWER)
    ddp_model.register(hooked, None, hooks.fp16_compress_hook)
    evaluated = copy.deepcopy(model)
    evaluated(batch_of(0))
    for copied in (copy.deepcopy(model), copy.deepcopy(hooked)):
        with pytest.raises(thinwire.AttachError, match="would train uncompressed; copy the original"):
            train(copied, range(1))
    with pytest.raises(thinwire.AttachError, match="before its first forward pass"):
        thinwire.attach(evaluated, POWER)
    # Torch's list of hooks is copied, its reducer is not: the copy has no hook, and join must know.
    assert ddp_model.hook_of(hooked) == ("fp16_compress_hook", True)
    assert ddp_model.hook_of(copy.deepcopy(hooked)) == ("", False)


# Models and gradients that can't be averaged


class Tabled(nn.Module):
    """An embedding inside a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))


@in_each_process(2)
def test_what_is_not_ddp_is_told_what_to_do() -> None:
    sharded = nn.Linear(8, 8)
    fully_shard(sharded)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    tables = [DistributedDataParallel(module) for module in (nn.Embedding(8, 4, sparse=True), Tabled())]
    frozen = DistributedDataParallel(nn.Linear(8, 8))
    frozen.requires_grad_(False)
    converted = DistributedDataParallel(nn.Linear(8, 8)).to(torch.bfloat16)
    hooked, attached = (DistributedDataParallel(nn.Linear(8, 8)) for _ in range(2))
    hooked.register_comm_hook(None, hooks.allreduce_hook)
    attach: Any = thinwire.attach
    attach(attached, POWER)
    steps_inside = nn.Linear(8, 8)
    # What torch.distributed.optim._apply_optimizer_in_backward, whose import warns, leaves on a parameter.
    steps_inside.weight._in_backward_optimizers = [torch.optim.SGD([steps_inside.weight], lr=0.1)]  # type: ignore[attr-defined]
    refusals: dict[str, Callable[[], object]] = {
        "got Linear; wrap it first": lambda: thinwire.attach(nn.Linear(8, 8), POWER),
        "got PowerSGD for the model and DistributedDataParallel for": lambda: attach(POWER, attached),
        "no parameter of the model is trained": lambda: attach(frozen, POWER),
        "the model was converted after DDP was built": lambda: attach(converted, POWER),
        "allows only one": lambda: attach(hooked, POWER),
        "sync.detach()": lambda: attach(attached, POWER),
        "DistributedDataParallel(model.module)": lambda: thinwire.attach(
            nn.DataParallel(nn.Linear(8, 8)), POWER
        ),
        'pass mesh["shard"] to fully_shard': lambda: thinwire.attach(sharded, POWER),
        'mesh["replicate"] to thinwire.attach or LocalSGD': lambda: thinwire.LocalSGD(
            sharded, optimizer, every_steps=2
        ),
        "got FSDPLinear, sharded by FSDP1; thinwire.attach takes models of fully_shard (FSDP2)": (
            lambda: thinwire.join(sharded).__enter__()
        ),
        "the Embedding that is the model makes sparse": lambda: thinwire.attach(tables[0], POWER),
        'the Embedding "layers.0" of the Tabled makes sparse': lambda: thinwire.attach(tables[1], POWER),
        "step an optimizer after backward()": lambda: thinwire.attach(
            DistributedDataParallel(steps_inside), POWER
        ),
    }
    for words, call in refusals.items():
        kind, message = raised_by(call)
        assert kind in ("AttachError", "ConfigError"), message
        assert words in message
        assert ("wrap it first" in message) == ("wrap it first" in words)


# A DDP model inside of something else


class Wrapper(nn.Module):
    """Stands for what a framework, or a user, puts around a model."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.inside = nn.ModuleList(inside)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.inside:
            x = module(x)
        return x


@in_each_process(2)
def test_the_ddp_model_inside_of_a_wrapper_is_taken() -> None:
    plain, ours = (Wrapper(Wrapper(DistributedDataParallel(two_types()))) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    sync = thinwire.attach(ours, POWER)
    with thinwire.join(ours):
        assert are_alike(train(ours, range(3)))
    check_trained(sync)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with thinwire.LocalSGD(plain, optimizer, every_steps=2):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(plain, 0))
        # DDP averages no gradient of it.
        assert not are_alike([p.grad for p in plain.parameters() if p.grad is not None])
        optimizer.step()
    assert are_alike(plain.parameters())


@in_each_process(2)
def test_a_wrapper_of_several_or_of_more_is_refused() -> None:
    two = Wrapper(*(DistributedDataParallel(nn.Linear(8, 8)) for _ in range(2)))
    more = Wrapper(DistributedDataParallel(nn.Linear(8, 8)), nn.Linear(8, 8))
    several, outside = "the Wrapper contains 2 DDP models", "inside.1.weight of the Wrapper is trained"
    optimizer = torch.optim.SGD(more.parameters(), lr=0.1)
    for call, words in (
        (lambda: thinwire.attach(two, POWER), several),
        (lambda: thinwire.join(two).__enter__(), several),
        (lambda: thinwire.attach(more, POWER), outside),
        (lambda: thinwire.join(more).__enter__(), outside),
        (lambda: thinwire.LocalSGD(more, optimizer, every_steps=2), outside),
    ):
        with refused(thinwire.AttachError, words):
            call()


# A model that changes after it was wrapped


REPLACED, CONVERTED = "0.weight was replaced (as by load_state_dict(assign=True))", "the model was converted"
CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "converted": (lambda model: model.to(torch.bfloat16), CONVERTED),
    "converted back": (lambda model: model.bfloat16().float(), CONVERTED),
    "in another memory format": (lambda model: model.to(memory_format=torch.channels_last), CONVERTED),
    "a layer more": (lambda model: model.module.append(nn.Conv2d(8, 8, 1)), "3.weight is trained, but DDP"),
    "another layer": (lambda model: model.module.__setitem__(0, nn.Linear(24, 48)), REPLACED),
    "another weight": (lambda m: setattr(m.module[0], "weight", nn.Parameter(torch.ones(48, 24))), REPLACED),
    "loaded": (lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True), REPLACED),
}


@pytest.mark.parametrize("change", CHANGES)
@in_each_process(2)
def test_a_change_that_ddp_does_not_see_is_told_before_the_next_pass(change: str) -> None:
    make, words = CHANGES[change]
    for steps in (0, 2):
        layers = nn.Linear(24, 48), nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 8, 2)
        model = DistributedDataParallel(nn.Sequential(*layers))
        sync = thinwire.attach(model, POWER)
        train(model, range(steps))
        make(model)
        inputs = batch_of(0).to(next(model.parameters()).dtype)
        # To evaluate it is no harm.
        with torch.no_grad():
            model(inputs)
        with refused(thinwire.StepError, words):
            model(inputs)
        assert sync.stats().steps == steps
        sync.detach()
        if words == REPLACED:
            with refused(thinwire.AttachError, words):
                thinwire.attach(model, POWER)


@in_each_process(2)
def test_a_memory_format_of_before_it_was_attached_is_told_in_the_first_pass() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Unflatten(1, (6, 2, 2)), nn.Conv2d(6, 8, 2)))
    thinwire.attach(model.to(memory_format=torch.channels_last), POWER)  # type: ignore[call-overload]
    with refused(thinwire.StepError, "the model was converted"):
        train(model, range(1))


@in_each_process(2)
def test_what_trains_nothing_more_is_no_change() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(24, 48)))
    sync = thinwire.attach(model, POWER)
    # As sharpness-aware training without a copy: in the place of each weight stands one that it moved to.
    for step in range(2):
        moved = {name: parameter + 0.01 for name, parameter in model.named_parameters()}
        outputs = torch.func.functional_call(model, moved, (batch_of(step),))
        model.zero_grad()
        outputs.square().mean().backward()
        assert are_alike(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    model.module.append(nn.Dropout(0.0))
    assert are_alike(train(model, range(2, 4)))
    check_trained(sync, 4)


@pytest.mark.parametrize("way", WAYS[:2])
@in_each_process(2)
def test_a_deleted_model_is_freed_at_once_so_that_ddp_can_take_its_module_again(way: str) -> None:
    module = nn.Linear(24, 48)
    model = DistributedDataParallel(module)
    state = registered(model, way)
    train(model, range(2))
    deleted = [weakref.ref(it) for it in (model, engine_of(getattr(state, "sync", state)))]
    del model, state
    assert [it() for it in deleted] == [None, None]
    again = DistributedDataParallel(module)
    registered(again, way)
    assert are_alike(train(again, range(2, 4)))


# Optimizers inside the backward pass


def stepping_in_hooks(model: nn.Module, hooked: list[Any]) -> None:
    """Each parameter has an optimizer of its own, in a hook, as torch's tutorial has it."""
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    parameter: Any
    for parameter in optimizers:
        hooked.append(parameter.register_post_accumulate_grad_hook(step))


@pytest.mark.parametrize("is_late", [False, True], ids=["before attach", "after attach"])
@in_each_process(2)
def test_an_optimizer_in_a_hook_of_the_parameters_is_refused_before_it_steps(is_late: bool) -> None:
    model = DistributedDataParallel(nn.Linear(24, 48))
    start, hooked = [p.detach().clone() for p in model.parameters()], list[Any]()
    if not is_late:
        stepping_in_hooks(model, hooked)
    sync = thinwire.attach(model, POWER)
    if is_late:
        stepping_in_hooks(model, hooked)
    with refused(thinwire.StepError, "SGD.step() was called inside the backward pass"):
        torch.autograd.backward(loss_of(model, 0))
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), start, strict=True))
    assert sync.stats().steps == 0


@in_each_process(2)
def test_hooks_that_only_look_and_models_that_are_not_attached_are_left_alone() -> None:
    seen, hooked = list[Any](), list[Any]()
    model, other = DistributedDataParallel(nn.Linear(24, 48)), nn.Linear(24, 48)
    parameter: Any
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    sync = thinwire.attach(model, POWER)
    stepping_in_hooks(other, hooked)
    torch.autograd.backward(loss_of(other, 0))
    assert are_alike(train(model, range(2)))
    assert len(seen) == 4
    check_trained(sync, 2)
    # A detached model is DDP's and the user's own again.
    sync.detach()
    stepping_in_hooks(model, hooked)
    torch.autograd.backward(loss_of(model, 2))
