"""FSDP2's front without FSDP2: two replicas of two shards in one process, on plain parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from thinwire import PowerSGD
from thinwire.channel import InProcessTransport, run_members
from thinwire.fronts.sharded.front import ShardedFront, specs_of
from thinwire.fronts.sharded.model import Piece, ShardedModel
from thinwire.sync import Engine, Settings

WIDTH, NAMES = 16, ("first", "second", "third")


@dataclass
class NoFSDP:
    """What a front asks of FSDP2."""

    parameters: Sequence[nn.Parameter]
    waits_for_more: bool = False


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


def run(orders: Sequence[Sequence[str]], body: Any) -> list[Any]:
    """Run `body(process, rank)` on two replicas of two shards, which see gradients in orders of their own."""
    between, inside = ([InProcessTransport.group(2) for _ in range(2)] for _ in range(2))

    def member(rank: int) -> Any:
        replica, shard = divmod(rank, 2)
        generator = torch.Generator().manual_seed(shard)
        pieces = []
        for number, name in enumerate(NAMES):
            values = torch.randn(WIDTH // 2, WIDTH, generator=generator, dtype=torch.float64) / WIDTH
            piece = Piece(name, nn.Parameter(values), (WIDTH, WIDTH), 0, number)
            pieces.append(piece.of_whole_matrix(shard, 2))
        matrices = {piece.name: piece.parameter for piece in pieces}
        settings = Settings(together=inside[replica][shard])
        engine = Engine(PowerSGD(matrix_rank=1), between[shard][replica], specs_of(pieces), settings)
        known = cast(ShardedModel, NoFSDP(list(matrices.values())))
        front = ShardedFront(engine, inside[replica][shard], known, pieces, overlap=True)
        front.register(nn.ParameterDict(matrices))
        return body(Process(matrices, front, orders[rank]), rank)

    results = run_members(4, member)
    assert len(results) == 4
    return results


def test_members_that_see_gradients_in_unlike_orders_send_them_in_one() -> None:
    """In each of the four processes another module comes first: they take the first one's order."""
    first, second, third = NAMES
    orders = (NAMES, (third, first, second), (second, third, first), (third, second, first))

    def body(process: Process, rank: int) -> tuple[list[int], Tensor, float]:
        early = [process.backward(10 * step + rank) for step in range(3)]
        gradients = [cast(Tensor, each.grad) for each in process.matrices.values()]
        return early, torch.cat(gradients), process.front.engine.counts().compression_ratio

    found = run(orders, body)
    # The first step sees the order; later ones send what is complete before the pass ends.
    assert all(early[0] == 0 for early, _, _ in found)
    assert found[0][0][1:] == [3, 3]
    for shard in range(2):
        (_, one, ratio), (_, other, _) = found[shard], found[2 + shard]
        assert torch.equal(one, other)
        assert one.any()
        assert ratio > 1.5
