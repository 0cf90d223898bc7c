"""The front for DistributedDataParallel: one communication hook, and what it drives can be switched."""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import GradBucket
from torch.amp.grad_scaler import GradScaler
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.algorithms import Algorithm
from thinwire.channel import Channel, ProcessGroupChannel
from thinwire.contributors import divide_by_contributors
from thinwire.engine import Engine
from thinwire.errors import (
    AttachError,
    ConfigError,
    GradientError,
    NonfiniteError,
    StateError,
    StepError,
)
from thinwire.loss_scale import LossScale, loss_scale_of
from thinwire.nonfinite import OnNonfinite, checked_on_nonfinite
from thinwire.plan import ParameterSpec
from thinwire.sync import GradientSync

__all__ = [
    "BucketFront",
    "attach",
    "check_options",
    "dense_buffer",
    "front_of",
    "hook_of",
    "is_sharded",
    "left_alone",
    "models_where",
    "plain_name",
    "refuse_training_of_copies",
    "register",
    "thinwire_hook",
    "wrong_model",
]

# What torch puts around a module shows in the names of its parameters.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")

SHARDED = ("FSDPModule", "FullyShardedDataParallel")

PATIENCE_SECONDS = 10.0


def attach(
    ddp_model: torch.nn.Module,
    algorithm: Algorithm,
    *,
    grad_scaler: GradScaler | Callable[[], float] | None = None,
    host_check: bool = True,
    on_nonfinite: OnNonfinite = "nan",
) -> GradientSync:
    """Let `algorithm` average the gradients of a DDP model from its next backward pass on.

    The training loop stays as it is. To be called on every process of the model's group, with the
    same algorithm.

    Args:
        ddp_model: A `DistributedDataParallel` model (or the result of `torch.compile` on one), on any
            backend, over any process group, with any of DDP's options but `mixed_precision` and
            `skip_all_reduce_unused_params`. A `copy.deepcopy` of it has no hook, as DDP has it, and raises
            when it is trained before it is attached itself.
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
        on_nonfinite: What becomes of a step in which a mean is not finite, on all processes alike. The error
            memory stays as it was in any case. "nan": all gradients are NaN, so that a `GradScaler` skips the
            step; without one the model is lost, and that is logged once. "zero": all are zeros; an
            optimizer with momentum or weight decay still moves the parameters. "raise": `backward()` raises
            `NonfiniteError` at its end; take no optimizer step, and training may go on. "zero" and "raise"
            are for runs without a `GradScaler`, which would never see an overflow. With them `AllReduce` and
            `Cast` look at the means as well: a pass over the gradients and a host synchronisation a step.

    Returns:
        The handle: plan, statistics, state, and switching the algorithm.

    Cost: one host synchronisation a step with low-rank algorithms (none if not `host_check`); see each
    algorithm's own. With
    `find_unused_parameters`, another one, and 4 bytes a parameter in the messages, while error is owed.

    Raises:
        AttachError: Not a DDP model, one that has a communication hook already (DDP's own
            `mixed_precision` is one), one with sparse gradients, or one with an option under which DDP does
            not hand over all gradients.
        ConfigError: `algorithm` or `grad_scaler` is not one, or `on_nonfinite` does not go with the others.
        NonfiniteError: (From `backward()`.) See `on_nonfinite`.
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
    loss_scale = loss_scale_of(grad_scaler)
    checked_on_nonfinite(on_nonfinite, grad_scaler)
    front = front_of(model, algorithm, channel, loss_scale, host_check=host_check, on_nonfinite=on_nonfinite)
    register(model, front, thinwire_hook)
    return front.sync


def register(model: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
    """Register a communication hook; copies of the model refuse to be trained without if it is Thinwire's.

    Raises:
        AttachError: The model has one already.
    """
    name, _ = hook_of(model)
    try:
        model.register_comm_hook(state, hook)
    except RuntimeError as error:
        model._comm_hooks.pop()  # DDP notes a hook before it finds that it can't have it
        model.logger._set_comm_hook_name(name)  # type: ignore[union-attr]
        remedy = "if it is Thinwire's, switch its algorithm with sync.use(…)"
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
        refuse_training_of_copies(model)


def front_of(
    model: DistributedDataParallel,
    algorithm: Algorithm,
    channel: Channel,
    loss_scale: LossScale | None = None,
    *,
    host_check: bool = True,
    on_nonfinite: OnNonfinite = "nan",
) -> "BucketFront":
    """A front that knows the model's parameters by name; not registered yet.

    Raises:
        AttachError: The model has an option under which DDP does not hand over all gradients.
    """
    check_options(model)
    names: dict[torch.nn.Parameter, str] = {}
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        if name not in model.parameters_to_ignore:
            names.setdefault(parameter, plain_name(name))
    specs = [ParameterSpec.of(name, each) for each, name in names.items() if each.requires_grad]
    engine = Engine(
        algorithm,
        channel,
        specs,
        loss_scale=loss_scale,
        may_be_unused=model.find_unused_parameters,
        host_check=host_check,
        on_nonfinite=on_nonfinite,
    )
    return BucketFront(engine, names, model)


def check_options(model: DistributedDataParallel) -> None:
    """Refuse options under which DDP does not hand all gradients to its hook.

    Raises:
        AttachError: The model has one.
    """
    if getattr(model, "_use_python_reducer", False):
        raise AttachError(PYTHON_REDUCER)
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
    """The name of the model's communication hook, "" if it has none, and whether it is Thinwire's.

    DDP's list of hooks has not those built in, and still has those that a copied model has lost.
    """
    data = {} if model.logger is None else model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    name = data.get("comm_hook", "")
    for hook, state in reversed(model.__dict__.get("_comm_hooks", [])):
        if hook.__qualname__ == name:
            made_in = {str(hook.__module__), type(state).__module__}
            return name, any(module.split(".")[0] == "thinwire" for module in made_in)
    return name, False


def refuse_training_of_copies(model: DistributedDataParallel) -> None:
    """Let `copy.deepcopy` make models that raise when they are trained without a hook of their own.

    DDP copies no communication hook, and would average whole gradients without a word. Copies that only
    follow or evaluate, as `torch.optim.swa_utils.AveragedModel` makes them, are none the wiser.
    """
    original = weakref.ref(model)

    def deepcopied(memo: dict[int, object]) -> DistributedDataParallel:
        model = original()
        if model is None:
            raise AssertionError("it is called through the model")
        copied = type(model).__new__(type(model))
        memo[id(model)] = copied
        state = model.__getstate__()  # type: ignore[no-untyped-call]
        del state["__deepcopy__"]
        copied.__setstate__(copy.deepcopy(state, memo))  # type: ignore[no-untyped-call]
        copied.register_forward_pre_hook(_hooked_by_refusal)
        return copied

    model.__dict__["__deepcopy__"] = deepcopied


def _hooked_by_refusal(copied: DistributedDataParallel, _: object) -> None:
    """Before a copy's forward pass that may have a backward pass: see that it has a hook."""
    if torch.is_grad_enabled() and hook_of(copied) == ("", False):
        copied.register_comm_hook(None, _refusing_hook)


def _refusing_hook(state: None, bucket: GradBucket) -> Future[torch.Tensor]:
    raise AttachError(
        "this DDP model is a copy of one that averages with Thinwire, and DDP copies no communication hook, "
        "so it would train uncompressed; copy it again and call thinwire.attach(copied_model, …) before its "
        "first step, or copy model.module and wrap that"
    )


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


def _model_with(parameters: Iterable[torch.Tensor]) -> DistributedDataParallel | None:
    """The DDP model that these are parameters of; None if it can't be told. Cost: as `models_where`."""
    wanted = set(map(id, parameters))
    models = [each for each in gc.get_objects() if DistributedDataParallel in type(each).__mro__]
    holding = [each for each in models if wanted <= set(map(id, each.__dict__.get("_module_parameters", ())))]
    return holding[0] if len(holding) == 1 else None


class DetachedFront:
    """Stands, in a copy of an attached model, where the original has its front."""


class BucketFront:
    """Feeds DDP's buckets to an `Engine` and hands their means back as futures.

    The work of all buckets is finished inside the call for the last one, on the thread that runs the
    backward pass: no collective is ever issued from a future's callback. In the first step of a static
    graph, where DDP calls every bucket its first, the last one is the one that completes the parameters.

    Args:
        engine: What averages.
        names: The name of each parameter; None where they can't be known. Then they are named in the
            first step, by their position from the model's end. DDP's first buckets hold the parameters in
            reverse, each type for itself, so the names are the same in every run of a model of one type
            if the front is there from the first backward pass on.
        model: Whose buckets they are; None to find it in the first step.
    """

    def __init__(
        self,
        engine: Engine,
        names: dict[torch.nn.Parameter, str] | None = None,
        model: DistributedDataParallel | None = None,
    ) -> None:
        self.engine, self.sync = engine, GradientSync(engine)
        self._model = None if model is None else weakref.ref(model)
        self._num_expected: int | None = None
        self._is_static = False
        self._num_taken = 0
        self._watched_pass = -1
        self._was_given_up = False
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
        num_trained = _num_trained(bucket.parameters())
        if self._num_expected is None:
            self._num_expected = self._num_in_first_step(bucket.parameters())
            self._is_static = self._num_expected > 0
        if not self.engine.num_started:
            self._num_taken = 0
        if self._is_static and not num_trained and not (bucket.is_last() and self.engine.num_started):
            return left_alone(flat)  # after those that are trained it would begin a step of its own
        try:
            self._watch_the_pass()
            divide_by_contributors(bucket.parameters(), flat)
            self.engine.start(self._specs_of(bucket), flat)
            future = _new_future(flat.device)
            self._waiting.append((future, flat))
            self._num_taken += num_trained
            if bucket.is_last() or 0 < self._num_expected == self._num_taken:
                self._num_expected = 0
                self._all_named = True
                self._finish()
                self._release()
        except BaseException:
            self._waiting = []
            self.engine.abandon()
            raise
        return future

    def _num_in_first_step(self, parameters: Iterable[torch.Tensor]) -> int:
        """With a static graph, parameters that complete the first step; 0 if DDP tells which bucket is last.

        Raises:
            AttachError: The model has an option under which DDP does not hand over all gradients.
        """
        model = _model_with(parameters) if self._model is None else self._model()
        if model is None:
            return 0
        check_options(model)
        return _num_trained(model._module_parameters) if model.static_graph else 0

    def _watch_the_pass(self) -> None:
        """Have a look at its end whether all buckets came. One inside another has an end of its own."""
        current = torch._C._current_graph_task_id()
        if current not in (-1, self._watched_pass):  # -1: a process without input shadows the others
            self._watched_pass = current
            Variable._execution_engine.queue_callback(self._check_finished)

    def _check_finished(self) -> None:
        """At the end of a backward pass whose buckets have not all come: be sure that it ends.

        If more are to come in another pass, DDP does nothing now. If it thinks that all have come, it goes on
        to wait for their futures, for ever.
        """
        num_started = self.engine.num_started
        if not num_started or torch._C._current_autograd_node() is not None:  # inside another pass
            return
        alarm = threading.Timer(PATIENCE_SECONDS, self._give_up)
        alarm.daemon = True
        alarm.start()

        def after_ddp() -> None:
            alarm.cancel()
            if self._was_given_up:
                self._was_given_up = False
                self.engine.abandon()
                raise StepError(
                    f"DDP ended a step after {num_started} parameters without "
                    "handing over the others, so that nothing was averaged; build the DDP model without the "
                    "option that leaves buckets out, and restart all processes from a checkpoint"
                )

        Variable._execution_engine.queue_callback(after_ddp)

    def _give_up(self) -> None:
        self._was_given_up = True
        self._release()

    def _finish(self) -> None:
        try:
            if not self.engine.finish():
                self.engine.warn_of_nonfinite()
        except NonfiniteError as error:
            _raise_after_backward(error)

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


def _num_trained(parameters: Iterable[torch.Tensor]) -> int:
    """Those that were frozen after the model was wrapped still have a place in a bucket."""
    return sum(parameter.requires_grad for parameter in parameters)


def thinwire_hook(state: BucketFront, bucket: GradBucket) -> Future[torch.Tensor]:
    """The hook that `attach` registers."""
    return state.run(bucket)


def dense_buffer(bucket: GradBucket) -> torch.Tensor:
    """A bucket's flat gradients.

    Raises:
        AttachError: It is no bucket: DDP works without.
        GradientError: They are sparse.
    """
    if not isinstance(bucket, GradBucket):
        raise AttachError(PYTHON_REDUCER)
    flat = bucket.buffer()
    if flat.is_sparse:
        raise GradientError(
            f"the gradient of a parameter of shape {tuple(flat.shape)} is sparse and can't be averaged; "
            "build its Embedding with sparse=False"
        )
    return flat


def _raise_after_backward(error: NonfiniteError) -> None:
    """Let `backward()` raise once DDP has finished its step, so that the model stays usable.

    DDP queues its own end of the step when the hook has returned: what our callback queues comes after that.
    """
    queue_callback = Variable._execution_engine.queue_callback

    def raise_it() -> NoReturn:
        raise error

    queue_callback(lambda: queue_callback(raise_it))


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
        raise AttachError(wrong_model(ddp_model))
    if model.mixed_precision is not None:
        raise AttachError(
            "DistributedDataParallel(mixed_precision=…) occupies the communication hook itself; "
            "leave it out and use torch.autocast, or a wire_dtype of the algorithm"
        )
    for name, module in model.module.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            owner = type(getattr(model.module, "_orig_mod", model.module)).__name__
            where = f'"{plain_name(name)}" of the {owner}' if plain_name(name) else "that is the model"
            raise AttachError(
                f"the {type(module).__name__} {where} makes sparse gradients, which can't be averaged here; "
                "build it with sparse=False"
            )
    return model


def wrong_model(given: object) -> str:
    """What to say to someone who gave something else than a DDP model."""
    expected = f"expected a DistributedDataParallel model, got {type(given).__name__}"
    if is_sharded(given):
        return (
            f"{expected}, which FSDP has sharded: it reduces gradients itself, and no process has a whole "
            "one to compress; if the model fits on each device, leave fully_shard (or "
            "FullyShardedDataParallel) out and wrap the plain module: "
            "torch.nn.parallel.DistributedDataParallel(module)"
        )
    if isinstance(given, torch.nn.DataParallel):
        return (
            f"{expected}, which is one process with several devices and has no gradients to average between "
            "processes; start one process a device (torchrun --nproc-per-node …) and wrap the module inside: "
            "torch.nn.parallel.DistributedDataParallel(model.module)"
        )
    return f"{expected}; wrap it first: torch.nn.parallel.DistributedDataParallel(model)"


def is_sharded(model: object) -> bool:
    """Whether FSDP, of either kind, holds a part of the model."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return any(kind.__name__ in SHARDED for module in modules for kind in type(module).__mro__)
