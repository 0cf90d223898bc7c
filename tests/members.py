"""Members of a group in this process that train with `LocalSGD`: what many processes do, in milliseconds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thinwire.algorithms import PowerSGD
from thinwire.comm import InProcessTransport, run_members
from thinwire.comm.metered import Wrapped
from thinwire.comm.transport import Message, Work
from thinwire.errors import CommunicationError
from thinwire.local_sgd import LocalSGD
from training import batch_of, flat, new_model, new_optimizer, train

Result = TypeVar("Result")

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
POWER = PowerSGD(matrix_rank=2)


@dataclass
class Member:
    """One of a group, with a model and an optimizer of its own.

    Attributes:
        transport: Its end of the group.
        pair: Its end of a group of two neighbours; its own alone in a group of odd size.
    """

    transport: InProcessTransport
    pair: InProcessTransport
    _look: InProcessTransport  # what tests look at does not go through what they test

    def __post_init__(self) -> None:
        self.rank, self.size = self.transport.rank, self.transport.size
        self.take(new_model())

    def take(self, model: nn.Module) -> None:
        """Train another model, with a new optimizer."""
        self.model, self.optimizer = model, new_optimizer(model)

    def local(self, **settings: Any) -> LocalSGD:
        """What averages its model over the group."""
        settings = {"replicas": self.transport, "every_steps": 2, **settings}
        return LocalSGD(self.model, self.optimizer, **settings)

    def residual(self, local: LocalSGD) -> Tensor:
        """Return the mean residual of all parameters."""
        error = dict(local.state_dict()["sync"]["error"])
        named = self.model.named_parameters()
        return torch.cat([error.get(name, torch.zeros_like(p)).reshape(-1) for name, p in named])

    def train(self, *steps: int) -> None:
        """Train for range(*steps), on its own batches."""
        train(self.model, self.optimizer, range(*steps), self.rank)

    def train_unevenly(self, local: LocalSGD, num_batches: Sequence[int], **options: Any) -> None:
        """Train as `Join` drives members: who has run out of batches shadows the others' steps."""
        hook, most = local.join_hook(**options), max(num_batches)
        own = num_batches[self.rank]
        self.train(own)
        for _ in range(own, most):
            hook.main_hook()
        hook.post_hook(own == most)

    def gathered(self, tensor: Tensor) -> Tensor:
        """Return those of all members, stacked."""
        rows = tensor.new_empty(self.size, tensor.numel())
        self._look.all_gather(rows, tensor.detach().reshape(-1), "a look").wait()
        return rows.view(self.size, *tensor.shape)

    def agreed(self) -> bool:
        """Return whether all members hold the same parameters to the bit."""
        everyone = self.gathered(flat(self.model))
        return bool((everyone == everyone[0]).all())

    def halves(self) -> tuple[bool, bool]:
        """Of four members: return whether all pairs agree within, and all members agree."""
        first, second, third, fourth = self.gathered(flat(self.model))
        return torch.equal(first, second) and torch.equal(third, fourth), self.agreed()


def run(size: int, body: Callable[..., Result], *args: Any) -> list[Result]:
    """Run `body(member, *args)` for each member of a new group; what each returned, by rank."""
    group, look = InProcessTransport.group(size), InProcessTransport.group(size)
    pair = 2 if size % 2 == 0 else 1
    pairs = [end for _ in range(size // pair) for end in InProcessTransport.group(pair)]
    return run_members(size, lambda rank: body(Member(group[rank], pairs[rank], look[rank]), *args))


def in_each_member(size: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let every member of a new group run a test's body; of no size: the test has a parameter `size`."""

    def decorated(body: Callable[..., None]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            run(given.pop("size") if size is None else size, lambda member: body(member, **given))

        update_wrapper(test, body)
        parameters = list(inspect.signature(body).parameters.values())
        size_of = inspect.Parameter("size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters[:1] = [size_of] if size is None else []
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorated


def once(function: Callable[..., Result]) -> Callable[..., Result]:
    """Compute a reference for the first member that asks; the others get the same."""
    lock, kept = Lock(), cache(function)

    def locked(*args: Any, **named: Any) -> Result:
        with lock:
            return kept(*args, **named)

    return locked


class Failing(Wrapped):
    """Loses means."""

    def start(self, message: Message) -> Work:
        if message.operation != "mean":
            return super().start(message)
        message.tensor.fill_(torch.nan)
        raise CommunicationError(f"{message.purpose}: lost")


@once
def data_parallel(num_workers: int, num_steps: int, dtype: torch.dtype, first_worker: int = 0) -> Tensor:
    """Train one model on the mean gradients of some workers; return its parameters."""
    model = new_model(dtype=dtype)
    optimizer = new_optimizer(model)
    workers = range(first_worker, first_worker + num_workers)
    for step in range(num_steps):
        optimizer.zero_grad()
        for worker in workers:
            loss = model(batch_of(step, worker).to(dtype)).square().mean() / num_workers
            torch.autograd.backward(loss)
        optimizer.step()
    return flat(model)
