"""Optimizers inside that would undo or replace the averaging: refused by name, on all members alike."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic.in_turns import alone
from members import Member, in_each_member
from processes import in_each_process
from thinwire import DiLoCo, LocalSGD, elastic
from thinwire.algorithms import AllReduce
from thinwire.errors import ConfigError
from thinwire.local_sgd.inner_optimizers import check_copies
from training import batch_of, flat, new_model, train

LR = 0.05


class Own(torch.optim.Optimizer):
    """SGD with momentum, which some derive from; `lag` is how many steps pass before `keep` is called."""

    def __init__(self, params: Iterable[Tensor], lag: int = 0) -> None:
        super().__init__(params, {"lr": LR})
        self.steps, self.lag = 0, lag

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if self.steps > self.lag:
                self.keep(parameter, state)
            velocity = state.setdefault("velocity", torch.zeros_like(parameter))
            parameter.sub_(velocity.mul_(0.9).add_(parameter.grad), alpha=LR)

    def keep(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Keep nothing more."""


class Copying(Own):
    """As MADGRAD, which keeps the weights of the start, or (late) Lookahead."""

    def keep(self, parameter: Tensor, state: dict[str, Any]) -> None:
        state.setdefault("x0", parameter.clone())


class Flat(Own):
    """As those that keep weights in fp32, flat."""

    def keep(self, parameter: Tensor, state: dict[str, Any]) -> None:
        state["master"] = parameter.float().reshape(-1).clone()


class Prodigy(Own):
    """It reads where it began, and never goes back."""

    def keep(self, parameter: Tensor, state: dict[str, Any]) -> None:
        state.setdefault("p0", parameter.flatten().clone())


class Viewing(Own):
    """It steps views of the parameters, which have the average as soon as those."""

    def keep(self, parameter: Tensor, state: dict[str, Any]) -> None:
        state.setdefault("flat", parameter.detach().view(-1))


class Behind(Own):
    """Steps weights of its own, and writes them to the model's; they are kept at different places."""

    def __init__(self, params: Iterable[Tensor], place: str) -> None:
        super().__init__(params)
        parameters = self.param_groups[0]["params"]
        masters = [parameter.detach().clone() for parameter in parameters]
        if place == "its parameters":
            self.inside = torch.optim.SGD(masters, lr=LR)
        elif place == "masters":
            self.masters = [masters]
        elif place == "flat":
            self.flat = torch.cat([master.reshape(-1) for master in masters])
        elif place == "kept['slow']":
            pairs = zip(parameters, masters, strict=True)
            self.kept = {parameter: {"slow": master, "other": torch.zeros(1)} for parameter, master in pairs}
        else:
            self.param_groups[0]["masters"] = masters


class Around(Own):
    """Wraps an optimizer that keeps the weights of the start."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params)
        self.inside = Copying(self.param_groups[0]["params"])

    def step(self, closure: Any = None) -> Any:
        self.inside.step()


COPIES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "state['x0']": Copying,
    "state['master']": Flat,
    "its parameters": partial(Behind, place="its parameters"),
    "masters": partial(Behind, place="masters"),
    "flat": partial(Behind, place="flat"),
    "kept['slow']": partial(Behind, place="kept['slow']"),
    "param_groups[…]['masters']": partial(Behind, place="in its groups"),
    "keeps a copy of the weights in state['x0']": Around,
}


@pytest.mark.parametrize("place", COPIES)
@in_each_member(2)
def test_a_copy_of_the_weights_is_refused(member: Member, place: str) -> None:
    """It would undo an average in the next step."""
    torch.manual_seed(member.rank)  # before entry, each has its own weights
    member.model = new_model()
    member.optimizer = COPIES[place](member.model.parameters())
    with pytest.raises(ConfigError) as refused, member.local(every_steps=4):
        member.train(4)
    assert place in str(refused.value)
    assert type(member.optimizer).__name__ in str(refused.value)[:80]


@in_each_member(2)
def test_a_copy_made_later_is_refused_too(member: Member) -> None:
    """Lookahead copies the weights at its first look."""
    member.optimizer = Copying(member.model.parameters(), lag=5)
    with pytest.raises(ConfigError, match="x0"), member.local(every_steps=4) as local:
        member.train(8)
    assert local.stats().messages == 1


def test_a_copy_of_zeros_is_refused_once_it_can_be_told() -> None:
    """A momentum is zero at first, too, so a model that begins with zeros tells nothing yet."""
    parameter, seen = nn.Parameter(torch.zeros(4)), set[tuple[int, str, int]]()
    optimizer = Own([parameter])
    slow = optimizer.state[parameter]["slow"] = torch.zeros(4)
    check_copies([optimizer], {id(parameter): torch.zeros(4)}, seen)
    with torch.no_grad():
        parameter.add_(1)
        slow.add_(0.9)
    with pytest.raises(ConfigError, match="slow"):
        check_copies([optimizer], {id(parameter): torch.zeros(4)}, seen)


@pytest.mark.parametrize("make", [Own, Prodigy, Viewing, partial(torch.optim.ASGD, t0=0)])
@in_each_member(2)
def test_others_are_taken(member: Member, make: Any) -> None:
    member.optimizer = make(member.model.parameters())
    with member.local(every_steps=2) as local:
        member.train(4)
    assert member.agreed()
    assert local.stats().messages == 2


def test_elastic_members_refuse_a_copy() -> None:
    model = new_model()
    optimizer = Copying(model.parameters())
    with pytest.raises(ConfigError, match="x0"), elastic.DiLoCo(model, optimizer, group=alone()):
        train(model, optimizer, range(2), 0)


class Averaging(Own):
    """It has a group, as Apex's and Horovod's."""

    process_group: Any = None


def distributed_optim() -> Any:
    with warnings.catch_warnings():  # importing it, torch warns of torch.jit.script
        warnings.simplefilter("ignore", DeprecationWarning)
        return import_module("torch.distributed.optim")


def zero(model: nn.Module) -> Any:
    return distributed_optim().ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=LR)


def post_local(model: nn.Module) -> Any:
    inside = torch.optim.SGD(model.parameters(), lr=LR)
    return distributed_optim().PostLocalSGDOptimizer(inside, averager=object())


def with_group(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = Averaging(model.parameters())
    optimizer.process_group = dist.group.WORLD
    return optimizer


@pytest.mark.parametrize("make", [zero, post_local, with_group])
@in_each_process(2)
def test_optimizers_that_communicate_are_refused(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    model = new_model()
    optimizer, before = make(model), flat(copy.deepcopy(model))
    kinds: list[Callable[..., Any]] = [
        partial(LocalSGD, every_steps=2),
        partial(DiLoCo, every_steps=2),
        partial(elastic.LocalSGD, every_steps=2, group=alone()),
        partial(elastic.Steps, algorithm=AllReduce(), group=alone()),
    ]
    for kind in kinds:
        with pytest.raises(ConfigError, match=f"^{type(optimizer).__name__} .* in its step"):
            kind(model, optimizer)
    assert torch.equal(flat(model), before)


class Gathering(Own):
    """As Muon over several processes: each parameter's step is computed by one of them."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            dist.broadcast(parameter.detach(), number % dist.get_world_size())


@in_each_process(2)
def test_an_optimizer_that_is_seen_to_communicate_is_refused_in_its_first_step() -> None:
    model = new_model()
    optimizer, rank = Gathering(model.parameters()), dist.get_rank()
    with (
        pytest.raises(ConfigError, match=r"^Gathering communicates in its step"),
        LocalSGD(model, optimizer, every_steps=4) as local,
    ):
        train(model, optimizer, range(2), rank)
    assert local.steps == 0


@in_each_process(2)
def test_what_a_closure_sends_is_the_users() -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(batch_of(0, 0)).square().mean()
        loss.backward()
        dist.all_reduce(loss.detach())
        return float(loss.detach())

    with LocalSGD(model, optimizer, every_steps=4) as local:
        optimizer.step(closure)
        optimizer.step(closure=closure)
    assert local.steps == 2


class SAM(Own):
    """Sharpness-aware minimisation as most write it: two backward passes, and its optimizer inside steps."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params)
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=LR, momentum=0.9)

    @torch.no_grad()
    def first_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old_p"] = parameter.data.clone()
            parameter.add_(parameter.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = self.state[parameter]["old_p"]
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


@pytest.mark.parametrize("is_in_parts", [True, False])
@in_each_member(2)
def test_a_step_of_an_optimizer_inside_another_is_counted_once(member: Member, is_in_parts: bool) -> None:
    sam = SAM(member.model.parameters())
    member.optimizer = sam

    def closure(step: int) -> None:
        sam.zero_grad()
        torch.autograd.backward(member.model(batch_of(step, member.rank)).square().mean())

    with member.local() as local:
        for step in range(4):
            closure(step)
            if is_in_parts:
                sam.first_step()
                closure(step)
                sam.second_step()
            else:
                sam.step(partial(closure, step))
        assert local.steps == 4
    assert local.stats().messages == 2
    assert member.agreed()


@pytest.mark.parametrize("is_given", [True, False])
def test_steps_of_an_optimizer_that_was_not_given_are_told(
    is_given: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing would be averaged; beside one that was given, it is."""
    model = new_model()
    given, other = (torch.optim.SGD(model.parameters(), lr=LR) for _ in range(2))
    with elastic.DiLoCo(model, given, group=alone()) as local:
        for step in range(4):
            train(model, other, range(step, step + 1), 0)
            if is_given:
                given.step()
    assert caplog.text.count("only their steps are counted") == (not is_given)
    assert local.steps == 4 * is_given
