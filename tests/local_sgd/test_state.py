"""Saving and resuming, to the bit; states that do not fit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from members import NESTEROV, POWER, Member, in_each_member, run
from processes import in_each_process
from thinwire import StateError, Streaming, checkpoint
from thinwire.adapters.attach import attach
from thinwire.algorithms import AllReduce, Quantize
from thinwire.powersgd import AlgorithmAggregator
from thinwire.sync.state import digest_of
from training import batch_of, flat, new_model, new_optimizer, refused, train

EVERY_4: dict[str, Any] = {"every_steps": 4, "algorithm": POWER}
IN_THREE: dict[str, Any] = {
    "every_steps": 6,
    "streaming": Streaming(fragments=3, delay_steps=1),
    "outer": NESTEROV,
}
FEW_BITS = Quantize(bits=4)


@pytest.mark.parametrize(
    ("settings", "saved_after", "num_in_flight", "suffix"),
    [
        (EVERY_4 | {"outer": NESTEROV}, 6, 0, "pt"),
        (IN_THREE | {"algorithm": POWER}, 8, 1, "safetensors"),
        (IN_THREE | {"algorithm": FEW_BITS}, 9, 0, "pt"),
    ],
)
@in_each_member(2)
def test_resuming_is_equal_to_the_bit(
    member: Member,
    settings: dict[str, Any],
    saved_after: int,
    num_in_flight: int,
    suffix: str,
    tmp_path: Path,
) -> None:
    """At an averaging or between two, or with fragments in flight; each with its own model and optimizer."""
    saved, file = io.BytesIO(), tmp_path / f"local.{suffix}"
    with member.local(**settings) as local:
        if local.outer is not None:
            local.outer.param_groups[0]["lr"] = np.float64(0.6)  # as schedules compute it
        member.train(saved_after)
        assert len(local.state_dict()["in_flight"]) == num_in_flight
        checkpoint.save(local.state_dict(), file)
        torch.save((member.model.state_dict(), member.optimizer.state_dict()), saved)
        member.train(saved_after, 20)
    straight = flat(member.model)
    saved.seek(0)
    model_state, optimizer_state = torch.load(saved, weights_only=True)
    member.take(new_model(seed=3))
    resumed = member.local(**settings)
    member.model.load_state_dict(model_state)
    member.optimizer.load_state_dict(optimizer_state)
    resumed.load_state_dict(checkpoint.load(file))
    # An attempt to enter that fails late leaves nothing in flight behind.
    with (
        patch.object(member.optimizer, "register_step_post_hook", side_effect=ValueError("no more hooks")),
        pytest.raises(ValueError, match="no more hooks"),
    ):
        resumed.__enter__()
    with resumed:
        member.train(saved_after, 20)
    assert torch.equal(straight, flat(member.model))
    assert member.agreed()
    assert local.stats().steps == resumed.stats().steps == 20
    assert resumed.stats().compression_ratio > 15


@in_each_member(3)
def test_a_run_that_resumes_again_and_again_is_the_one_that_only_saves(member: Member) -> None:
    """Saved once more before all fragments were sent again: those that were not stay as they were loaded."""
    settings = EVERY_4 | {"every_steps": 6, "streaming": Streaming(fragments=2, delay_steps=2)}

    def trained(saved: Any, *parts: tuple[int, int]) -> Any:
        member.take(new_model())
        objects: list[Any] = [member.local(**settings, outer=NESTEROV), member.model, member.optimizer]
        for loading, state in zip(objects, saved, strict=False):
            loading.load_state_dict(state)
        with objects[0]:
            for steps in parts:
                member.train(*steps)
                saved = copy.deepcopy([it.state_dict() for it in objects])
        return saved

    parts, saved = [(0, 9), (9, 12), (12, 20)], ()
    for part in parts:
        saved = trained(saved, part)
    assert digest_of(saved) == digest_of(trained((), *parts))


def test_more_members_resume_from_one_state_which_is_the_same_on_all() -> None:
    first, second = run(2, _state)
    assert (first["step"], first["sent_after"]) == (5, (4,))
    assert dict(first["sync"]["error"])
    assert digest_of(first) == digest_of(second)

    def resumed(member: Member) -> None:
        member.model.load_state_dict(first["last_average"])
        local = member.local(every_steps=4, algorithm=POWER)
        local.load_state_dict(first)
        with local:
            assert member.agreed()
            error = dict(local.state_dict()["sync"]["error"])
            torch.testing.assert_close(error, dict(first["sync"]["error"]))
            member.train(5, 12)
        assert member.agreed()
        assert local.stats().steps == 12

    run(4, resumed)


def _state(member: Member) -> dict[str, Any]:
    with member.local(every_steps=4, algorithm=POWER) as local:
        member.train(5)
        return local.state_dict()


def replaced(name: str, value: object) -> Callable[[dict[str, Any]], Any]:
    """Put a value in the place of one of the last averages."""
    return lambda state: state | {"last_average": state["last_average"] | {name: value}}


STATES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda state: [1], "made by LocalSGD.state_dict()"),
    (lambda state: state | {"version": 3}, "reads version 5"),
    (lambda state: state | {"step": -1}, "step must be a whole number"),
    # A fragment's number is missing.
    (lambda state: state | {"in_flight": ((torch.ones(2), {}),)}, "the state can't be read"),
    (lambda state: state | {"last_average": {"x": torch.ones(1)}}, "differ in ['0.bias'"),
    (lambda state: state | {"last_average": 3}, "the state can't be read"),
    (replaced("0.bias", torch.ones(1)), "0.bias has dtype torch.float32 and shape (1,), expected"),
    (lambda state: state | {"sync": {}}, "expected a state"),
    (lambda state: state | {"outer": {}}, "pass the same outer="),
    (replaced("0.bias", torch.full((48,), torch.nan)), "0.bias is not finite"),
    (replaced("0.bias", torch.zeros(48).to(torch.float8_e5m2)), "0.bias has dtype torch.float8_e5m2"),
]


@in_each_member(2)
def test_a_state_that_does_not_fit_is_refused(member: Member) -> None:
    state = _state(member)
    member.take(new_model())
    local = member.local(every_steps=1)
    for change, words in STATES:
        with refused(StateError, words):
            local.load_state_dict(change(state))
        assert local.stats().steps == 0


NO_STEP = "SGD can't make a step with the outer optimizer's state"
OUTERS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda outer: outer.update(param_groups=[]), "the state is from a different outer optimizer"),
    (lambda outer: outer.pop("state"), NO_STEP),
    (lambda outer: outer.update(state=[1]), NO_STEP),
    (lambda outer: outer["state"][0].update(momentum_buffer=torch.ones(3)), NO_STEP),  # of another shape
    (lambda outer: outer["param_groups"][0].update(lr="0.7"), NO_STEP),
]


@in_each_member(2)
def test_an_outer_optimizers_state_that_would_end_the_next_averaging_is_refused_on_entry(
    member: Member,
) -> None:
    settings = {"every_steps": 2, "outer": NESTEROV, "streaming": Streaming(fragments=2)}
    with member.local(**settings) as local:
        member.train(3)
        state = local.state_dict()
    before = flat(member.model)
    for change, words in OUTERS:
        changed, other = copy.deepcopy(state), member.local(**settings)
        change(changed["outer"])
        other.load_state_dict(changed)
        with refused(StateError, words):
            other.__enter__()
        assert torch.equal(before, flat(member.model))
        assert other.outer is None


@in_each_member(2)
def test_inference_mode_changes_nothing(member: Member) -> None:
    """An evaluation is in it, and what is made inside could not be written to afterwards."""
    settings = IN_THREE | {"algorithm": POWER}

    def trained(mode: Callable[[], AbstractContextManager[object]]) -> tuple[Tensor, Tensor]:
        member.take(new_model())
        first = member.local(**settings)
        with first:
            member.train(5)
            with mode():
                first.average()
                assert first.stats().messages
                state = first.state_dict()
                with first.averaged():
                    shown = member.model(batch_of(0, 0))
            member.train(5, 9)
        second = member.local(**settings)
        with mode():
            second.load_state_dict(state)
        with second:
            with mode(), second.averaged():
                pass
            member.train(9, 20)
        return flat(member.model), shown

    (expected, _), (got, shown) = trained(nullcontext), trained(torch.inference_mode)
    assert shown.is_inference()  # the evaluation itself is still in it
    assert torch.equal(got, expected)


@in_each_process(2)
def test_a_handle_and_an_aggregator_take_inference_mode() -> None:
    rank = torch.distributed.get_rank()

    def trained(mode: Callable[[], AbstractContextManager[object]]) -> Tensor:
        model = DistributedDataParallel(new_model())
        with mode():
            sync = attach(model, POWER)
        optimizer = new_optimizer(model)
        train(model, optimizer, range(3), rank)
        with mode():
            state = sync.state_dict()
            assert sync.stats().compression_ratio > 2
            sync.load_state_dict(state)
        train(model, optimizer, range(3, 6), rank)
        with mode():
            sync.load_state_dict(sync.local_state_dict())
            sync.use(AllReduce())
        train(model, optimizer, range(6, 9), rank)
        return flat(model)

    assert torch.equal(trained(torch.inference_mode), trained(nullcontext))
    model = new_model()
    aggregator = AlgorithmAggregator(model.parameters(), POWER)
    for mode in (torch.inference_mode, nullcontext):
        gradients = [torch.full_like(each, rank + 1.0) for each in model.parameters()]
        with mode():
            means = aggregator.aggregate(gradients)
        assert not any(mean.is_inference() for mean in means)
    assert aggregator.stats().compression_ratio > 2
