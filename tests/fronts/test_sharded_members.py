"""FSDP2's front without FSDP2: two replicas of two shards in one process, on plain parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor, nn

from thinwire import PowerSGD, Quantize
from thinwire.algorithms import Algorithm
from thinwire.channel import InProcessTransport, Metered, Transport, Work, run_members
from thinwire.channel.wrapped import Wrapped
from thinwire.errors import CommunicationError
from thinwire.fronts.sharded import trial
from thinwire.fronts.sharded.front import ShardedFront, specs_of
from thinwire.fronts.sharded.model import Piece, ShardedModel
from thinwire.fronts.sharded.trial import as_averaged_faster
from thinwire.sync import Engine, Settings

WIDTH, NAMES = 16, ("first", "second", "third")


@dataclass
class NoFSDP:
    """What a front asks of FSDP2."""

    parameters: Sequence[nn.Parameter]
    waits_for_more: bool = False

    def is_all_of(self, _: nn.Module) -> bool:
        return True


@dataclass
class Process:
    """A process of a replica: half of the rows of each matrix, used in an order of its own."""

    matrices: dict[str, nn.Parameter]
    front: ShardedFront
    order: Sequence[str]

    def backward(self, seed: int) -> int:
        """Return how many messages had left when the last gradient came."""
        x = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)
        before, early = self.front.engine.counts().messages, list[int]()
        watched: Any = x
        watched.register_hook(lambda _: early.append(self.front.engine.counts().messages - before))
        out = x
        for name in self.order:
            self.matrices[name].grad = None
            out = (out + (self.matrices[name] @ out).repeat(2)).tanh()
        noise = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        torch.autograd.backward(out @ noise)
        return early[0]


def pieces_of(shard: int) -> list[Piece]:
    generator = torch.Generator().manual_seed(shard)
    pieces = []
    for number, name in enumerate(NAMES):
        values = torch.randn(WIDTH // 2, WIDTH, generator=generator, dtype=torch.float64) / WIDTH
        pieces.append(Piece(name, nn.Parameter(values), (WIDTH, WIDTH), 0, number))
    return pieces


def run(body: Any) -> list[Any]:
    """Run `body(rank, between, inside)` on two replicas of two shards, with what joins either."""
    between, inside = ([InProcessTransport.group(2) for _ in range(2)] for _ in range(2))
    results = run_members(
        4, lambda rank: body(rank, between[rank % 2][rank // 2], inside[rank // 2][rank % 2])
    )
    assert len(results) == 4
    return results


@pytest.mark.parametrize("are_whole", [True, False])
def test_members_that_see_gradients_in_unlike_orders_send_them_in_one(are_whole: bool) -> None:
    """In each of the four processes another module comes first: they take the first one's order."""
    first, second, third = NAMES
    orders = (NAMES, (third, first, second), (second, third, first), (third, second, first))

    def body(rank: int, between: Transport, inside: Transport) -> tuple[list[int], Tensor, float, Any]:
        pieces = pieces_of(rank % 2)
        if are_whole:
            pieces = [piece.of_whole_matrix(rank % 2, 2) for piece in pieces]
        matrices = {piece.name: piece.parameter for piece in pieces}
        engine = Engine(PowerSGD(matrix_rank=1), between, specs_of(pieces), Settings(together=inside))
        known = cast(ShardedModel, NoFSDP(list(matrices.values())))
        front = ShardedFront(engine, inside, known, pieces, overlap=True)
        front.register(nn.ParameterDict(matrices))
        process = Process(matrices, front, orders[rank])
        early = [process.backward(10 * step + rank) for step in range(3)]
        gradients = [cast(Tensor, each.grad) for each in matrices.values()]
        ratio = engine.counts().compression_ratio
        # Lanes are opened anew, in the order that was seen, and the state has it.
        engine.use(PowerSGD(matrix_rank=2))
        process.backward(30 + rank)
        return early, torch.cat(gradients), ratio, engine.state_dict()["buckets"]

    found = run(body)
    assert len({repr(buckets) for _, _, _, buckets in found}) == 1
    # The first step sees the order; later ones send what is complete before the pass ends.
    assert all(early[0] == 0 for early, _, _, _ in found)
    assert found[0][0][1:] == [3, 3]
    for shard in range(2):
        (_, one, ratio, _), (_, other, _, _) = found[shard], found[2 + shard]
        assert torch.equal(one, other)
        assert one.any()
        assert ratio > 1.5


POWER = PowerSGD(matrix_rank=1)
CANT = PowerSGD(matrix_rank=1, alternating=True)


@pytest.mark.parametrize(
    ("algorithm", "seconds_between", "seconds_inside", "are_whole", "is_tried"),
    [
        (POWER, 1.0, 1e-3, True, True),
        (POWER, 1.0, 1.0, False, True),
        (replace(POWER, warmup_steps=9), 1.0, 1e-3, True, True),
        (CANT, 1.0, 1e-3, False, False),
        (Quantize(bits=4), 1.0, 1e-3, False, False),
    ],
)
def test_whole_matrices_are_taken_where_the_links_make_them_faster(
    algorithm: Algorithm, seconds_between: float, seconds_inside: float, are_whole: bool, is_tried: bool
) -> None:
    """The clock goes by what was sent: a second a byte between replicas, as much or less inside of them."""

    def body(rank: int, between: Transport, inside: Transport) -> tuple[bool, bool]:
        sent, aside = Metered(between), Metered(inside)

        def clock() -> float:
            return seconds_between * sent.traffic.message_bytes + seconds_inside * aside.traffic.message_bytes

        pieces = as_averaged_faster(algorithm, pieces_of(rank % 2), sent, aside, clock)
        # More than a question whether the plans differ.
        return all(piece.whole_matrix is not None for piece in pieces), sent.traffic.message_bytes > 100

    assert run(body) == [(are_whole, is_tried)] * 4


def test_a_trial_has_one_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two engines, the first one is gone while the second one is timed."""
    made = dict[Transport, list[ReferenceType[Engine]]]()

    def noted(algorithm: Algorithm, transport: Transport, *settings: Any) -> Engine:
        engine = Engine(algorithm, transport, *settings)
        made.setdefault(transport, []).append(ref(engine))
        return engine

    monkeypatch.setattr(trial, "Engine", noted)

    def body(rank: int, between: Transport, inside: Transport) -> list[int]:
        alive = list[int]()

        def clock() -> float:
            alive.append(sum(engine() is not None for engine in made[between]))
            return float(len(alive))

        as_averaged_faster(POWER, pieces_of(rank % 2), between, inside, clock)
        return alive

    ticks = 2 * (1 + trial.TIMED_STEPS)
    assert run(body) == [[2] * ticks + [1] * ticks] * 4


class Failing(Wrapped):
    """Loses the means of a step."""

    def mean(self, tensor: Tensor, purpose: str) -> Work:
        raise CommunicationError(f"{purpose}: lost")


def test_what_a_trial_loses_is_an_error_of_attach() -> None:
    def body(rank: int, between: Transport, inside: Transport) -> tuple[str, str]:
        with pytest.raises(CommunicationError) as caught:
            as_averaged_faster(POWER, pieces_of(rank % 2), Failing(between), inside)
        return str(caught.value), str(caught.value.__cause__)

    for message, cause in run(body):
        assert message.startswith('attach(whole_matrices="auto"): a collective failed')
        assert str(trial.LATE_STEP) not in message
        assert cause.endswith(": lost")
