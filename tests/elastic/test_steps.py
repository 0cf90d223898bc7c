"""`elastic.Steps`: gradients averaged at every step by members of one process that come, go and vanish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elastic.in_turns import FEW_BITS, VOTE, InTurns, Turn, alone, clean_lives
from thinwire.algorithms import Algorithm, AllReduce, PowerSGD, TopK
from thinwire.comm.in_process import wait_for
from thinwire.elastic import Steps
from thinwire.errors import ConfigError, LeftError, StepError

LR = 0.1


class Run(InTurns[Steps]):
    """Members that average random gradients at every step, and note all numbers of theirs after it.

    These are the parameters, in their order, and the optimizer's. `put_in`: by step and member, its gradient.
    """

    def __init__(
        self,
        joins_at: list[int],
        *,
        steps: int = 6,
        ends: dict[int, tuple[int, str]] | None = None,
        faults: dict[int, tuple[Any, ...]] | None = None,
        adam: bool = True,
        works: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
        algorithm: Algorithm = FEW_BITS,
        rate: Callable[[int, int], float] | None = None,
    ) -> None:
        self.steps, self.adam, self.works = steps, adam, works
        self.algorithm, self.rate = algorithm, rate  # the rate by the steps of all, and a member's own
        self.put_in: dict[int, dict[int, torch.Tensor]] = {}
        self.observed: set[tuple[int, int]] = set()  # member and step
        super().__init__(joins_at, ends=ends, faults=faults)

    def train(self, member: int) -> str:
        torch.manual_seed(member)
        model = nn.Linear(32, 16)
        parameters = list(model.parameters())
        optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(parameters, lr=LR)]
        if self.adam:
            optimizers = [torch.optim.AdamW([each], lr=LR) for each in parameters]
        draws = torch.Generator().manual_seed(100 + member)
        steps = self.adapters[member] = Steps(model, optimizers, self.algorithm, group=self.groups[member])
        end_step, end = self.ends.get(member, (-1, ""))
        own_steps = 0
        with steps:
            steps.observers.append(lambda _: self.observed.add((member, steps.steps)))
            self.note(member, optimizers)
            while steps.steps < self.steps:
                if steps.steps == end_step:
                    self.end(end, member)
                for parameter in parameters:
                    parameter.grad = torch.randn(parameter.shape, generator=draws)
                flat = torch.cat([each.grad.flatten() for each in parameters if each.grad is not None])
                self.put_in.setdefault(steps.steps, {})[member] = flat.double()
                for group in (group for each in optimizers for group in each.param_groups):
                    group["lr"] = group["lr"] if self.rate is None else self.rate(steps.steps, own_steps)
                steps.step(self.works[member])
                own_steps += 1
                wait_for(Turn())
                self.note(member, optimizers)
        return "left" if steps.is_leaving else "done"

    def note(self, member: int, optimizers: list[torch.optim.Optimizer]) -> None:
        numbers = [each for one in optimizers for group in one.param_groups for each in group["params"]]
        numbers += [each for one in optimizers for state in one.state.values() for each in state.values()]
        held = torch.cat([each.detach().flatten() for each in numbers])
        self.models[self.adapters[member].steps, member] = held

    def moved(self) -> torch.Tensor:
        """Return by how much the first member's numbers have changed since it began."""
        return self.models[self.steps, 0].double() - self.models[0, 0].double()

    def meant(self) -> torch.Tensor:
        """Return the sum of SGD's steps along the mean gradients."""
        means = [torch.stack([*gradients.values()]).mean(0) for gradients in self.put_in.values()]
        return -LR * torch.stack(means).sum(0)


def test_members_that_come_go_and_vanish_take_the_same_steps() -> None:
    run = Run([0, 0, 0, 2], ends={1: (3, "leave"), 2: (4, "kill")})
    assert run.results == ["done", "left", "killed", "done"]
    run.check_equal(since=1)
    stats = run.adapters[0].membership()
    assert (stats.members, stats.averagings, stats.joins, stats.leaves, stats.losses) == (2, 6, 1, 1, 1)
    assert stats.lost_error > 0
    assert [len(run.put_in[step]) for step in range(6)] == [3, 3, 3, 4, 2, 2]
    assert {(1, 4), (0, 6)} <= run.observed  # the last ones of who has left, and of who stays
    assert run.adapters[0].stats().compression_ratio > 2


def test_the_step_is_along_the_mean_of_what_each_has_learnt_from() -> None:
    run = Run([0, 0], steps=1, adam=False, works=(1.0, 3.0), algorithm=AllReduce())
    mean = (run.put_in[0][0] + 3 * run.put_in[0][1]) / 4
    torch.testing.assert_close(run.moved(), -LR * mean, rtol=1e-5, atol=1e-6)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    clean_lives(1, steps=8),
    st.sampled_from(
        [FEW_BITS, PowerSGD(matrix_rank=2), TopK(density=1 / 8, error_decay=1.0, merge="members")]
    ),
)
def test_movement_and_mean_residual_are_all_mean_gradients_whoever_joins_and_leaves(
    lives: dict[str, Any], algorithm: Algorithm
) -> None:
    run = Run(**lives, adam=False, algorithm=algorithm)
    assert not run.errors
    run.check_equal(since=1)
    true = run.meant()
    owed = torch.zeros_like(true)
    for member in (member for member, result in enumerate(run.results) if result == "done"):
        # By those of the last step, who have left with it included.
        owed += run.owed(member).double() / run.adapters[member].membership().members
    assert owed.norm() > 0.05 * true.norm() / LR  # it was compressed
    assert (run.moved() - LR * owed - true).norm() < 3e-6 * true.norm()


@pytest.mark.parametrize("words", [VOTE, "round 1"])
def test_a_step_that_fails_is_repeated_with_the_same_gradients(words: str) -> None:
    calm = Run([0, 0, 0])
    run = Run([0, 0, 0], faults=dict.fromkeys(range(3), (words, 3)))
    run.check_equal(since=1)
    assert run.adapters[0].membership().retries == 1
    assert torch.equal(run.models[6, 0], calm.models[6, 0])


def test_who_misses_the_last_message_alone_takes_the_step_late() -> None:
    calm, run = Run([0, 0, 0]), Run([0, 0, 0], faults={1: (VOTE, 3)})
    assert run.results == ["done"] * 3
    run.check_equal(since=1)
    assert torch.equal(run.models[2, 0], calm.models[2, 0])
    assert (2, 1) not in run.models  # it took that step together with the next one
    assert run.adapters[1].membership().averagings == 6
    assert 2 not in {step for step, put_in in run.put_in.items() if 1 in put_in}


def test_gradients_of_a_step_taken_late_count_once() -> None:
    run = Run([0, 0, 0], adam=False, algorithm=AllReduce(), faults={1: (VOTE, 3)})
    assert [len(gradients) for gradients in run.put_in.values()] == [3, 3, 2, 3, 3, 3]
    torch.testing.assert_close(run.moved(), run.meant(), rtol=1e-5, atol=1e-6)


def test_a_schedule_must_go_by_the_steps_of_all_or_the_one_that_came_later_ends() -> None:
    """Models would part, as after a kill and a restart."""
    run = Run([0, 2], rate=lambda steps, own: LR / (1 + own))
    assert run.results == ["done", "StepError"]
    assert str(run.errors[1]).startswith("lr of AdamW is 0.1 on this member and 0.02 on the others at step 4")
    # Rounded otherwise, by who came later.
    run = Run([0, 0, 3], rate=lambda steps, own: LR / (1 + steps) * (1 + 1e-15 * (own < 2)))
    assert run.results == ["done"] * 3


def test_what_does_not_go_is_told() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = Steps(model, optimizer, AllReduce(), group=alone())
    with pytest.raises(StepError, match="outside the context"):
        steps.step()
    with steps:
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(ConfigError, match="work"):
            steps.step(-1)
        before = model.weight.detach().clone()
        for own in (optimizer, torch.optim.AdamW([model.weight])):
            with pytest.raises(StepError, match=r"call step\(\) of elastic\.Steps"):
                own.step()
        with pytest.raises(StepError, match="all members passed work=0"):
            steps.step(work=0)
        assert steps.steps == 0
        model.weight.grad = torch.full((4, 4), torch.inf)
        with pytest.raises(StepError, match="gradients"):
            steps.step()
        assert torch.equal(model.weight, before)
        with pytest.raises(LeftError, match="left"):
            steps.step()
    with pytest.raises(StepError, match="already entered"):
        steps.__enter__()
