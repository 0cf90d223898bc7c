"""Gradients that are averaged in every step, of a model that is itself averaged now and then: refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from thinwire.channel import InProcessTransport, ProcessGroupTransport, Transport
from thinwire.errors import AttachError, StepError

# Weak: who is dropped without being left averages nothing any more.
_entered: WeakKeyDictionary[object, tuple[nn.Module, Transport]] = WeakKeyDictionary()


@contextmanager
def averaging_model(owner: object, module: nn.Module, transport: Transport) -> Iterator[None]:
    """Mark a model as being averaged while the context is open."""
    _entered[owner] = module, transport
    try:
        yield
    finally:
        _entered.pop(owner, None)


def refuse_averaged_twice(
    parameters: Iterable[torch.Tensor], transport: Transport, error: type[AttachError | StepError]
) -> None:
    """Refuse to average gradients of a model that is averaged meanwhile, over the same processes.

    Over fewer processes, those of a machine, say, both are of use.

    Cost: none outside of such a context; inside, a look at all parameters of the model.
    """
    if not _entered:
        return
    given = set(map(id, parameters))
    for module, other in list(_entered.values()):
        if _reaches(transport, other) and any(id(each) in given for each in module.parameters()):
            raise error(
                f"the gradients of this {type(module).__name__} are averaged in every step, and LocalSGD "
                "averages the model itself over the same processes, so each step would send what LocalSGD is "
                "there to spare; leave out one of the two: train the plain module inside LocalSGD, or leave "
                "its context first"
            )


def _reaches(transport: Transport, other: Transport) -> bool:
    """Return whether all processes of the other group are in a group."""
    if isinstance(transport, ProcessGroupTransport) and isinstance(other, ProcessGroupTransport):
        mine, theirs = _ranks_of(transport.group), _ranks_of(other.group)
        return bool(theirs) and theirs <= mine
    # Nobody knows who is at the ends of another one: advice times both ways over one that sends to nobody.
    return isinstance(transport, InProcessTransport) and transport is other


def _ranks_of(group: dist.ProcessGroup) -> set[int]:
    """Return who is in a group; nobody if it was destroyed, over which nothing is averaged any more."""
    try:
        return set(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return set()
