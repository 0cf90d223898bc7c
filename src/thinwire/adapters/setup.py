"""Parts that all adapters share: engines, contributors of a join, checks, messages at the start."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire.algorithms import Algorithm, BatchedPowerSGD, PowerSGD
from thinwire.comm import Layout, ProcessGroupTransport, Transport, machines_of
from thinwire.comm.machines import why_by_itself
from thinwire.errors import AttachError, ConfigError, StepError
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine, Settings
from thinwire.sync.weights import multiply
from thinwire.torch_private import backward_pass, leave_join, scales_now

logger = logging.getLogger(__name__)


Kind = TypeVar("Kind")


def live_objects(*kinds: type[Kind]) -> list[Kind]:
    """Return all of this process's objects of some types. Cost: 0.1 s for ten million references."""
    # Each object refers to its type. Compare types: `isinstance` reads `__class__`, which may run code.
    wanted = set().union(*map(_with_subclasses, kinds))
    return [found for found in gc.get_referrers(*wanted) if type(found) in wanted]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def trains(optimizer: Any, owned: set[int]) -> bool:
    """Return whether an optimizer holds parameters with these ids."""
    groups = getattr(optimizer, "param_groups", ())
    return any(id(parameter) in owned for group in groups for parameter in group["params"])


def new_engine(
    algorithm: Algorithm,
    transport: Transport,
    specs: Iterable[ParameterSpec],
    settings: Settings,
    layout: Layout,
) -> Engine:
    """Return an engine that sends once per machine if machines have several processes. Collective."""
    machines = None
    if isinstance(transport, ProcessGroupTransport):
        machines = machines_of(transport, layout)
        if layout is True and machines is None:
            why = why_by_itself(transport, dist.get_process_group_ranks(transport.group))
            if why and not transport.rank:
                logger.warning("%s", why)
    return Engine(algorithm, transport, specs, settings, machines=machines)


# Contributors are the processes that still have input: `join` counts them, and adapters divide by the count.
# Stored by parameter, since a stateless hook sees only the parameters of its bucket, not the model; with the
# number of members among which contributors are counted.
contributor_scales: MutableMapping[torch.Tensor, tuple[torch.Tensor, int]] = WeakTensorKeyDictionary()


def divide_by_contributors(parameters: Sequence[torch.Tensor], flat: torch.Tensor, num_members: int) -> None:
    """Scale this process's gradients so that their mean over `num_members` is the mean over contributors.

    Scaling the input, not the mean, keeps the residual in one unit while their number changes.
    """
    if parameters and parameters[0] in contributor_scales:
        scale, num_counted = contributor_scales[parameters[0]]
        if num_members == num_counted:  # how many contribute to a subgroup is not known
            multiply(flat, scale)


def refuse_weight_of_contributors(engine: Engine) -> None:
    """Raise if gradients would be scaled both by a weight and by the contributors."""
    if engine.settings.weight is not None:
        raise ConfigError(
            "divide_by_initial_world_size=False can't be combined with weight; leave it True, and return "
            "weight 0 on a process that has run out of batches"
        )


class Shadow(JoinHook):
    """Takes part in the collectives of a join context's other processes, for a process without input."""

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
    """Mark a model as averaged inside this context."""
    averaged_models[owner] = module, transport
    try:
        yield
    finally:
        averaged_models.pop(owner, None)


def refuse_averaged_twice(
    parameters: Iterable[torch.Tensor], transport: Transport, error: type[AttachError | StepError]
) -> None:
    """Raise if gradients are averaged over the same processes as the model itself."""
    if not averaged_models:
        return
    ids = set(map(id, parameters))
    for module, other in list(averaged_models.values()):
        # Averaging gradients over fewer processes, such as a machine's, is useful.
        mine, theirs = _members_of(transport), _members_of(other)
        if theirs and theirs <= mine and any(id(parameter) in ids for parameter in module.parameters()):
            raise error(
                f"this {type(module).__name__} is averaged twice over the same processes: its gradients in "
                "every step, and the model by LocalSGD; pass LocalSGD the plain module"
            )


def _members_of(transport: Transport) -> set[object]:
    """Return the global ranks of a group; for members in one process, their transport."""
    if not isinstance(transport, ProcessGroupTransport):
        return {transport}
    try:
        return set(dist.get_process_group_ranks(transport.group))
    except (KeyError, ValueError):  # the group was destroyed, so nothing is averaged over it any more
        return set()


# Parameters whose gradients are means only after `backward()` has returned, by the object that averages them.
_averaged_in_backward: WeakKeyDictionary[object, frozenset[int]] = WeakKeyDictionary()


def refuse_steps_inside(owner: object, parameters: Iterable[torch.Tensor]) -> None:
    """Forbid optimizer steps of these parameters inside a backward pass, while `owner` lives."""
    _look_at_steps()
    # The owner keeps the parameters alive, so no other object can get one of their ids.
    _averaged_in_backward[owner] = frozenset(map(id, parameters))


def allow_steps_inside(owner: object) -> None:
    """Undo `refuse_steps_inside`."""
    _averaged_in_backward.pop(owner, None)


def _refuse_step_inside(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if backward_pass() == -1:
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not all(map(stepped.isdisjoint, _averaged_in_backward.values())):
        raise StepError(
            f"{type(optimizer).__name__}.step() was called inside the backward pass, before gradients were "
            "averaged; step after backward(), and restart all processes from a checkpoint"
        )


# Torch calls the hook before every step of every optimizer, whoever makes the step.
_look_at_steps = cache(partial(register_optimizer_step_pre_hook, _refuse_step_inside))


# Messages at the start: how much is sent, and what would go wrong silently.

ALONE = (
    "nothing is averaged: this process is alone in its group. If others train with it, start all as one job "
    "(docs/clusters.md), such as torchrun --nnodes 2 … or accelerate launch --num_machines 2 …"
)


def log_start(engine: Engine, parameters: Iterable[torch.Tensor], averages: str = "") -> None:
    """Log on the first process what an engine does in a step, and after its first step any misfits.

    `averages` names what averages models, and how often; "" if gradients are averaged in every step.
    """
    together = engine.settings.health_group
    if engine.transport.rank or (together is not None and together.rank):
        return
    if engine.transport.size == 1:
        logger.warning(ALONE)
        return
    where, sender = f"{engine.transport.size} processes", "process"
    if engine.partition is not None:
        where = f"{engine.inter_node.size} machines of {engine.partition.intra_node.size} processes"
        sender = "machine"
    elif together is not None:
        where = f"{engine.transport.size} replicas of {together.size} processes"
    sent = engine.reporter.plan.message_bytes / 1e6
    in_bf16 = 2 * sum(spec.numel for spec in engine.specs) / 1e6
    what, per = f"{engine.algorithm} averages gradients", f"a step, where bf16 sends {in_bf16:.3g}"
    if averages:
        what = f"{averages}, averages models"
        per = f"an averaging, where gradients in bf16 are {in_bf16:.3g} a step"
    sends = f": a {sender} sends {sent:.3g} MB {per}" if in_bf16 else ""
    logger.info("%s over %s%s", what, where, sends)
    if averages or not engine.algorithm.remembers:
        return
    owned = {id(parameter) for parameter in parameters}  # ids, so that no model is kept alive

    def look(committed: bool) -> None:
        nonlocal look
        engine.reporter.observers.remove(look)
        del look  # its cycle would keep the residual of a deleted model until garbage is collected
        for words in _mismatches(engine, owned):
            logger.warning("%s", words)

    # After the first step the loss has been scaled, and there is an optimizer. A hook does not know them, so
    # search all objects, once, in about 0.1 s.
    engine.reporter.observers.append(look)


def _mismatches(engine: Engine, owned: set[int]) -> Iterator[str]:
    """Yield warnings about objects in this process that do not suit an algorithm with state."""
    objects = live_objects(GradScaler, torch.optim.Optimizer)
    scalers = [candidate for candidate in objects if isinstance(candidate, GradScaler)]
    if engine.settings.loss_scale is None and any(map(scales_now, scalers)):
        yield (
            f"a GradScaler scales a loss, but {engine.algorithm} has no grad_scaler, so its residual "
            "is wrong after each change of the scale; pass grad_scaler=scaler, unless the scaler is another "
            "model's"
        )
    if not isinstance(engine.algorithm, PowerSGD | BatchedPowerSGD):
        return
    for candidate in objects:
        if trains(candidate, owned) and any("Adam" in kind.__name__ for kind in type(candidate).__mro__):
            yield (
                f"{type(engine.algorithm).__name__} with {type(candidate).__name__} raises the loss (by 3.6 "
                "% after 300 steps of a small GPT); with Quantize(bits=4) we could measure no loss, see "
                "docs/optimizers.md"
            )
            return
