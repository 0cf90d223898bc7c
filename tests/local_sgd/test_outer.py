"""The outer optimizer: its rates, its rounding, and what is saved of it."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from members import NESTEROV, Member, in_each_member
from thinwire import Streaming
from thinwire.errors import StepError
from thinwire.local_sgd.averaged_model import AveragedModel
from thinwire.local_sgd.saved_state import saved_outer
from thinwire.local_sgd.schedule import Schedule
from training import flat, new_model, refused


@in_each_member(3)
def test_an_outer_rate_that_one_process_has_changed_is_refused(member: Member) -> None:
    with member.local(every_steps=2, outer=NESTEROV) as local:
        member.train(2)
        assert local.outer is not None
        local.outer.param_groups[0]["lr"] = 0.1
        member.train(2)  # on all alike
        if member.rank == 1:
            local.outer.param_groups[0]["lr"] = 0.2
        before = local.state_dict()["last_average"]
        with refused(StepError, "rank 1 has other settings of the outer optimizer"):
            member.train(2)
        after = local.state_dict()["last_average"]
        assert all(torch.equal(before[name], after[name]) for name in before)
        local.outer.param_groups[0]["lr"] = 0.1
    assert member.agreed()


SMALL = partial(torch.optim.SGD, lr=2**-6, momentum=0.5, nesterov=True)
STREAMING: dict[str, dict[str, Any]] = {
    "whole": {"every_steps": 2},
    "fragments": {"every_steps": 4, "streaming": Streaming(fragments=2)},
    "delay": {"every_steps": 4, "streaming": Streaming(fragments=2, delay_steps=1, local_weight=0)},
}


@pytest.mark.parametrize("settings", STREAMING.values(), ids=STREAMING)
@in_each_member(2)
def test_outer_steps_that_16_bits_would_round_away_add_up(member: Member, settings: dict[str, Any]) -> None:
    """As in a reference that keeps the last averages in fp32; a run that resumes in the middle, too."""
    member.take(new_model(dtype=torch.bfloat16))
    with torch.no_grad():
        nn.utils.vector_to_parameters(torch.ones_like(flat(member.model)), member.model.parameters())
    member.optimizer = torch.optim.SGD(member.model.parameters(), lr=2**-7)
    for parameter in member.model.parameters():
        parameter.grad = torch.full_like(parameter, -1.0 - 2 * member.rank)
    saved: dict[str, Any] = {}
    model: dict[str, Tensor] = {}
    for _ in range(2):
        local = member.local(**settings, outer=SMALL)
        if saved:
            local.load_state_dict(saved)
            member.model.load_state_dict(model)  # without the averaging at the end of the context
        with local:
            for _ in range(12):
                member.optimizer.step()
            saved, model = local.state_dict(), copy.deepcopy(member.model.state_dict())
            fragments = local._model.fragments
            lasts = [fragment.last[0][0].item() for fragment in fragments]
            values = [next(iter(fragment)).value.view(-1)[0].item() for fragment in fragments]
    assert (lasts, values) == _in_32_bits(local._schedule, member.rank)
    assert 1.0 not in torch.tensor(lasts).bfloat16()
    if "streaming" not in settings:
        assert values == torch.tensor(lasts).bfloat16().tolist()
    kept = [*saved["last_average"].values()]
    kept += [state["momentum_buffer"] for state in saved["outer"]["state"].values()]
    assert {each.dtype for each in kept} == {torch.float32}


def _in_32_bits(schedule: Schedule, rank: int) -> tuple[list[float], list[float]]:
    """Two members with a number a fragment, in bf16, their last averages in fp32; what one of them holds.

    It is a number of each fragment: of its last average, and of the model.
    """
    lasts = [nn.Parameter(torch.ones(())) for _ in range(schedule.streaming.fragments)]
    outers = [SMALL([last]) for last in lasts]
    own = [[torch.ones((), dtype=torch.bfloat16) for _ in lasts] for _ in range(2)]
    sent: dict[int, tuple[int, Tensor]] = {}
    for step in range(1, 25):
        for place, values in enumerate(own):
            for value in values:
                value.add_(2**-7 * (1.0 + 2 * place))
        turns, last_turn = schedule.position(step)
        for place in [(turns - 1) % len(lasts)] if turns and last_turn == step else []:
            start = lasts[place].detach().bfloat16()
            change = torch.stack([values[place] - start for values in own]).mean()
            assert start + 2**-6 * change == start
            sent[place] = step, change.float()
        for place, (sent_after, change) in tuple(sent.items()):
            if step == sent_after + schedule.streaming.delay_steps:
                lasts[place].grad = -change
                outers[place].step()
                for values in own:
                    values[place].copy_(lasts[place].detach())
                del sent[place]
    return [last.item() for last in lasts], [value.item() for value in own[rank]]


class Interrupted(torch.optim.SGD):
    """Raises in its second step, before it has stepped anything."""

    num_steps = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        if self.num_steps == 2:
            raise KeyboardInterrupt
        super().step()


@in_each_member(2)
def test_what_an_outer_step_that_raises_was_given_is_not_applied_by_the_next_one(member: Member) -> None:
    outer = partial(Interrupted, lr=1.0)
    with member.local(every_steps=2, streaming=Streaming(fragments=2), outer=outer) as local:

        def lasts() -> list[Tensor]:
            return [torch.cat(fragment.last) for fragment in local._model.fragments]

        start = lasts()
        member.train(1)
        before = lasts()
        assert not torch.equal(start[0], before[0])
        with pytest.raises(KeyboardInterrupt):
            member.train(1, 2)
        member.train(2, 3)
        assert not torch.equal(before[0], lasts()[0])
        assert torch.equal(before[1], lasts()[1])  # of the interrupted step


def test_what_is_saved_of_an_outer_optimizer_lies_on_the_cpu() -> None:
    """What lay on a GPU, all processes of a machine would load onto that one."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        last = nn.Parameter(torch.empty(3, device="cuda"))
        outer = torch.optim.SGD([last], lr=0.5, momentum=0.9)
        outer.state[last]["momentum_buffer"] = torch.empty(3, device="cuda")
        fragment = Mock(lasts=[(Mock(), last)])
        state: Any = saved_outer(AveragedModel(nn.Module(), outer=outer, fragments=[fragment]))
    assert state["state"][0]["momentum_buffer"].device.type == "cpu"
    assert outer.state[last]["momentum_buffer"].device.type == "cuda"
