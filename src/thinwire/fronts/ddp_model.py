"""What has to be known of DDP's models and buckets to hang a hook on them."""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

import copy
import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch._compile import _disable_dynamo as disable_dynamo
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import AttachError, GradientError, StepError

# What torch puts around a module shows in the names of its parameters.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")

# The names, for the modules take seconds to import.
SHARDED = ("FSDPModule", "FullyShardedDataParallel")


def register(model: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
    """Register a communication hook, and `guard` the model if it is Thinwire's."""
    name, _ = hook_of(model)
    try:
        model.register_comm_hook(state, hook)
    except RuntimeError as error:
        # DDP notes a hook before it finds that it can't have it.
        model._comm_hooks.pop()
        model.logger._set_comm_hook_name(name)  # type: ignore[union-attr]
        remedy = "if it is Thinwire's, switch its algorithm with sync.use(…), or call sync.detach() first"
        if name == _refusing_hook.__qualname__:
            remedy = (
                "this model is a copy, and since its first forward pass with gradients it has one that "
                "refuses to train it; copy again and attach that copy first, or evaluate it under "
                "torch.no_grad()"
            )
        raise AttachError(
            f"the model has a communication hook already, and DDP allows one only; {remedy}"
        ) from error
    if hook_of(model)[1]:
        guard(model)


def guard(model: DistributedDataParallel) -> None:
    """Let copies of an attached model refuse to be trained without a hook, and the model if it is sharded."""
    refuse_training_of_copies(model)
    model.register_forward_pre_hook(_StillWhole(model))


def unguard(model: DistributedDataParallel) -> None:
    """Undo `guard`."""
    model.__dict__.pop("__deepcopy__", None)
    for number, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, _StillWhole):
            del model._forward_pre_hooks[number]


def check_options(model: DistributedDataParallel) -> None:
    """Refuse options under which DDP does not hand all gradients to its hook."""
    if getattr(model, "_use_python_reducer", False):
        raise AttachError(PYTHON_REDUCER)
    # DDP would register a hook of its own in the first forward pass, where it can't have a second one.
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
        raise AttachError(
            "parameters have optimizers that step inside of the backward pass "
            "(_apply_optimizer_in_backward), for which DDP needs its one communication hook itself; step an "
            "optimizer after backward()"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise AttachError(
            "with skip_all_reduce_unused_params=True DDP leaves out the hook for buckets that nobody used, "
            "so a step would never be complete; build the DDP model without it"
        )


PYTHON_REDUCER = (
    'under torch._dynamo.config.optimize_ddp="python_reducer" DDP has no buckets to hand to a communication '
    "hook; set it to True or False before the DDP model is built"
)


def hook_of(model: DistributedDataParallel) -> tuple[str, bool]:
    """Return the name of the model's communication hook, "" if it has none, and whether it is Thinwire's.

    DDP's list of hooks has not those built in, and still has those that a copied model has lost.
    """
    # What DDP logs is the hook in use, built-in ones included.
    data = {} if model.logger is None else model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    name = data.get("comm_hook", "")
    for hook, state in reversed(model.__dict__.get("_comm_hooks", [])):
        if hook.__qualname__ == name:
            made_in = {str(hook.__module__), type(state).__module__}
            return name, any(module.split(".")[0] == "thinwire" for module in made_in)
    return name, False


def refuse_training_of_copies(model: DistributedDataParallel) -> None:
    """Let `copy.deepcopy` make models that raise when they are trained without a hook of their own.

    DDP copies no communication hook, and would average uncompressed gradients without a word. Copies that
    only follow or evaluate, as `torch.optim.swa_utils.AveragedModel` makes them, are none the wiser.
    """
    # Weak, or the model would hold itself by what follows.
    original = weakref.ref(model)

    def deepcopied(memo: dict[int, object]) -> DistributedDataParallel:
        model = original()
        if model is None:
            raise AssertionError("it is called through the model")
        copied = type(model).__new__(type(model))
        # Before its parts are copied: they may hold the model.
        memo[id(model)] = copied
        # As pickle would: DDP leaves its reducer out, and makes another one.
        state = model.__getstate__()  # type: ignore[no-untyped-call]
        # This bound method belongs to the original; on the copy it would copy the original again.
        del state["__deepcopy__"]
        copied.__setstate__(copy.deepcopy(state, memo))  # type: ignore[no-untyped-call]
        copied.register_forward_pre_hook(_hooked_by_refusal)
        return copied

    model.__dict__["__deepcopy__"] = deepcopied


class _StillWhole:
    """Sees, before a pass of a DDP model, that `fully_shard` has taken no part of it since it was attached.

    DDP has hooks on the parameters that it was built with, so it would average nothing without a word.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        # Don't keep the model, which holds this object. fully_shard changes the class of each module that it
        # takes: comparing classes is 50 times as fast as asking for their bases, and each step does it.
        self._type = type(model)
        self._types = [(module, type(module)) for module in model.module.modules()]

    @disable_dynamo
    def __call__(self, model: DistributedDataParallel, _: object) -> None:
        if type(model) is self._type and all(type(module) is kind for module, kind in self._types):
            return
        # A parametrization gives another class as well.
        sharded = [name for name, module in model.named_modules() if SHARDED[0] in _kinds(module)]
        if sharded:
            where = plain_name(sharded[0].removeprefix("module").removeprefix(".")) or "the whole model"
            raise StepError(
                f"fully_shard has taken parts of the DDP model ({where}) since it was attached, so neither "
                "DDP nor Thinwire sees their gradients, and nobody averages them; call fully_shard on the "
                "plain module, without DDP, then thinwire.attach(module, algorithm, "
                'replicas=mesh["replicate"]), and make the optimizer last'
            )


def _hooked_by_refusal(copied: DistributedDataParallel, _: object) -> None:
    """See, before a copy's forward pass that may have a backward pass, that it has a hook."""
    if torch.is_grad_enabled() and hook_of(copied) == ("", False):
        copied.register_comm_hook(None, _refusing_hook)


def _refusing_hook(state: None, bucket: GradBucket) -> Future[torch.Tensor]:
    raise AttachError(
        "this DDP model is a copy of one that averages with Thinwire, and DDP copies no communication hook, "
        "so it would train uncompressed; copy it again and call thinwire.attach(copied_model, …) before its "
        "first step, or copy model.module and wrap that"
    )


def ddp_models_with(is_wanted: Callable[[object], bool]) -> list[DistributedDataParallel]:
    """Return the DDP models on which a wanted state is registered, with a communication hook.

    A hook is not given its model, and without the model it knows neither names nor options.

    Cost: a look at every Python object, 0.2 s for a million of them.
    """
    return [
        each
        for each in _ddp_models()
        if any(is_wanted(state) for _, state in each.__dict__.get("_comm_hooks", ()))
    ]


def plain_name(name: str) -> str:
    """Return a parameter's name as the user's own module has it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def names_of(module: torch.nn.Module, ignored: Collection[str] = ()) -> dict[torch.nn.Parameter, str]:
    """Return the parameters of a module in its order, each with its name."""
    # A shared parameter has several names: take the first that DDP does not ignore, since DDP sends it.
    names: dict[torch.nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in ignored:
            names.setdefault(parameter, plain_name(name))
    return names


def ddp_model_of(parameters: Iterable[torch.Tensor]) -> DistributedDataParallel | None:
    """Return the DDP model that these are parameters of; None if that is not clear.

    Cost: as `ddp_models_with`.
    """
    wanted = set(map(id, parameters))
    holding = [
        each for each in _ddp_models() if wanted <= set(map(id, each.__dict__.get("_module_parameters", ())))
    ]
    # If several models share the parameters, the model is ambiguous.
    return holding[0] if len(holding) == 1 else None


def _ddp_models() -> list[DistributedDataParallel]:
    # Look at types: isinstance asks every object for its __class__, which has side effects on proxies.
    return [each for each in gc.get_objects() if DistributedDataParallel in type(each).__mro__]


class DetachedFront:
    """Stands, in a copy of an attached model, where the original has its front."""


def dense_buffer(bucket: GradBucket) -> torch.Tensor:
    """Return a bucket's flat gradients."""
    # The python reducer calls hooks as well, with gradients in place of buckets.
    if not isinstance(bucket, GradBucket):
        raise AttachError(PYTHON_REDUCER)
    flat = bucket.buffer()
    if flat.is_sparse:
        raise GradientError(
            f"the gradient of a parameter of shape {tuple(flat.shape)} is sparse and can't be averaged; "
            "build its Embedding with sparse=False"
        )
    # Later versions of torch hand complex gradients over as pairs of real numbers.
    if flat.is_complex():
        raise GradientError(
            f"DDP of torch {torch.__version__} hands over gradients of {flat.dtype}, expected them as pairs "
            "of real numbers, which torch 2.13 makes of them; use that, or keep such parameters as real ones "
            "(torch.view_as_real)"
        )
    return flat


def new_future(device: torch.device) -> Future[torch.Tensor]:
    """Return a future that DDP can wait for, of a tensor on `device`."""
    # With a device, the future makes DDP's stream wait for queued work. It takes no CPU as a device.
    return Future(devices=None if device.type == "cpu" else [device])


def completed_future(flat: torch.Tensor) -> Future[torch.Tensor]:
    """Return a bucket's gradients, done as they are: nothing is averaged."""
    future = new_future(flat.device)
    future.set_result(flat)
    return future


def wrong_model(given: object) -> str:
    """Return what to say to someone who gave something else than a DDP model."""
    expected = f"expected a DistributedDataParallel model, got {type(given).__name__}"
    if is_sharded(given):
        return (
            f"{expected}, which FSDP has sharded; thinwire.attach takes models of fully_shard (FSDP2), not "
            "of FullyShardedDataParallel (FSDP1): shard it with fully_shard over a mesh of one replica, and "
            'attach(model, algorithm, replicas=mesh["replicate"])'
        )
    if isinstance(given, torch.nn.DataParallel):
        return (
            f"{expected}, which is one process with several devices and has no gradients to average between "
            "processes; start one process per device (torchrun --nproc-per-node …) and wrap the module "
            "inside: torch.nn.parallel.DistributedDataParallel(model.module)"
        )
    if isinstance(given, torch.nn.Module) and any(hasattr(each, "to_local") for each in given.parameters()):
        return (
            f"{expected}, whose parameters lie on several processes (tensor parallelism), which does not go "
            "with Thinwire yet; shard the plain module with fully_shard, and attach(model, algorithm, "
            'replicas=mesh["replicate"])'
        )
    first = "" if dist.is_initialized() else "call torch.distributed.init_process_group(), then "
    return f"{expected}; {first}wrap it first: torch.nn.parallel.DistributedDataParallel(model)"


def is_fsdp2(model: object) -> bool:
    """Return whether `fully_shard` or `replicate` holds a part of the model."""
    return _has_part(model, SHARDED[:1])


def is_sharded(model: object) -> bool:
    """Return whether FSDP, of either kind, holds a part of the model."""
    return _has_part(model, SHARDED)


def _has_part(model: object, kinds: Sequence[str]) -> bool:
    # Compare names of base classes: FSDP2 makes a new class for each kind of module.
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return any(kind in kinds for module in modules for kind in _kinds(module))


def _kinds(module: torch.nn.Module) -> Iterator[str]:
    return (kind.__name__ for kind in type(module).__mro__)
