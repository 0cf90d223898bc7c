"""Uneven inputs: processes that have no more batches shadow the collectives of those that have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from thinwire.contributors import counted, members_over_contributors
from thinwire.ddp import BucketFront, models_where
from thinwire.errors import AttachError, ConfigError
from thinwire.sync import GradientSync

__all__ = ["join"]


@contextmanager
def join(
    joined: torch.nn.Module | GradientSync | Joinable,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """Around a training loop whose processes have different numbers of batches.

    A process that has run out of batches leaves its loop and then takes part in the others' averages with
    zero gradients, until all have run out. It goes on paying back what it owes: the sum of all results
    and the mean error left at the end is the sum of the true means over the whole uneven run. At the
    end every process gets the model of the last to finish. (Optimizers are not averaged: momentum of
    the processes that stopped earlier is older.)

    With torch's own `model.join()` our hooks work as well, but always divide by the initial world size.

    Args:
        joined: The DDP model, with any of Thinwire's hooks or none; what `attach` returned for it; or
            a Thinwire object that averages without DDP (`thinwire.powersgd.PowerSGD`, `LocalSGD`).
        divide_by_initial_world_size: Divide sums of gradients by the members of the group. If False, by the
            contributors, the processes that still have batches, in this step.
        enable: False switches all of it off.
        throw_on_early_termination: Raise on all processes when the first has run out, instead.

    Cost: a message of one element a step (two with DDP, which tells in another whether this step
    synchronises); one process's model is broadcast at the end.

    Raises:
        AttachError: `joined` is none of these.
        ConfigError: The model has SyncBatchNorm, whose collectives nobody can shadow, and
            `throw_on_early_termination` is False.
        RuntimeError: With `throw_on_early_termination`, when a process has run out.

    Examples:
        >>> import thinwire
        >>> ddp_model = DistributedDataParallel(torch.nn.Linear(8, 4))  # in a process group
        >>> sync = thinwire.attach(ddp_model, thinwire.PowerSGD())
        >>> with thinwire.join(ddp_model):
        ...     for batch in torch.ones(3, 1, 8):  # or more, or fewer, on another process
        ...         ddp_model(batch).sum().backward()
        >>> sync.stats().steps
        3
    """
    joinable = _joinable(joined)
    _refuse_other_collectives(joinable, enable and not throw_on_early_termination)
    options = (enable, throw_on_early_termination)
    try:
        if enable and not divide_by_initial_world_size and isinstance(joinable, DistributedDataParallel):
            with _counting(joinable) as counter, Join([counter, joinable], *options):
                yield
        else:
            divide = divide_by_initial_world_size
            with Join([joinable], *options, divide_by_initial_world_size=divide):
                yield
    finally:
        joinable._join_config = type(joinable._join_config).construct_disabled_join_config()


class _Counter(Joinable):
    """Notifies the join context in place of the DDP model, and keeps the number of contributors."""

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__()
        self._model = model
        self.share = torch.ones(1, device=model.device)

    def count(self, *unused: Any) -> None:
        """Before each forward pass: say that this process contributes, and learn how many do."""
        share = members_over_contributors(self)
        if share is not None:
            self.share.copy_(share)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Nothing to shadow: the model's own hook does it all."""
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return self._model.join_device  # type: ignore[no-any-return]

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self._model.join_process_group  # type: ignore[no-any-return]


@contextmanager
def _counting(model: DistributedDataParallel) -> Iterator[_Counter]:
    counter = _Counter(model)
    handle = model.register_forward_pre_hook(counter.count)
    try:
        with counted(model.parameters(), counter.share):
            yield counter
    finally:
        handle.remove()


def _joinable(joined: object) -> Joinable:
    if isinstance(joined, GradientSync):
        models = models_where(lambda state: isinstance(state, BucketFront) and state.sync is joined)
        if not models:
            raise AttachError(
                "this GradientSync is not attached to a DDP model; pass the object that owns it"
            )
        return models[0]
    joinable = getattr(joined, "_orig_mod", joined)
    if not isinstance(joinable, Joinable):
        raise AttachError(
            "expected a DistributedDataParallel model, the GradientSync attached to one, a LocalSGD or a "
            f"thinwire.powersgd aggregator, got {type(joined).__name__}"
        )
    return joinable


def _refuse_other_collectives(joinable: Joinable, shadows: bool) -> None:
    model = getattr(joinable, "module", None)  # a DDP model's or a LocalSGD's; an aggregator knows none
    if not shadows or not isinstance(model, torch.nn.Module):
        return
    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules()):
        raise ConfigError(
            "the model has SyncBatchNorm, whose collectives a process without input can't take part in; "
            "use join(…, throw_on_early_termination=True) or BatchNorm"
        )
