"""FSDP2's adapter without FSDP2: two replicas of two shards in one process, on plain parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from thinwire import PowerSGD
from thinwire.adapters.sharded.fsdp import FSDPAdapter, specs_of
from thinwire.adapters.sharded.model import Piece, ShardedModel
from thinwire.comm import InProcessTransport, Transport, run_members
from thinwire.sync import Engine, GradientSync, Settings

WIDTH, NAMES = 16, ("first", "second", "third")


@dataclass
class NoFSDP:
    """Stands for FSDP2."""

    parameters: Sequence[nn.Parameter]
    waits_for_more: bool = False

    def has_calls_to_come(self, _: int) -> bool:
        return False

    def is_all_of(self, _: nn.Module) -> bool:
        return True


@dataclass
class Process:
    """A process of a replica: half of the rows of each matrix, used in an order of its own."""

    matrices: dict[str, nn.Parameter]
    adapter: FSDPAdapter
    order: Sequence[str]

    def backward(self, seed: int) -> int:
        """Return how many messages had left when the last gradient came."""
        x = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)
        before, early = self.adapter.engine.reporter.counts().messages, list[int]()
        watched: Any = x
        watched.register_hook(lambda _: early.append(self.adapter.engine.reporter.counts().messages - before))
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


def test_members_that_see_gradients_in_unlike_orders_send_them_in_one() -> None:
    """In each of the four processes another module comes first: they take the first one's order."""
    first, second, third = NAMES
    orders = (NAMES, (third, first, second), (second, third, first), (third, second, first))

    def body(rank: int, between: Transport, inside: Transport) -> tuple[list[int], Tensor, float, list[Any]]:
        pieces = pieces_of(rank % 2)
        matrices = {piece.name: piece.parameter for piece in pieces}
        engine = Engine(PowerSGD(matrix_rank=1), between, specs_of(pieces), Settings(health_group=inside))
        known = cast(ShardedModel, NoFSDP(list(matrices.values())))
        adapter = FSDPAdapter(engine, inside, known, pieces)
        adapter.register(nn.ParameterDict(matrices))
        process = Process(matrices, adapter, orders[rank])
        early = [process.backward(10 * step + rank) for step in range(3)]
        gradients = [cast(Tensor, each.grad) for each in matrices.values()]
        ratio = engine.reporter.counts().compression_ratio
        # Buckets are opened again, in the order that was seen.
        GradientSync(engine).use(PowerSGD(matrix_rank=2))
        process.backward(30 + rank)
        return early, torch.cat(gradients), ratio, [plan.labels for plan in engine.buckets.plans]

    found = run(body)
    assert all(sorted(order) == [(name,) for name in sorted(NAMES)] for *_, order in found)
    assert all(order == found[0][3] for *_, order in found)
    # The first step sees the order; later ones send what is complete before the pass ends.
    assert all(early[0] == 0 for early, _, _, _ in found)
    assert found[0][0][1:] == [3, 3]
    for shard in range(2):
        (_, one, ratio, _), (_, other, _, _) = found[shard], found[2 + shard]
        assert torch.equal(one, other)
        assert one.any()
        assert ratio > 1.5
