"""The outer optimizer: DiLoCo."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from members import Member, run
from thinwire import Streaming
from thinwire.localsgd.fragment import Averaged
from thinwire.localsgd.outer import saved_outer
from thinwire.localsgd.replica import Replica
from thinwire.localsgd.schedule import Schedule
from training import batch_of, error_of, flat, new_model, train_step

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("size", [2, 4])
def test_diloco_against_a_plain_reference(size: int) -> None:
    expected = _diloco_by_itself(size, num_averagings=4, every_steps=5)
    assert (expected - flat(new_model(dtype=torch.float64))).norm() > 0.5
    for parameters, agreed in run(size, _diloco):
        assert (parameters - expected).norm() < 1e-11
        assert agreed


def _diloco(member: Member) -> tuple[Tensor, bool]:
    member.take(new_model(dtype=torch.float64))
    member.optimizer = torch.optim.AdamW(member.model.parameters(), lr=1e-2)
    with member.local(every_steps=5, outer=NESTEROV):
        member.train(20)
    return flat(member.model), member.agreed()


def _diloco_by_itself(num_workers: int, *, num_averagings: int, every_steps: int) -> Tensor:
    """Algorithm 1 of the DiLoCo paper on one vector of parameters, in float64."""
    workers = [new_model(dtype=torch.float64) for _ in range(num_workers)]
    optimizers = [torch.optim.AdamW(worker.parameters(), lr=1e-2) for worker in workers]
    theta, velocity = flat(workers[0]), torch.zeros(flat(workers[0]).shape, dtype=torch.float64)
    for averaging in range(num_averagings):
        for place, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            nn.utils.vector_to_parameters(theta.clone(), worker.parameters())
            for step in range(averaging * every_steps, (averaging + 1) * every_steps):
                train_step(worker, optimizer, batch_of(step, place).double())
        outer_gradient = theta - torch.stack([flat(worker) for worker in workers]).mean(0)
        velocity = 0.9 * velocity + outer_gradient
        theta = theta - 0.7 * (outer_gradient + 0.9 * velocity)
    return theta


def test_an_outer_rate_that_one_process_has_changed_is_refused() -> None:
    def body(member: Member) -> tuple[str, bool]:
        with member.local(every_steps=2, outer=NESTEROV) as local:
            member.train(2)
            assert local.outer is not None
            local.outer.param_groups[0]["lr"] = 0.1
            member.train(2)  # on all alike
            if member.rank == 1:
                local.outer.param_groups[0]["lr"] = 0.2
            before = local.state_dict()["last_average"]
            message = error_of(lambda: member.train(2))
            after = local.state_dict()["last_average"]
            local.outer.param_groups[0]["lr"] = 0.1
        return message, all(torch.equal(before[name], after[name]) for name in before) and member.agreed()

    for message, unchanged in run(3, body):
        assert message.startswith("StepError: the outer optimizer's settings on process 1 differ")
        assert unchanged


SMALL = partial(torch.optim.SGD, lr=2**-6, momentum=0.5, nesterov=True)
STREAMING: dict[str, dict[str, Any]] = {
    "whole": {"every_steps": 2},
    "fragments": {"every_steps": 4, "streaming": Streaming(fragments=2)},
    "delay": {"every_steps": 4, "streaming": Streaming(fragments=2, delay_steps=1, local_weight=0)},
}


@pytest.mark.parametrize("settings", STREAMING.values(), ids=STREAMING)
def test_outer_steps_that_16_bits_would_round_away_add_up(settings: dict[str, Any]) -> None:
    """As in a reference that keeps the last averages in fp32; a run that resumes in the middle, too."""
    for held, expected, dtypes in run(2, _small_outer_steps, settings):
        assert dtypes == {torch.float32}
        assert held == expected
        lasts, values = held
        assert 1.0 not in torch.tensor(lasts).bfloat16()
        if "streaming" not in settings:
            assert values == torch.tensor(lasts).bfloat16().tolist()


Held = tuple[list[float], list[float]]  # a number of each fragment: of its last average, and of the model


def _small_outer_steps(member: Member, settings: dict[str, Any]) -> tuple[Held, Held, set[torch.dtype]]:
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
            fragments = local._averagings.fragments
            lasts = [fragment.last[0][0].item() for fragment in fragments]
            values = [next(iter(fragment)).value.view(-1)[0].item() for fragment in fragments]
    kept = [*saved["last_average"].values()]
    kept += [state["momentum_buffer"] for state in saved["outer"]["state"].values()]
    return (lasts, values), _in_32_bits(local._schedule, member.rank), {each.dtype for each in kept}


def _in_32_bits(schedule: Schedule, rank: int) -> Held:
    """Two members with a number a fragment, in bf16, their last averages in fp32; what one of them holds."""
    lasts = [nn.Parameter(torch.ones(())) for _ in range(schedule.num_fragments)]
    outers = [SMALL([last]) for last in lasts]
    own = [[torch.ones((), dtype=torch.bfloat16) for _ in lasts] for _ in range(2)]
    sent: dict[int, tuple[int, Tensor]] = {}
    for step in range(1, 25):
        for place, values in enumerate(own):
            for value in values:
                value.add_(2**-7 * (1.0 + 2 * place))
        for place in schedule.fragments_after(step):
            start = lasts[place].detach().bfloat16()
            change = torch.stack([values[place] - start for values in own]).mean()
            assert start + 2**-6 * change == start
            sent[place] = step, change.float()
        for place, (sent_after, change) in tuple(sent.items()):
            if step == sent_after + schedule.delay_steps:
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


def test_what_an_outer_step_that_raises_was_given_is_not_applied_by_the_next_one() -> None:
    assert run(2, _interrupted) == [(True, False)] * 2


def _interrupted(member: Member) -> tuple[bool, bool]:
    """Return whether the next step left each of the fragments alone, that of the interrupted one first."""
    with member.local(
        every_steps=2, streaming=Streaming(fragments=2), outer=partial(Interrupted, lr=1.0)
    ) as local:
        lasts = [torch.cat(fragment.last) for fragment in local._averagings.fragments]
        member.train(1)
        assert not torch.equal(lasts[0], torch.cat(local._averagings.fragments[0].last))
        lasts = [torch.cat(fragment.last) for fragment in local._averagings.fragments]
        with pytest.raises(KeyboardInterrupt):
            member.train(1, 2)
        member.train(2, 3)
        after = [torch.cat(fragment.last) for fragment in local._averagings.fragments]
    return torch.equal(lasts[1], after[1]), torch.equal(lasts[0], after[0])


def test_what_is_saved_of_an_outer_optimizer_lies_on_the_cpu() -> None:
    """What lay on a GPU, all processes of a machine would load onto that one."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        last = nn.Parameter(torch.empty(3, device="cuda"))
        outer = torch.optim.SGD([last], lr=0.5, momentum=0.9)
        outer.state[last]["momentum_buffer"] = torch.empty(3, device="cuda")
        state = saved_outer(outer, [(Averaged("weight", last, is_buffer=False), last)], Replica(None))
    assert state["state"][0]["momentum_buffer"].device.type == "cpu"
    assert outer.state[last]["momentum_buffer"].device.type == "cuda"


def test_an_outer_optimizer_can_be_scheduled() -> None:
    for frozen, agreed in run(2, _outer_schedule):
        assert frozen == [False, True]
        assert agreed


def _outer_schedule(member: Member) -> tuple[list[bool], bool]:
    frozen = []
    with member.local(outer=partial(torch.optim.SGD, lr=1.0)) as local:
        for lr in (1.0, 0.0):
            assert local.outer is not None
            local.outer.param_groups[0]["lr"] = lr
            before = flat(member.model)
            member.train(2)
            frozen.append(torch.equal(before, flat(member.model)))
    return frozen, member.agreed()
