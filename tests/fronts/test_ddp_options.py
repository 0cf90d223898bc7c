"""Options of DDP that change what a hook is called for; copies of a model; models that are none of DDP's."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import thinwire
from pool import Pool
from thinwire import GradientSync, PowerSGD, hooks
from thinwire.channel.agreement import check_same
from thinwire.channel.process_group import named_failure
from thinwire.fronts import ddp, ddp_model
from thinwire.sync import engine_of

DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
POWER = PowerSGD(matrix_rank=2)
SMALL_BUCKETS_MB = 0.001


def error_of(action: Callable[[], Any]) -> tuple[str, str]:
    """The error an action raises, PyTorch's too: its type and message."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


class TwoTypes(nn.Module):
    """DDP puts each type of parameter into buckets of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(24, 48)
        self.head = nn.Linear(48, 24).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).double())
        return out


class TwoOutputs(nn.Module):
    """Layers that share nothing, so that each may have a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 48), nn.Linear(24, 40)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


class Checkpointed(nn.Module):
    """A layer whose backward pass runs inside the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        inside: Tensor = checkpoint(self.middle, self.first(x), use_reentrant=True)
        out: Tensor = self.last(inside)
        return out


class OneOfTwo(nn.Module):
    """Only the later layer is used; DDP hands over the earlier one's bucket last."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Linear(24, 48), nn.Linear(24, 40)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def inputs_of(step: int) -> Tensor:
    return torch.randn(16, 24, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def loss_of(model: nn.Module, step: int) -> Tensor:
    outputs = model(inputs_of(step))
    both = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.stack([each.square().mean().float() for each in both]).sum()


def train(model: nn.Module, steps: range) -> list[Tensor]:
    """Learning rate one; the parameters at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, step))
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


WAYS = ["attach", "hook", "hook in a hook of one's own"]


# A static graph


@pytest.mark.parametrize("way", WAYS)
def test_a_static_graph_of_two_types(pool2: Pool, way: str) -> None:
    """DDP calls both buckets of the first step its first, and neither its last."""
    for steps, ratio, parameters in (results := pool2.run(_static, way, {})):
        assert steps == 3
        assert ratio > 1.5
        assert all(map(torch.equal, parameters, results[0][2]))


@pytest.mark.skipif("bucket_cap_mb_list" not in DDP_OPTIONS, reason="DDP has no bucket_cap_mb_list yet")
def test_a_static_graph_with_sizes_of_buckets(pool2: Pool) -> None:
    for steps, ratio, parameters in (results := pool2.run(_static, "attach", {"bucket_cap_mb_list": [1, 1]})):
        assert steps == 3
        assert ratio > 1.5
        assert all(map(torch.equal, parameters, results[0][2]))


def _static(way: str, options: dict[str, Any]) -> tuple[int, float, list[Tensor]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoTypes(), static_graph=True, **options)
    state = registered(model, way)
    parameters = train(model, range(3))
    return state.stats().steps, state.stats().compression_ratio, parameters


NEW_OPTIONS = {
    "batched_grad_copy": "batched_grad_copy" in DDP_OPTIONS,
    "lazy_bucket_allocation": "lazy_bucket_allocation" in DDP_OPTIONS,
    "finalize_backward": hasattr(DistributedDataParallel, "finalize_backward"),
}


@pytest.mark.parametrize("option", NEW_OPTIONS)
def test_an_option_that_torch_2_6_has_not_changes_no_result(pool2: Pool, option: str) -> None:
    if not NEW_OPTIONS[option]:
        pytest.skip(f"DDP has no {option} yet")
    for steps, ratio, with_it, without in pool2.run(_with_and_without, option):
        assert steps == 3
        assert ratio > 1.5
        assert all(map(torch.equal, with_it, without))


def _with_and_without(option: str) -> tuple[int, float, list[Tensor], list[Tensor]]:
    by_hand = option == "finalize_backward"
    options: list[dict[str, Any]] = [{}, {} if by_hand else {option: True}]
    results = []
    for finalized_by_hand, each in zip((False, by_hand), options, strict=True):
        torch.manual_seed(0)
        model: Any = DistributedDataParallel(TwoTypes(), bucket_cap_mb=SMALL_BUCKETS_MB, **each)
        sync = thinwire.attach(model, POWER)
        if finalized_by_hand:
            model.require_manual_backward_finalization = True
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, step))
            if finalized_by_hand:
                model.finalize_backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    return sync.stats().steps, sync.stats().compression_ratio, results[1], results[0]


class Frozen(nn.Module):
    """Layers of three types, so of three buckets; none of one is trained any more."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24).double(), nn.Linear(24, 24).half()])
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        for layer, dtype in zip(self.layers, (torch.float32, torch.float64, torch.float16), strict=True):
            x = layer(x.to(dtype))
        return x


@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("layer", range(3))
def test_a_layer_is_frozen_after_the_model_was_wrapped(
    pool2: Pool, options: dict[str, Any], layer: int
) -> None:
    """DDP still hands over its bucket, wherever it stands; a step is one step."""
    for steps, buckets, ratio in pool2.run(_frozen, options, layer):
        assert steps == [1, 2, 3]
        assert buckets > 1
        assert ratio > 1.5


def _frozen(options: dict[str, Any], layer: int) -> tuple[list[int], int, float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Frozen(layer), **options)
    model.module.layers[layer].requires_grad_(False)
    sync = thinwire.attach(model, POWER)
    steps = []
    for step in range(3):
        train(model, range(step, step + 1))
        steps.append(sync.stats().steps)
    return steps, len(engine_of(sync).plans), sync.stats().compression_ratio


@pytest.mark.parametrize("way", WAYS[:2])
def test_parameters_of_which_ddp_has_no_gradient_are_refused(pool2: Pool, way: str) -> None:
    """DDP makes buckets once: what is unfrozen or added later would drift apart without a word."""
    for told in pool2.run(_unknown_to_ddp, way):
        assert [error for error, _ in told] == ["StepError", "StepError"]
        assert "first.bias is trained, and DDP averages no gradient of it" in told[0][1]
        assert "second.added is trained" in told[1][1]


def _unknown_to_ddp(way: str) -> list[tuple[str, str]]:
    told = []
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
        told.append(error_of(functools.partial(train, model, range(1, 2))))
    return told


# Steps that never finish


@pytest.mark.skipif("skip_all_reduce_unused_params" not in DDP_OPTIONS, reason="DDP can't skip buckets yet")
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_skips_buckets_is_refused(pool2: Pool, way: str) -> None:
    for error, message in pool2.run(_skipping, way):
        assert error == "AttachError"
        assert "build the DDP model without it" in message


def _skipping(way: str) -> tuple[str, str]:
    model = DistributedDataParallel(
        OneOfTwo(), find_unused_parameters=True, skip_all_reduce_unused_params=True
    )

    def attach_and_train() -> None:
        registered(model, way)
        train(model, range(1))

    return error_of(attach_and_train)


@pytest.mark.skipif("skip_all_reduce_unused_params" not in DDP_OPTIONS, reason="DDP can't skip buckets yet")
def test_a_step_that_ddp_ends_too_early_raises(pool2: Pool) -> None:
    """An option that nobody knows yet may leave a bucket out; DDP would wait for ever."""
    for error, message, messages in pool2.run(_too_early):
        assert error == "StepError"
        assert "DDP ended a step after" in message
        assert messages == "can be saved"


def _too_early() -> tuple[str, str, str]:
    model = DistributedDataParallel(
        OneOfTwo(),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=SMALL_BUCKETS_MB,
    )
    model.skip_all_reduce_unused_params = False  # DDP itself has noted it already
    sync = thinwire.attach(model, POWER)
    with patch.object(ddp, "PATIENCE_SECONDS", 0.1):
        error, message = error_of(lambda: train(model, range(1)))
    return error, message, "can be saved" if sync.state_dict() else ""


def test_two_backward_passes_of_one_step(pool2: Pool) -> None:
    """After the first DDP still waits for gradients, and so do we."""
    for steps, ratio, gap in pool2.run(_in_two_passes):
        assert steps == 2
        assert ratio > 1.5
        assert gap < 1e-5


def _in_two_passes() -> tuple[int, float, float]:
    torch.manual_seed(0)
    plain, ours = (DistributedDataParallel(TwoOutputs(), bucket_cap_mb=SMALL_BUCKETS_MB) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    sync = thinwire.attach(ours, POWER)
    totals = []
    for model in (plain, ours):
        model.zero_grad()
        total = torch.zeros(48, 24)
        for step in range(2):
            model.zero_grad()
            for output in reversed(model(inputs_of(step))):
                torch.autograd.backward(output.square().mean())
            total += model.module.first.weight.grad
        totals.append(total)
    totals[1] += dict(sync.state_dict()["error"])["first.weight"]
    gap = (totals[0] - totals[1]).norm() / totals[0].norm()
    return sync.stats().steps, sync.stats().compression_ratio, float(gap)


def test_a_backward_pass_inside_another(pool2: Pool) -> None:
    for steps, ratio, parameters in (results := pool2.run(_inside_another)):
        assert steps == 3
        assert ratio > 1.5
        assert all(map(torch.equal, parameters, results[0][2]))


def _inside_another() -> tuple[int, float, list[Tensor]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Checkpointed(), bucket_cap_mb=SMALL_BUCKETS_MB)
    sync = thinwire.attach(model, POWER)
    parameters = train(model, range(3))
    return sync.stats().steps, sync.stats().compression_ratio, parameters


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


def test_the_reducer_in_python_is_refused(pool2: Pool) -> None:
    # Where nothing is compiled, torch 2.6 takes the usual one after all, and hooks are called with buckets.
    falls_back = hasattr(DistributedDataParallel, "_should_disable_cpp_reducer")
    for told in pool2.run(_python_reducer):
        assert len(told) == 3
        for error, message in told[:1] if falls_back else told:
            assert error == "AttachError"
            assert 'torch._dynamo.config.optimize_ddp="python_reducer"' in message


def _python_reducer() -> list[tuple[str, str]]:
    with python_reducer():
        models = [DistributedDataParallel(nn.Linear(24, 24)) for _ in range(3)]
    told = [error_of(lambda: thinwire.attach(models[0], POWER))]
    models[1].register_comm_hook(None, hooks.fp16_compress_hook)
    models[2].register_comm_hook(hooks.PowerSGDState(None), hooks.powerSGD_hook)
    return told + [error_of(functools.partial(train, model, range(1))) for model in models[1:]]


# Copies


@pytest.mark.parametrize("way", ["attach", "hook"])
def test_a_copy_refuses_to_train_until_it_is_attached(pool2: Pool, way: str) -> None:
    results = pool2.run(_copied, way)
    for averaged, refused, first, second, inner in results:
        assert averaged
        assert refused[0] == "AttachError"
        assert "copied_model" in refused[1]
        assert first[0] == 3
        assert second[0] == inner[0] == 2
        assert min(first[1], second[1], inner[1]) > 1.5
        assert all(map(torch.equal, second[2], results[0][3][2]))


def test_a_copy_is_refused_from_registering_on_and_says_what_to_do(pool2: Pool) -> None:
    for untrained, hooked, evaluated in pool2.run(_copied_early):
        assert untrained[0] == hooked[0] == evaluated[0] == "AttachError"
        assert "would train uncompressed; copy it again" in untrained[1]
        assert untrained == hooked
        assert "copy again and attach that copy first" in evaluated[1]


def _copied_early() -> list[tuple[str, str]]:
    """Before the first step, of a model with a hook without memory, and attached after a forward pass."""
    model, hooked = (DistributedDataParallel(nn.Linear(24, 24)) for _ in range(2))
    thinwire.attach(model, POWER)
    ddp_model.register(hooked, None, hooks.fp16_compress_hook)
    evaluated = copy.deepcopy(model)
    evaluated(inputs_of(0))
    calls: list[Callable[[], Any]] = [
        lambda: train(copy.deepcopy(model), range(1)),
        lambda: train(copy.deepcopy(hooked), range(1)),
        lambda: thinwire.attach(evaluated, POWER),
    ]
    return [error_of(call) for call in calls]


Trained = tuple[int, float, list[Tensor]]


def _copied(way: str) -> tuple[bool, tuple[str, str], Trained, Trained, Trained]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24)))
    state = registered(model, way)
    train(model, range(2))
    follower = AveragedModel(model)
    follower.update_parameters(model)
    averaged = torch.equal(follower(inputs_of(0)), model(inputs_of(0)))
    refused = error_of(lambda: train(copy.deepcopy(copy.deepcopy(model)), range(1)))
    attached = copy.deepcopy(model)
    first = train(model, range(2, 3))
    stats = state.stats()
    inner = DistributedDataParallel(copy.deepcopy(model.module))
    return (
        averaged,
        refused,
        (stats.steps, stats.compression_ratio, first),
        _trained(attached),
        _trained(inner),
    )


def _trained(model: DistributedDataParallel) -> Trained:
    sync = thinwire.attach(model, POWER)
    parameters = train(model, range(2))
    return sync.stats().steps, sync.stats().compression_ratio, parameters


def test_a_copy_of_a_model_with_another_hook_takes_ours(pool2: Pool) -> None:
    """Torch's list of hooks is copied, its reducer is not: the copy has no hook, and join must know."""
    assert pool2.run(_copy_without) == [("", False)] * 2


def _copy_without() -> tuple[str, bool]:
    model = DistributedDataParallel(nn.Linear(24, 24))
    model.register_comm_hook(None, hooks.allreduce_hook)
    assert ddp_model.hook_of(model) == ("allreduce_hook", True)
    return ddp_model.hook_of(copy.deepcopy(model))


# Models and gradients that can't be averaged


class Tabled(nn.Module):
    """An embedding inside a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))


def test_what_is_not_ddp_is_told_what_to_do(pool2: Pool) -> None:
    for plain, parallel, sharded, local, joined, embedding, table, inside in pool2.run(_not_ddp):
        assert "got Linear; wrap it first" in plain
        assert "DistributedDataParallel(model.module)" in parallel
        assert "wrap it first" not in parallel + sharded + joined
        assert 'give mesh["shard"] to fully_shard' in sharded
        assert "got FSDPLinear" in joined
        assert "thinwire.attach takes models of fully_shard (FSDP2)" in joined
        assert 'mesh["replicate"] to thinwire.attach or LocalSGD' in local
        assert "the Embedding that is the model makes sparse gradients" in embedding
        assert 'the Embedding "layers.0" of the Tabled makes sparse gradients' in table
        assert "step an optimizer after backward()" in inside


def _not_ddp() -> list[str]:
    sharded = nn.Linear(8, 8)
    fully_shard(sharded)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    tables = [DistributedDataParallel(module) for module in (nn.Embedding(8, 4, sparse=True), Tabled())]
    steps_inside = nn.Linear(8, 8)
    # What torch.distributed.optim._apply_optimizer_in_backward, whose import warns, leaves on a parameter.
    steps_inside.weight._in_backward_optimizers = [torch.optim.SGD([steps_inside.weight], lr=0.1)]  # type: ignore[attr-defined]
    calls: list[Callable[[], Any]] = [
        lambda: thinwire.attach(nn.Linear(8, 8), POWER),
        lambda: thinwire.attach(nn.DataParallel(nn.Linear(8, 8)), POWER),
        lambda: thinwire.attach(sharded, POWER),
        lambda: thinwire.LocalSGD(sharded, optimizer, every_steps=2),
        lambda: thinwire.join(sharded).__enter__(),
        lambda: thinwire.attach(tables[0], POWER),
        lambda: thinwire.attach(tables[1], POWER),
        lambda: thinwire.attach(DistributedDataParallel(steps_inside), POWER),
    ]
    told = [error_of(call) for call in calls]
    assert {error for error, _ in told} == {"AttachError"}
    return [message for _, message in told]


def test_a_failed_collective_names_uneven_batches_and_attach() -> None:
    with pytest.raises(thinwire.CommunicationError) as raised, named_failure("step 7"):
        raise RuntimeError("Connection closed by peer")
    assert "uneven batches: train inside thinwire.join" in str(raised.value)
    assert "made on every process (attach, " in str(raised.value)


def test_of_unlike_algorithms_no_settings_are_told() -> None:
    alike = {"thinwire": "1", "committed steps": "0"}
    told = [
        {**alike, "algorithm": "PowerSGD", "matrix_rank": "4", "seed": "0"},
        {**alike, "algorithm": "Cast", "dtype": "'fp16'"},
    ]
    with pytest.raises(thinwire.AgreementError) as raised:
        check_same(told, "step 0")
    assert str(raised.value).startswith(
        "step 0: process 0 has algorithm PowerSGD, process 1 has algorithm Cast. "
    )
