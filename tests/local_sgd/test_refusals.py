"""Mistakes: each raises at once, and its error names the remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from elastic.in_turns import alone
from members import NESTEROV, POWER, Member, in_each_member
from processes import in_each_process
from thinwire import DiLoCo, Nesterov, Streaming, Warmup, elastic
from thinwire.adapters.attach import attach
from thinwire.algorithms import AllReduce, PowerSGD
from thinwire.comm import InProcessTransport
from thinwire.errors import AttachError, ConfigError
from thinwire.local_sgd import LocalSGD
from thinwire.powersgd import AlgorithmAggregator, optimizer_step
from training import batch_of, error_of, new_model, new_optimizer, refused, train

DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
BUFFERS_OPTION = "forward_sync_buffers" if "forward_sync_buffers" in DDP_OPTIONS else "broadcast_buffers"


def make(model: Any = None, optimizer: Any = None, **settings: Any) -> LocalSGD:
    """One over the default group."""
    model = new_model() if model is None else model
    optimizer = new_optimizer(model) if optimizer is None else optimizer
    return LocalSGD(model, optimizer, **{"every_steps": 2, **settings})


def with_model(model: Any, optimizer: Any = None) -> Callable[[Member], object]:
    """Average another model; without an optimizer, with the member's."""

    def mistake(member: Member) -> None:
        member.model, member.optimizer = model, optimizer or member.optimizer
        member.local()

    return mistake


def entered(**settings: Any) -> Callable[[Member], object]:
    return lambda member: member.local(**settings).__enter__()


def entered_twice(member: Member) -> None:
    with member.local() as local:
        local.__enter__()


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "LocalSGD": lambda model: LocalSGD(model, new_optimizer(model), every_steps=2, replicas=one_member()),
    "DiLoCo": lambda model: DiLoCo(model, new_optimizer(model), replicas=one_member()),
    "elastic": lambda model: elastic.DiLoCo(model, new_optimizer(model), group=alone()),
    "Steps": lambda model: elastic.Steps(model, new_optimizer(model), AllReduce(), group=alone()),
}


def one_member() -> InProcessTransport:
    return InProcessTransport.group(1)[0]


@pytest.mark.parametrize(("outer", "inner"), [*pairwise([*KINDS, "LocalSGD"])])
def test_a_model_is_averaged_by_one_context_at_a_time(outer: str, inner: str) -> None:
    """Each would take what the other has averaged for training."""
    model: Any = new_model()
    second = KINDS[inner](nn.Sequential(nn.Linear(3, 3), model[0]))  # they share a layer
    with KINDS[outer](model), refused(ConfigError, "is averaged already, by the"):
        second.__enter__()
    with second, KINDS[outer](new_model()):  # one after the other, or of two models
        pass


def averaged_outside(member: Member) -> None:
    with member.local() as local:
        pass
    local.average()


def loaded_inside(member: Member) -> None:
    with member.local() as local:
        local.load_state_dict(local.state_dict())


class Wrapper(torch.optim.Optimizer):
    """As torch's PostLocalSGDOptimizer and Accelerate's: an optimizer that is none itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = inner, inner.param_groups


def foreign_parameters(member: Member) -> None:
    parameters = [*member.model.parameters(), nn.Parameter(torch.ones(3))]
    with_model(member.model, torch.optim.SGD(parameters, lr=0.1))(member)


def frozen(member: Member) -> None:
    member.model.requires_grad_(False)
    member.local()


def joined_by_contributors(member: Member, **settings: Any) -> None:
    with member.local(every_steps=4, **settings) as local:
        local.join_hook(divide_by_initial_world_size=False)


def state_on_one_only(member: Member) -> None:
    with member.local() as local:
        member.train(1)
    other = member.local()
    if member.rank:
        other.load_state_dict(local.state_dict())
    else:
        local.state_dict()
    other.__enter__()


def other_settings(member: Member, **settings: Any) -> None:
    """Enter with a setting of each member's own."""
    own = {name: values[member.rank] for name, values in settings.items()}
    with member.local(**{"every_steps": 4, "streaming": Streaming(delay_steps=1), **own}):
        pass


def use_in_flight(member: Member) -> None:
    with member.local(every_steps=4, streaming=Streaming(delay_steps=3)) as local:
        member.train(5)
        local.sync.use(POWER)


WITHOUT_VALUES = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False, device="meta"))
OUTER = "ConfigError: outer must be a thinwire.Nesterov or a function that returns"
# What some do, or the settings that they give.
MISTAKES: dict[str, tuple[Callable[[Member], object] | dict[str, Any], str]] = {
    "every_steps": ({"every_steps": 0}, "ConfigError: every_steps must be a whole number of at least 1"),
    "no warm-up": (lambda _: Warmup(0, AllReduce()), "AllReduce() is for the warm-up, which has 0 steps"),
    "algorithm": ({"algorithm": "PowerSGD"}, "ConfigError: expected an algorithm such as"),
    "no module": (with_model([1]), "ConfigError: expected a torch.nn.Module"),
    "lazy": (with_model(nn.LazyLinear(3)), "ConfigError: weight has no shape yet; run one forward pass"),
    "no values": (with_model(WITHOUT_VALUES), "AttachError: 1.running_mean is on the meta device and has no"),
    "nothing to train": (frozen, "AttachError: no parameter of the model is trained"),
    "no optimizer": (with_model(new_model(), "SGD"), "ConfigError: expected a torch.optim.Optimizer"),
    "wrapped optimizer": (
        lambda member: with_model(member.model, Wrapper(member.optimizer))(member),
        "ConfigError: Wrapper wraps an optimizer",
    ),
    "one optimizer twice": (
        lambda member: with_model(member.model, [member.optimizer] * 2)(member),
        "ConfigError: expected one optimizer or several, each once",
    ),
    "other model's": (with_model(new_model()), "ConfigError: the optimizer holds none of the model's"),
    "more than the model's": (foreign_parameters, "ConfigError: SGD's parameter group 0 has param"),
    "outer is an optimizer": (lambda member: member.local(outer=member.optimizer), OUTER),
    "outer makes nothing": (entered(outer=lambda _: None), "ConfigError: outer must return a torch.optim"),
    "outer of some": (
        entered(outer=lambda parameters: torch.optim.SGD(parameters[:1], lr=1.0)),
        "ConfigError: outer must return an optimizer of all the tensors",
    ),
    "zero without DDP": (
        {"warmup": Warmup(on_nonfinite="zero")},
        'ConfigError: on_nonfinite="zero" is for gradients that a DDP model averages',
    ),
    "entered twice": (entered_twice, "StepError: this LocalSGD was already entered"),
    "average after": (averaged_outside, "StepError: average() was called outside"),
    "state before": (lambda member: member.local().state_dict(), "StepError: there is nothing to save"),
    "joined outside": (lambda member: member.local().join_hook(), "StepError: enter LocalSGD before"),
    "joined with a subgroup": (
        lambda member: joined_by_contributors(member, subgroup=member.pair),
        "ConfigError: with a subgroup",
    ),
    "joined without processes": (
        lambda member: member.local().join_process_group,
        "AttachError: there is no process group to join",
    ),
    "load inside": (loaded_inside, "StepError: load the state before you enter the context"),
    "state on one only": (
        state_on_one_only,
        "process 0 has loaded no state, process 1 has loaded a state with",
    ),
    # Fragments and delays.
    "layers": (
        {"every_steps": 9, "streaming": Streaming(fragments=4)},
        "ConfigError: fragments=4 is more than the model's trained layers, 3 (0, 2, 4 …)",
    ),
    "steps": ({"streaming": Streaming(fragments=3)}, "ConfigError: fragments=3 is more than every_steps=2"),
    "delay": (
        {"streaming": Streaming(delay_steps=2)},
        "ConfigError: delay_steps=2 can't be combined with every_steps=2 / fragments=1",
    ),
    "weight of 1": (lambda _: Streaming(delay_steps=1, local_weight=1), "local_weight must be in [0, 1)"),
    "weight without delay": (lambda _: Streaming(local_weight=0.5), "got 0.5 with delay_steps=0"),
    "device": (lambda _: Nesterov(device="moon"), "ConfigError: device must be a device"),
    "endless outer rate": (lambda _: Nesterov(lr=float("inf")), "ConfigError: lr must be finite, got inf"),
    "momentum": (lambda _: Nesterov(momentum=1), "ConfigError: momentum must be from 0 to below 1, got 1"),
    "outer is a number": ({"outer": 0.7}, OUTER),
    "streaming": ({"streaming": 2}, "ConfigError: streaming must be a thinwire.Streaming, got 2"),
    "warmup": ({"warmup": 100}, "ConfigError: warmup must be a thinwire.Warmup, got 100"),
    # Settings of each member's own.
    "other steps": (
        partial(other_settings, every_steps=(4, 5)),
        "AgreementError: entering LocalSGD: process 0 has every_steps 4, process 1 has every_steps 5",
    ),
    "other fragments": (
        partial(other_settings, streaming=(Streaming(), Streaming(fragments=2))),
        "process 1 has streaming Streaming(fragments=2)",
    ),
    "other warm-up": (
        partial(other_settings, warmup=(Warmup(2), Warmup(3))),
        "process 0 has warmup Warmup(steps=2), process 1 has warmup Warmup(steps=3)",
    ),
    "other outer": (
        partial(other_settings, outer=(NESTEROV, partial(torch.optim.SGD, lr=0.5))),
        "process 0 has outer optimizer SGD(lr=0.7, momentum=0.9",
    ),
    "use in flight": (use_in_flight, "call average() first"),
    "fragments joined by contributors": (
        partial(joined_by_contributors, streaming=Streaming(fragments=2)),
        "ConfigError: with fragments or delay_steps, join needs",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
@in_each_member(2)
def test_mistakes_raise_at_once_and_name_the_remedy(member: Member, case: str) -> None:
    mistake, words = MISTAKES[case]
    made = partial(member.local, **mistake) if isinstance(mistake, dict) else partial(mistake, member)
    assert words in error_of(made)


# Mistakes with process groups and DDP models, in real processes


def _in_a_foreign_subgroup() -> None:
    groups = [dist.new_group([process_rank]) for process_rank in range(2)]
    make(subgroup=groups[1 - dist.get_rank()])


def _outside_the_group() -> None:
    groups = [dist.new_group([process_rank]) for process_rank in range(2)]
    make(replicas=groups[dist.get_rank()], subgroup=dist.group.WORLD)


def _joined_ddp() -> None:
    with make(DistributedDataParallel(new_model())) as local:
        local.join_hook()


def _attached_ddp() -> None:
    model = DistributedDataParallel(new_model())
    attach(model, PowerSGD())
    make(model)


def _with_buffers() -> None:
    make(DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(24), nn.Linear(24, 8))))


def _attached_inside() -> None:
    module = new_model()
    with make(module):
        attach(DistributedDataParallel(module), PowerSGD())


def _trained_attached() -> None:
    module = new_model()
    model = DistributedDataParallel(module)
    attach(model, PowerSGD())
    with make(module):
        train(module, new_optimizer(module), range(1))
        train(model, new_optimizer(model), range(1))


def _aggregated_inside() -> None:
    module = new_model()
    aggregator = AlgorithmAggregator(module.parameters(), PowerSGD())
    with make(module):
        torch.autograd.backward(module(batch_of(0)).sum())
        optimizer_step(new_optimizer(module), aggregator)


PROCESS_MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "group": (
        lambda: make(replicas=3),
        "AttachError: process_group must be a torch.distributed process group or None, got 3",
    ),
    "subgroup without this process": (_in_a_foreign_subgroup, "AttachError: this process is not a member"),
    "subgroup outside the group": (_outside_the_group, "of the subgroup are not in the process group"),
    "another group than DDP's": (
        lambda: make(DistributedDataParallel(new_model()), replicas=dist.new_group([0, 1])),
        "ConfigError: replicas differs from the DDP model's group",
    ),
    "DDP with a hook": (_attached_ddp, "AttachError: the DDP model already has a communication hook"),
    "DDP with buffers": (_with_buffers, f"build it with {BUFFERS_OPTION}=False (LocalSGD averages them)"),
    "DDP looks for unused": (
        lambda: make(DistributedDataParallel(new_model(), find_unused_parameters=True)),
        "AttachError: find_unused_parameters=True",
    ),
    "attached inside": (_attached_inside, "AttachError: this Sequential is averaged twice"),
    "trained attached": (_trained_attached, "StepError: this Sequential is averaged twice"),
    "aggregated inside": (_aggregated_inside, "pass LocalSGD the plain module"),
    "joined with DDP": (_joined_ddp, "AttachError: a DDP model can't be joined through LocalSGD"),
    "raise with a subgroup": (
        lambda: make(
            DistributedDataParallel(new_model()),
            warmup=Warmup(on_nonfinite="raise"),
            subgroup=dist.group.WORLD,
        ),
        'ConfigError: on_nonfinite="raise" can\'t be combined with a subgroup',
    ),
}


@pytest.mark.parametrize("case", PROCESS_MISTAKES)
@in_each_process(2)
def test_mistakes_with_groups_and_ddp_raise_at_once_and_name_the_remedy(case: str) -> None:
    mistake, words = PROCESS_MISTAKES[case]
    assert words in error_of(mistake)


def test_without_a_process_group() -> None:
    assert error_of(make).startswith("AttachError: torch.distributed is not initialised")


def test_a_local_sgd_whose_group_was_destroyed_is_in_nobodys_way() -> None:
    """It was entered, and never left: of its own model, and of others."""
    model = new_model()
    for is_inside in (True, False):
        dist.init_process_group(store=HashStore(), rank=0, world_size=1)
        try:
            if is_inside:
                entered = make(model)
                entered.__enter__()
                with pytest.raises(AttachError, match="and the model by LocalSGD"):
                    attach(DistributedDataParallel(model), PowerSGD())
            else:
                for each in (model, new_model()):
                    attach(DistributedDataParallel(each), PowerSGD())
        finally:
            dist.destroy_process_group()
    assert entered.sync.algorithm == AllReduce()
