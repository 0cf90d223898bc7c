"""The outer optimizer: DiLoCo."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from members import Member, run
from thinwire.fronts.local_sgd.outer import saved_outer
from thinwire.fronts.local_sgd.replica import Replica
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
    with member.local(every_steps=2, fragments=2, outer=partial(Interrupted, lr=1.0)) as local:
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
        state = saved_outer(outer, {id(last): "weight"}, Replica(None))
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
