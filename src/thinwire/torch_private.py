"""All uses of torch's private API, each with a name: if a new torch breaks one, it breaks in this module.

`tests/test_torch_private.py` finds uses elsewhere. All exist in torch 2.6, the oldest that Thinwire supports,
unless a docstring says otherwise. Two kinds of names are used elsewhere directly: `torch._foreach_*`, and
public classes that only `torch._C` exports with their types.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib import import_module
from inspect import isfunction
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import GradScaler, OptState
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler
from torch.utils import _pytree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Kind = TypeVar("Kind")

# Autograd. Unwrapped torch functions, since hooks call them for each bucket or gradient.

backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of this thread's innermost backward pass; -1 outside of any."""

running_node: Callable[[], Node | None] = torch._C._current_autograd_node
"""Return the autograd node running on this thread; in a pass's final callback, that of the outer pass."""

at_end_of_backward: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
"""Call a function at the end of the current backward pass, after those queued before."""


def is_pass_compiled() -> bool:
    """Return whether compiled autograd runs the backward pass: it loses functions of `at_end_of_backward`."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


not_compiled = _disable_dynamo
"""Decorate a function of a module or class that `torch.compile` must not trace."""

is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Return whether `torch.profiler` or `torch.autograd.profiler` records on this thread."""


@not_compiled
def _called(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    return function(*args, **kwargs)


def closure_not_compiled(closure: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function inside a function that `torch.compile` must not trace."""
    # `not_compiled` makes a cycle: the function refers to its wrapper. So what a closure holds, such as the
    # model, would be freed only by the garbage collector.
    return partial(_called, closure)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Return a context in which torch's profilers record nothing on this thread.

    For what may end after them: torch would write its end to a recording that is freed.
    """
    torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)  # type: ignore[attr-defined]


# Modules, tensors and optimizers.

tree_map = _pytree.tree_map
"""Apply a function to each leaf of nested lists, tuples and dictionaries."""


def children_and_parameters(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's own mappings of modules and of parameters: dictionaries, unless it is scripted."""
    return module._modules, module._parameters


def put_parameters(module: nn.Module, parameters: dict[str, nn.Parameter | None]) -> None:
    """Make a module look up its own parameters in another dictionary."""
    module.__dict__["_parameters"] = parameters


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of a module are compiled: by `torch.compile(module)` or `module.compile()`."""
    return uncompiled(module) is not module or module._compiled_call_impl is not None


def has_recorded_a_graph() -> bool:
    """Return whether this thread has computed anything that autograd records."""
    return torch.autograd._get_sequence_nr() > 0  # type: ignore[attr-defined]


def version_of(tensor: torch.Tensor | None) -> int:
    """Return how often a tensor, or a view that shares its memory, was written to in place."""
    return -1 if tensor is None else tensor._version


def forward_pre_hooks(module: nn.Module, kind: type[Kind]) -> list[Kind]:
    """Return a module's hooks of a class."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, kind)]


def remove_forward_pre_hooks(module: nn.Module, kind: type) -> None:
    """Remove the hooks of a class: a copied module has copies of hooks, for which there are no handles."""
    for number, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, kind):
            del module._forward_pre_hooks[number]


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that are not saved."""
    return module._non_persistent_buffers_set


def uncompiled(model: object) -> object:
    """Return the model that `torch.compile` was given, if this is its result; otherwise the model itself."""
    return getattr(model, "_orig_mod", model)


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors share if they have the same storage, even an empty one."""
    return int(tensor.untyped_storage()._cdata)


def post_accumulate_hooks(parameter: torch.Tensor) -> Iterable[Any]:
    """Return the hooks of `register_post_accumulate_grad_hook`."""
    return (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()


def takes_step_hooks(optimizer: object) -> bool:
    """Return whether it supports step hooks: wrappers may derive from Optimizer without its `__init__`."""
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def counted_step(step: Callable[..., None]) -> Callable[..., None]:
    """Return a function that can replace an optimizer's step without a scheduler's warning."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that an optimizer has stepped, as its own step does."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def num_steps(scheduler: LRScheduler) -> int:
    """Return how many steps a scheduler has made; a `ChainedScheduler` does not count them itself."""
    while isinstance(scheduler, ChainedScheduler):
        scheduler = scheduler._schedulers[0]
    return scheduler.last_epoch


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has step hooks."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def makes_state(optimizer: torch.optim.Optimizer, options: Mapping[str, object]) -> bool:
    """Return whether `torch.distributed.checkpoint` makes a step, of zeros, for the state that it creates."""
    groups = optimizer.param_groups
    if options != {"closure": None} or any(group.get("lr") != 0 for group in groups):
        return False
    # A warm-up's first rate is 0, too. A DTensor's own `any` would be a collective.
    gradients = (parameter.grad for group in groups for parameter in group["params"])
    parts = (it.to_local() if hasattr(it, "to_local") else it for it in gradients if it is not None)
    return not any(part.any() for part in parts)


def was_unscaled(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the gradients of an optimizer were unscaled since its last step."""
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED


def scales_now(scaler: GradScaler) -> bool:
    """Return whether it has scaled a loss and not unscaled gradients yet; False for a disabled one."""
    if getattr(scaler, "_scale", None) is None:
        return False
    return all(state["stage"] is OptState.READY for state in scaler._per_optimizer_states.values())


# Precision of products in fp32.

# Both are None before torch 2.9, where only `torch.set_float32_matmul_precision` exists.

fp32_precision: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
"""Return the current setting for a backend ("generic" for all) and an operation ("all" for all)."""

set_fp32_precision: Callable[..., object] | None = getattr(torch._C, "_set_fp32_precision_setter", None)
"""Set it, by backend, operation and value; "none" follows the wider setting."""


# DDP.


def ddp_parameters(model: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters that DDP was built with, including frozen ones, but not ignored ones."""
    # Empty for a half-constructed object, which a search through all objects may find.
    parameters: list[nn.Parameter] = model.__dict__.get("_module_parameters", [])
    return parameters


def comm_hooks(model: DistributedDataParallel) -> Sequence[tuple[Callable[..., Any], Any]]:
    """Return each communication hook with its state; a copied model still lists its lost hooks."""
    hooks: Sequence[tuple[Callable[..., Any], Any]] = model.__dict__.get("_comm_hooks", ())
    return hooks


def forget_refused_hook(model: DistributedDataParallel, name_before: str) -> None:
    """Undo what `register_comm_hook` records before it finds that DDP can't have the hook."""
    model._comm_hooks.pop()
    model.logger._set_comm_hook_name(name_before)  # type: ignore[union-attr]


def forget_hooks_in(state: dict[str, Any]) -> None:
    """Remove Thinwire's hooks from a DDP model's state, before it is pickled."""
    ours, before = "thinwire.", state["_forward_pre_hooks"].items()
    others = ((number, hook) for number, hook in before if not type(hook).__module__.startswith(ours))
    comm = [(hook, held) for hook, held in state["_comm_hooks"] if not hook.__module__.startswith(ours)]
    state |= {"_comm_hooks": comm, "_forward_pre_hooks": OrderedDict(others)}


def ddp_logging_data(model: DistributedDataParallel) -> dict[str, Any]:
    """Return DDP's logging data: `comm_hook`, the hook in use, and `dtypes`, the reducer's dtype names."""
    if model.logger is None:
        return {}
    return model._get_ddp_logging_data()  # type: ignore[no-untyped-call, no-any-return]


def has_python_reducer(model: DistributedDataParallel) -> bool:
    """Return whether it was built under `optimize_ddp="python_reducer"`: then it has no buckets."""
    return bool(getattr(model, "_use_python_reducer", False))


def delays_all_reduce(model: DistributedDataParallel) -> bool:
    """Return whether it was built with `delay_all_reduce_named_params`: its hook does not see those."""
    return bool(getattr(model, "_delay_all_reduce_params", ()))


def has_optimizer_in_backward(parameter: torch.Tensor) -> bool:
    """Return whether `_apply_optimizer_in_backward` was called for it; DDP takes its hook for that."""
    return hasattr(parameter, "_in_backward_optimizers")


def divide_by_all_members(model: DistributedDataParallel) -> None:
    """Make DDP stop dividing by a join context's last number of contributors."""
    model.reducer._set_forward_pass_work_handle(None, True)  # type: ignore[arg-type]


def call_before_pass(model: DistributedDataParallel, action: Callable[[Any], None]) -> None:
    """Call an action before each pass of a DDP model, until `stop_calling`.

    `model.forward(…)` calls none of the model's hooks; nor does `replicate`, only a part of DDP's forward.
    """
    held: Callable[[], Any] = weakref.ref(model)  # without a cycle
    name = _first_called(model)

    @not_compiled
    def first_called(*inputs: Any, **named: Any) -> Any:
        action(held())
        return getattr(type(held()), name)(held(), *inputs, **named)

    setattr(model, name, first_called)


def stop_calling(model: DistributedDataParallel, state: dict[str, Any]) -> None:
    """Undo `call_before_pass` in a model's attributes, or in a copy of them."""
    state.pop(_first_called(model), None)


def _first_called(model: DistributedDataParallel) -> str:
    # A subclass's own forward may not call DDP's.
    return "_pre_forward" if type(model).forward is DistributedDataParallel.forward else "forward"


def leave_join(joinable: Joinable) -> None:
    """Stop notifying a join context in later steps: torch keeps that enabled after the context's end."""
    joinable._join_config = type(joinable._join_config).construct_disabled_join_config()


# Process groups.


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return a group's timeout, which has no public API; None if its backend has no such option."""
    options = getattr(group._get_backend(device), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def num_messages(group: Any) -> int | None:  # its stub lacks the method
    """Return how many collectives a group has started; None if its backend does not count them."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return None


def num_groups() -> int:
    """Return how many process groups this process has created: torch uses it to name the next one."""
    return len(dist.distributed_c10d._world.pg_names)


def release_default_group() -> None:
    """Let `destroy_process_group` end the default group's threads: at Python's end, one might abort it."""
    # Optimizers import this module of torch, and its default arguments keep a group that exists by then.
    for function in filter(isfunction, vars(import_module("torch.distributed.nn.functional")).values()):
        defaults = function.__defaults__ or ()
        function.__defaults__ = tuple(None if isinstance(it, dist.ProcessGroup) else it for it in defaults)


def default_store() -> Any:  # its stub lacks the class
    """Return the default group's store, through which its processes found each other."""
    return dist.distributed_c10d._get_default_store()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh from which a submesh was taken; before torch 2.7, the argument."""
    return mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh


# FSDP2. Don't import its modules: that takes seconds, and a model that uses them has imported them.


def fsdp_states(model: nn.Module) -> list[Any]:
    """Return the state of each call of `fully_shard` or `replicate`; modules of one call share a state."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    states = [module._get_fsdp_state() for module in modules]
    return list({id(state): state for state in states}.values())


class FSDPModel:
    """FSDP2's view of a model: its states, and groups of parameters that are reduced as one."""

    def __init__(self, model: nn.Module) -> None:
        self.states, self.groups = fsdp_states(model), list[Any]()
        for state in self.states:
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # before torch 2.12 there was one, or none
                groups = [group for group in [state._fsdp_param_group] if group]
            self.groups += groups

    def parameters_of(self, group: int) -> list[tuple[str | None, nn.Parameter]]:
        """Return the shards that get gradients from a group; named from the first forward pass on."""
        return [(param._param_fqn, param.sharded_param) for param in self.groups[group].fsdp_params]

    def has_calls_to_come(self, group: int) -> bool:
        """Return whether some forward calls of a group have not run backward in this pass; some never do."""
        return bool(self.groups[group]._post_forward_indices)

    @property
    def waits_for_more(self) -> bool:
        """Whether the user has announced another backward pass of the same step."""
        reduces = all(group.all_reduce_grads and group.reduce_grads for group in self.groups)
        return not reduces or not all(state._state_ctx.is_last_backward for state in self.states)

    @property
    def is_in_pass(self) -> bool:
        """Whether a backward pass has begun and not ended; between passes: whether one has raised."""
        return any(state._state_ctx.post_backward_final_callback_queued for state in self.states)

    @property
    def is_inside_another(self) -> bool:
        """Whether it is part of a larger FSDP2 model; known from its first forward pass on."""
        # The first module to run is a root. There are several roots if no module holds the others.
        return all(state._is_root is False for state in self.states)

    @property
    def is_finalized_by_hand(self) -> bool:
        """Whether the user calls `finalize_backward`, as torch 2.15 allows."""
        return any(getattr(state._state_ctx, "manual_backward_finalization", False) for state in self.states)
