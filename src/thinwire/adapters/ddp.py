"""The adapter for DistributedDataParallel: one communication hook, and what it drives can be switched."""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import NoReturn

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters import ddp_model
from thinwire.adapters.common import (
    allow_steps_inside,
    averaged_models,
    contributor_scales,
    divide_by_contributors,
    new_engine,
    refuse_averaged_twice,
    refuse_steps_inside,
    tell_start,
)
from thinwire.algorithms import Algorithm, AllReduce
from thinwire.comm import Layout, ProcessGroupTransport, Transport
from thinwire.errors import AttachError, ConfigError, GradientError, NonfiniteError, StepError
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine, GradientSync, Settings, streams
from thinwire.sync.bucket_plans import BucketState
from thinwire.sync.partition import Specs
from thinwire.sync.step import Step
from thinwire.sync.streams import CommStream
from thinwire.torch_private import at_end_of_backward, backward_pass, comm_hooks, ddp_parameters, running_node

PATIENCE_SECONDS = 10.0
ONE_EACH = "make one state for each model"  # what errors advise


def attach_ddp(
    holder: torch.nn.Module, algorithm: Algorithm, settings: Settings, layout: Layout
) -> GradientSync:
    """Do what `thinwire.attach` does, with a DDP model."""
    model, transport = attachable(holder)
    adapter = adapter_of(model, algorithm, transport, settings, layout)
    switch = switched(model, lambda: adapter, ATTACHED)
    tell_start(adapter.engine, model.parameters())
    # A new handle, since what this one holds leads back to the adapter.
    return GradientSync(adapter.engine, switch.free)


def attachable(holder: torch.nn.Module) -> tuple[DistributedDataParallel, ProcessGroupTransport]:
    """Return the DDP model that was given, or that a wrapper holds, and its transport; refuse others."""
    model = ddp_model.ddp_inside(holder)
    if model is None:
        raise AttachError(ddp_model.wrong_model(holder))
    ddp_model.check_attachable(model)
    ddp_model.check_options(model)
    transport = _transport_of(model)
    refuse_averaged_twice(model.parameters(), transport, AttachError)
    return model, transport


def _transport_of(model: DistributedDataParallel) -> ProcessGroupTransport:
    # Taken from a parameter: gradients are on its device, and on CPUs DDP has no device_ids.
    return ProcessGroupTransport(model.process_group, next(model.parameters()).device)


def adapter_of(
    model: DistributedDataParallel,
    algorithm: Algorithm,
    transport: Transport,
    settings: Settings = Settings(),  # noqa: B008 - frozen
    layout: Layout = False,
) -> "DDPAdapter":
    """Return an adapter that knows the model's parameters by name; not registered yet. Collective."""
    ddp_model.check_options(model)
    specs = [ParameterSpec.of(name, p) for p, name in ddp_model.names_in(model).items() if p.requires_grad]
    settings = replace(settings, may_be_unused=model.find_unused_parameters)
    adapter = DDPAdapter(new_engine(algorithm, transport, specs, settings, layout), model)
    refuse_steps_inside(adapter, ddp_parameters(model))
    return adapter


def adapter_of_hook(
    hook_state: object, algorithm: Algorithm, transport: Transport, settings: Settings, layout: Layout
) -> "DDPAdapter":
    """Return an adapter for a hook that the user has registered with this state. Collective."""
    models = ddp_model.ddp_models_with(lambda state: state is hook_state)
    if len(models) > 1:
        shared = f"this {type(hook_state).__name__} is registered on {len(models)} models"
        raise ConfigError(f"{shared}; {ONE_EACH}")
    if models:
        adapter = adapter_of(models[0], algorithm, transport, settings, layout)
        ddp_model.guard(models[0])
    else:
        # Inside a hook of the user's own: the model's options are not known, so the costlier is assumed.
        settings = replace(settings, may_be_unused=True)
        adapter = DDPAdapter(new_engine(algorithm, transport, (), settings, layout))
    tell_start(adapter.engine, models[0].parameters() if models else ())
    return adapter


class DDPAdapter:
    """Starts DDP's buckets in steps of an `Engine`, and hands their means back as futures."""

    def __init__(self, engine: Engine, model: DistributedDataParallel | None = None) -> None:
        self.engine, self.sync = engine, GradientSync(engine)
        # Weak: the model holds the hook's state, and with it this.
        self._model = None if model is None else weakref.ref(model)
        self._buckets = DDPBuckets(engine, None if model is None else ddp_model.names_in(model))
        self._comm_stream = CommStream()
        self._is_new = True
        self._static_graph: _StaticGraph | None = None
        self._step: Step | None = None
        self._waiting: list[tuple[Future[torch.Tensor], torch.Tensor]] = []
        self._watched_pass = -1
        self._used: ddp_model.Used | None = None
        # Gradients in a bucket that the step may leave as they are: name, part of the bucket, copy.
        self._copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def run(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Start a bucket, and finish the step with the last one; return a future of the bucket's mean."""
        flat, current = dense_buffer(bucket), backward_pass()
        if self._is_new:
            self._look_at_model(bucket)
        step = self._step if self._step is not None and self._step.is_open else None
        graph = self._static_graph
        if graph is not None and graph.leaves_out(bucket, step):
            return completed_future(flat)
        # Check at the end of each pass, nested ones included, whether all buckets have come. -1 is outside of
        # any pass: there a process without input shadows the others.
        if current not in (-1, self._watched_pass):
            self._watched_pass = current
            at_end_of_backward(self._check_finished)
        future, has_none = new_future(flat.device), flat.device.type in streams.WITHOUT_STREAMS
        try:
            if contributor_scales:
                divide_by_contributors(bucket.parameters(), flat, self.engine.transport.size)
            beside = nullcontext() if has_none else self._comm_stream.wait_for_current(flat.device)
            with beside:
                # Time both as one: while a bucket is opened, and processes agree, its gradients wait.
                with self.engine.clock.inside(self.engine.traffic):
                    state = self._buckets.of(bucket.parameters())
                    step = step or self._begin(bucket)
                    used = None
                    if self._used is not None:
                        used = self._used.of(bucket.parameters(), is_pass=current != -1)
                        self._copy_unused(bucket, state.specs, used)
                    step.start(state, flat, used)
                self._waiting.append((future, flat))
                is_last = (
                    bucket.is_last() if self._static_graph is None else self._static_graph.is_last(bucket)
                )
                if is_last:
                    self._finish(step, is_pass=current != -1)
            if is_last and not has_none:
                self._comm_stream.current_waits()
        except BaseException:
            # Leave the futures unset: the exception ends the backward pass before DDP waits for them.
            self._waiting, self._copies = [], []
            self.engine.abandon()
            self._comm_stream.current_waits()
            raise
        return future

    def _begin(self, bucket: GradBucket) -> Step:
        # The model of a user's own hook is unknown; it may average within a machine only.
        if averaged_models and self._model is not None:
            refuse_averaged_twice(bucket.parameters(), self.engine.transport, StepError)
        if self._static_graph is not None:
            self._static_graph.num_taken = 0
        self._step = self.engine.begin(pipelined=True)
        return self._step

    def _finish(self, step: Step, *, is_pass: bool) -> None:
        # In the hook's last call, not in a future's callback: those run on separate threads. Rank 0 could
        # start the messages of step 8 before the last ones of step 7, rank 1 behind them: both would wait.
        for parameter, name in self._buckets.outside:
            if parameter.requires_grad:
                raise ddp_model.unaveraged(name)
        if not step.finish():
            self._report_nonfinite()
        for name, gradient, before in self._copies:
            if name in step.unused:
                gradient.copy_(before)
        self._copies = []
        self._buckets.are_all_known = True
        if self._used is not None and is_pass:
            self._used.forget()
        self._release()

    def _release(self) -> None:
        # Emptied first: a result may run callbacks at once, and the alarm may call this from its own thread.
        waiting, self._waiting = self._waiting, []
        for future, flat in waiting:
            future.set_result(flat)

    # Rare cases.

    def _report_nonfinite(self) -> None:
        """Warn of a step that was not committed; or let `backward()` raise at its end."""
        try:
            self.engine.raise_unless(committed=False)
        except NonfiniteError as error:
            refusal = error

            def raise_it() -> NoReturn:
                raise refusal

            # Raised here it would leave DDP in the middle of its step. DDP queues that step's end when the
            # hook has returned: what our callback queues comes behind it, and the model stays usable.
            at_end_of_backward(lambda: at_end_of_backward(raise_it))
        else:
            self.engine.reporter.warn_of_nonfinite()

    def _look_at_model(self, bucket: GradBucket) -> None:
        """Check the model of the first bucket. A hook inside of a user's own may not find it."""
        model = ddp_model.ddp_model_of(bucket.parameters()) if self._model is None else self._model()
        if model is not None:
            ddp_model.check_options(model)
            self._static_graph = _StaticGraph(model) if model.static_graph else None
            if model.find_unused_parameters and self.engine.settings.may_be_unused:
                self._used = ddp_model.Used(ddp_parameters(model))
        self._is_new = False

    def _copy_unused(self, bucket: GradBucket, specs: Specs, used: list[bool] | None) -> None:
        """Copy gradients that lie in the bucket itself, and that DDP leaves alone if no process used them."""
        if used is None or all(used):
            return
        parts = zip(specs, bucket.parameters(), bucket.gradients(), used, strict=True)
        for spec, parameter, gradient, is_used in parts:
            before = None if is_used else parameter.grad
            if before is not None and before.data_ptr() == gradient.data_ptr():
                self._copies.append((spec.name, gradient, gradient.clone()))

    def let_go(self) -> None:
        """Remove hooks of the model's parameters, and allow steps inside of its backward pass again."""
        allow_steps_inside(self)
        if self._used is not None:
            self._used.remove()

    def _check_finished(self) -> None:
        """Make sure, at the end of a backward pass whose buckets have not all come, that it ends.

        If more are to come in a later pass, DDP does nothing now. If it thinks that all have come, it goes on
        to wait for their futures, forever.
        """
        step = self._step
        num_started = step.num_parameters if step is not None and step.is_open else 0
        # A pass inside of a pass, such as a checkpoint's: the outer one has an end too.
        if not num_started or running_node() is not None:
            return
        # On a separate thread: this one will block in DDP's code until the futures have results. A daemon,
        # so that a process that fails meanwhile can end.
        alarm = threading.Timer(PATIENCE_SECONDS, self._release)
        alarm.daemon = True
        alarm.start()

        def after_ddp() -> None:
            alarm.cancel()
            if not self._waiting:  # the alarm has given up
                self.engine.abandon()
                raise StepError(
                    f"DDP ended a step after {num_started} parameters without handing over the others, so "
                    "nothing was averaged; build the model without the option that leaves buckets out, and "
                    "restart from a checkpoint"
                )

        # Queued from here, it runs behind DDP's own end of the step, which waits for the futures.
        at_end_of_backward(after_ddp)


class _StaticGraph:
    """Finds out of a static graph what DDP does not say: the first pass's last bucket, frozen parameters."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._num_expected = ddp_model.num_trained(ddp_parameters(model))  # 0 after the first step
        self.num_taken = 0

    def leaves_out(self, bucket: GradBucket, step: Step | None) -> bool:
        """Return whether a bucket is frozen: after the others it would begin a new step."""
        return not ddp_model.num_trained(bucket.parameters()) and (step is None or not bucket.is_last())

    def is_last(self, bucket: GradBucket) -> bool:
        """Count a bucket that was started; return whether it is the step's last."""
        self.num_taken += ddp_model.num_trained(bucket.parameters())
        # In the first pass DDP calls every bucket its first, and none the last.
        if bucket.is_last() or 0 < self._num_expected == self.num_taken:
            self._num_expected = 0
            return True
        return False


class DDPBuckets:
    """The buckets of a DDP model, whose parameters have names, or positions from the model's end."""

    def __init__(self, engine: Engine, names: dict[torch.nn.Parameter, str] | None) -> None:
        self.are_all_known = names is not None
        self._plans = engine.buckets
        self._states: dict[tuple[int, ...], BucketState] = {}  # by the parameters' ids
        # The parameters are kept so that no other object can take over an id.
        self._names: dict[int, tuple[torch.Tensor, str]] = {
            id(parameter): (parameter, name) for parameter, name in (names or {}).items()
        }
        self._inside: set[int] = set()
        # Those in no bucket so far. DDP makes buckets of what is trained when it is built: what is unfrozen
        # later is in none, and would drift apart. What is frozen later stays in them.
        self.outside: list[tuple[torch.Tensor, str]] = []

    def of(self, parameters: list[torch.Tensor]) -> BucketState:
        """Return the bucket of some parameters."""
        # Found by identity: this runs in every step, and names are slower.
        key = tuple(map(id, parameters))
        known = self._states.get(key)
        if known is None or not known.is_current:
            # The others of this step stay; those of earlier layouts, or closed, hold plans and buffers.
            self._states = {ids: bucket for ids, bucket in self._states.items() if bucket.is_in_flight}
            known = self._states[key] = self._plans.bucket(self._specs_of(parameters))
        return known

    def _specs_of(self, parameters: list[torch.Tensor]) -> Specs:
        # DDP fills buckets from the model's end, and lists each one's parameters from its start.
        for parameter in (tensor for tensor in reversed(parameters) if id(tensor) not in self._names):
            if self.are_all_known:
                words = f"a bucket holds a parameter of shape {tuple(parameter.shape)}"
                raise ConfigError(f"{words} that the model at the first step did not have; {ONE_EACH}")
            self._names[id(parameter)] = (parameter, f"parameter[-{len(self._names) + 1}]")
        self._inside.update(map(id, parameters))
        self.outside = [known for known_id, known in self._names.items() if known_id not in self._inside]
        return tuple(ParameterSpec.of(self._names[id(p)][1], p) for p in parameters)


class Switch:
    """The state of a DDP model's hook. DDP takes one and never lets go of it, so what it does is switched."""

    adapter_now: Callable[[], DDPAdapter | None]  # what averages in this pass; None leaves gradients alone
    taken_by = ""  # who has put it there; "" if no one needs it any more

    @property
    def engine(self) -> Engine | None:
        """The engine that averages the gradients of each step, if `attach` has put it there."""
        adapter = self.adapter_now() if self.taken_by == ATTACHED else None
        return None if adapter is None else adapter.engine

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)

    def free(self) -> None:
        """Average as DDP would without a hook, from the next pass on."""
        if (model := self._model()) is not None:  # else there is nothing to average any more
            ddp_model.unguard(model)
            if (adapter := self.adapter_now()) is not None:
                adapter.let_go()
            adapter = DDPAdapter(Engine(AllReduce(), _transport_of(model)), model)
            self.adapter_now, self.taken_by = lambda: adapter, ""

    def __deepcopy__(self, memo: dict[int, object]) -> ddp_model.DetachedAdapter:
        """Return a stand-in: a copied model, as weight averaging makes it, has a reducer without a hook."""
        return ddp_model.DetachedAdapter()

    def __reduce__(self) -> NoReturn:
        raise ddp_model.not_pickled()


ATTACHED = "attach"


def switched(
    model: DistributedDataParallel, adapter_now: Callable[[], DDPAdapter | None], taken_by: str
) -> Switch:
    """Let adapters average a model's gradients, by the hook that it has from before, or a new one."""
    hooks = [state for _, state in comm_hooks(model) if isinstance(state, Switch) and not state.taken_by]
    switch = hooks[0] if hooks else Switch(model)
    if hooks:
        ddp_model.guard(model)
    else:
        ddp_model.register(model, switch, thinwire_hook)
    switch.adapter_now, switch.taken_by = adapter_now, taken_by
    return switch


def thinwire_hook(state: Switch, bucket: GradBucket) -> Future[torch.Tensor]:
    """Hand a bucket to the adapter whose turn it is: the hook that DDP is given."""
    adapter = state.adapter_now()  # the same one throughout a pass
    return completed_future(dense_buffer(bucket)) if adapter is None else adapter.run(bucket)


# A bucket, and the future that DDP waits for.


def dense_buffer(bucket: GradBucket) -> torch.Tensor:
    """Return a bucket's flat gradients."""
    # The python reducer calls hooks as well, with gradients in place of buckets.
    if not isinstance(bucket, GradBucket):
        raise AttachError(ddp_model.PYTHON_REDUCER)
    flat = bucket.buffer()
    if flat.is_sparse:
        words = f"the gradient of a parameter of shape {tuple(flat.shape)} is sparse and can't be averaged"
        raise GradientError(f"{words}; build its Embedding with sparse=False")
    if flat.is_complex():
        words = f"DDP of torch {torch.__version__} hands over {flat.dtype} gradients"
        remedy = "use that, or keep such parameters as real ones (torch.view_as_real)"
        raise GradientError(f"{words}, torch 2.13 pairs of real numbers; {remedy}")
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
