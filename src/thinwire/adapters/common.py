"""Parts that adapters share: engines that know machines, the count of contributors, averaged models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire.algorithms import Algorithm
from thinwire.comm import Layout, ProcessGroupTransport, Transport, machines_of, why_by_itself
from thinwire.errors import AttachError, StepError
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine, Settings
from thinwire.sync.weights import multiply
from thinwire.torch_private import backward_pass, leave_join

logger = logging.getLogger(__name__)


def new_engine(
    algorithm: Algorithm,
    transport: Transport,
    specs: Iterable[ParameterSpec],
    settings: Settings,
    layout: Layout,
) -> Engine:
    """Return an engine that sends once for each machine of several processes. Collective."""
    machines = None
    if isinstance(transport, ProcessGroupTransport):
        machines, uneven = machines_of(transport, layout)
        if layout is True and machines is None and not uneven:
            why = why_by_itself(transport, dist.get_process_group_ranks(transport.group))
            if why and not transport.rank:
                logger.warning("%s", why)
    return Engine(algorithm, transport, specs, settings, machines=machines)


# Contributors are the processes that still have input: `join` counts them, and adapters divide by that.
# Kept by parameter, since a stateless hook sees nothing of its model but the parameters in a bucket.
contributor_scales: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()


@contextmanager
def counted(parameters: Iterable[torch.Tensor], scale: torch.Tensor) -> Iterator[None]:
    """Divide gradients of `parameters` by the contributors, while this is open."""
    # A list: what is frozen or replaced meanwhile must be taken out again as well.
    before = [(parameter, contributor_scales.get(parameter)) for parameter in parameters]
    contributor_scales.update((parameter, scale) for parameter, _ in before)
    try:
        yield
    finally:
        for parameter, was in before:
            # A parameter that two models share is still the outer one's.
            if was is None:
                del contributor_scales[parameter]
            else:
                contributor_scales[parameter] = was


def divide_by_contributors(parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Scale this process's gradients so that their mean over the group is that over contributors.

    Scaling what goes in, not what comes out, keeps the residual in one unit while their number changes.
    """
    if parameters and parameters[0] in contributor_scales:
        multiply(flat, contributor_scales[parameters[0]])


class Shadow(JoinHook):
    """Takes part, for a process without input, in what a join context's other processes send."""

    def __init__(self, adapter: Joinable, step: Callable[[], object], end: Callable[[bool], object]) -> None:
        super().__init__()
        self._adapter, self._step, self._end = adapter, step, end

    def main_hook(self) -> None:
        # Leave first; otherwise the averaging would report this process as active to the join context.
        leave_join(self._adapter)
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        leave_join(self._adapter)
        self._end(is_last_joiner)


# Averager -> (model, transport). Weak keys: a garbage-collected averager releases its model.
averaged_models: WeakKeyDictionary[object, tuple[nn.Module, Transport]] = WeakKeyDictionary()


@contextmanager
def averaging_model(owner: object, module: nn.Module, transport: Transport) -> Iterator[None]:
    """Mark a model as being averaged while the context is open."""
    averaged_models[owner] = module, transport
    try:
        yield
    finally:
        averaged_models.pop(owner, None)


def refuse_averaged_twice(
    parameters: Iterable[torch.Tensor], transport: Transport, error: type[AttachError | StepError]
) -> None:
    """Refuse to average gradients of a model that is itself averaged, over the same processes."""
    if not averaged_models:
        return
    ids = set(map(id, parameters))
    for module, other in list(averaged_models.values()):
        # Over fewer processes, such as those of a machine, both have a use.
        mine, theirs = _members_of(transport), _members_of(other)
        if theirs and theirs <= mine and any(id(parameter) in ids for parameter in module.parameters()):
            raise error(
                f"this {type(module).__name__} is averaged twice: its gradients in every step, and the model "
                "itself by LocalSGD, over the same processes; train the plain module inside LocalSGD"
            )


def _members_of(transport: Transport) -> set[object]:
    """Return the processes of a group by their rank, members in one process by their transport."""
    if not isinstance(transport, ProcessGroupTransport):
        return {transport}
    try:
        return set(dist.get_process_group_ranks(transport.group))
    except (KeyError, ValueError):  # it was destroyed, so nothing is averaged over it any more
        return set()


# Parameters whose gradients are means only when `backward()` has returned, by what averages them.
_averaged_in_backward: WeakKeyDictionary[object, frozenset[int]] = WeakKeyDictionary()


def refuse_steps_inside(owner: object, parameters: Iterable[torch.Tensor]) -> None:
    """Refuse to step an optimizer of these in a backward pass, as in their hooks, while `owner` lives."""
    _look_at_steps()
    # The owner holds the parameters, so no other object takes over an id.
    _averaged_in_backward[owner] = frozenset(map(id, parameters))


def allow_steps_inside(owner: object) -> None:
    """Undo `refuse_steps_inside`."""
    _averaged_in_backward.pop(owner, None)


@cache
def _look_at_steps() -> RemovableHandle:
    # Torch calls it before every step of every optimizer: so whatever makes the step shows.
    return register_optimizer_step_pre_hook(_refuse_step_inside)


def _refuse_step_inside(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if backward_pass() == -1:
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not all(map(stepped.isdisjoint, _averaged_in_backward.values())):
        raise StepError(
            f"{type(optimizer).__name__}.step() was called inside of the backward pass, before gradients "
            "were averaged; step after backward(), and restart all processes from a checkpoint"
        )
