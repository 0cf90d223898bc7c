"""Fragments and delays: Streaming DiLoCo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from members import NESTEROV, Failing, Member, in_each_member, once
from thinwire import Streaming
from thinwire.algorithms import Algorithm, AllReduce, PowerSGD, Quantize, TopK
from thinwire.comm.metered import Wrapped
from thinwire.comm.transport import Message, Work
from thinwire.errors import CommunicationError, StateError, StepError
from thinwire.local_sgd.averaged_model import AveragedModel
from thinwire.local_sgd.fragment import fragments_of, layer_of
from thinwire.local_sgd.schedule import Schedule
from thinwire.sync import engine_of
from training import batch_of, flat, new_model, refused, train_step

POWER = PowerSGD(matrix_rank=2, min_compression_ratio=1)


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width))


class Blocks(nn.Module):
    """As language models are: an embedding, equal blocks, a head; and a scale of its own."""

    def __init__(self, num_blocks: int, width: int = 4, tokens: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(num_blocks))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, tokens)
        self.scale = nn.Parameter(torch.ones(3))


def dealt(model: nn.Module, num_fragments: int) -> list[list[str]]:
    """The layers of each fragment, in the order of the model."""
    fragments = fragments_of(AveragedModel(model).tensors(), num_fragments)
    return [list(dict.fromkeys(layer_of(each.name) for each in fragment)) for fragment in fragments]


def test_a_model_is_divided_by_layers_of_all_depths_and_equal_bytes() -> None:
    assert dealt(nn.ModuleList(block(4) for _ in range(6)), 3) == [["0", "3"], ["1", "4"], ["2", "5"]]
    model = Blocks(12)
    fragments = fragments_of(AveragedModel(model).tensors(), 3)
    names = [it.name for fragment in fragments for it in fragment]
    assert len(names) == len(set(names)) == 12 * 6 + 8
    assert "norm.running_mean" in names
    sizes = [sum(it.value.nbytes for it in fragment) for fragment in fragments]
    assert max(sizes) < 1.2 * sum(sizes) / 3
    for layers in dealt(model, 3):
        depths = [int(layer.removeprefix("blocks.")) for layer in layers if layer.startswith("blocks")]
        assert min(depths) < 6 <= max(depths)
    # A large layer has a fragment nearly to itself.
    assert sorted(map(len, dealt(Blocks(6, tokens=120), 3)))[:2] == [1, 1]


@pytest.mark.parametrize(
    ("size", "fragments", "delay_steps", "mix"), [(2, 1, 0, 0.0), (2, 1, 4, 0.25), (3, 3, 1, 0.25)]
)
@in_each_member()
def test_against_a_plain_reference(member: Member, fragments: int, delay_steps: int, mix: float) -> None:
    """Three outer steps of every fragment, AdamW inside and Nesterov's momentum outside."""
    expected = _by_itself(member.size, 18, 6, fragments, delay_steps, mix)
    member.take(new_model(dtype=torch.float64))
    start = flat(member.model)
    member.optimizer = torch.optim.AdamW(member.model.parameters(), lr=1e-2)
    weight = mix if delay_steps else None
    streaming = Streaming(fragments=fragments, delay_steps=delay_steps, local_weight=weight)
    with member.local(every_steps=6, outer=NESTEROV, streaming=streaming) as local:
        member.train(18)
        assert (flat(member.model) - expected[member.rank]).norm() < 1e-11
        assert local.sync.steps == 3 * fragments - local._membership.is_open
    assert (expected[0] - start).norm() > 0.3


@once
def _by_itself(
    num_workers: int, num_steps: int, every_steps: int, num_fragments: int, delay: int, mix: float
) -> list[Tensor]:
    """Algorithm 2 of the Streaming DiLoCo paper, on vectors; each fragment some elements of them.

    With one fragment and no delay it is algorithm 1 of the DiLoCo paper.
    """
    workers = [new_model(dtype=torch.float64) for _ in range(num_workers)]
    optimizers = [torch.optim.AdamW(worker.parameters(), lr=1e-2) for worker in workers]
    theta = flat(workers[0])
    velocity = torch.zeros(theta.shape, dtype=torch.float64)
    averaged = AveragedModel(workers[0]).tensors()
    sizes = [parameter.numel() for parameter in workers[0].parameters()]
    parts = torch.arange(sum(sizes)).split_with_sizes(sizes)
    places = {each.name: part for each, part in zip(averaged, parts, strict=True)}
    fragments = [
        torch.cat([places[each.name] for each in fragment])
        for fragment in fragments_of(averaged, num_fragments)
    ]
    in_flight: dict[int, tuple[int, Tensor]] = {}
    for step in range(1, num_steps + 1):
        for place, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            train_step(worker, optimizer, batch_of(step - 1, place).double())
        for number, of_it in enumerate(fragments):
            if step % every_steps == -(-(number + 1) * every_steps // num_fragments) % every_steps:
                now = torch.stack([flat(worker)[of_it] for worker in workers])
                in_flight[number] = step + delay, theta[of_it] - now.mean(0)
            if number in in_flight and in_flight[number][0] == step:
                gradient = in_flight.pop(number)[1]
                velocity[of_it] = 0.9 * velocity[of_it] + gradient
                theta[of_it] -= 0.7 * (gradient + 0.9 * velocity[of_it])
                for worker in workers:
                    held = flat(worker)
                    held[of_it] = mix * held[of_it] + (1 - mix) * theta[of_it]
                    nn.utils.vector_to_parameters(held, worker.parameters())
    return [flat(worker) for worker in workers]


@in_each_member(2)
def test_the_most_that_is_sent_after_a_step_falls_with_the_number_of_fragments(member: Member) -> None:
    member.take(nn.Sequential(*(nn.Linear(24, 24) for _ in range(6))))
    sent = [0]
    with member.local(every_steps=4, streaming=Streaming(fragments=3)) as local:
        for step in range(8):
            member.train(step, step + 1)
            sent.append(local.counts().message_bytes)
    model_bytes = flat(member.model).nbytes
    assert [after - before for before, after in pairwise(sent)] == [0, *[model_bytes // 3] * 3] * 2


class Watched(Wrapped):
    """Notes at which step something is sent, and waited for."""

    def __init__(self, transport: Any) -> None:
        super().__init__(transport)
        self.step, self.sent, self.waited = 0, set[int](), set[int]()

    def start(self, message: Message) -> Work:
        self.sent.add(self.step)
        return WatchedWork(super().start(message), self)


@dataclass
class WatchedWork:
    work: Work
    watched: Watched

    def wait(self) -> None:
        self.watched.waited.add(self.watched.step)
        self.work.wait()


@pytest.mark.parametrize(
    ("algorithm", "later"),
    # Two rounds: how many is known once it has been made, and then the first has half of the delay.
    [(AllReduce(), [2]), (Quantize(bits=4), [1, 2])],
    ids=str,
)
@in_each_member(3)
def test_a_delayed_averaging_is_waited_for_when_it_is_due_and_no_sooner(
    member: Member, algorithm: Algorithm, later: list[int]
) -> None:
    """Fragments are sent after steps 3, 6, 9 and so on."""
    watched: Any = Watched(member.transport)
    settings: dict[str, Any] = {"replicas": watched, "algorithm": algorithm}
    with member.local(every_steps=6, streaming=Streaming(fragments=2, delay_steps=2), **settings):
        for watched.step in range(1, 17):
            member.train(watched.step - 1, watched.step)
        watched.step = 17
    starts = [(3, [2]), (6, [2]), (9, later), (12, later), (15, later)]
    expected = {start + age for start, ages in starts for age in ages if start + age <= 16}
    assert watched.waited - {0, 17} == expected
    assert watched.sent >= {3, 6, 9, 12, 15}


@in_each_member(2)
def test_fragments_are_averaged_one_after_another(member: Member) -> None:
    """Alternating PowerSGD takes each side in turn. Nobody trains: members differ only at the start."""
    algorithm = PowerSGD(matrix_rank=2, alternating=True, min_compression_ratio=1)
    streaming = Streaming(fragments=3, delay_steps=1, local_weight=0.0)
    member.optimizer = torch.optim.SGD(member.model.parameters(), lr=0.0)
    with member.local(every_steps=6, streaming=streaming, algorithm=algorithm) as local:
        start = flat(member.model)
        with torch.no_grad():
            draws = torch.Generator().manual_seed(member.rank)
            for parameter in member.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=draws))
        mean = member.gathered(flat(member.model)).mean(0)
        assert not torch.equal(mean, start)
        member.train(25)
        local.average()
        residual = member.residual(local)
        assert residual.norm() > 1e-3
        assert (flat(member.model) + residual - mean).norm() < 1e-5 * residual.norm() + 1e-6
        assert local.stats().compression_ratio > 10


def test_what_a_model_keeps_of_its_own_if_nothing_is_said() -> None:
    """Nothing where a residual would send it a second time."""
    schedules = [Schedule(9, streaming=Streaming(delay_steps=steps)) for steps in (0, 5)]
    assert [schedule.local_weight(TopK()) for schedule in schedules] == [0.0, 0.0]
    assert [schedule.local_weight(Quantize()) for schedule in schedules] == [0.0, 0.5]


@in_each_member(2)
def test_the_last_averages_can_be_looked_at(member: Member) -> None:
    """The same model on all members, buffers included; afterwards each has its own again."""
    with member.local(every_steps=4, streaming=Streaming(fragments=2, delay_steps=1)) as local:
        start = flat(member.model)
        member.train(1)
        with local.averaged():
            assert torch.equal(flat(member.model), start)
        member.train(1, 6)
        own = flat(member.model)
        with local.averaged():
            assert member.agreed()
            with refused(StepError, "a step was called inside averaged()"):
                member.train(6, 7)
            with torch.no_grad():
                next(member.model.parameters()).zero_()
        assert torch.equal(flat(member.model), own)
        assert not member.agreed()


@in_each_member(2)
def test_another_number_of_fragments_goes_on_unless_some_are_in_flight(member: Member) -> None:
    settings: dict[str, Any] = {"every_steps": 4, "algorithm": POWER, "outer": NESTEROV}
    with member.local(streaming=Streaming(fragments=2, delay_steps=1), **settings) as local:
        member.train(4)
        in_flight = local.state_dict()
        local.average()
        at_rest = local.state_dict()
    other = member.local(streaming=Streaming(fragments=3), **settings)
    with refused(StateError, "saved during an averaging of one of 2 fragments", "pass fragments=2"):
        other.load_state_dict(in_flight)
    other.load_state_dict(at_rest)
    with other:
        member.train(4, 9)
    assert member.agreed()
    assert other.steps == 9


@in_each_member(2)
def test_a_fragment_that_fails_leaves_all_as_it_was(member: Member) -> None:
    """It can't be sent, and is sent again, whole."""
    streaming = Streaming(fragments=2, delay_steps=1)
    with member.local(every_steps=4, streaming=streaming, outer=NESTEROV, algorithm=POWER) as local:
        member.train(7)
        before, engine = local.state_dict(), engine_of(local.sync)
        engine.wire = Failing(member.transport)
        with refused(CommunicationError, "lost"):
            member.train(7, 8)
        engine.wire = engine.metered
        after = local.state_dict()
        assert all(torch.equal(v, after["last_average"][name]) for name, v in before["last_average"].items())
        assert repr(before["outer"]) == repr(after["outer"])
        member.train(8, 13)
    assert member.agreed()


@pytest.mark.parametrize(
    ("becomes", "words"),
    [
        ("fewer", "ranks are at different steps (0: 14, 1: 15)"),
        ("infinite", "parameters or buffers of rank 1 are not finite"),
    ],
)
@in_each_member(2)
def test_members_that_differ_learn_it_when_they_next_ask_each_other(
    member: Member, becomes: str, words: str
) -> None:
    """One has fewer batches, or parameters that are not finite: while a fragment is in flight."""
    streaming = Streaming(fragments=2, delay_steps=2)
    with (
        refused(StepError, words),
        member.local(every_steps=6, streaming=streaming, algorithm=Quantize(bits=4)),
    ):
        member.train(5)
        if becomes == "infinite" and member.rank:
            next(member.model.parameters()).data.fill_(torch.inf)
        member.train(5, 14 if becomes == "fewer" and not member.rank else 20)


def replaced(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "frozen": (lambda model: model[2].requires_grad_(False), "['2.bias', '2.weight']"),
    "replaced": (replaced, "['0.weight']"),
}


@pytest.mark.parametrize("case", CHANGES)
@in_each_member(2)
def test_a_model_that_changes_in_mid_round_is_refused(member: Member, case: str) -> None:
    change, names = CHANGES[case]
    member.optimizer = torch.optim.SGD(member.model.parameters(), lr=0.1)
    with (
        refused(StepError, "inside the context: " if case == "replaced" else "since the context was", names),
        member.local(every_steps=4, streaming=Streaming(fragments=2, delay_steps=1)),
    ):
        member.train(2)
        change(member.model)
        member.train(2, 3)
