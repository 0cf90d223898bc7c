"""A small model, batches by step and process, and how to compare: for tests of averaging less often."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import ThinwireError


def new_model(seed: int = 7, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 8)).to(
        dtype
    )


class Branches(nn.ModuleList):
    """Layers, of which each pass uses one."""

    def forward(self, x: Tensor, number: int) -> Tensor:
        out: Tensor = self[number](x)
        return out


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch_of(step: int, process_rank: int | None = None) -> Tensor:
    place = dist.get_rank() if process_rank is None else process_rank
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(1_000 * step + place))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(model(batch).square().mean())
    optimizer.step()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, process_rank: int | None = None
) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        train_step(model, optimizer, batch_of(step, process_rank).to(dtype))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def error_of(action: Callable[[], object]) -> str:
    """The Thinwire error an action raises: its type and message; empty if it raises none."""
    try:
        action()
    except ThinwireError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """An error of this very kind ends the block; its message has all of these words."""
    with pytest.raises(kind) as raised:
        yield
    assert type(raised.value) is kind
    for word in words:
        assert word in str(raised.value), str(raised.value)


def raised_by(action: Callable[..., object]) -> tuple[str, str]:
    """The type and the message of any error that an action raises; both empty if it raises none."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


# In real processes.


def ddp_of(module: nn.Module | None = None, /, **options: Any) -> DistributedDataParallel:
    """Wrap a module, or the small model, for DDP to average in several buckets."""
    options = {"bucket_cap_mb": 0.005, **options}
    return DistributedDataParallel(new_model() if module is None else module, **options)


def gradient_of(model: nn.Module, step: int, process_rank: int | None = None) -> Tensor:
    """Return all gradients of a pass over the batch of a step."""
    model.zero_grad()
    batch = batch_of(step, process_rank).to(next(model.parameters()).dtype)
    torch.autograd.backward(model(batch).square().mean())
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def residual_of(saved: Mapping[str, Any], model: nn.Module) -> Tensor:
    """Return the mean residual in a state, in the order of `gradient_of`."""
    error = dict(saved["error"])
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return torch.cat([error.get(name, torch.zeros(p.shape)).flatten() for name, p in parameters])


def gathered(tensor: Tensor) -> Tensor:
    """Return the tensors of all processes, stacked by rank: to look, not part of what is tested."""
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.detach().contiguous())
    return torch.stack(rows)


def told_by_all(value: Any) -> list[Any]:
    """Return the values of all processes, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def are_alike(tensors: Iterable[Tensor]) -> bool:
    """Return whether all processes hold the same finite tensors, to the bit."""
    for tensor in tensors:
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        if not real.isfinite().all() or not all(torch.equal(real, other) for other in gathered(real)):
            return False
    return True


def agreed(model: nn.Module) -> bool:
    """Return whether all processes hold the same parameters to the bit."""
    return are_alike([flat(model)])


def halves(model: nn.Module) -> tuple[bool, bool]:
    """On four processes in two subgroups: whether all subgroups agree within, and all processes agree."""
    first, second, third, fourth = gathered(flat(model))
    return torch.equal(first, second) and torch.equal(third, fourth), agreed(model)


def pairs() -> dist.ProcessGroup:
    """This process's group of two."""
    subgroup: dist.ProcessGroup = dist.new_subgroups(2)[0]  # type: ignore[no-untyped-call]
    return subgroup
