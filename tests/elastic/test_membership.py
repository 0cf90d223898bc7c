"""Members of one process that come, go, vanish and are in doubt: what is averaged, kept, and lost."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elastic.in_turns import FEW_BITS, VOTE, InTurns, Turn, alone, clean_lives
from thinwire import Nesterov, Streaming, Watch
from thinwire.algorithms import AllReduce, PowerSGD, TopK
from thinwire.comm import InProcessTransport, run_members
from thinwire.comm.in_process import wait_for
from thinwire.elastic import DiLoCo, InProcessGroup, InProcessLighthouse, LocalSGD, Steps
from thinwire.errors import AttachError, CommunicationError, ConfigError, StateError
from thinwire.local_sgd.admission import admitted
from thinwire.local_sgd.elastic_contributor import ElasticChanges
from thinwire.local_sgd.groups import state_transfer
from thinwire.local_sgd.groups.group import NoQuorumError
from thinwire.local_sgd.groups.state_transfer import deserialize, serialize
from thinwire.local_sgd.member_status import MemberStatus
from thinwire.sync.state import digest_of
from thinwire.watch import read_run

EVERY = 2
HANDED_OVER = "the residual of a leaving member"


def linear_and_sgd() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(32, 16)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def linear_and_two() -> tuple[nn.Linear, list[torch.optim.Optimizer]]:
    """A model with two optimizers, as Muon and AdamW are used together."""
    model = nn.Linear(32, 16)
    return model, [torch.optim.SGD([model.weight], momentum=0.9), torch.optim.AdamW([model.bias])]


def pending(local: LocalSGD) -> int:
    """Return a member's steps since the last averaging."""
    return local.steps - local._contributor.averaged_steps


def adopt(local: Any, state: dict[str, Any]) -> None:
    """Let a member start from a state, as if others had sent it."""
    local._contributor.start_from(local._contributor.check_state(state))


def parameters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class Run(InTurns[LocalSGD]):
    """Members that average their models.

    `ends` are "leave", "leave late" (in the averaging), "kill", "away" for some averagings, and "stray" (it
    has averaged with others, who are gone), "resume" (an older state, with other `min_members`). `options`,
    `of_groups`: settings that some have of their own, or their groups.
    """

    def __init__(
        self,
        joins_at: list[int],
        *,
        steps: int = 8,
        ends: dict[int, tuple[int, str]] | None = None,
        faults: dict[int, tuple[Any, ...]] | None = None,
        options: dict[int, dict[str, Any]] | None = None,
        of_groups: dict[int, dict[str, Any]] | None = None,
        kind: Callable[..., LocalSGD] = LocalSGD,
        wait_seconds: float = 60.0,
        weigh_by: str = "steps",
        send_optimizer: bool = True,
        rate: Callable[[int, int], float] | None = None,
        **shared: Any,
    ) -> None:
        self.steps, self.kind, self.options, self.of_groups = steps, kind, options or {}, of_groups or {}
        self.rate = rate  # by the steps of all, and a member's own
        self.shared = {"algorithm": FEW_BITS, "every_steps": EVERY, **shared}
        # By turn and member, its steps and its change.
        self.put_in: dict[int, dict[int, tuple[int, torch.Tensor]]] = {}
        of_group = {"weigh_by": weigh_by, "send_optimizer": send_optimizer}
        lighthouse = InProcessLighthouse(1, wait_seconds, **of_group)
        super().__init__(joins_at, lighthouse=lighthouse, ends=ends, faults=faults)

    def train(self, member: int) -> str:
        vars(self.groups[member]).update(self.of_groups.get(member, {}))
        torch.manual_seed(member)
        model = nn.Linear(32, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(100 + member)
        shared = self.shared | self.options.get(member, {})
        local = self.adapters[member] = self.kind(model, optimizer, group=self.groups[member], **shared)
        end_step, end = self.ends.get(member, (-1, ""))
        with local:
            self.models[local.steps, member] = parameters_of(model)
            while local.steps < self.steps:
                if local.steps == end_step:
                    self.end(end, member)
                for parameter in model.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
                if self.rate is not None:
                    optimizer.param_groups[0]["lr"] = self.rate(local.steps, local._contributor.steps_here)
                if (pending(local) + 1) * shared.get("streaming", Streaming()).fragments >= EVERY:
                    self.note_before(member, local, model, optimizer)
                with suppress(KeyboardInterrupt):
                    optimizer.step()
                wait_for(Turn())
                if not pending(local):
                    self.models[local.steps, member] = self.lasts(member)
            # The exit would average other fragments' work after a turn, and `put_in` would not see it.
            for fragment in local._model.fragments if not pending(local) else ():
                fragment.work = 0.0
        return "left" if local.is_leaving else "done"

    def end(self, how: str, member: int) -> None:
        local, group = self.adapters[member], self.groups[member]
        if how == "leave late":
            commit = group.commit

            def told_meanwhile(committed: bool) -> None:
                commit(committed)
                local.leave()

            group.commit = told_meanwhile  # type: ignore[method-assign]
        elif how == "stray":
            local._contributor.lineage += 2
            local._contributor.steps += 3
            for fragment in local._model.fragments:
                for _, last in fragment.lasts:
                    last.add_(1.0)
        elif how == "resume":
            local._contributor.lineage, local._contributor.commits, group.min_members = 7, 1, 2
        elif how == "away":
            self.wait_until(local.steps + 3 * EVERY)
        else:
            super().end(how, member)

    def note_before(
        self, member: int, local: LocalSGD, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Note what the member is about to put in, of which the last step is still to be taken."""
        changes = local._contributor
        (fragment,) = changes.fragments_at(local._schedule.warmup.steps + 1, changes.turns)
        due = {each.name: last for each, last in fragment.lasts}
        change = torch.zeros(0, dtype=torch.float64)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            # Of another fragment, this averaging moves nothing.
            moved = (parameter - due.get(name, parameter)).detach().double()
            moved -= (name in due) * optimizer.param_groups[0]["lr"] * parameter.grad.double()
            change = torch.cat([change, moved.flatten()])
        weight = round(fragment.work) + 1
        self.put_in.setdefault(changes.turns, {})[member] = (weight, change)

    def lost(self, *, least_owed: float = 0.05) -> float:
        """Return by how much movement and mean residual differ from the mean changes, relative to these.

        What is owed is at least some share of these, since changes were compressed.
        """
        last = [member for member, result in enumerate(self.results) if result == "done"]
        changes = [
            sum(steps * change for steps, change in each.values()) / sum(steps for steps, _ in each.values())
            for each in self.put_in.values()
        ]
        moved = self.models[self.steps, last[0]].double() - self.models[0, 0].double()
        # What is owed counts by the number of members at the last averaging, those who left with it included.
        num_members = self.adapters[last[0]].membership().members
        owed = torch.stack([self.owed(member).double() for member in last]).sum(0) / num_members
        true = torch.stack([torch.as_tensor(change) for change in changes]).sum(0)
        assert owed.norm() > least_owed * true.norm()
        return float((moved + owed - true).norm() / true.norm())


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_members_that_come_go_and_vanish_hold_one_model_after_every_averaging(kind: Any) -> None:
    run = Run([0, 0, 0, 3, 5], steps=12, kind=kind, ends={1: (4, "leave"), 2: (7, "kill")})
    assert run.results == ["done", "left", "killed", "done", "done"]
    run.check_equal()
    assert not torch.equal(run.models[12, 0], run.models[2, 0])
    stats = run.adapters[0].membership()
    assert (stats.members, stats.averagings, stats.joins, stats.leaves, stats.losses) == (3, 6, 2, 1, 1)
    assert stats.lost_error > 0
    assert run.adapters[0].stats().compression_ratio > 2


def test_who_is_told_to_leave_in_an_averaging_hands_over_at_the_next_one() -> None:
    run = Run([0, 0, 0], steps=10, ends={1: (4, "leave late")})
    assert run.results == ["done", "left", "done"]
    assert [len(run.put_in[turn]) for turn in range(5)] == [3, 3, 3, 3, 2]
    stats = run.adapters[0].membership()
    assert (stats.leaves, stats.losses, stats.lost_error) == (1, 0, 0)
    run.check_equal()
    assert run.lost() < 3e-6


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    clean_lives(EVERY, steps=8),
    st.sampled_from([FEW_BITS, TopK(density=1 / 8, error_decay=1.0, merge="members")]),
    # With an outer step along the mean change itself, the model moves by what has been averaged.
    st.sampled_from([(LocalSGD, {}), (DiLoCo, {"outer": Nesterov(lr=1.0, momentum=0.0)})]),
    st.sampled_from([1, 2]),
)
def test_movement_and_mean_residual_are_all_changes_whoever_joins_and_leaves(
    lives: dict[str, Any], algorithm: Any, adapter: tuple[Any, dict[str, Any]], fragments: int
) -> None:
    kind, outer = adapter
    run = Run(**lives, kind=kind, algorithm=algorithm, streaming=Streaming(fragments=fragments), **outer)
    assert run.results[0] == "done"
    assert not run.errors
    run.check_equal()
    assert run.lost() < 3e-6


@pytest.mark.parametrize("words", [VOTE, "round 1", "who takes part"])
def test_an_averaging_that_fails_for_one_or_all_is_repeated_and_nothing_is_lost(words: str) -> None:
    calm = Run([0, 0, 0])
    for failing in ([1], [0, 1, 2]):
        run = Run([0, 0, 0], faults=dict.fromkeys(failing, (words, 2)))
        assert run.results == ["done"] * 3
        run.check_equal()
        if words == VOTE and failing == [1]:
            continue  # the others have committed: told below
        assert run.adapters[0].membership().retries == 1
        assert torch.equal(run.models[8, 0], calm.models[8, 0])
        assert all(torch.equal(run.owed(member), calm.owed(member)) for member in range(3))


@pytest.mark.parametrize("error", [CommunicationError, KeyboardInterrupt])
def test_who_misses_the_last_message_alone_learns_that_it_was_committed(error: type[Exception]) -> None:
    """Also if Ctrl-C was why, and the loop has gone on."""
    calm, run = Run([0, 0, 0]), Run([0, 0, 0], faults={1: (VOTE, 2, error)})
    run.check_equal()
    assert torch.equal(run.models[2, 0], calm.models[2, 0])
    assert (2, 1) not in run.models  # it learnt of it with the next one, of which it took part with nothing
    assert run.adapters[1].membership().averagings == 4
    assert run.adapters[0].membership().losses == run.adapters[1].membership().losses == 0
    assert run.adapters[1].membership().lost_error == 0
    assert len(run.put_in[1]) == 2  # its own steps of that turn were never made


@pytest.mark.parametrize("turn", [0, 2])
def test_who_learns_late_of_one_fragments_averaging_puts_the_next_fragment_in(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales: dict[tuple[int, int], float] = {}
    start = ElasticChanges.start

    def noted(changes: Any, known: Any, scale: float, step: int, **options: Any) -> Any:
        scales[changes.turns, changes.engine.transport.rank] = scale
        return start(changes, known, scale, step, **options)

    monkeypatch.setattr(ElasticChanges, "start", noted)
    faults = {1: (VOTE, turn + 2)}
    run = Run([0, 0, 0], streaming=Streaming(fragments=2), algorithm=AllReduce(), faults=faults)
    assert run.results == ["done"] * 3
    # Of the next fragment the others have made two steps, and it one.
    assert [scales[turn + 1, rank] for rank in range(3)] == pytest.approx([6 / 5, 3 / 5, 6 / 5])


def test_a_member_that_was_away_starts_from_the_others_and_tells_what_was_lost() -> None:
    run = Run([0, 0, 0], steps=16, ends={1: (4, "away")})
    assert run.results == ["done"] * 3
    run.check_equal()
    assert run.adapters[1].membership().lost_error > 0
    stats = run.adapters[0].membership()
    assert (stats.losses, stats.joins) == (1, 1)


@pytest.mark.parametrize("joins_at", [[0, 0, 0, 3], [0, 0, 0, 0, 3]])
def test_most_of_those_who_were_here_decide_whose_model_is_kept(joins_at: list[int]) -> None:
    run = Run(joins_at, ends={0: (2, "stray")}, wait_seconds=2.0)
    assert run.results == ["done"] * len(joins_at)
    run.check_equal()
    assert run.adapters[0].membership().lost_error > 0
    assert run.adapters[1].membership().lost_error == 0
    assert {step for step, _ in run.models} == {0, 2, 4, 6, 8}  # its own steps do not count


@pytest.mark.parametrize(
    ("held", "are_new"),
    [
        ([(0, 0), (0, 0)], [True, True]),  # the first one's model is sent
        ([(0, 0), (7, 1), (0, 0)], [True, False, True]),
        ([(7, 4), (9, 5), (7, 4)], [True, False, True]),
        ([(7, 5), (9, 5), (9, 5), (3, 4)], [True, False, False, True]),
        ([(7, 5), (9, 5)], [False, True]),
    ],
)
def test_the_lineage_of_most_averagings_is_kept_and_then_that_of_most_members(
    held: list[tuple[int, int]], are_new: list[bool]
) -> None:
    statuses = admitted([MemberStatus(3, lineage=lineage, commits=commits) for lineage, commits in held])
    assert [status.is_new for status in statuses] == are_new
    assert [status.weight for status in statuses] == [float(not is_new) for is_new in are_new]


class TwoKinds(nn.Module):
    """A model that is sent in two messages."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(32, 16), nn.Linear(32, 16, dtype=torch.bfloat16)


class Delayed(InTurns[LocalSGD]):
    def train(self, member: int) -> int:
        model = TwoKinds()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"every_steps": 4, "streaming": Streaming(delay_steps=2)}
        local = LocalSGD(model, optimizer, group=self.groups[member], algorithm=FEW_BITS, **options)
        self.adapters[member] = local
        with local:
            while local.steps < 12:
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                wait_for(Turn())
        return local.membership().retries


def test_who_joins_sends_in_the_order_of_those_whose_averaging_is_delayed() -> None:
    assert Delayed([0, 0, 6]).results == [0, 0, 0]


class Hollow(torch.Tensor):
    """A class of its own, without memory at its address: as states of 8-bit optimizers are."""

    @staticmethod
    def __new__(cls) -> Hollow:
        return torch.Tensor._make_wrapper_subclass(cls, (1000,))

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(("note", "is_late"), [(object, False), (Hollow, True)])
def test_what_can_not_be_sent_to_newcomers_is_told_as_soon_as_it_is_there(
    note: Callable[[], Any], is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Remembering(torch.optim.SGD):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__([{"params": [*parameters], **({} if is_late else {"note": note()})}], lr)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["note"] = note()

    monkeypatch.setattr(torch.optim, "SGD", Remembering)
    run = Run([0, 0])
    assert run.results == ["StateError"] * 2
    assert f"a {note.__name__} can't be sent to a joining member, expected" in str(run.errors[0])
    assert not run.lighthouse.there
    assert bool(run.models) == is_late
    assert Run([0, 0], send_optimizer=False).results == ["done"] * 2


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner  # as torch.compile calls it


def test_of_a_compiled_block_newcomers_are_sent_besides_only_what_is_not_averaged() -> None:
    block = nn.Linear(4, 4)
    block.bias.requires_grad_(False)
    model = nn.Sequential(Wrapper(block), nn.Linear(4, 4))
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    group = alone()
    with LocalSGD(model, optimizer, every_steps=2, group=group) as local:
        assert set(local._contributor.state()["members"]["not_averaged"]) == {"0.bias"}


def test_work_that_nobody_has_counted_is_told() -> None:
    run = Run([0, 0], weigh_by="work", algorithm=AllReduce())
    assert run.results == ["StepError"] * 2
    assert "call count_work() before optimizer.step()" in str(run.errors[0])


@pytest.mark.parametrize("part", [2, 5])
def test_what_leavers_could_not_hand_over_is_lost_of_all_of_them(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what has come of it before the link was cut."""
    monkeypatch.setattr(state_transfer, "PART_BYTES", 500)
    calm = Run([0, 0, 0], steps=4, ends={1: (2, "leave"), 2: (2, "leave")})
    cut = [
        Run([0, 0, 0], steps=4, ends={1: (2, "leave"), 2: (2, "leave")}, faults={0: (HANDED_OVER, place)})
        for place in (1, part)
    ]
    lost = [each.error_norm for each in cut[1].adapters[0]._membership.statuses if each.is_leaving]
    assert (calm.adapters[0].membership().lost_error, len(lost)) == (0, 2)
    assert cut[1].adapters[0].membership().lost_error == pytest.approx(sum(lost))
    assert torch.equal(cut[1].owed(0), cut[0].owed(0))
    assert not torch.equal(cut[1].owed(0), calm.owed(0))


@pytest.mark.parametrize(
    ("setting", "values", "words"),
    [
        ("every_steps", (2, 3), "has every_steps 2"),
        ("min_members", (1, 2), "has min_members=2, but the members that it met have min_members=1"),
        ("kind", ("torchft 2", "torchft 3"), "has group torchft 2, process 1 has group torchft 3"),
    ],
)
def test_a_member_with_another_setting_is_refused_by_name_and_the_others_go_on(
    setting: str, values: tuple[Any, Any], words: str
) -> None:
    own = {member: {setting: values[member == 2]} for member in range(3)}
    run = Run([0, 0, 3], options=own) if setting == "every_steps" else Run([0, 0, 3], of_groups=own)
    assert run.results == ["done", "done", "AgreementError"]
    assert words in str(run.errors[2])
    assert "the others continue" in str(run.errors[2])
    assert run.adapters[0].membership().losses == 0
    run.check_equal()


def test_who_resumes_an_older_state_does_not_decide_how_many_members_are_needed() -> None:
    assert Run([0, 0], ends={0: (4, "resume")}).results == ["AgreementError", "done"]


def test_newcomers_are_sent_no_state_while_there_are_too_few() -> None:
    with patch.object(InProcessGroup, "join") as joined:
        run = Run([0, 0], of_groups={rank: {"min_members": 3} for rank in range(2)}, wait_seconds=0.1)
    assert run.results == ["CommunicationError"] * 2
    assert str(run.errors[0]).endswith("at least min_members=3 members are running")
    assert not joined.called


def test_a_member_that_changes_its_model_says_so_at_its_next_averaging_and_the_others_go_on() -> None:
    class Freezing(Run):
        def end(self, how: str, member: int) -> None:
            cast(nn.Linear, self.adapters[member].module).bias.requires_grad_(False)

    run = Freezing([0, 0, 0], ends={1: (5, "freeze")})
    assert run.results == ["done", "StepError", "done"]
    assert "since the context was entered: ['bias']; leave it before you freeze" in str(run.errors[1])
    assert (run.adapters[1].steps, run.adapters[0].membership().members) == (6, 2)
    run.check_equal()


@pytest.mark.parametrize("is_sent", [True, False])
def test_newcomers_are_sent_the_optimizer_inside_unless_each_has_its_own(is_sent: bool) -> None:
    optimizers, adapters, groups = [], [], []
    for _ in range(2):
        model, own = linear_and_two()
        optimizers.append(own)
        groups.append(InProcessGroup(InProcessLighthouse(send_optimizer=is_sent)))
        adapters.append(LocalSGD(model, optimizers[-1], group=groups[-1], every_steps=2))
    with adapters[0], adapters[1]:
        for _ in range(3):
            adapters[0].module(torch.ones(1, 32)).sum().backward()
            for optimizer in optimizers[0]:
                optimizer.step()
        assert adapters[0].steps == 3
        adopt(adapters[1], deserialize(serialize(adapters[0]._contributor.state())))
        for one, other in zip(*optimizers, strict=True):
            sent, held = (each.state_dict()["state"] for each in (one, other))
            assert sent[0]
            assert held.keys() == (sent.keys() if is_sent else set())
            assert all(torch.equal(sent[0][key], held[0][key]) for place in held for key in sent[place])
        assert adapters[0]._contributor.description()["optimizer"] == (
            "SGD, AdamW" if is_sent else "not sent"
        )


def entered(adapter: Callable[..., Any], opened: ExitStack) -> Any:
    """Return a member of a group by itself, after two steps."""
    model, optimizers = linear_and_two()
    member = opened.enter_context(adapter(model, optimizers, group=alone()))
    for _ in range(2):
        model(torch.randn(1, 32)).sum().backward()
        for stepping in [member] if adapter is STEPS else optimizers:
            stepping.step()
    return member


def of_second(change: Callable[[Any], Any] | None = None) -> Callable[[dict[str, Any]], Any]:
    """Put something in the place of the second optimizer's state, or leave it out."""

    def changing(state: dict[str, Any]) -> dict[str, Any]:
        first, second = state["optimizers"]
        return {"optimizers": [first, change(second)] if change else [first]}

    return changing


DILOCO, STEPS = partial(DiLoCo, every_steps=2), partial(Steps, algorithm=FEW_BITS)
UNFIT: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a later version": (lambda state: {"version": 9}, "version 9, but this Thinwire release reads version 5"),
    "too few optimizers": (of_second(), "has . optimizers, expected ."),
    "a tensor for optimizers": (lambda state: {"optimizers": torch.ones(2)}, "can't be read"),
    "the second one of another kind": (
        of_second(lambda its: {**its, "param_groups": []}),
        "into this member's AdamW",
    ),
}


def changed(state: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Return a state with some values replaced, its own or those of members."""
    members = state["members"]
    others = change(state | members)
    inside = {key: others.pop(key) for key in members.keys() & others.keys()}
    return {**state, **others, "members": members | inside}


@pytest.mark.parametrize("adapter", [DILOCO, STEPS], ids=["DiLoCo", "Steps"])
def test_what_a_newcomer_can_not_start_from_is_refused_and_nothing_changed(
    adapter: Callable[..., Any],
) -> None:
    with ExitStack() as opened:
        first, second = entered(adapter, opened), entered(adapter, opened)
        for fill, local in enumerate((first, second)):
            for name, size in {"same": 2, "grows": 2 + fill, f"only_{fill}": 2}.items():
                local.module.register_buffer(name, torch.full((size,), float(fill)), persistent=False)
        sent = deserialize(serialize(first._contributor.state()))
        held = digest_of(second._contributor.state())
        assert held != digest_of(sent)
        for case, (change, words) in UNFIT.items():
            with pytest.raises(StateError, match=words):
                adopt(second, changed(sent, change))
            assert digest_of(second._contributor.state()) == held, case
        adopt(second, sent)  # nothing stands in its way
        assert [float(second.module.get_buffer(it)[0]) for it in ("same", "grows", "only_1")] == [0, 1, 1]
        assert second._contributor.state()["members"]["optimizers"][1]["state"]


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_bytes_that_are_damaged_or_would_run_something_are_not_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, harmful = serialize({"step": 3, "weight": torch.ones(9)}), io.BytesIO()
    torch.save({"step": Harmful()}, harmful)
    for data in (whole[:-30], whole[30:], torch.zeros(5, dtype=torch.uint8), harmful.getvalue()):
        with pytest.raises(StateError, match="can't be read"):
            deserialize(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    assert capsys.readouterr().out == ""
    assert deserialize(serialize({"rate": np.float64(0.5)})) == {"rate": 0.5}


def test_a_newcomer_gets_no_optimizer_state_of_a_member_that_diverges() -> None:
    class Diverging(LocalSGD):
        def _after_own_step(self) -> None:
            if self.steps == 5 and self._membership.group.transport.rank == 0:
                for parameter, state in self._optimizers[0].state.items():
                    parameter.detach().fill_(torch.nan)
                    state["momentum_buffer"].fill_(torch.nan)
            super()._after_own_step()

    with patch.object(torch.optim, "SGD", partial(torch.optim.SGD, momentum=0.9)):
        run = Run([0, 0, 5], kind=Diverging)
    assert run.results == ["StepError", "done", "done"]
    assert "not finite" in str(run.errors[0])
    assert run.models[8, 1].isfinite().all()
    for state in run.adapters[2]._optimizers[0].state.values():
        assert state["momentum_buffer"].isfinite().all()
    run.check_equal()


def test_work_weighs_changes_and_counts_in_one_averaging_alone() -> None:
    class Weighed(LocalSGD):
        def _after_own_step(self) -> None:
            has_done_most = self._membership.group.transport.rank == self.steps // EVERY
            self.count_work(4 if has_done_most else 1)
            super()._after_own_step()

    run = Run([0, 0], steps=2 * EVERY, kind=Weighed, algorithm=AllReduce(), weigh_by="work")
    models = [run.models[steps, 0].double() for steps in range(0, 3 * EVERY, EVERY)]
    for turn, weights in enumerate([(4, 1), (1, 4)]):
        mean = sum(weights[member] * run.put_in[turn][member][1] for member in range(2)) / 5
        torch.testing.assert_close(models[turn + 1] - models[turn], mean, rtol=1e-5, atol=1e-6)


def test_fragments_take_turns_and_newcomers_take_all_of_them() -> None:
    run = Run([0, 0, 3], steps=8, streaming=Streaming(fragments=2), algorithm=PowerSGD(matrix_rank=2))
    assert run.results == ["done"] * 3
    assert all(torch.equal(run.lasts(0), run.lasts(member)) for member in (1, 2))


def test_all_processes_of_a_member_average_if_one_of_them_must() -> None:
    """Only one may have counted work, or have got a signal."""
    ends = InProcessTransport.group(2)

    def numbers_of_averagings(rank: int) -> list[int]:
        group, numbers = alone(InProcessLighthouse(weigh_by="work")), []
        local = LocalSGD(*linear_and_sgd(), every_steps=2, group=group)
        with local, patch.object(local._membership, "average") as averaged:
            group.inside = ends[rank]
            for ask in (bool, partial(local.count_work, rank), local.leave if rank else bool):
                ask()
                local.average()
                numbers.append(averaged.call_count)
                local._model.fragments[0].work = 0.0
        return numbers

    assert run_members(2, numbers_of_averagings) == [[0, 1, 2]] * 2


def test_what_does_not_go_is_refused_before_anything_changes() -> None:
    model, optimizer = linear_and_sgd()
    group = alone()
    with pytest.raises(ConfigError, match='"steps" or "work"'):
        InProcessGroup(InProcessLighthouse(weigh_by="tokens"))
    one = torch.optim.SGD([model.weight], lr=0.1)
    with pytest.raises(
        ConfigError, match=r"1 trainable parameters \(e.g. 'bias'\) are in none of the given optim"
    ):
        LocalSGD(model, one, every_steps=2, group=group)
    unsent = InProcessGroup(InProcessLighthouse(send_optimizer=False))
    with pytest.raises(ConfigError, match="needs a group with send_optimizer=True"):
        Steps(model, optimizer, AllReduce(), group=unsent)
    local = LocalSGD(model, optimizer, every_steps=2, group=group)
    with pytest.raises(ConfigError, match="weigh_by"):
        local.count_work(3)
    group.inside = InProcessTransport.group(2)[0]
    with pytest.raises(AttachError, match="2 processes but the model spans 1"):
        LocalSGD(model, optimizer, every_steps=2, group=group)


def test_a_watch_logs_who_has_come_and_gone(tmp_path: Path) -> None:
    model, optimizer = linear_and_sgd()
    local = LocalSGD(model, optimizer, every_steps=EVERY, group=alone())
    with local, Watch(local, tmp_path / "run.jsonl"):
        for _ in range(2 * EVERY):
            model(torch.ones(1, 32)).sum().backward()
            optimizer.step()
    run = read_run(tmp_path / "run.jsonl")
    assert [point.value for point in run.points("members")] == [1.0] * 4
    assert [point.value for point in run.points("averagings")] == [0, 1, 1, 2]
    assert set(run.logged) == set(vars(local.membership()))


def test_a_schedule_that_counts_a_members_own_steps_is_refused() -> None:
    run = Run([0, 0, 4], rate=lambda _, own: 0.1 / (1 + own))
    assert run.results == ["done", "done", "StepError"]
    words = "lr of SGD is 0.05 on this member and 0.0125 on the others at step 8"
    assert str(run.errors[2]).startswith(words)
    by_steps = Run([0, 0, 4], rate=lambda steps, _: 0.1 / (1 + steps))
    assert by_steps.results == ["done"] * 3


def test_who_has_waited_long_enough_for_a_quorum_leaves() -> None:
    group = alone(InProcessLighthouse(wait_seconds=0.1))
    asked = Mock(side_effect=[NoQuorumError("there is none")])
    with patch.object(group, "start_quorum", asked), pytest.raises(NoQuorumError):
        LocalSGD(*linear_and_sgd(), every_steps=2, group=group).__enter__()


@pytest.mark.parametrize(
    ("handler", "code"), [(signal.SIG_DFL, -signal.SIGTERM), (lambda *_: sys.exit(7), 7)]
)
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 or later, of forks
def test_sigterm_makes_this_process_leave_and_reaches_one_that_it_forks(handler: Any, code: int) -> None:
    (group := alone()).leaves_on_sigterm = True
    before = signal.signal(signal.SIGTERM, handler)
    with LocalSGD(*linear_and_sgd(), every_steps=2, group=group) as local:
        forked = get_context("fork").Process(target=signal.raise_signal, args=(signal.SIGTERM,))
        forked.start()
        forked.join()
        signal.raise_signal(signal.SIGTERM)
        assert local.is_leaving
    assert (signal.signal(signal.SIGTERM, before), forked.exitcode) == (handler, code)
