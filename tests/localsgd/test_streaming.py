"""Fragments and delays: Streaming DiLoCo."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from members import Member, run
from thinwire import Nesterov, Streaming, Warmup
from thinwire.algorithms import Algorithm, AllReduce, Cast, PowerSGD, Quantize
from thinwire.channel.metered import Wrapped
from thinwire.channel.transport import Collective, Message, Work
from thinwire.errors import CommunicationError
from thinwire.localsgd.fragment import fragments_of, layer_of
from thinwire.localsgd.model import AveragedModel
from thinwire.sync import engine_of
from training import batch_of, error_of, flat, new_model, train_step

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
POWER = PowerSGD(matrix_rank=2, min_compression_ratio=1)


# Dividing the model


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


def test_fragments_take_turns_with_equal_blocks() -> None:
    first, second, third = dealt(nn.ModuleList(block(4) for _ in range(9)), 3)
    assert (first, second, third) == (["0", "3", "6"], ["1", "4", "7"], ["2", "5", "8"])


@pytest.mark.parametrize("num_fragments", [1, 2, 3, 4])
def test_a_model_is_divided_by_layers_of_all_depths_and_equal_bytes(num_fragments: int) -> None:
    model = Blocks(12)
    fragments = fragments_of(AveragedModel(model).tensors(), num_fragments)
    names = [each.name for fragment in fragments for each in fragment]
    assert len(names) == len(set(names)) == 12 * 6 + 8
    assert [fragment for fragment in fragments if any(each.name == "norm.running_mean" for each in fragment)]
    sizes = [sum(each.value.nbytes for each in fragment) for fragment in fragments]
    assert max(sizes) < 1.2 * sum(sizes) / num_fragments
    for layers in dealt(model, num_fragments):
        depths = [int(layer.removeprefix("blocks.")) for layer in layers if layer.startswith("blocks")]
        assert min(depths) < 6 <= max(depths)


def test_a_large_layer_has_a_fragment_nearly_to_itself() -> None:
    model = Blocks(6, tokens=120)
    assert sorted(map(len, dealt(model, 3)))[:2] == [1, 1]


# Against plain references, in float64


@pytest.mark.parametrize(
    ("size", "fragments", "delay_steps", "mix"),
    [(3, 1, 0, 0.0), (2, 2, 1, 0.5), (2, 3, 4, 0.25), (3, 3, 4, 0.25)],
)
def test_against_a_plain_reference(size: int, fragments: int, delay_steps: int, mix: float) -> None:
    """Four outer steps of every fragment, AdamW inside and Nesterov's momentum outside."""
    expected = _by_itself(size, 24, 6, fragments, delay_steps, mix)
    assert (expected[0] - flat(new_model(dtype=torch.float64))).norm() > 0.3
    for rank, parameters in enumerate(run(size, _streaming, fragments, delay_steps, mix)):
        assert (parameters - expected[rank]).norm() < 1e-11


def _streaming(member: Member, fragments: int, delay_steps: int, mix: float) -> Tensor:
    member.take(new_model(dtype=torch.float64))
    member.optimizer = torch.optim.AdamW(member.model.parameters(), lr=1e-2)
    weight = mix if delay_steps else None
    streaming = Streaming(fragments=fragments, delay_steps=delay_steps, local_weight=weight)
    with member.local(every_steps=6, outer=NESTEROV, streaming=streaming) as local:
        member.train(24)
        parameters = flat(member.model)
        assert local.sync.steps == 4 * fragments - len(local._averagings.flights)
    return parameters


def _by_itself(
    num_workers: int, num_steps: int, every_steps: int, num_fragments: int, delay: int, mix: float
) -> list[Tensor]:
    """Algorithm 2 of the Streaming DiLoCo paper, on vectors; each fragment some elements of them."""
    workers = [new_model(dtype=torch.float64) for _ in range(num_workers)]
    optimizers = [torch.optim.AdamW(worker.parameters(), lr=1e-2) for worker in workers]
    theta = flat(workers[0])
    velocity = torch.zeros(theta.shape, dtype=torch.float64)
    averaged = AveragedModel(workers[0]).tensors()
    places = {each.name: part for each, part in zip(averaged, _places(workers[0]), strict=True)}
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


def _places(model: nn.Module) -> Sequence[Tensor]:
    sizes = [parameter.numel() for parameter in model.parameters()]
    return torch.arange(sum(sizes)).split_with_sizes(sizes)


# What is sent, and when it is waited for


@pytest.mark.parametrize("fragments", [2, 3, 4])
def test_the_most_that_is_sent_after_a_step_falls_with_the_number_of_fragments(fragments: int) -> None:
    (whole, *_), (sent, *_) = run(2, _sent_by_step, 1), run(2, _sent_by_step, fragments)
    assert [step for step, sent_bytes in enumerate(whole, 1) if sent_bytes] == [8, 16]
    assert len([sent_bytes for sent_bytes in sent if sent_bytes]) == 2 * fragments
    assert sum(sent) == sum(whole) > 0
    assert max(sent) == max(whole) / fragments


def _sent_by_step(member: Member, fragments: int) -> list[int]:
    member.take(nn.Sequential(*(nn.Linear(24, 24) for _ in range(12))))
    sent, before = [], 0
    with member.local(every_steps=8, streaming=Streaming(fragments=fragments)) as local:
        for step in range(16):
            member.train(step, step + 1)
            sent.append(local.counts().message_bytes - before)
            before += sent[-1]
    return sent


@dataclass
class Look:
    """Notes at which step something is sent, and waited for."""

    step: int = 0

    def __post_init__(self) -> None:
        self.sent: list[tuple[int, Collective]] = []
        self.waited: list[tuple[int, Collective]] = []


class Watched(Wrapped):
    def __init__(self, transport: Any, look: Look) -> None:
        super().__init__(transport)
        self.look = look

    def start(self, message: Message) -> Work:
        self.look.sent.append((self.look.step, message.collective))
        return WatchedWork(super().start(message), self.look, message.collective)


@dataclass
class WatchedWork:
    work: Work
    look: Look
    collective: Collective

    def wait(self) -> None:
        self.look.waited.append((self.look.step, self.collective))
        self.work.wait()


@pytest.mark.parametrize(
    ("algorithm", "delay_steps", "first", "later"),
    [
        (AllReduce(), 3, [3], [3]),
        # Two rounds: how many is known once it has been made, and then the first has half of the delay.
        (Quantize(bits=4), 4, [4], [2, 4]),
        (Quantize(bits=4), 1, [1], [1]),
    ],
    ids=str,
)
def test_a_delayed_averaging_is_waited_for_when_it_is_due_and_no_sooner(
    algorithm: Algorithm, delay_steps: int, first: list[int], later: list[int]
) -> None:
    """Fragments are sent after steps 3, 6, 9 and so on; those in flight overlap where the delay is longer."""
    starts = [(3, first), (6, first), (9, later), (12, later), (15, later)]
    expected = sorted({start + age for start, ages in starts for age in ages if start + age <= 16})
    for look in run(2, _waits, algorithm, delay_steps):
        assert sorted({step for step, _ in look.waited if 0 < step <= 16}) == expected
        assert {step for step, _ in look.sent} >= {3, 6, 9, 12, 15}


def _waits(member: Member, algorithm: Algorithm, delay_steps: int) -> Look:
    look = Look()
    watched: dict[str, Any] = {"replicas": Watched(member.transport, look), "algorithm": algorithm}
    with member.local(every_steps=6, streaming=Streaming(fragments=2, delay_steps=delay_steps), **watched):
        for look.step in range(1, 17):
            member.train(look.step - 1, look.step)
        look.step = 17
    return look


@pytest.mark.parametrize("delay_steps", [1, 3, 5])
def test_fragments_in_flight_side_by_side_are_averaged_as_one_after_another(delay_steps: int) -> None:
    """Alternating PowerSGD takes each side in turn of every fragment; error memory is by parameter."""
    for residual, gap, ratio in run(2, _side_by_side, delay_steps):
        assert residual > 1e-3
        assert gap < 1e-5 * residual + 1e-6
        assert ratio > 10


def _side_by_side(member: Member, delay_steps: int) -> tuple[float, float, float]:
    """Nobody trains: all that is averaged is what members differ in at the start, and its residual."""
    algorithm = PowerSGD(matrix_rank=2, alternating=True, min_compression_ratio=1)
    member.optimizer = torch.optim.SGD(member.model.parameters(), lr=0.0)
    with member.local(
        every_steps=6,
        streaming=Streaming(fragments=3, delay_steps=delay_steps, local_weight=0.0),
        algorithm=algorithm,
    ) as local:
        start = flat(member.model)
        with torch.no_grad():
            draws = torch.Generator().manual_seed(member.rank)
            for parameter in member.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=draws))
        mean = member.gathered(flat(member.model)).mean(0)
        assert not torch.equal(mean, start)
        member.train(24 + delay_steps)
        local.average()
        error = dict(local.state_dict()["sync"]["error"])
        named = list(member.model.named_parameters())
        residual = torch.cat([error.get(name, torch.zeros_like(p)).reshape(-1) for name, p in named])
        gap = (flat(member.model) + residual - mean).norm().item()
        return residual.norm().item(), gap, local.stats().compression_ratio


# What goes on besides


@pytest.mark.parametrize("delay_steps", [0, 2])
def test_with_subgroups_a_warm_up_and_buffers(delay_steps: int) -> None:
    for seen, agreed, bounds in run(4, _with_subgroups, delay_steps):
        everywhere, within = (True, True), (True, False)
        assert seen == [everywhere] * 2 + [within] * 8
        assert agreed
        assert bounds == [-torch.inf, 3.0]


def _with_subgroups(member: Member, delay_steps: int) -> tuple[list[tuple[bool, bool]], bool, list[float]]:
    member.model.register_buffer("bounds", torch.tensor([-torch.inf, 3.0]))
    seen = []
    settings = {
        "streaming": Streaming(fragments=2, delay_steps=delay_steps),
        "warmup": Warmup(2),
        "outer": NESTEROV,
    }
    with member.local(every_steps=4, subgroup=member.pair, **settings):
        for step in range(10):
            member.train(step, step + 1)
            seen.append(member.halves())
    bounds: Any = member.model.bounds
    return seen, member.agreed(), bounds.tolist()


@pytest.mark.parametrize("num_batches", [(9, 4), (3, 8)], ids=str)
def test_uneven_inputs(num_batches: tuple[int, int]) -> None:
    for agreed, steps in run(2, _uneven, num_batches):
        assert agreed
        assert steps == max(num_batches)


def _uneven(member: Member, num_batches: tuple[int, int]) -> tuple[bool, int]:
    with member.local(
        every_steps=4, streaming=Streaming(fragments=2, delay_steps=3), algorithm=POWER
    ) as local:
        hook = local.join_hook()
        own, most = num_batches[member.rank], max(num_batches)
        member.train(own)
        for _ in range(own, most):
            hook.main_hook()
        hook.post_hook(own == most)
    return member.agreed(), local.steps


def test_the_last_averages_can_be_looked_at() -> None:
    """The same model on all members, buffers included; afterwards each has its own again."""
    for same, restored, started, message in run(2, _averaged):
        assert same == [True, False]
        assert restored
        assert started
        assert message.startswith("StepError: a step came inside averaged()")


def _averaged(member: Member) -> tuple[list[bool], bool, bool, str]:
    with member.local(every_steps=4, streaming=Streaming(fragments=2, delay_steps=1)) as local:
        start = flat(member.model)
        member.train(1)
        with local.averaged():
            started = torch.equal(flat(member.model), start)
        member.train(1, 6)
        own = flat(member.model)
        with local.averaged():
            same = [member.agreed()]
            message = error_of(lambda: member.train(6, 7))
            with torch.no_grad():
                next(member.model.parameters()).zero_()
        restored = torch.equal(flat(member.model), own)
        same.append(member.agreed())
    return same, restored, started, message


# Saving


@pytest.mark.parametrize("saved_after", [8, 10, 11])
@pytest.mark.parametrize("algorithm", [POWER, Quantize(bits=4)], ids=str)
def test_resuming_with_fragments_in_flight_is_equal_to_the_bit(
    algorithm: Algorithm, saved_after: int
) -> None:
    for straight, resumed, in_flight, agreed in run(2, _resume, algorithm, saved_after):
        assert torch.equal(straight, resumed)
        assert in_flight == {8: 2, 10: 2, 11: 1}[saved_after]
        assert agreed


def _resume(member: Member, algorithm: Algorithm, saved_after: int) -> tuple[Tensor, Tensor, int, bool]:
    settings = {
        "every_steps": 6,
        "streaming": Streaming(fragments=3, delay_steps=3),
        "algorithm": algorithm,
        "outer": NESTEROV,
    }
    saved = io.BytesIO()
    with member.local(**settings) as local:
        member.train(saved_after)
        in_flight = len(local.state_dict()["in_flight"])
        torch.save((local.state_dict(), member.model.state_dict(), member.optimizer.state_dict()), saved)
        member.train(saved_after, 20)
    straight = flat(member.model)
    saved.seek(0)
    local_state, model_state, optimizer_state = torch.load(saved, weights_only=True)
    member.take(new_model(seed=3))
    resumed = member.local(**settings)
    member.model.load_state_dict(model_state)
    member.optimizer.load_state_dict(optimizer_state)
    resumed.load_state_dict(local_state)
    # An attempt to enter that fails late leaves nothing in flight behind.
    with (
        patch.object(member.optimizer, "register_step_post_hook", side_effect=ValueError("no more hooks")),
        pytest.raises(ValueError, match="no more hooks"),
        resumed,
    ):
        pass
    with resumed:
        member.train(saved_after, 20)
    return straight, flat(member.model), in_flight, member.agreed()


def test_another_number_of_fragments_goes_on_unless_some_are_in_flight() -> None:
    for message, agreed, steps in run(2, _other_number):
        assert message.startswith("StateError: the state was saved while one of 2 fragments was in flight")
        assert "pass fragments=2" in message
        assert agreed
        assert steps == 9


def _other_number(member: Member) -> tuple[str, bool, int]:
    states = []
    with member.local(
        every_steps=4, streaming=Streaming(fragments=2, delay_steps=1), algorithm=POWER, outer=NESTEROV
    ) as local:
        member.train(4)
        states.append(local.state_dict())
        local.average()
        states.append(local.state_dict())
    other = member.local(every_steps=4, streaming=Streaming(fragments=3), algorithm=POWER, outer=NESTEROV)
    message = error_of(lambda: other.load_state_dict(states[0]))
    other.load_state_dict(states[1])
    with other:
        member.train(4, 9)
    return message, member.agreed(), other.steps


# What goes wrong


class Failing(Wrapped):
    """Loses means."""

    def mean(self, tensor: Tensor, purpose: str) -> Work:
        raise CommunicationError(f"{purpose}: lost")


def test_a_fragment_that_fails_leaves_all_as_it_was() -> None:
    for message, untouched, agreed in run(2, _failing):
        assert message.startswith("CommunicationError")
        assert untouched == [True, True]
        assert agreed


def _failing(member: Member) -> tuple[str, list[bool], bool]:
    """A fragment is in flight while the next one can't be sent: both are sent again, whole."""
    with member.local(
        every_steps=4, streaming=Streaming(fragments=2, delay_steps=3), outer=NESTEROV, algorithm=POWER
    ) as local:
        member.train(7)
        before, engine = local.state_dict(), engine_of(local.sync)
        engine.wire = Failing(member.transport)
        message = error_of(lambda: member.train(7, 8))
        engine.wire = engine.metered
        after = local.state_dict()
        untouched = [
            all(
                torch.equal(each, after["last_average"][name])
                for name, each in before["last_average"].items()
            ),
            repr(before["outer"]) == repr(after["outer"]),
        ]
        member.train(8, 13)
    return message, untouched, member.agreed()


def test_members_that_differ_learn_it_when_they_next_ask_each_other() -> None:
    """One has fewer batches, or parameters that are not finite: while a fragment is in flight."""

    def fewer(member: Member) -> None:
        with member.local(
            every_steps=6, streaming=Streaming(fragments=2, delay_steps=4), algorithm=Quantize(bits=4)
        ):
            member.train(20 if member.rank else 14)

    def infinite(member: Member) -> None:
        with member.local(
            every_steps=6, streaming=Streaming(fragments=2, delay_steps=4), algorithm=Quantize(bits=4)
        ):
            member.train(5)
            if member.rank:
                next(member.model.parameters()).data.fill_(torch.inf)
            member.train(5, 20)

    for message in run(2, lambda member: error_of(lambda: fewer(member))):
        assert message.startswith("StepError: processes are at different steps (0: 14, 1: 15)")
    for message in run(2, lambda member: error_of(lambda: infinite(member))):
        assert message.startswith("StepError: the parameters or buffers of process 1 are not finite")


def test_a_mean_that_leaves_the_range_of_its_type_is_an_error_when_it_is_due() -> None:
    def body(member: Member) -> tuple[str, bool]:
        def loop() -> None:
            with member.local(every_steps=4, streaming=Streaming(delay_steps=2), algorithm=Cast("fp16")):
                member.train(3)
                next(member.model.parameters()).data[0, 0] = 1e6
                member.train(3, 5)
                kept.append(member.rank)
                member.train(5, 6)

        kept: list[int] = []
        return error_of(loop), bool(kept)

    for message, came_so_far in run(2, body):
        assert message.startswith("StepError: the mean change of the parameters is not finite")
        assert came_so_far


def change_in_mid_round(member: Member, change: Callable[[nn.Module], object]) -> None:
    member.optimizer = torch.optim.SGD(member.model.parameters(), lr=0.1)
    with member.local(every_steps=4, streaming=Streaming(fragments=2, delay_steps=1)):
        member.train(2)
        change(member.model)
        member.train(2, 3)


def replaced(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def resized(model: Any) -> None:
    model[4].weight.data, model[4].bias.data = torch.zeros(3, 40), torch.zeros(3)


def added(model: Any) -> None:
    model.extra = nn.Parameter(torch.ones(1))


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "frozen": (lambda model: model[2].requires_grad_(False), "['2.bias', '2.weight']"),
    "replaced": (replaced, "['0.weight']"),
    "resized": (resized, "['4.bias', '4.weight']"),
    "added": (added, "['extra']"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_model_that_changes_in_mid_round_is_refused(case: str) -> None:
    change, names = CHANGES[case]
    for message in run(2, lambda member: error_of(lambda: change_in_mid_round(member, change))):
        assert message.startswith("StepError: the model's trainable parameters or buffers are others")
        assert names in message


def other_settings(member: Member, **settings: Any) -> None:
    own = {name: values[member.rank] for name, values in settings.items()}
    with member.local(**{"every_steps": 4, "streaming": Streaming(delay_steps=1), **own}):
        pass


def use_in_flight(member: Member) -> None:
    with member.local(every_steps=4, streaming=Streaming(delay_steps=3)) as local:
        member.train(5)
        local.sync.use(POWER)


def joined_by_contributors(member: Member) -> None:
    with member.local(every_steps=4, streaming=Streaming(fragments=2)) as local:
        local.join_hook(divide_by_initial_world_size=False)


LATE = Streaming(delay_steps=1)
MISTAKES: dict[str, tuple[Callable[[Member], object], str]] = {
    "layers": (
        lambda member: member.local(every_steps=9, streaming=Streaming(fragments=4)),
        "ConfigError: fragments=4 is more than the layers that the model trains, 3 (0, 2, 4 …)",
    ),
    "steps": (
        lambda member: member.local(streaming=Streaming(fragments=3)),
        "ConfigError: fragments=3 is more than every_steps=2",
    ),
    "no fragment": (
        lambda member: member.local(streaming=Streaming(fragments=0)),
        "ConfigError: fragments must be",
    ),
    "delay": (
        lambda member: member.local(streaming=Streaming(delay_steps=2)),
        "ConfigError: delay_steps must be less than every_steps=2, got 2",
    ),
    "weight of 1": (
        lambda member: member.local(streaming=Streaming(delay_steps=1, local_weight=1)),
        "ConfigError: local_weight is the share",
    ),
    "weight without delay": (
        lambda member: member.local(streaming=Streaming(local_weight=0.5)),
        "delay_steps=0: leave it out, or give delay_steps",
    ),
    "device": (
        lambda member: member.local(outer=Nesterov(device="moon")),
        "ConfigError: device must be a device",
    ),
    "other fragments": (
        lambda member: other_settings(member, streaming=(Streaming(), Streaming(fragments=2))),
        "process 1 has streaming Streaming(fragments=2)",
    ),
    "other delay": (
        lambda member: other_settings(member, streaming=(Streaming(delay_steps=2), Streaming(delay_steps=3))),
        "process 1 has streaming Streaming(delay_steps=3)",
    ),
    "other weight": (
        lambda member: other_settings(
            member, streaming=(Streaming(delay_steps=1), Streaming(delay_steps=1, local_weight=0.25))
        ),
        "process 1 has streaming Streaming(delay_steps=1, local_weight=0.25)",
    ),
    "other outer": (
        lambda member: other_settings(member, outer=(NESTEROV, partial(torch.optim.SGD, lr=0.5))),
        "process 0 has outer optimizer SGD(lr=0.7, momentum=0.9",
    ),
    "use in flight": (use_in_flight, "call average() first"),
    "joined by contributors": (joined_by_contributors, "ConfigError: with fragments or delay_steps, use"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_raise_at_once_and_name_the_remedy(case: str) -> None:
    for message in run(2, lambda member: error_of(lambda: MISTAKES[case][0](member))):
        assert MISTAKES[case][1] in message
