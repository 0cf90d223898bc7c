"""Over which group a DDP model averages its gradients: all processes, the subgroup, or none."""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.algorithms import AllReduce
from thinwire.channel import ProcessGroupChannel
from thinwire.ddp import (
    BucketFront,
    DetachedFront,
    check_options,
    dense_buffer,
    left_alone,
    plain_name,
)
from thinwire.engine import Engine
from thinwire.errors import AttachError, StateError

__all__ = ["check_ddp", "driven_gradients"]


class _GradientSwitch:
    """The hook's state. DDP takes one hook and never lets go of it, so what it does can be switched.

    Attributes:
        front_now: Tells the front for the buckets of this backward pass; None to leave gradients alone.
    """

    def __init__(self, front_now: Callable[[], BucketFront | None]) -> None:
        self.front_now = front_now

    def __deepcopy__(self, memo: dict[int, object]) -> DetachedFront:
        """A copied model has a reducer of its own, without a hook."""
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
    model: DistributedDataParallel,
    everywhere: Engine,
    inside: Engine | None,
    is_warm_up: Callable[[], bool],
) -> Iterator[None]:
    """Average the model's gradients over the group in the warm-up, later in the subgroup or not at all.

    After the context, they are averaged over the group again.

    Args:
        model: Registers our hook, if it has none of ours yet.
        everywhere: Averages over the group.
        inside: Averages within the subgroup, None for no averaging.
        is_warm_up: Asked at every bucket.
    """
    warm_up = _front(model, everywhere)
    later = None if inside is None else _front(model, inside)

    def front_now() -> BucketFront | None:
        return warm_up if is_warm_up() else later

    switch = next((state for _, state in model._comm_hooks if isinstance(state, _GradientSwitch)), None)
    if switch is None:
        switch = _GradientSwitch(front_now)
        model.register_comm_hook(switch, _local_sgd_hook)
    switch.front_now = front_now
    try:
        yield
    finally:
        afterwards = _front(model, Engine(AllReduce(), ProcessGroupChannel(model.process_group)))
        switch.front_now = lambda: afterwards


def _front(model: DistributedDataParallel, engine: Engine) -> BucketFront:
    names = {parameter: plain_name(name) for name, parameter in model.module.named_parameters()}
    return BucketFront(engine, names, model)


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
