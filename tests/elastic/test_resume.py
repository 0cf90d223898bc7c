"""Members that come and go: their runs saved and resumed, and what they do as fixed members do."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import thinwire
from elastic.in_turns import FEW_BITS, VOTE, InTurns, Turn, alone
from thinwire import Nesterov, Streaming, Warmup, checkpoint
from thinwire.algorithms import AllReduce, PowerSGD, TopK
from thinwire.comm import InProcessTransport, run_members
from thinwire.comm.in_process import wait_for
from thinwire.elastic import DiLoCo, LocalSGD, Steps
from thinwire.errors import ConfigError, LeftError, StateError, StepError
from thinwire.local_sgd import elastic_contributor
from thinwire.sync.state import digest_of
from training import flat


def member_of(seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def draw_gradients(model: nn.Module, step: int, member: int) -> None:
    """Of the step and the member alone: a run that resumes draws the same."""
    draws = torch.Generator().manual_seed(100 * step + member)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draws)


def in_order(tensors: Any) -> torch.Tensor:
    """What a state has by parameter, in the order of a model."""
    named, parameters = dict(tensors), member_of(0)[0].named_parameters()
    return torch.cat([named.get(name, torch.zeros_like(each)).flatten() for name, each in parameters])


class Run(InTurns[Any]):
    """Members that train for some steps, after which some save; or resume from what others have saved.

    `saves_at`: after which step all save, and go on. `states`: what each resumes from, or nothing. Who does
    not ask for an average at the end gets that of leaving the context.
    """

    def __init__(
        self,
        members: int,
        kind: Callable[..., Any],
        *,
        steps: int = 12,
        saves_at: int = -1,
        savers: Collection[int] = range(9),
        states: dict[int, Any] | None = None,
        joins_at: list[int] | None = None,
        asks: bool = True,
        **struck: Any,
    ) -> None:
        self.kind, self.steps, self.saves_at, self.states = kind, steps, saves_at, states or {}
        self.asks, self.savers = asks, savers
        self.saved: dict[int, Any] = {}
        super().__init__(joins_at or [0] * members, **struck)

    def train(self, member: int) -> str:
        model, optimizer = member_of(member)
        adapter = self.adapters[member] = self.kind(model, optimizer, group=self.groups[member])
        if member in self.states:
            adapter.load_state_dict(self.states[member])
        end_step, end = self.ends.get(member, (-1, ""))
        with adapter:
            while adapter.steps < self.steps:
                if adapter.steps == end_step:
                    self.end(end, member)
                draw_gradients(model, adapter.steps, member)
                adapter.step() if isinstance(adapter, Steps) else optimizer.step()
                if adapter.steps == self.saves_at and member in self.savers:
                    self.saved[member] = adapter.state_dict()
                wait_for(Turn())
                self.models[adapter.steps, member] = flat(model)
            if self.asks and not isinstance(adapter, Steps):
                adapter.average()
                asked = self.groups[member].quorum_id
                adapter.average()  # nothing is left, so it waits for nobody
                assert self.groups[member].quorum_id == asked
        self.models[adapter.steps, member] = flat(model)
        return "done"


local = partial(partial, LocalSGD, every_steps=3, algorithm=FEW_BITS)
diloco = partial(partial, DiLoCo, every_steps=4, algorithm=FEW_BITS)
KINDS: dict[str, Any] = {
    "local": local(),
    "fragments": diloco(streaming=Streaming(fragments=2), algorithm=PowerSGD(matrix_rank=2)),
    "delay": diloco(streaming=Streaming(delay_steps=2)),
    "warm-up": local(warmup=Warmup(8, FEW_BITS), algorithm=TopK(density=1 / 8)),
    "steps": partial(Steps, algorithm=PowerSGD(matrix_rank=2)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_resumes_is_the_run_that_went_on_to_the_bit(kind: str) -> None:
    """Of three members, each with its own optimizer; saved in the middle of a turn, or of a warm-up."""
    whole = Run(3, KINDS[kind], saves_at=7)
    assert whole.results == ["done"] * 3
    resumed = Run(3, KINDS[kind], states=whole.saved)
    assert resumed.results == ["done"] * 3, resumed.errors
    after = {at: model for at, model in whole.models.items() if at[0] > 7}
    assert after.keys() == resumed.models.keys()
    assert all(torch.equal(model, resumed.models[at]) for at, model in after.items())
    assert all(torch.equal(whole.owed(member), resumed.owed(member)) for member in range(3))
    assert resumed.adapters[0].membership().lost_error == 0
    if kind != "delay":
        assert torch.equal(resumed.models[12, 0], resumed.models[12, 2])


@pytest.mark.parametrize("kind", ["local", "fragments", "steps"])
def test_any_number_of_members_resume_from_one_file_and_nothing_that_was_owed_is_lost(
    kind: str, tmp_path: Path
) -> None:
    saved = Run(3, KINDS[kind], saves_at=7).saved
    # The optimizers inside apart, it does not matter whose it is.
    assert len({digest_of(state["sync"]) for state in saved.values()}) == 1
    for name in ("run.pt", "run.safetensors"):
        checkpoint.save(saved[1], tmp_path / name)
    states = [checkpoint.load(tmp_path / name) for name in ("run.pt", "run.safetensors")]
    expected, average = in_order(saved[1]["sync"]["error"]), in_order(saved[1]["last_average"])
    assert expected.norm() > 0
    for members in (1, 4):
        # The last of them starts with nothing, and the others' model wins, whoever came first.
        loaded = {member: states[member % 2] for member in range(1, members)} or {0: states[0]}
        resumed = Run(members, KINDS[kind], steps=saved[1]["step"], states=loaded)
        assert resumed.results == ["done"] * members, resumed.errors
        mean = torch.stack([resumed.owed(member) for member in range(members)]).mean(0)
        torch.testing.assert_close(mean, expected)
        assert all(torch.equal(flat(adapter.module), average) for adapter in resumed.adapters.values())
        assert resumed.adapters[members - 1].membership().lost_error == 0


def test_who_resumes_late_takes_over_what_the_others_are_at_and_nothing_counts_as_lost() -> None:
    state = Run(2, KINDS["local"], saves_at=6).saved[0]
    run = Run(2, KINDS["local"], states={0: state, 1: state}, joins_at=[0, 9], steps=15)
    assert run.results == ["done"] * 2
    assert torch.equal(run.models[15, 0], run.models[15, 1])
    assert [adapter.membership().lost_error for adapter in run.adapters.values()] == [0, 0]


@pytest.mark.parametrize(("words", "place"), [("state_dict()", 1), (VOTE, 4)])
def test_a_message_that_fails_while_a_run_is_saved_is_sent_again(words: str, place: int) -> None:
    run = Run(3, KINDS["local"], saves_at=7, faults={2: (words, place)})
    assert run.results == ["done"] * 3, run.errors
    assert run.adapters[2].membership().retries >= 1
    assert torch.equal(run.models[12, 0], run.models[12, 2])
    assert run.saved[0]["sync"]["slots"] == run.saved[2]["sync"]["slots"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_is_saved_by_torch_distributed_checkpoint_too(tmp_path: Path) -> None:
    def alone_at(seed: int) -> LocalSGD:
        return LocalSGD(*member_of(seed), every_steps=2, group=alone(), algorithm=FEW_BITS)

    with alone_at(0) as first:
        draw_gradients(first.module, 0, 0)
        first._optimizers[0].step()
        save({"local": first.distributed_state()}, checkpoint_id=tmp_path, no_dist=True)
    again = alone_at(1)
    with pytest.raises(StateError, match="was saved before the context was entered"):
        again.distributed_state().load_state_dict(again.distributed_state().state_dict())
    load({"local": again.distributed_state()}, checkpoint_id=tmp_path, no_dist=True)
    with again:
        assert again.steps == 1
        assert torch.equal(flat(first.module), flat(again.module))


def test_who_does_not_save_takes_part_and_goes_on() -> None:
    run = Run(3, KINDS["local"], saves_at=7, savers=(1,))
    assert run.results == ["done"] * 3, run.errors
    assert set(run.saved) == {1}
    assert not any(adapter._membership._saved for adapter in run.adapters.values())  # it has a model's bytes


def test_what_can_not_be_resumed_is_refused_and_others_are_unharmed() -> None:
    state = Run(2, KINDS["local"], saves_at=6).saved[0]
    optimizer = torch.optim.AdamW((model := nn.Linear(32, 16)).parameters())
    adapter, entered = (LocalSGD(model, optimizer, every_steps=2, group=alone()) for _ in range(2))
    with pytest.raises(StepError, match="outside the context"):
        adapter.state_dict()
    with pytest.raises(StateError, match=r"differ in \['0.bias'"):
        adapter.load_state_dict(state)
    with entered, pytest.raises(StepError, match="before you enter"):
        entered.load_state_dict(state)
    with pytest.raises(LeftError, match=r"^state_dict\(\)"):
        entered.state_dict()
    others = Run(3, KINDS["local"], states={0: {**state, "step": -1}}, steps=8)
    assert others.results == ["StateError", "done", "done"]


def of_fixed_members(state: dict[str, Any] | None, **settings: Any) -> tuple[Any, torch.Tensor]:
    """Train two fixed members from a state, or from the start; what the first one saves, and its model."""
    group = InProcessTransport.group(2)

    def train(rank: int) -> tuple[Any, torch.Tensor]:
        model, optimizer = member_of(rank)
        local = thinwire.LocalSGD(model, optimizer, replicas=group[rank], algorithm=FEW_BITS, **settings)
        if state is not None:
            local.load_state_dict(state)
        with local:
            start = flat(model)
            for _ in range(3):
                model(torch.ones(1, 32) + rank).square().sum().backward()
                optimizer.step()
            return local.state_dict(), start if state is not None else flat(model)

    return run_members(2, train)[0]


def test_fixed_members_resume_what_elastic_ones_have_saved_and_the_other_way_round() -> None:
    state = Run(2, KINDS["local"], saves_at=6).saved[0]
    _, start = of_fixed_members(state, every_steps=3)
    assert torch.equal(start, in_order(state["last_average"]))
    saved, model = of_fixed_members(None, every_steps=3)
    run = Run(2, KINDS["local"], states={0: saved, 1: saved}, steps=saved["step"])
    assert run.results == ["done"] * 2, run.errors
    assert torch.equal(flat(run.adapters[1].module), model)
    mean = (run.owed(0) + run.owed(1)) / 2
    torch.testing.assert_close(mean, in_order(saved["sync"]["error"]))
    delayed, _ = of_fixed_members(None, every_steps=3, streaming=Streaming(delay_steps=2))
    refused = Run(1, KINDS["local"], states={0: delayed})
    assert "save after average()" in str(refused.errors[0])


# What fixed members can do.

FIXED: dict[str, dict[str, Any]] = {
    "whole": {},
    "fragments and a delay": {"streaming": Streaming(fragments=2, delay_steps=1, local_weight=0.25)},
    "low rank with a delay": {"streaming": Streaming(delay_steps=2), "algorithm": PowerSGD(matrix_rank=2)},
    "a warm-up": {"warmup": Warmup(3), "streaming": Streaming(fragments=2)},
    "a warm-up in few bits": {"warmup": Warmup(5, FEW_BITS), "algorithm": TopK(density=1 / 8)},
    "an outer step": {"outer": Nesterov(lr=0.7, momentum=0.9), "warmup": Warmup(2)},
    "a warm-up of one step": {"warmup": Warmup(1, FEW_BITS)},
}


@pytest.mark.parametrize("name", FIXED)
def test_members_that_stay_do_what_a_fixed_group_does_to_the_bit(name: str) -> None:
    settings = {"every_steps": 4, "algorithm": FEW_BITS, **FIXED[name]}
    run = Run(3, partial(LocalSGD, **settings), steps=13)
    assert run.results == ["done"] * 3, run.errors
    fixed = models_of_fixed_members(3, 13, settings)
    for step in range(1, 13):
        assert all(torch.equal(fixed[rank][step], run.models[step, rank]) for rank in range(3)), step


def models_of_fixed_members(members: int, steps: int, settings: dict[str, Any]) -> list[list[torch.Tensor]]:
    """Return the model of each after each step, and at the end."""
    group = InProcessTransport.group(members)

    def train(rank: int) -> list[torch.Tensor]:
        model, optimizer = member_of(rank)
        models = [flat(model)]
        with thinwire.LocalSGD(model, optimizer, replicas=group[rank], **settings):
            for step in range(steps):
                draw_gradients(model, step, rank)
                optimizer.step()
                models.append(flat(model))
        return [*models, flat(model)]

    return run_members(members, train)


@pytest.mark.parametrize("steps", [12, 13], ids=["after a turn", "between turns"])
def test_members_that_end_together_average_all_fragments(steps: int) -> None:
    streaming = Streaming(fragments=2, delay_steps=1)
    settings: dict[str, Any] = {"every_steps": 4, "algorithm": FEW_BITS, "streaming": streaming}
    settings["outer"] = Nesterov(lr=0.7, momentum=0.9)
    run = Run(2, partial(LocalSGD, **settings), steps=steps, asks=False)
    assert run.results == ["done"] * 2, run.errors
    fixed = models_of_fixed_members(2, steps, settings)
    assert all(torch.equal(fixed[0][-1], run.models[steps, member]) for member in (0, 1))


def test_what_was_in_flight_when_a_message_failed_is_averaged_when_it_is_due() -> None:
    """Or when members die and join."""
    kind = local(streaming=Streaming(delay_steps=1, local_weight=0.0), algorithm=AllReduce())
    for fault in (("round 1", 1), (VOTE, 2)):
        run = Run(3, kind, faults={1: fault}, steps=12)
        assert run.results == ["done"] * 3, run.errors
        assert all(torch.equal(run.lasts(0), run.lasts(each)) for each in (1, 2))
    run = Run(0, KINDS["delay"], joins_at=[0, 0, 0, 5], ends={1: (5, "kill")}, steps=16)
    assert run.results == ["done", "killed", "done", "done"], run.errors
    assert all(torch.equal(run.lasts(0), run.lasts(each)) for each in (2, 3))
    assert run.adapters[0].membership().losses == 1


def test_a_member_that_joins_in_the_warm_up_or_behind_it_uses_what_the_others_do() -> None:
    kind = local(warmup=Warmup(6, FEW_BITS), algorithm=PowerSGD(matrix_rank=2))
    for joins in (2, 5, 9):
        run = Run(0, kind, joins_at=[0, 0, joins], steps=12)
        assert run.results == ["done"] * 3, (joins, run.errors)
        assert torch.equal(run.models[12, 0], run.models[12, 2])
        assert run.adapters[2]._engine.algorithm == PowerSGD(matrix_rank=2)


class Unequal(InTurns[Any]):
    """Members whose steps take so many seconds each; each has a clock."""

    def __init__(self, step_seconds: list[float], kind: Callable[..., Any], until: float = 300.0) -> None:
        self.step_seconds, self.kind, self.until = step_seconds, kind, until
        self.clocks, self.waited = [0.0] * len(step_seconds), [0.0] * len(step_seconds)
        self.running = 0
        super().__init__([0] * len(step_seconds))

    def train(self, member: int) -> str:
        torch.manual_seed(0)
        truth = torch.randn(16, 8)
        model, group = nn.Linear(16, 8, bias=False), self.groups[member]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        start_quorum = group.start_quorum

        def met(commits: int) -> None:
            start_quorum(commits)
            # All stand where the last one has come; who was earlier has waited.
            self.waited[member] += max(self.clocks) - self.clocks[member]
            wait_for(Turn())
            self.clocks[member] = max(self.clocks)

        group.start_quorum = met  # type: ignore[method-assign]
        with patch.object(elastic_contributor, "monotonic", lambda: self.clocks[self.running]):
            draws = torch.Generator().manual_seed(member)
            self.running = member
            adapter = self.adapters[member] = self.kind(model, optimizer, group=group)
            with adapter:
                while self.clocks[member] < self.until:
                    inputs = torch.randn(8, 16, generator=draws)
                    optimizer.zero_grad()
                    (model(inputs) - inputs @ truth).square().mean().backward()
                    self.clocks[member] += self.step_seconds[member]
                    self.running = member
                    optimizer.step()
                    wait_for(Turn())
        return "done"


def test_by_the_clock_a_slow_member_holds_no_fast_one_back_and_each_weighs_its_steps() -> None:
    kind = partial(LocalSGD, every_seconds=20.0, algorithm=AllReduce())
    run = Unequal([0.5, 1.0], kind)
    assert run.results == ["done"] * 2, run.errors
    assert all(waited / run.until <= 0.05 for waited in run.waited)
    fast, slow = (run.adapters[member]._contributor.steps_here for member in range(2))
    assert fast == pytest.approx(2 * slow, rel=0.05)
    assert run.adapters[0].steps == run.adapters[1].steps
    by_steps = Unequal([0.5, 1.0], partial(LocalSGD, every_steps=20, algorithm=AllReduce()))
    assert by_steps.waited[0] / by_steps.until > 0.4


def test_settings_that_do_not_go_are_refused_and_a_clock_stands_in_the_name() -> None:
    model, optimizer = member_of(0)
    refused: dict[str, Any] = {
        "every_steps or every_seconds, got None": {},
        "every_steps or every_seconds, got 2": {"every_steps": 2, "every_seconds": 3.0},
        "above 0": {"every_seconds": 0.0},
        "use fragments": {"every_seconds": 9.0, "streaming": Streaming(delay_steps=2)},
    }
    for words, settings in refused.items():
        with pytest.raises(ConfigError, match=words):
            LocalSGD(model, optimizer, group=alone(), **settings)
    assert "every_seconds=2" in str(DiLoCo(model, optimizer, every_seconds=2.0, group=alone()))
    assert "every_steps=30" in str(DiLoCo(model, optimizer, group=alone()))
