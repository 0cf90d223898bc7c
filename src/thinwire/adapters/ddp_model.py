"""Functions to inspect DDP models and buckets, and to register hooks on them."""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.autograd.graph import get_gradient_edge
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire import torch_private
from thinwire.adapters.setup import live_objects
from thinwire.algorithms import Bucket
from thinwire.checks import shown
from thinwire.errors import AttachError, StateError, StepError
from thinwire.plan import ParameterSpec
from thinwire.sync.partition import Specs
from thinwire.tensors import accelerators
from thinwire.torch_private import comm_hooks, ddp_logging_data, ddp_parameters, uncompiled

# Prefixes that torch's module wrappers add to parameter names.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")

# Base classes of modules sharded by FSDP2 and FSDP1, by name: importing the classes takes seconds.
FSDP2, FSDP1 = "FSDPModule", "FullyShardedDataParallel"

PYTHON_REDUCER = (
    'with torch._dynamo.config.optimize_ddp="python_reducer" DDP has no buckets for a communication hook; '
    "set it to True or False before you build the DDP model"
)

# DDP's reducer's names of parameter dtypes.
REDUCERS_NAMES = {torch.float32: "float", torch.float64: "double"}
REDUCERS_NAMES |= {torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16"}

# If gradients can't be averaged because of how a model is divided, models still can.
DIVIDED = 'or average such a model by DiLoCo or LocalSGD, with replicas=mesh["replicate"]'

CONVERTED = (
    "the model was converted (to another type, device or memory format) after DDP was built, so DDP loses or "
    "mixes up its gradients; convert first, then build a new DDP model and attach it"
)

GLANCE = 64  # elements

# Parameters and their models.


def plain_name(name: str) -> str:
    """Return a parameter's name in the user's own module, without wrappers' prefixes."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def names_of(module: torch.nn.Module, ignored: Collection[str] = ()) -> dict[torch.nn.Parameter, str]:
    """Return a module's parameters in module order, each with its name."""
    # A shared parameter has several names: take the first one that DDP does not ignore.
    names: dict[torch.nn.Parameter, str] = {}
    # Module's own method: TorchRL's losses have one that does not take `remove_duplicate`.
    for name, parameter in torch.nn.Module.named_parameters(module, remove_duplicate=False):
        if name not in ignored:
            names.setdefault(parameter, plain_name(name))
    return names


def names_in(model: DistributedDataParallel) -> dict[torch.nn.Parameter, str]:
    """Return the parameters of a DDP model that it does not ignore, each with its name in the module."""
    return names_of(model.module, model.parameters_to_ignore)


def specs_of(model: DistributedDataParallel) -> list[ParameterSpec]:
    """Return the specs of a DDP model's trained parameters, in module order."""
    return [ParameterSpec.of(name, p) for p, name in names_in(model).items() if p.requires_grad]


def accumulator_of(parameter: torch.Tensor) -> torch.autograd.graph.Node:
    """Return the autograd node that accumulates a parameter's gradient, frozen or not."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        with torch.inference_mode(False):  # inference mode has no graph
            return get_gradient_edge(parameter).node
    finally:
        parameter.requires_grad_(trained)


class Used:
    """Parameters that got a gradient from any backward pass since the last step, including `no_sync` passes.

    DDP leaves `.grad` of all others alone, so their means are not applied. A nonzero gradient proves nothing:
    it may be from an earlier step or pass.
    """

    # By the same condition as in DDP's reducer, which reports it only when the last bucket is averaged.

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._ids: set[int] = set()
        # This object has not seen the current pass, nor passes before it was made.
        self._is_complete = False
        self._handles = [
            self._noted(parameter)
            for parameter in parameters
            if parameter.is_floating_point() or parameter.is_complex()  # others are never trained
        ]

    def _noted(self, parameter: torch.nn.Parameter) -> RemovableHandle:
        # No reference to `self`: the reducer holds the node and its hook, unseen by the garbage collector.
        ids = self._ids

        def note(gradients: tuple[torch.Tensor | None, ...]) -> None:
            # A node may be called without a gradient.
            if gradients[0] is not None or parameter.grad is not None:
                ids.add(id(parameter))

        return accumulator_of(parameter).register_prehook(note)

    def of(self, parameters: Sequence[torch.Tensor], *, is_pass: bool) -> list[bool] | None:
        """Return which of a bucket's parameters were used; None if unknown."""
        if not is_pass:  # a process without input shadows the others
            return [False] * len(parameters)
        return [id(parameter) in self._ids for parameter in parameters] if self._is_complete else None

    def forget(self) -> None:
        """Start again, after a step."""
        self._ids.clear()
        self._is_complete = True

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def nonzero(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return for each flat gradient whether it has a nonzero element; on an accelerator, not read back."""
    if accelerators.is_accelerator(gradients[0].device):
        # The sum of magnitudes, since empty tensors have no maximum.
        return torch.stack(list(torch._foreach_norm(list(gradients), 1))) != 0
    # A nonzero gradient mostly shows in its first elements.
    return torch.tensor([bool(one[:GLANCE].any() or one.any()) for one in gradients], device="cpu")


def num_trained(parameters: Iterable[torch.Tensor]) -> int:
    """Return how many are trained: parameters frozen after DDP was built are still in a bucket."""
    return sum(parameter.requires_grad for parameter in parameters)


def ddp_inside(model: object) -> DistributedDataParallel | None:
    """Return the given DDP model, or the one inside a wrapper such as Fabric's; None if there is none."""
    if isinstance(model, DistributedDataParallel):
        return model
    if not isinstance(model, torch.nn.Module):
        return None
    ddp_models = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    kind = type(model).__name__
    if len(ddp_models) > 1:
        raise AttachError(
            f"the {kind} contains {len(ddp_models)} DDP models, expected one; pass them one by one"
        )
    inside = {id(parameter) for module in ddp_models for parameter in module.parameters()}
    outside = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
    if ddp_models and outside:
        raise AttachError(
            f"{plain_name(outside[0])} of the {kind} is trained but is not in its DDP model, so it would "
            "not be averaged; wrap the whole model in DistributedDataParallel, or pass the DDP model"
        )
    return ddp_models[0] if ddp_models else None


def hooked_models_with(parameters: Iterable[torch.Tensor]) -> list[DistributedDataParallel]:
    """Return the DDP models with all of these parameters and a communication hook."""
    ids = set(map(id, parameters))
    return find_ddp_models(
        lambda model: bool(comm_hooks(model)) and ids.issubset(map(id, ddp_parameters(model)))
    )


def find_ddp_models(matches: Callable[[DistributedDataParallel], bool]) -> list[DistributedDataParallel]:
    """Return the DDP models that match; if none does, search what `gc.freeze()` has hidden, too."""
    found = [model for model in live_objects(DistributedDataParallel) if matches(model)]
    if not found and gc.get_freeze_count():
        gc.unfreeze()
        found = [model for model in live_objects(DistributedDataParallel) if matches(model)]
        gc.freeze()
    return found


# Models that can't be attached.


def is_fsdp2(model: object) -> TypeGuard[torch.nn.Module]:
    """Return whether `fully_shard` or `replicate` was applied to a part of the model."""
    return isinstance(model, torch.nn.Module) and any(_is_one_of(m, FSDP2) for m in model.modules())


def is_sharded(model: object) -> bool:
    """Return whether FSDP, of either kind, was applied to a part of the model."""
    return isinstance(model, torch.nn.Module) and any(_is_one_of(m, FSDP2, FSDP1) for m in model.modules())


def _is_one_of(module: torch.nn.Module, *kinds: str) -> bool:
    # Compare base classes: FSDP2 makes a new class for each kind of module.
    return any(kind.__name__ in kinds for kind in type(module).__mro__)


LIGHTNING = "make the Trainer with strategy=thinwire.integrations.lightning.ThinwireStrategy(algorithm)"

# Advice for objects of frameworks, by package and base class: importing them takes seconds.
WAYS_IN = {
    ("transformers", "Trainer"): "call thinwire.integrations.transformers.attach(trainer, algorithm)",
    ("lightning", "Trainer"): LIGHTNING,
    ("lightning", "LightningModule"): LIGHTNING,
    ("lightning", "Fabric"): "pass the model that fabric.setup(…) returns",
    ("accelerate", "Accelerator"): "pass the model that accelerator.prepare(…) returns",
}


def way_in(model: object) -> str:
    """Return advice for a framework's object: the function to call; "" if it is not such an object."""
    for kind in type(model).__mro__:
        package = kind.__module__.partition(".")[0].removeprefix("pytorch_")
        if (package, kind.__name__) in WAYS_IN:
            return WAYS_IN[package, kind.__name__]
    return ""


def wrong_model(model: object) -> str:
    """Return the message for an object that is not a DDP model."""
    if way := way_in(model):
        return f"expected a DistributedDataParallel model, got {type(model).__name__}; {way}"
    if not isinstance(model, torch.nn.Module):
        return f"expected a DistributedDataParallel model, got {shown(model)}; pass the model"
    remedy = 'shard the plain module with fully_shard, and attach(…, replicas=mesh["replicate"])'
    ddp = "torch.nn.parallel.DistributedDataParallel"
    first = "" if dist.is_initialized() else "call torch.distributed.init_process_group(), then "
    rest = f"; {first}wrap it first: {ddp}(model)"
    if is_sharded(model):
        rest = f", sharded by FSDP1; thinwire.attach takes models of fully_shard (FSDP2): {remedy}"
    elif isinstance(model, torch.nn.DataParallel):
        start = "start one process per device (torchrun --nproc-per-node …)"
        rest = f", one process with several devices; {start}, with {ddp}(model.module)"
    elif any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        rest = f" with DTensors (tensor or expert parallelism); {remedy}, {DIVIDED}"
    elif getattr(model, "_is_accelerate_prepared", False):
        rest = (
            ", which Accelerate has prepared without DDP: this run has one process (then do not attach), or "
            "the model was evaluated before training (pass TrainingArguments(eval_on_start=True) instead)"
        )
    return f"expected a DistributedDataParallel model, got {type(model).__name__}{rest}"


def check_attachable(model: DistributedDataParallel) -> None:
    """Raise if a DDP model's gradients can't be averaged."""
    # DDP itself refuses a frozen model, so the parameters were frozen later.
    if not num_trained(ddp_parameters(model)):
        raise AttachError("no parameter of the model is trained, so there is nothing to average")
    if model.mixed_precision is not None:
        words = "DistributedDataParallel(mixed_precision=…) uses the communication hook itself"
        raise AttachError(
            f"{words}; build it without mixed_precision, and use torch.autocast or the algorithm's wire_dtype"
        )
    names, known = names_in(model), set(ddp_parameters(model))
    if any(parameter.requires_grad and parameter not in names for parameter in known):
        if new := next((name for parameter, name in names.items() if parameter not in known), ""):
            raise AttachError(_replaced(new))
        raise AttachError(
            "a trained parameter was removed from the model after DDP was built; build a new DDP model"
        )
    built_with = ddp_logging_data(model).get("dtypes", "").split(", ")
    trained = {parameter.dtype for parameter in ddp_parameters(model) if parameter.requires_grad}
    if all(REDUCERS_NAMES.get(dtype, built_with[0]) not in built_with for dtype in trained):
        raise AttachError(
            "the model was converted after DDP was built, so DDP no longer sees its gradients; convert the "
            "module first, then build the DDP model"
        )
    for name, module in model.module.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            owner = type(uncompiled(model.module)).__name__
            where = f'"{plain_name(name)}" of the {owner}' if plain_name(name) else "that is the model"
            raise AttachError(
                f"the {type(module).__name__} {where} makes sparse gradients, which can't be averaged here; "
                "build it with sparse=False"
            )


def check_options(model: DistributedDataParallel) -> None:
    """Refuse options with which DDP does not pass all gradients to its hook."""
    if torch_private.has_python_reducer(model):
        raise AttachError(PYTHON_REDUCER)
    # For these, DDP registers its own hook in the first forward pass.
    if any(map(torch_private.has_optimizer_in_backward, model.parameters())):
        words = "DDP uses its one communication hook itself for _apply_optimizer_in_backward"
        raise AttachError(f"{words}; step an optimizer after backward() instead")
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise AttachError(
            "with skip_all_reduce_unused_params=True DDP skips the hook for buckets that no process used, "
            "so a step would never complete; build the DDP model without it"
        )
    if torch_private.delays_all_reduce(model):
        raise AttachError(
            "with delay_all_reduce_named_params=… DDP itself averages those gradients and does not wait, "
            "so models would drift apart; build the DDP model without it"
        )


# The hook of a model.


def register(holder: object, state: object, hook: Callable[..., Any]) -> None:
    """Register a communication hook on a DDP model or one inside a wrapper; `guard` it if Thinwire's."""
    model = ddp_inside(holder)
    if model is None:
        raise AttachError(wrong_model(holder))
    before, _ = hook_of(model)
    try:
        model.register_comm_hook(state, hook)
    except RuntimeError as error:
        torch_private.forget_refused_hook(model, before)
        raise AttachError(
            "the model already has a communication hook, and DDP allows only one; if it is Thinwire's, call "
            "sync.use(…) or sync.detach(). A copy can be attached before its first forward pass"
        ) from error
    if hook_of(model)[1]:
        guard(model)


def hook_of(model: DistributedDataParallel) -> tuple[str, bool]:
    """Return the name of the model's communication hook, "" if it has none, and whether it is Thinwire's."""
    # DDP logs the hook in use. Its list lacks built-in hooks, and still has a copied model's lost ones.
    name = ddp_logging_data(model).get("comm_hook", "")
    for hook, state in reversed(comm_hooks(model)):
        if hook.__qualname__ == name:
            made_in = {str(hook.__module__), type(state).__module__}
            return name, any(module.split(".")[0] == "thinwire" for module in made_in)
    return name, False


def guard(model: DistributedDataParallel) -> None:
    """Make an attached model refuse passes that no hook would see: of copies and of sharded parts."""
    unguard(model)
    model.register_forward_pre_hook(_Guard(model))


def unguard(model: DistributedDataParallel) -> None:
    """Undo `guard`."""
    torch_private.remove_forward_pre_hooks(model, _Guard)


def leave_in_the_middle(model: DistributedDataParallel | None, error: BaseException) -> None:
    """Make a guarded model refuse its next passes, because `error` has ended one inside DDP."""
    for hook in [] if model is None else torch_private.forward_pre_hooks(model, _Guard):
        hook.ended_by = type(error).__name__  # not the error, whose traceback holds the group


class _Guard:
    """Detects, before each pass, gradients that would reach no hook: DDP alone would train silently."""

    # DDP has hooks on the nodes of its original parameters, not on those that `fully_shard`, a conversion or
    # a new layer makes; and a copy of a model has no communication hook. Copies that are not trained
    # (averaged weights) work.

    ended_by = ""  # the error that has ended the last pass inside DDP, which then can't continue

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)
        self._known = set(map(id, model.parameters()))
        self._names = set(names_in(model).values())
        # One of each dtype and device: a conversion of the whole model changes at least one. DDP itself
        # detects if only some parameters take no part.
        by_kind = {(p.dtype, p.device): p for p in ddp_parameters(model) if p.requires_grad}
        self._nodes = [(parameter, accumulator_of(parameter)) for parameter in by_kind.values()]
        # A memory format changes the strides of these, but not DDP's layout of their gradients.
        self._images = [p for p in ddp_parameters(model) if p.requires_grad and p.dim() > 3]
        self._strides = list(map(torch.Tensor.stride, self._images))
        self._learn(model)

    def _learn(self, model: DistributedDataParallel) -> None:
        # Without the model itself: a cycle would keep its reducer, which hooks the same parameters as that of
        # a new DDP model, until garbage is collected.
        self._modules = list(model.module.modules())
        holders = [model, *self._modules]
        held = chain.from_iterable(map(torch_private.children_and_parameters, holders))
        self._held = [mapping for mapping in held if isinstance(mapping, dict)]  # scripted ones can't grow
        self._then = self._now()

    def _now(self) -> tuple[list[type], list[int]]:
        # Runs in each step, so without a Python loop: 0.1 ms for 300 modules. `fully_shard` changes the class
        # of each module; comparing classes is 50 times as fast as checking bases.
        held = chain.from_iterable(map(dict.values, self._held))
        return list(map(type, self._modules)), list(map(id, held))

    def __deepcopy__(self, memo: dict[int, object]) -> "_Guard":
        """Return a guard that knows only the original, and so recognises that a copy is not attached."""
        copied = _Guard.__new__(_Guard)
        copied._model = self._model
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        raise not_pickled()

    @torch_private.not_compiled
    def __call__(self, model: DistributedDataParallel, _: object) -> None:
        if not torch.is_grad_enabled():
            return
        if model is not self._model():
            if hook_of(model) == ("", False):
                model.register_comm_hook(None, _refuse_to_train_copy)
            return
        if self.ended_by:  # DDP itself would blame unused parameters
            raise StepError(
                f"the last backward pass was ended by a {self.ended_by}, and DDP can't continue after that; "
                "wrap the module in DDP again, attach it, and load a checkpoint on all processes"
            )
        if self._now() != self._then:
            self._look_again(model)
        is_converted = list(map(torch.Tensor.stride, self._images)) != self._strides
        for parameter, node in self._nodes:
            is_converted |= parameter.requires_grad and accumulator_of(parameter) is not node
        if is_converted:
            raise StepError(CONVERTED)

    def _look_again(self, model: DistributedDataParallel) -> None:
        # A parametrization changes a module's class as well.
        for name, module in model.named_modules():
            if _is_one_of(module, FSDP2):
                where = plain_name(name.removeprefix("module").removeprefix(".")) or "the whole model"
                raise StepError(
                    f"fully_shard was applied to parts of the DDP model ({where}) after it was attached, so "
                    "neither DDP nor Thinwire sees their gradients; shard and attach the plain module"
                )
        for parameter, name in names_in(model).items():
            # `torch.func.functional_call` may replace a parameter by a tensor computed from it.
            if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._known:
                if name in self._names:
                    raise StepError(_replaced(name))
                raise unaveraged(name)
        self._learn(model)


def check_layout(specs: Specs, parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Raise if DDP lays out a gradient in another memory format, of before the model was attached."""
    for spec, parameter, part in zip(specs, parameters, Bucket(specs, flat).gradients, strict=True):
        gradient, formats = parameter.grad, {4: torch.channels_last, 5: torch.channels_last_3d}
        if len(spec.shape) not in formats or gradient is None or gradient.dtype != part.dtype:
            continue
        image = torch.empty(spec.shape, device="meta")
        layouts = spec.stride, image.stride(), image.to(memory_format=formats[image.dim()]).stride()
        # The values tell: DDP does not. Other hooks may have changed all of them.
        fits = (torch.equal(part.as_strided(spec.shape, stride), gradient) for stride in layouts)
        if not next(fits) and any(fits):
            raise StepError(CONVERTED)


def _refuse_to_train_copy(state: None, bucket: GradBucket) -> Future[torch.Tensor]:
    raise AttachError(
        "this DDP model is a copy without the communication hook, so it would train uncompressed; copy the "
        "original again, and call attach(copied_model, …) before the copy's first step"
    )


def _replaced(name: str) -> str:
    return (
        f"{name} was replaced (as by load_state_dict(assign=True)) after DDP was built, so DDP does not "
        "average its gradient; load or replace first, then build a new DDP model and attach it"
    )


def unaveraged(name: str) -> StepError:
    """Return the error for a parameter that is trained but not averaged."""
    return StepError(
        f"{name} is trained, but DDP does not average its gradient: it was frozen or missing when the DDP "
        "model was built; unfreeze or add it first, then build a new DDP model"
    )


def not_pickled() -> StateError:
    """Return the error for pickling a whole DDP model."""
    return StateError(
        "a DDP model whose gradients Thinwire averages can't be pickled whole; save "
        "model.module.state_dict(), and the state_dict() of attach's result or of the LocalSGD"
    )


class DetachedAdapter:
    """Replaces the adapter in a copy of an attached model."""
