"""A layer of experts, whole or divided over processes that send each other tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


class Mixture(nn.Module):
    """Sends each token to one of four experts, as a router says, and projects what comes back."""

    def __init__(self, width: int = 8, num_out: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.Parameter(torch.randn(4, width, width) / width**0.5)
        self.out = nn.Linear(width, num_out)
        self.group: dist.ProcessGroup | None = None  # over which experts are divided

    def forward(self, tokens: Tensor) -> Tensor:
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        back = torch.empty_like(tokens).index_copy(0, order, self._exchanged(tokens[order], chosen))
        out: Tensor = self.out(tokens + weight[:, None] * back)
        return out

    def _exchanged(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Let experts, wherever they are, work on tokens in the order of the experts."""
        experts = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
        counts = chosen.bincount(minlength=4)
        if self.group is None:
            return _worked(tokens, counts, experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, got = counts.view(-1, len(experts)).sum(1).tolist(), arriving.view(-1, len(experts))
        arrived = all_to_all_single_autograd(tokens, got.sum(1).tolist(), sent, self.group)
        parts = arrived.split(got.sum(1).tolist())
        worked = torch.cat([_worked(part, number, experts) for part, number in zip(parts, got, strict=True)])
        return all_to_all_single_autograd(worked, sent, got.sum(1).tolist(), self.group)


def _worked(tokens: Tensor, counts: Tensor, experts: Tensor) -> Tensor:
    parts = tokens.split(counts.tolist())
    return torch.cat([(part @ expert).tanh() for part, expert in zip(parts, experts, strict=True)])


def divide(model: Mixture, mesh: DeviceMesh, *, how: str) -> None:
    """Divide the experts: as "local" tensors, "stacked" in one, or stacked and the rest "sharded" by FSDP2."""
    model.group = mesh.get_group()
    whole = model.experts.detach()
    if how == "local":
        model.experts = nn.Parameter(whole.chunk(mesh.size())[mesh.get_local_rank()].clone())
    else:
        model.experts = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    rest = [*model.router.parameters(), *model.out.parameters()]
    if how == "sharded":
        rest = []
        for part in model.router, model.out:
            fully_shard(part, mesh=mesh)

    def average(parameter: Tensor) -> None:
        assert parameter.grad is not None
        # Tokens of all processes have come to an expert already.
        if parameter is not model.experts:
            dist.all_reduce(parameter.grad, group=model.group)
        parameter.grad /= mesh.size()

    for parameter in model.experts, *rest:
        parameter.register_post_accumulate_grad_hook(average)
