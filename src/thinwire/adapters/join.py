"""Uneven inputs: processes that have run out of batches shadow the collectives of the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.adapters.ddp import Switch
from thinwire.adapters.ddp_model import ddp_inside, find_ddp_models, hook_of, wrong_model
from thinwire.adapters.setup import contributor_scales, refuse_weight_of_contributors
from thinwire.comm.process_group import members_over_contributors
from thinwire.errors import AttachError, ConfigError
from thinwire.sync import GradientSync, engine_of
from thinwire.torch_private import comm_hooks, divide_by_all_members, leave_join, not_compiled


@contextmanager
def join(
    joined: torch.nn.Module | GradientSync | Joinable,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """Allow the processes of a training loop to have different numbers of batches.

    A process that has run out of batches leaves its loop. It then contributes zero gradients, and its
    residual, to the averages of the others until all have run out. At the end every process gets the model of
    the last to finish; optimizers are not averaged. Under torch's `model.join()` our hooks always divide by
    the initial world size.

    Args:
        joined: The DDP model, with any of Thinwire's hooks or none; the handle that `attach` returned for it;
            or a Thinwire object that averages without DDP (`thinwire.powersgd.PowerSGD`, `LocalSGD`).
        divide_by_initial_world_size: Divide sums of gradients by the members of the group. If False, by the
            processes that still have batches in this step; a DDP model's communication hook, if it has one,
            must then be Thinwire's.
        enable: False disables the context.
        throw_on_early_termination: Raise on all processes when the first has run out, instead.

    Cost: per step a message of one element (with DDP a second one, which says whether the step
    synchronises); one process's model is broadcast at the end.

    Raises:
        AttachError: `joined` is none of these.
        ConfigError: The model has SyncBatchNorm, whose collectives can't be shadowed; or another library's
            communication hook while `divide_by_initial_world_size` is False. Both are allowed with
            `throw_on_early_termination`. Or (from `optimizer.step()`) the optimizer communicates too, such as
            `ZeroRedundancyOptimizer`: use torch's `Join([ddp_model, optimizer])`.
        RuntimeError: With `throw_on_early_termination`, when a process has run out.

    Examples:
        >>> import thinwire
        >>> ddp_model = DistributedDataParallel(torch.nn.Linear(8, 4))  # in a process group
        >>> sync = thinwire.attach(ddp_model, thinwire.PowerSGD())
        >>> with thinwire.join(ddp_model):
        ...     for batch in torch.ones(3, 1, 8):  # other processes may have more, or fewer
        ...         ddp_model(batch).sum().backward()
        >>> sync.stats().steps
        3
    """
    joinable = _joinable(joined)
    model = joinable if isinstance(joinable, DistributedDataParallel) else None
    shadows = enable and not throw_on_early_termination
    # DDP models and LocalSGD have a `module`; aggregators do not.
    module = getattr(joinable, "module", None)
    modules = module.modules() if isinstance(module, torch.nn.Module) else ()
    if shadows and any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in modules):
        raise ConfigError(
            "the model has SyncBatchNorm, whose collectives need every process, even without input; use "
            "join(…, throw_on_early_termination=True) or BatchNorm"
        )
    options = (enable, throw_on_early_termination)
    with ExitStack() as entered:
        # Otherwise DDP would keep dividing by the last number of contributors.
        if model is not None:
            entered.callback(divide_by_all_members, model)
        entered.callback(leave_join, joinable)
        if shadows:
            entered.callback(register_optimizer_step_pre_hook(_refuse_to_step).remove)
        if shadows and not divide_by_initial_world_size and model is not None and _is_hooked(model):
            # Register our counter before DDP: only the first joinable's notification counts, and DDP's would
            # make DDP divide as well.
            counter = _Counter(model)
            entered.callback(model.register_forward_pre_hook(counter.count).remove)
            # Undone for parameters that are frozen or replaced inside the context, too, and for one shared by
            # two models, which still belongs to the outer context.
            scale = counter.scale, model.process_group.size()
            counted: dict[torch.Tensor, tuple[torch.Tensor, int]] = dict.fromkeys(model.parameters(), scale)
            outer = {it: contributor_scales[it] for it in counted if it in contributor_scales}
            entered.callback(lambda: contributor_scales.update(outer))
            entered.callback(lambda: [contributor_scales.pop(parameter) for parameter in counted])
            contributor_scales.update(counted)
            entered.enter_context(Join([counter, model], *options))
        else:
            divide = divide_by_initial_world_size
            entered.enter_context(Join([joinable], *options, divide_by_initial_world_size=divide))
        yield


def _refuse_to_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuse an optimizer whose step communicates: processes without input would not take part."""
    if isinstance(optimizer, Joinable):
        name = type(optimizer).__name__
        raise ConfigError(
            f"{name}.step() sends parameters, but in thinwire.join processes without input make no step; "
            "use torch's Join([ddp_model, optimizer])"
        )


class _Counter(Joinable):
    """Notifies the join context in place of the DDP model, and keeps the number of contributors.

    DDP divides by them only what it averages itself, and does not pass their number to its hook.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__()
        self._model = model
        self.scale = torch.ones(1, dtype=torch.float64, device=model.device)

    @not_compiled
    def count(self, *unused: Any) -> None:
        """Notify the join context, before each forward pass, and store how many processes contribute."""
        # In place: the adapters hold this tensor.
        scale = members_over_contributors(self)
        if scale is not None:
            self.scale.copy_(scale)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinHook()  # shadows nothing: DDP's own join hook runs our communication hook with zeros

    @property
    def join_device(self) -> torch.device:
        return self._model.join_device  # type: ignore[no-any-return]

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self._model.join_process_group  # type: ignore[no-any-return]


def _joinable(joined: object) -> Joinable:
    if isinstance(joined, GradientSync):
        engine = engine_of(joined)

        def is_owner(model: DistributedDataParallel) -> bool:
            return any(isinstance(state, Switch) and state.engine is engine for _, state in comm_hooks(model))

        models = find_ddp_models(is_owner)
        if not models:
            raise AttachError(
                "this GradientSync is not attached to a DDP model, so it can't be joined; pass the object "
                "that owns it"
            )
        return models[0]
    joinable = joined if isinstance(joined, Joinable) else ddp_inside(joined)
    if not isinstance(joinable, Joinable):
        others = "Or pass the GradientSync attached to one, a LocalSGD or a thinwire.powersgd aggregator"
        raise AttachError(f"{wrong_model(joined)}. {others}")
    return joinable


def _is_hooked(model: DistributedDataParallel) -> bool:
    """Return whether one of our hooks divides, rather than DDP itself."""
    name, is_ours = hook_of(model)
    if name and not is_ours:
        raise ConfigError(
            f"divide_by_initial_world_size=False has no effect on the model's communication hook {name}, "
            "which divides by the group's size; leave it True, or register one of thinwire.hooks"
        )
    for _, state in comm_hooks(model):
        if isinstance(state, Switch) and state.engine is not None:
            refuse_weight_of_contributors(state.engine)
    return bool(name)
