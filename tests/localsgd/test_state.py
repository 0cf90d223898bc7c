"""Saving and resuming, to the bit; states that do not fit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from members import Member, run
from thinwire import StateError, Streaming, checkpoint
from thinwire.algorithms import PowerSGD
from training import error_of, flat, new_model

POWER = PowerSGD(matrix_rank=2)
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("name", ["local.pt", "local.safetensors"])
@pytest.mark.parametrize("saved_after", [4, 6])
@pytest.mark.parametrize("outer", [None, NESTEROV], ids=["mean", "outer"])
def test_resuming_is_equal_to_the_bit(outer: Any, saved_after: int, name: str, tmp_path: Path) -> None:
    """At an averaging or between two, each member with its own model and optimizer."""
    for straight, resumed, steps, ratio in run(2, _resume, outer, saved_after, tmp_path / name):
        assert torch.equal(straight, resumed)
        assert steps == [11, 11]
        assert ratio > 15


def _resume(
    member: Member, outer: Any, saved_after: int, file: Path
) -> tuple[Tensor, Tensor, list[int], float]:
    settings = {"every_steps": 4, "algorithm": POWER, "outer": outer}
    saved = io.BytesIO()
    with member.local(**settings) as local:
        member.train(saved_after)
        checkpoint.save(local.state_dict(), file)
        torch.save((member.model.state_dict(), member.optimizer.state_dict()), saved)
        member.train(saved_after, 11)
    straight = flat(member.model)
    saved.seek(0)
    model_state, optimizer_state = torch.load(saved, weights_only=True)
    member.take(new_model(seed=3))
    resumed = member.local(**settings)
    member.model.load_state_dict(model_state)
    member.optimizer.load_state_dict(optimizer_state)
    resumed.load_state_dict(checkpoint.load(file))
    with resumed:
        member.train(saved_after, 11)
    steps = [local.stats().steps, resumed.stats().steps]
    return straight, flat(member.model), steps, resumed.stats().compression_ratio


@pytest.mark.parametrize("name", ["local.pt", "local.safetensors"])
def test_a_damaged_file_is_refused_or_means_the_same(name: str, tmp_path: Path) -> None:
    """One that was saved with outer momentum and a fragment in flight comes back as it was."""
    state, _ = run(2, _in_flight)
    assert len(state["in_flight"]) == 1
    assert state["outer"]
    file = tmp_path / name
    checkpoint.save(state, file)
    whole, refused = file.read_bytes(), 0
    assert_same(checkpoint.load(file), state)
    for place in range(0, len(whole), 211):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            assert checkpoint.load(file)["checksum"] == state["checksum"]
        except StateError:
            refused += 1
    assert refused > 50


def assert_same(one: Any, other: Any) -> None:
    """Of the same kinds, names and numbers, however deep."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, tuple | list):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


def _in_flight(member: Member) -> dict[str, Any]:
    streaming = Streaming(fragments=2, delay_steps=1)
    with member.local(algorithm=POWER, every_steps=4, outer=NESTEROV, streaming=streaming) as local:
        member.train(8)
        return local.state_dict()


def test_what_was_pending_when_saved_is_averaged_after_resuming() -> None:
    assert run(2, _pending) == [(False, True)] * 2


def _pending(member: Member) -> tuple[bool, bool]:
    with member.local(every_steps=4) as local:
        member.train(2)
        state, saved = local.state_dict(), copy.deepcopy(member.model.state_dict())
    member.model.load_state_dict(saved)
    resumed = member.local(every_steps=4)
    resumed.load_state_dict(state)
    with resumed:
        before = member.agreed()
    return before, member.agreed()


def test_the_state_is_the_same_on_all_members() -> None:
    first, second = run(2, _state)
    assert first.keys() == second.keys()
    assert first["step"] == second["step"] == 5
    assert first["sent_after"] == second["sent_after"] == (4,)
    for part in (first["last_average"], dict(first["sync"]["error"])):
        assert part
    for name, tensor in first["last_average"].items():
        assert torch.equal(tensor, second["last_average"][name])
    for name, tensor in dict(first["sync"]["error"]).items():
        assert torch.equal(tensor, dict(second["sync"]["error"])[name])


def _state(member: Member) -> dict[str, Any]:
    with member.local(every_steps=4, algorithm=POWER) as local:
        member.train(5)
        return local.state_dict()


def test_an_averaged_model_resumes_on_another_number_of_members() -> None:
    """One model, one optimizer's state and one LocalSGD state for all."""
    saved = run(2, _save_one)[0]
    results = run(4, _resume_on_more, saved)
    assert len(results) == 4
    for same_start, agreed, steps, error in results:
        assert same_start
        assert agreed
        assert steps == 12
        assert error


def _save_one(member: Member) -> tuple[dict[str, Any], ...]:
    with member.local(every_steps=4, algorithm=POWER, outer=NESTEROV) as local:
        member.train(6)
        local.average()
        return local.state_dict(), member.model.state_dict(), member.optimizer.state_dict()


def _resume_on_more(member: Member, saved: tuple[dict[str, Any], ...]) -> tuple[bool, bool, int, bool]:
    member.take(new_model(seed=member.rank))
    local = member.local(every_steps=4, algorithm=POWER, outer=NESTEROV)
    local.load_state_dict(saved[0])
    member.model.load_state_dict(saved[1])
    member.optimizer.load_state_dict(copy.deepcopy(saved[2]))
    with local:
        same_start = member.agreed()
        member.train(6, 12)
    error = dict(local.state_dict()["sync"]["error"])
    return same_start, member.agreed(), local.stats().steps, bool(error)


STATES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no state": (lambda state: [1], "made by LocalSGD.state_dict()"),
    "version": (lambda state: state | {"version": 3}, "reads version 4"),
    "version of no kind": (
        lambda state: state | {"version": torch.ones(2)},
        "version must be a whole number",
    ),
    "version too long": (lambda state: state | {"version": 10**5000}, "16610 bits, expected at most 64"),
    "step": (lambda state: state | {"step": -1}, "step must be a whole number"),
    "steps too long": (lambda state: state | {"sent_after": (10**5000,)}, "16610 bits, expected at most 64"),
    "a fragment's number": (
        lambda state: state | {"in_flight": ((torch.ones(2), {}),)},
        "in_flight must hold pairs",
    ),
    "gradient": (
        lambda state: (
            state | {"last_average": {**state["last_average"], "0.bias": torch.ones(48).requires_grad_()}}
        ),
        "a Tensor of shape (48,) that requires a gradient",
    ),
    "graph": (
        lambda state: state | {"outer": {"state": {0: torch.ones(2).requires_grad_() * 2}}},
        "a Tensor of shape (2,) that requires a gradient",
    ),
    "names": (lambda state: state | {"last_average": {"x": torch.ones(1)}}, "differ in ['0.bias'"),
    "kind": (lambda state: state | {"last_average": 3}, "must map names to tensors"),
    "shape": (
        lambda state: state | {"last_average": state["last_average"] | {"0.bias": torch.ones(1)}},
        "not a tensor of shape (48,)",
    ),
    "sync": (lambda state: state | {"sync": {}}, "expected a state"),
    "outer": (lambda state: state | {"outer": {}}, "pass outer="),
    "not finite": (
        lambda state: (
            state | {"last_average": state["last_average"] | {"0.bias": torch.full((48,), torch.nan)}}
        ),
        "0.bias is not finite",
    ),
    "8 bits": (
        lambda state: (
            state
            | {"last_average": state["last_average"] | {"0.bias": torch.zeros(48).to(torch.float8_e5m2)}}
        ),
        "0.bias is of torch.float8_e5m2",
    ),
    "expanded": (
        lambda state: state | {"outer": {"momentum": torch.zeros(1).expand(2**20, 2**20)}},
        "some are expanded",
    ),
    "sparse": (
        lambda state: state | {"outer": {"momentum": torch.zeros(2, 2).to_sparse()}},
        "layout torch.sparse_coo",
    ),
    "damaged": (lambda state: state | {"checksum": "crc32:00000000"}, "the state is damaged"),
    "key": (lambda state: state | {"more": 1}, "made by LocalSGD.state_dict()"),
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_does_not_fit_is_refused(case: str) -> None:
    results = run(2, _bad_state, case)
    assert len(results) == 2
    for message, steps in results:
        assert message.startswith("StateError")
        assert STATES[case][1] in message
        assert steps == 0


def _bad_state(member: Member, case: str) -> tuple[str, int]:
    state: Any = STATES[case][0](_state(member) | {"checksum": None})
    member.take(new_model())
    local = member.local(every_steps=1)
    return error_of(lambda: local.load_state_dict(state)), local.stats().steps


def buffer_of(value: object) -> Callable[[dict[str, Any]], object]:
    """Put something in the place of the first parameter's momentum."""
    return lambda outer: outer["state"][0].update(momentum_buffer=value)


NO_STEP = "SGD can't make a step with the outer optimizer's state"
OUTERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no groups": (lambda outer: outer.update(param_groups=[]), "the state is of a different outer optimizer"),
    "no state": (lambda outer: outer.pop("state"), NO_STEP),
    "a list of states": (lambda outer: outer.update(state=[1]), NO_STEP),
    "a tensor as state": (lambda outer: outer["state"].update({0: torch.ones(2)}), NO_STEP),
    "a place that is text": (lambda outer: outer["state"].update({"0": {}}), NO_STEP),
    "a momentum of another shape": (buffer_of(torch.ones(3)), NO_STEP),
    "a momentum that is text": (buffer_of("0.9"), NO_STEP),
    "a momentum that is a number": (buffer_of(3), NO_STEP),
    "a rate that is text": (lambda outer: outer["param_groups"][0].update(lr="0.7"), NO_STEP),
}


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("case", OUTERS)
def test_an_outer_optimizers_state_that_would_end_the_next_averaging_is_refused_on_entry(
    case: str, fragments: int
) -> None:
    messages = run(2, _bad_outer, case, fragments)
    assert len(messages) == 2
    for message, is_unchanged in messages:
        assert message.startswith(f"StateError: {OUTERS[case][1]}")
        assert is_unchanged


def _bad_outer(member: Member, case: str, fragments: int) -> tuple[str, bool]:
    settings = {"every_steps": 2, "outer": NESTEROV, "streaming": Streaming(fragments=fragments)}
    with member.local(**settings) as local:
        member.train(3)
        state = local.state_dict()
    OUTERS[case][0](state["outer"])
    state["checksum"] = None
    before = flat(member.model)
    other = member.local(**settings)
    other.load_state_dict(state)
    message = error_of(other.__enter__)
    return message, torch.equal(before, flat(member.model)) and other.outer is None
