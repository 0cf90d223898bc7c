"""Fragments: slices of a model that are averaged apart."""

from __future__ import annotations

import torch
from torch import Tensor

from members import Member, run
from thinwire.algorithms import AllReduce, PowerSGD
from thinwire.localsgd.flight import Flight
from thinwire.localsgd.fragment import Fragment
from thinwire.localsgd.model import AveragedModel
from thinwire.sync import Engine
from training import flat, new_model

POWER = PowerSGD(matrix_rank=2)


def test_two_fragments_of_a_model_are_averaged_apart() -> None:
    """Here by engines of their own, with memory, step count and plan; what they send is counted together."""
    before = flat(new_model())
    for parameters, means, steps, error, traffic in run(2, _two_fragments):
        assert (parameters[0] - means[0]).abs().max() < 1e-6
        assert (parameters[1] + error - means[1]).norm() < 1e-5 * error.norm() + 1e-6
        assert error.norm() > 1e-3
        assert steps == (2, 1)
        assert traffic[0] == traffic[1] < 3 * before.nbytes


def _two_fragments(
    member: Member,
) -> tuple[list[Tensor], list[Tensor], tuple[int, int], Tensor, tuple[int, int]]:
    averaged = AveragedModel(member.model).tensors()
    slices = averaged[:2], averaged[2:]
    first = Engine(AllReduce(), member.transport, [each.spec for each in slices[0]])
    second = Engine(
        POWER,
        member.transport,
        [each.spec for each in slices[1]],
        traffic=first.traffic,
        clock=first.clock,
    )
    fragments = [Fragment(slices[0]), Fragment(slices[1])]
    for fragment in fragments:
        fragment.take()
    member.train(4)
    own = [torch.cat([each.value.reshape(-1) for each in part]) for part in slices]
    means = [member.gathered(each).mean(0) for each in own]
    for place, engine in ((0, first), (1, second), (0, first)):  # the first one more often
        changes = fragments[place].changes()
        Flight({fragments[place]: changes}, engine).land()
        fragments[place].move(changes, None)
    kept = dict(second.state_dict()["error"])
    error = torch.cat([kept.get(each.name, torch.zeros_like(each.value)).reshape(-1) for each in slices[1]])
    after = [torch.cat([each.value.reshape(-1) for each in part]) for part in slices]
    counted = first.counts().message_bytes, second.counts().message_bytes
    return after, means, (first.steps, second.steps), error, counted
