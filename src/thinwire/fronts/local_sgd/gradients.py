"""Over whom a DDP model averages its gradients: the group, the subgroup, or nobody."""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.algorithms import AllReduce
from thinwire.errors import AttachError, StateError
from thinwire.fronts.ddp import BucketFront
from thinwire.fronts.ddp_model import DetachedFront, check_options, dense_buffer, left_alone, plain_name
from thinwire.fronts.local_sgd.schedule import Members
from thinwire.sync import Engine

__all__ = ["check_ddp", "driven_gradients"]


class _GradientSwitch:
    """The hook's state. DDP takes one hook and never lets go of it, so what it does can be switched."""

    def __init__(self) -> None:
        self.front_now: Callable[[], BucketFront | None]  # None to leave the gradients of this pass alone

    def __deepcopy__(self, memo: dict[int, object]) -> DetachedFront:
        return DetachedFront()

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a DDP model with LocalSGD can't be pickled whole; save model.module.state_dict() and "
            "the LocalSGD's state_dict() instead"
        )


def _local_sgd_hook(state: _GradientSwitch, bucket: GradBucket) -> Future[torch.Tensor]:
    front = state.front_now()
    return left_alone(dense_buffer(bucket)) if front is None else front.run(bucket)


@contextmanager
def driven_gradients(
    model: DistributedDataParallel, engines: Mapping[Members, Engine], current: Callable[[], Members | None]
) -> Iterator[None]:
    """Average the model's gradients over whom the schedule says; after the context over the group again.

    Args:
        model: Registers our hook, if it has none of ours yet.
        engines: Average over the group and within the subgroup.
        current: Returns over whom now; asked at every bucket.
    """
    names = {parameter: plain_name(name) for name, parameter in model.module.named_parameters()}
    fronts = {members: BucketFront(engine, names, model) for members, engine in engines.items()}

    switch = next((state for _, state in model._comm_hooks if isinstance(state, _GradientSwitch)), None)
    if switch is None:
        switch = _GradientSwitch()
        model.register_comm_hook(switch, _local_sgd_hook)
    switch.front_now = lambda: None if (members := current()) is None else fronts[members]
    try:
        yield
    finally:
        afterwards = BucketFront(Engine(AllReduce(), engines["group"].transport), names, model)
        switch.front_now = lambda: afterwards


def check_ddp(model: DistributedDataParallel) -> None:
    """Refuse a DDP model that LocalSGD can't drive, or that would go on to send to all at every step.

    Raises:
        AttachError: It has a hook of someone else's, or options that are collective over the whole group.
    """
    if any(not isinstance(state, _GradientSwitch | DetachedFront) for _, state in model._comm_hooks):
        raise AttachError(
            "the DDP model has a communication hook already, and DDP allows one only; pass LocalSGD a DDP "
            "model without one (it registers its own), or the plain module instead of the DDP model"
        )
    if model.broadcast_buffers and any(True for _ in model.module.buffers()):
        option = "forward_sync_buffers" if hasattr(model, "forward_sync_buffers") else "broadcast_buffers"
        raise AttachError(
            "this DDP model sends its buffers to all processes at every forward pass; build it with "
            f"{option}=False (LocalSGD averages them)"
        )
    check_options(model)
    if model.find_unused_parameters:
        raise AttachError(
            "find_unused_parameters=True makes DDP ask all processes at every step; build the DDP model "
            "without it, or pass the plain module instead of the DDP model"
        )
