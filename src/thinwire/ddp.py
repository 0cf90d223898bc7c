"""The front for DistributedDataParallel: one communication hook, and what it drives can be switched."""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

import gc
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import GradBucket
from torch.amp.grad_scaler import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.algorithms import Algorithm
from thinwire.channel import Channel, ProcessGroupChannel
from thinwire.contributors import divide_by_contributors
from thinwire.errors import AttachError, ConfigError, GradientError, StateError
from thinwire.loss_scale import LossScale, loss_scale_of
from thinwire.plan import ParameterSpec
from thinwire.sync import GradientSync

__all__ = [
    "BucketFront",
    "attach",
    "dense_buffer",
    "front_of",
    "left_alone",
    "models_where",
    "plain_name",
    "register",
    "thinwire_hook",
]

# What torch puts around a module shows in the names of its parameters.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def attach(
    ddp_model: torch.nn.Module,
    algorithm: Algorithm,
    *,
    grad_scaler: GradScaler | Callable[[], float] | None = None,
    host_check: bool = True,
) -> GradientSync:
    """Let `algorithm` average the gradients of a DDP model from its next backward pass on.

    The training loop stays as it is. To be called on every process of the model's group, with the
    same algorithm.

    Args:
        ddp_model: A `DistributedDataParallel` model (or the result of `torch.compile` on one), on any
            backend, over any process group, with any of DDP's options.
        algorithm: Such as `thinwire.PowerSGD(matrix_rank=4)`.
        grad_scaler: The scaler that scales the loss, if there is one; or, where something else scales it, a
            function that returns what the loss of the step under way was multiplied by. Error memory is
            then kept in unscaled units, so that a change of scale changes no result.
        host_check: Whether the host learns in each step if all means were finite, for which it waits for
            the device. If not, steps don't make it wait, but for those that pay back what another
            algorithm left owed, for `warm_start=False` and for a function as `grad_scaler`. A step that is
            not finite leaves the error memory as it was and makes the gradients NaN just so, but counts
            in `steps`, a warm-up and the turns of `alternating` (which then starts from random factors).
            The same on all processes; not with `find_unused_parameters`. Cost: a copy of what one bucket
            has in memory, while it is written.

    Returns:
        The handle: plan, statistics, state, and switching the algorithm.

    Cost: one host synchronisation a step with low-rank algorithms (none if not `host_check`); see each
    algorithm's own. With
    `find_unused_parameters`, another one, and 4 bytes a parameter in the messages, while error is owed.

    Raises:
        AttachError: Not a DDP model, one that has a communication hook already (DDP's own
            `mixed_precision` is one), or one with sparse gradients.
        ConfigError: `algorithm` or `grad_scaler` is not one.
        GradientError: A parameter's gradient can't be averaged by the algorithm.

    Examples:
        >>> import thinwire
        >>> ddp_model = DistributedDataParallel(torch.nn.Linear(64, 32))  # in a process group
        >>> sync = thinwire.attach(ddp_model, thinwire.PowerSGD(matrix_rank=2))
        >>> ddp_model(torch.ones(1, 64)).sum().backward()
        >>> sync.stats().steps, round(sync.stats().compression_ratio, 1)
        (1, 9.3)
    """
    model = _checked_model(ddp_model)
    channel = ProcessGroupChannel(model.process_group, next(model.parameters()).device)
    front = front_of(model, algorithm, channel, loss_scale_of(grad_scaler), host_check=host_check)
    register(model, front, thinwire_hook)
    return front.sync


def register(model: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
    """Register a communication hook.

    Raises:
        AttachError: The model has one already.
    """
    try:
        model.register_comm_hook(state, hook)
    except RuntimeError as error:
        model._comm_hooks.pop()  # DDP notes a hook before it finds that it can't have it
        raise AttachError(
            "the model has a communication hook already, and DDP allows one only; "
            "if it is Thinwire's, switch its algorithm with sync.use(…)"
        ) from error


def front_of(
    model: DistributedDataParallel,
    algorithm: Algorithm,
    channel: Channel,
    loss_scale: LossScale | None = None,
    *,
    host_check: bool = True,
) -> "BucketFront":
    """A front that knows the model's parameters by name; not registered yet."""
    names: dict[torch.nn.Parameter, str] = {}
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        if name not in model.parameters_to_ignore:
            names.setdefault(parameter, plain_name(name))
    specs = [ParameterSpec.of(name, each) for each, name in names.items() if each.requires_grad]
    sync = GradientSync(
        algorithm,
        channel,
        specs,
        loss_scale=loss_scale,
        may_be_unused=model.find_unused_parameters,
        host_check=host_check,
    )
    return BucketFront(sync, names)


def models_where(is_wanted: Callable[[object], bool]) -> list[DistributedDataParallel]:
    """The DDP models on which a wanted state is registered, with a communication hook.

    A hook is not told its model, and without the model it knows neither names nor options.

    Cost: a look at every Python object, 0.2 s for a million of them.
    """
    models = [each for each in gc.get_objects() if DistributedDataParallel in type(each).__mro__]
    return [
        each for each in models if any(is_wanted(state) for _, state in each.__dict__.get("_comm_hooks", ()))
    ]


def plain_name(name: str) -> str:
    """A parameter's name as the user's own module has it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class DetachedFront:
    """Stands, in a copy of an attached model, where the original has its front."""


class BucketFront:
    """Feeds DDP's buckets to a `GradientSync` and hands their means back as futures.

    The work of all buckets is finished inside the call for the last one, on the thread that runs the
    backward pass: no collective is ever issued from a future's callback.

    Args:
        sync: What averages.
        names: The name of each parameter; None where they can't be known. Then they are named in the
            first step, by their position from the model's end. DDP's first buckets hold the parameters in
            reverse, each type for itself, so the names are the same in every run of a model of one type
            if the front is there from the first backward pass on.
    """

    def __init__(self, sync: GradientSync, names: dict[torch.nn.Parameter, str] | None = None) -> None:
        self.sync = sync
        self._all_named = names is not None
        # The parameters are kept so that no other object can take over an id.
        self._names: dict[int, tuple[torch.Tensor, str]] = {
            id(p): (p, name) for p, name in (names or {}).items()
        }
        self._specs: dict[tuple[int, ...], tuple[ParameterSpec, ...]] = {}
        self._waiting: list[tuple[Future[torch.Tensor], torch.Tensor]] = []

    def __deepcopy__(self, memo: dict[int, object]) -> "DetachedFront":
        """A copied model (weight averaging makes one) has a reducer of its own, without a hook."""
        return DetachedFront()

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a DDP model that is attached can't be pickled whole; save model.module.state_dict() and "
            "sync.state_dict() instead"
        )

    def run(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Take a bucket; at the last one, finish them all."""
        flat = dense_buffer(bucket)
        try:
            divide_by_contributors(bucket.parameters(), flat)
            self.sync.start(self._specs_of(bucket), flat)
            future = _new_future(flat.device)
            self._waiting.append((future, flat))
            if bucket.is_last():
                self._all_named = True
                self.sync.finish()
                self._release()
        except BaseException:
            self._waiting = []
            self.sync.abandon()
            raise
        return future

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future, flat in waiting:
            future.set_result(flat)

    def _specs_of(self, bucket: GradBucket) -> tuple[ParameterSpec, ...]:
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self._specs:
            self._name(reversed(parameters))
            self._specs[key] = tuple(ParameterSpec.of(self._names[id(p)][1], p) for p in parameters)
        return self._specs[key]

    def _name(self, parameters: Iterable[torch.Tensor]) -> None:
        """Name unknown parameters by their position from the model's end."""
        for parameter in parameters:
            if id(parameter) not in self._names:
                if self._all_named:
                    raise ConfigError(
                        f"a bucket holds a parameter of shape {tuple(parameter.shape)} that the model at the "
                        "first step did not have; make one state for each model"
                    )
                self._names[id(parameter)] = (parameter, f"parameter[-{len(self._names) + 1}]")


def thinwire_hook(state: BucketFront, bucket: GradBucket) -> Future[torch.Tensor]:
    """The hook that `attach` registers."""
    return state.run(bucket)


def dense_buffer(bucket: GradBucket) -> torch.Tensor:
    """A bucket's flat gradients.

    Raises:
        GradientError: They are sparse.
    """
    flat = bucket.buffer()
    if flat.is_sparse:
        raise GradientError("a sparse gradient can't be averaged; build the embedding with sparse=False")
    return flat


def _new_future(device: torch.device) -> Future[torch.Tensor]:
    """A future that DDP can wait for, of a tensor on `device`."""
    return Future(devices=None if device.type == "cpu" else [device])


def left_alone(flat: torch.Tensor) -> Future[torch.Tensor]:
    """A bucket's gradients, done as they are: nothing is averaged."""
    future = _new_future(flat.device)
    future.set_result(flat)
    return future


def _checked_model(ddp_model: object) -> DistributedDataParallel:
    """The DDP model, after refusing what can't be attached."""
    model = getattr(ddp_model, "_orig_mod", ddp_model)
    if not isinstance(model, DistributedDataParallel):
        raise AttachError(
            f"expected a DistributedDataParallel model, got {type(ddp_model).__name__}; "
            "wrap it first: torch.nn.parallel.DistributedDataParallel(model)"
        )
    if model.mixed_precision is not None:
        raise AttachError(
            "DistributedDataParallel(mixed_precision=…) occupies the communication hook itself; "
            "leave it out and use torch.autocast, or a wire_dtype of the algorithm"
        )
    for name, module in model.module.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise AttachError(
                f"{name} makes sparse gradients, which can't be averaged here; use sparse=False"
            )
    return model
