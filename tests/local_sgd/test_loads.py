"""Weights that no step has changed: loaded, copied in, or of an optimizer that was not passed."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from elastic.in_turns import alone
from members import NESTEROV, Member, in_each_member
from thinwire import DiLoCo, Streaming, elastic
from thinwire.algorithms import Quantize
from thinwire.comm import InProcessTransport
from thinwire.errors import ConfigError, StepError
from training import batch_of, flat, new_model, new_optimizer

KINDS = ("fixed", "DiLoCo", "Steps")
WITHOUT_A_STEP = "parameters changed since the last averaging without a step"


@in_each_member(2)
def test_what_an_optimizer_that_was_not_passed_has_changed_is_refused(member: Member) -> None:
    local = member.local(every_steps=2, streaming=Streaming(fragments=2))
    with refusing(WITHOUT_A_STEP), local:
        member.train(2)
        assert not member.agreed()
        assert local.stats().messages == 2  # the first fragment after one step
        local.average()
        if member.rank:
            member.optimizer = new_optimizer(member.model)  # whose steps nobody counts
            member.train(1)
        held = flat(member.model)
        with refusing(WITHOUT_A_STEP):
            local.average()
        assert torch.equal(flat(member.model), held)
    assert torch.equal(flat(member.model), held)


LOADED = "load_state_dict() of the model was called inside the context"


def refusing(words: str) -> AbstractContextManager[object]:
    return pytest.raises(StepError, match=f"^{re.escape(words)}")


BEST: dict[str, Any] = {"outer": NESTEROV, "algorithm": Quantize(bits=4)}


def copy_in(model: nn.Module, weights: Tensor) -> None:
    """As callbacks do that keep a moving average."""
    parts = torch.split(weights, [each.numel() for each in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.data.copy_(part.view_as(parameter))


def load(model: nn.Module, weights: Tensor) -> None:
    other = copy.deepcopy(model)
    copy_in(other, weights)
    frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}  # not averaged
    model.load_state_dict(other.state_dict() | frozen)


@pytest.mark.parametrize(
    ("put_in", "streaming"), [(load, Streaming(delay_steps=1)), (copy_in, Streaming(fragments=2))]
)
@in_each_member(2)
def test_weights_loaded_at_the_end_are_those_that_stay(
    member: Member, put_in: Callable[[nn.Module, Tensor], None], streaming: Streaming
) -> None:
    """Trainers load the best model before they say that training has ended."""
    with member.local(every_steps=4, streaming=streaming, **BEST) as local:
        member.train(4)
        local.average()
        best = flat(member.model)
        member.train(4, 10)
        local.average()
        assert (flat(member.model) - best).norm() > 0.1
        put_in(member.model, best)
    assert torch.equal(flat(member.model), best)
    assert local.stats().compression_ratio > 4


@in_each_member(2)
def test_training_goes_on_from_loaded_weights_without_an_outer_step(member: Member) -> None:
    with member.local(every_steps=4, **BEST) as local:
        member.train(4)
        best = flat(member.model)
        member.train(4, 8)
        load(member.model, best)
        local.average()
        assert torch.equal(flat(member.model), best)
        state = local.state_dict()
        assert torch.equal(torch.cat([each.flatten() for each in state["last_average"].values()]), best)
        member.train(8, 12)
        assert member.agreed()


def load_in_place(model: nn.Module, weights: Tensor) -> None:
    own = model.state_dict()  # torch.distributed.checkpoint writes to it
    copy_in(model, weights)
    model.load_state_dict(own)


@pytest.mark.parametrize("put_in", [load, load_in_place])
@in_each_member(2)
def test_training_does_not_go_on_from_loaded_weights_unasked(member: Member, put_in: Any) -> None:
    with refusing(LOADED), member.local(every_steps=4, **BEST) as local:
        best = flat(member.model)
        load_in_place(member.model, best)
        local.average()  # it is the last average still
        member.train(6)
        put_in(member.model, best)
        for goes_on in (partial(member.train, 8, 9), local.average):
            with refusing(LOADED):
                goes_on()
        assert torch.equal(flat(member.model), best)


@in_each_member(2)
def test_weights_of_one_process_are_refused(member: Member) -> None:
    with refusing(WITHOUT_A_STEP), member.local(every_steps=4, **BEST):
        best = flat(member.model)
        member.train(8)
        if member.rank:
            load(member.model, best)


@in_each_member(2)
def test_weights_loaded_for_an_evaluation_and_taken_back_change_nothing(member: Member) -> None:
    def trained(*, evaluates: bool) -> Tensor:
        member.take(new_model())
        next(member.model.parameters()).requires_grad_(False)
        with member.local(every_steps=4, **BEST):
            first = flat(member.model)
            member.train(6)
            own = flat(member.model)
            if evaluates:
                load(member.model, first)
                load(member.model, own)
            member.train(6, 10)
        return flat(member.model)

    assert torch.equal(trained(evaluates=True), trained(evaluates=False))


@in_each_member(1)
def test_a_model_can_be_saved_whole_inside_the_context(member: Member) -> None:
    with member.local(every_steps=4):
        again = pickle.loads(pickle.dumps(member.model))
        again.load_state_dict(copy.deepcopy(member.model).state_dict())
    assert torch.equal(flat(again), flat(member.model))


class Alone:
    """A model that one member trains."""

    def __init__(self, kind: str) -> None:
        self.kind, self.model = kind, new_model()
        self.optimizer = new_optimizer(self.model)
        if kind == "Steps":
            self.local: Any = elastic.Steps(self.model, self.optimizer, Quantize(bits=4), group=alone())
        elif kind == "DiLoCo":
            self.local = elastic.DiLoCo(self.model, self.optimizer, every_steps=4, group=alone())
        else:
            self.local = DiLoCo(
                self.model, self.optimizer, every_steps=4, replicas=InProcessTransport.group(1)[0]
            )

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.model(batch_of(0, 0)).square().mean().backward()
            self.local.step() if self.kind == "Steps" else self.optimizer.step()


@pytest.mark.parametrize("kind", ["DiLoCo", "Steps"])
def test_an_elastic_member_does_not_train_on_with_loaded_weights(kind: str) -> None:
    one = Alone(kind)
    best = flat(one.model)
    with refusing(LOADED), one.local:
        one.step(3)
        load(one.model, best)
        with refusing(LOADED):
            one.step()
        assert torch.equal(flat(one.model), best)
        raise StepError(LOADED)
    assert torch.equal(flat(one.model), best)


@pytest.mark.parametrize("kind", KINDS)
def test_replaced_parameters_are_told_in_the_next_step_and_at_the_end(kind: str) -> None:
    """The optimizer would train those that the model no longer has."""
    one, replaced = Alone(kind), "parameters were replaced inside the context: ['0.bias', "
    with refusing(replaced) if kind != "Steps" else nullcontext(), one.local:
        one.step(3)
        state = copy.deepcopy(one.model.state_dict())
        one.model.load_state_dict(state, assign=True)
        with refusing(replaced):
            one.step()
        assert one.local.steps == 3


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_others_than_the_model_hold_are_told_in_the_next_step(kind: str) -> None:
    """They would never be averaged. Nothing is lost by the refusal."""
    calm, one = Alone(kind), Alone(kind)
    temperature = nn.Parameter(torch.ones(1))
    temperature.grad = torch.ones(1)
    with calm.local, one.local:
        calm.step(6)
        get_optimizer_state_dict(one.model, one.optimizer)  # makes a step of zeros, which does not count
        one.step(2)
        one.optimizer.add_param_group({"params": [temperature]})
        with pytest.raises(
            ConfigError, match=r"^SGD's parameter group 1 has parameters that are not the model.s \(1\)"
        ):
            one.step()
        del one.optimizer.param_groups[1]
        one.step(4)
    assert torch.equal(flat(one.model), flat(calm.model))
    assert one.local.steps == 6
    assert torch.equal(temperature, torch.ones(1))
