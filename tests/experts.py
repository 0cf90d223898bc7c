"""A layer of experts, whole or divided over processes that send each other tokens."""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

NUM_EXPERTS = 4


class Experts(nn.Module):
    """Those that this process has, of whatever type their one parameter is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, width, width) / width**0.5)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Let each expert work on its tokens, which lie `counts[sender, expert]` after each other."""
        held = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        parts = torch.split(tokens, counts.flatten().tolist())
        return torch.cat([(part @ held[place % len(held)]).tanh() for place, part in enumerate(parts)])


class Mixture(nn.Module):
    """Sends each token to one expert, as a router says, and projects what comes back."""

    def __init__(self, width: int = 8, num_out: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, NUM_EXPERTS)
        self.experts = Experts(width)
        self.out = nn.Linear(width, num_out)
        self.group: dist.ProcessGroup | None = None  # over which experts are divided

    def forward(self, tokens: Tensor) -> Tensor:
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        worked = self._worked(tokens[order], chosen.bincount(minlength=NUM_EXPERTS))
        back = torch.empty_like(tokens).index_copy(0, order, worked)
        out: Tensor = self.out(tokens + weight[:, None] * back)
        return out

    def _worked(self, tokens: Tensor, counts: Tensor) -> Tensor:
        if self.group is None:
            worked: Tensor = self.experts(tokens, counts)
            return worked
        counts = counts.view(self.group.size(), -1)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, arrived = counts.sum(1).tolist(), arriving.sum(1).tolist()
        there = all_to_all_single_autograd(tokens, arrived, sent, self.group)
        return all_to_all_single_autograd(self.experts(there, arriving), sent, arrived, self.group)


def divide(model: Mixture, mesh: DeviceMesh, *, how: str) -> None:
    """Divide the experts over a mesh, or its dimension "expert".

    They are "local" tensors, or "stacked" in a DTensor; beside which FSDP2 holds the rest ("beside"), or all,
    the experts over the dimension "shard" and the rest over both ("within").
    """
    own = mesh if mesh.ndim == 1 else mesh["expert"]
    model.group = own.get_group()
    whole, rest = model.experts.weight.detach(), [model.router, model.out]
    if how == "local":
        model.experts.weight = nn.Parameter(whole.chunk(own.size())[own.get_local_rank()].clone())
    else:
        model.experts.weight = nn.Parameter(distribute_tensor(whole, own, [Shard(0)]))
    if how == "within":
        fully_shard(model.experts, mesh=mesh["shard"])
    if how in ("beside", "within"):
        for part in rest:
            fully_shard(part, mesh=mesh._flatten() if how == "within" else mesh)
        rest = []

    def average(parameter: Tensor) -> None:
        # The tokens of all processes have come to an expert already.
        if parameter is not model.experts.weight:
            dist.all_reduce(parameter.grad, group=model.group)
        parameter.grad.div_(own.size())  # type: ignore[union-attr]

    for parameter in (model.experts.weight, *chain.from_iterable(part.parameters() for part in rest)):
        parameter.register_post_accumulate_grad_hook(average)  # type: ignore[no-untyped-call]
