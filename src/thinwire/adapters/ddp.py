"""The adapter for DistributedDataParallel: one communication hook, whose adapter can be switched."""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire import torch_private
from thinwire.adapters import ddp_model, setup
from thinwire.algorithms import Algorithm, AllReduce, Bucket
from thinwire.comm import Layout, ProcessGroupTransport, Transport
from thinwire.errors import AttachError, ConfigError, GradientError, StepError
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine, GradientSync, Settings, streams
from thinwire.sync.bucket_plans import BucketState
from thinwire.sync.partition import Specs
from thinwire.sync.step import Step
from thinwire.sync.streams import CommStream
from thinwire.torch_private import comm_hooks, ddp_parameters

PATIENCE_SECONDS = 10.0
ATTACHED = "attach"  # the caller of `switched` whose adapter averages each step's gradients
ONE_EACH = "make one state for each model"  # advice in errors


def attach_ddp(
    holder: torch.nn.Module, algorithm: Algorithm, settings: Settings, layout: Layout
) -> GradientSync:
    """Implement `thinwire.attach` for a DDP model."""
    model, transport = attachable(holder)
    adapter = adapter_of(model, algorithm, transport, settings, layout)
    switch = switched(model, lambda: adapter, ATTACHED)
    setup.log_start(adapter.engine, model.parameters())
    # A new handle: the adapter's own would create a reference cycle.
    return GradientSync(adapter.engine, switch.free)


def attachable(holder: torch.nn.Module) -> tuple[DistributedDataParallel, ProcessGroupTransport]:
    """Return the given DDP model, or the one inside a wrapper, with its transport; raise for others."""
    model = ddp_model.ddp_inside(holder)
    if model is None:
        raise AttachError(ddp_model.wrong_model(holder))
    ddp_model.check_attachable(model)
    ddp_model.check_options(model)
    transport = _transport_of(model)
    setup.refuse_averaged_twice(model.parameters(), transport, AttachError)
    return model, transport


def _transport_of(model: DistributedDataParallel) -> ProcessGroupTransport:
    # The device of a parameter: gradients are on it, and on CPUs DDP has no device_ids.
    return ProcessGroupTransport(model.process_group, next(model.parameters()).device)


def adapter_of(
    model: DistributedDataParallel,
    algorithm: Algorithm,
    transport: Transport,
    settings: Settings = Settings(),  # noqa: B008 - frozen
    layout: Layout = False,
) -> "DDPAdapter":
    """Return an adapter that knows the names of the model's parameters; not registered yet. Collective."""
    settings = replace(settings, may_be_unused=model.find_unused_parameters)
    engine = setup.new_engine(algorithm, transport, ddp_model.specs_of(model), settings, layout)
    adapter = DDPAdapter(engine, model)
    setup.refuse_steps_inside(adapter, ddp_parameters(model))
    return adapter


def adapter_of_hook(
    hook_state: object,
    bucket: GradBucket,
    algorithm: Algorithm,
    transport: Transport,
    settings: Settings,
    layout: Layout = False,
    *,
    is_in_every_step: bool = True,
) -> "DDPAdapter":
    """Return an adapter for a hook that is called with this state and first bucket. Collective."""
    models = ddp_model.find_ddp_models(  # a hook does not get its model
        lambda model: any(state is hook_state for _, state in comm_hooks(model))
    )
    is_hidden = not models  # inside the user's own hook
    kinds: set[object] = set(models)
    if is_hidden:
        models = ddp_model.hooked_models_with(bucket.parameters())
        # Models of one module may be one that a notebook has replaced, and its successor: take either.
        kinds = {(m.module, m.find_unused_parameters, m.static_graph) for m in models}
    if len(kinds) != 1:
        found = f"found {len(models)} DDP models for this {type(hook_state).__name__}, expected one"
        raise ConfigError(f"{found}; {ONE_EACH}, and keep one DDP model of the same parameters")
    adapter = adapter_of(models[0], algorithm, transport, settings, layout)
    adapter.is_in_every_step = is_in_every_step and not is_hidden
    for model in models:
        ddp_model.guard(model)
    if is_hidden:
        setup.allow_steps_inside(adapter)  # the user's hook may step when a bucket's future is done
    if is_in_every_step:
        setup.log_start(adapter.engine, models[0].parameters())
    return adapter


class DDPAdapter:
    """Starts DDP's buckets in steps of an `Engine`, and returns their means as futures."""

    # False if a hook may average with others, or not at all, in some steps or buckets.
    is_in_every_step = True

    def __init__(self, engine: Engine, model: DistributedDataParallel) -> None:
        self.engine, self.sync = engine, GradientSync(engine)
        # Weak: the model holds the hook's state, and so this adapter.
        self._model = weakref.ref(model)
        self._buckets = DDPBuckets(engine, ddp_model.names_in(model))
        self._comm_stream = CommStream()
        self._is_new = True
        self._static_graph: _StaticGraph | None = None
        self._step: Step | None = None
        self._waiting: list[tuple[Future[torch.Tensor], torch.Tensor]] = []
        self._watched_pass = -1
        self._used: ddp_model.Used | None = None
        self._flags: list[torch.Tensor] = []  # for each bucket of the step, which parameters were used
        # Gradients that may have to be restored after the step: name, part of the bucket, copy.
        self._copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def run(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Start a bucket, and finish the step with the last one; return a future of the bucket's mean."""
        flat, current = dense_buffer(bucket), torch_private.backward_pass()
        if self._is_new:
            self._look_at_model()
        step = self._step if self._step is not None and self._step.is_open else None
        graph = self._static_graph
        if graph is not None and graph.leaves_out(bucket, step):
            return completed_future(flat)
        # Check at the end of each pass, including nested ones, that all buckets were ready. -1 is outside of
        # any pass: a process without input shadows the others.
        if current not in (-1, self._watched_pass):
            self._watched_pass = current
            torch_private.at_end_of_backward(self._check_finished)
        future, has_streams = new_future(flat.device), flat.device.type not in streams.WITHOUT_STREAMS
        try:
            beside = self._comm_stream.wait_for_current(flat.device) if has_streams else nullcontext()
            with beside:
                # Time both together: while a bucket is opened, and processes agree, its gradients wait.
                with self.engine.clock.inside():
                    state = self._buckets.of(bucket.parameters(), flat)
                    if setup.contributor_scales:
                        setup.divide_by_contributors(bucket.parameters(), flat, self.engine.transport.size)
                    step = step or self._begin(bucket)
                    if step.finds_unused or self._used is not None:
                        self._note_used(step, bucket, state.specs, is_pass=current != -1)
                    step.start(state, flat)
                self._waiting.append((future, flat))
                is_last = bucket.is_last() if graph is None else graph.is_last(bucket)
                if is_last:
                    self._finish(step, is_pass=current != -1)
            if is_last and has_streams:
                self._comm_stream.current_waits()
        except BaseException:
            # Leave the futures incomplete: the exception ends the backward pass before DDP waits for them.
            self._waiting, self._copies = [], []
            self.engine.abandon()
            self._comm_stream.current_waits()
            raise
        return future

    def _begin(self, bucket: GradBucket) -> Step:
        if setup.averaged_models and self.is_in_every_step:
            setup.refuse_averaged_twice(bucket.parameters(), self.engine.transport, StepError)
        if self._static_graph is not None:
            self._static_graph.num_taken = 0
        self._step, self._flags = self.engine.begin(pipelined=True), []
        return self._step

    def _finish(self, step: Step, *, is_pass: bool) -> None:
        # Finish in the hook's last call, not in a future's callback: those run on separate threads. Rank 0
        # could send messages of step 8 before the last ones of step 7, rank 1 after them: both would wait.
        for parameter, name in self._buckets.outside.items():
            if parameter.requires_grad and self.is_in_every_step:
                raise ddp_model.unaveraged(name)
        used = torch.cat([flags.to(self._flags[0].device) for flags in self._flags]) if self._flags else None
        if not step.finish(used):
            self._report_nonfinite()
        for name, gradient, before in self._copies:
            if name in step.unused:
                gradient.copy_(before)
        self._copies = []
        if self._used is not None and is_pass:
            self._used.forget()
        self._release()

    def _release(self) -> None:
        # Empty the list first: setting a result may run callbacks, and the alarm may call this on its thread.
        waiting, self._waiting = self._waiting, []
        for future, flat in waiting:
            future.set_result(flat)

    # Rare cases.

    def _report_nonfinite(self) -> None:
        """Warn of a step that was not committed; or make `backward()` raise at its end."""
        if self.engine.settings.on_nonfinite != "raise":
            self.engine.reporter.warn_of_nonfinite()
            return
        raise_it = partial(self.engine.raise_unless, committed=False)
        # Raising now would leave DDP in the middle of its step. DDP queues the step's end after the hook has
        # returned. A callback queued by our callback runs after it, and the model stays usable.
        torch_private.at_end_of_backward(lambda: torch_private.at_end_of_backward(raise_it))

    def _look_at_model(self) -> None:
        """Check the options of the model, at the first bucket."""
        if (model := self._model()) is not None:  # otherwise it was deleted before its backward pass
            ddp_model.check_options(model)
            self._static_graph = _StaticGraph(model) if model.static_graph else None
            if self.engine.settings.may_be_unused:
                self._used = ddp_model.Used(ddp_parameters(model))
        self._is_new = False

    def _note_used(self, step: Step, bucket: GradBucket, specs: Specs, *, is_pass: bool) -> None:
        """Note which parameters this process used, before the bucket is started, which may overwrite it.

        Copy gradients that are views of the bucket and that DDP leaves alone if no process used them.
        """
        used = None if self._used is None else self._used.of(bucket.parameters(), is_pass=is_pass)
        if step.finds_unused:
            gradients = Bucket(specs, bucket.buffer()).gradients
            self._flags.append(
                ddp_model.nonzero(gradients) if used is None else torch.tensor(used, device="cpu")
            )
        if used is None or all(used):
            return
        parts = zip(specs, bucket.parameters(), bucket.gradients(), used, strict=True)
        for spec, parameter, gradient, is_used in parts:
            before = None if is_used else parameter.grad
            if before is not None and before.data_ptr() == gradient.data_ptr():
                self._copies.append((spec.name, gradient, gradient.clone()))

    def remove_hooks(self) -> None:
        """Remove hooks of the model's parameters, and allow steps inside its backward pass again."""
        setup.allow_steps_inside(self)
        if self._used is not None:
            self._used.remove()

    @torch_private.not_compiled
    def _check_finished(self) -> None:
        """Ensure that a backward pass ends even if some of its buckets were never ready.

        If DDP expects more in a later pass, it does nothing now. If it believes that all were ready, it waits
        for their futures forever.
        """
        step = self._step
        num_started = step.num_parameters if step is not None and step.is_open else 0
        # A nested pass, such as a checkpoint's: the outer one ends later.
        if not num_started or torch_private.running_node() is not None:
            return
        # On a separate thread: this one will block in DDP's code until the futures have results. A daemon
        # thread, so that a process that fails meanwhile can end.
        alarm = threading.Timer(PATIENCE_SECONDS, self._release)
        alarm.daemon = True
        alarm.start()

        def after_ddp() -> None:
            alarm.cancel()
            if not self._waiting:  # the alarm has given up
                self.engine.abandon()
                raise StepError(
                    f"DDP ended a step after {num_started} parameters without passing the others to its "
                    "hook, so nothing was averaged; build the model without the option that skips buckets, "
                    "and restart from a checkpoint"
                )

        # Queued now, it runs after DDP's own end of the step, which waits for the futures.
        torch_private.at_end_of_backward(after_ddp)


class _StaticGraph:
    """Finds what DDP does not report for a static graph: the first pass's last bucket, frozen buckets."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._num_expected = ddp_model.num_trained(ddp_parameters(model))  # 0 after the first step
        self.num_taken = 0

    def leaves_out(self, bucket: GradBucket, step: Step | None) -> bool:
        """Return whether a bucket is frozen: it comes after the others, and would begin a new step."""
        return not ddp_model.num_trained(bucket.parameters()) and (step is None or not bucket.is_last())

    def is_last(self, bucket: GradBucket) -> bool:
        """Count a bucket that was started; return whether it is the step's last."""
        self.num_taken += ddp_model.num_trained(bucket.parameters())
        # In the first pass DDP marks every bucket as the first, and none as the last.
        if bucket.is_last() or 0 < self._num_expected == self.num_taken:
            self._num_expected = 0
            return True
        return False


class DDPBuckets:
    """The buckets of a DDP model."""

    def __init__(self, engine: Engine, names: dict[torch.nn.Parameter, str]) -> None:
        self._plans = engine.buckets
        self._states: dict[tuple[int, ...], BucketState] = {}  # by the parameters' ids
        # Keeps the parameters, so that no other object can get one of their ids.
        self._names: dict[torch.Tensor, str] = dict(names.items())
        # Parameters in no bucket so far. DDP makes buckets of the parameters trained when it is built: ones
        # unfrozen later are in none, and would drift apart. Ones frozen later stay in their buckets.
        self.outside = dict(self._names)

    def of(self, parameters: list[torch.Tensor], flat: torch.Tensor) -> BucketState:
        """Return the bucket of some parameters, whose gradients are flat."""
        # Looked up by id: this runs in every step, and names are slower.
        key = tuple(map(id, parameters))
        known = self._states.get(key)
        if known is None or not known.is_current:
            # Keep only this step's buckets: old or closed ones would keep plans and buffers alive.
            self._states = {ids: bucket for ids, bucket in self._states.items() if bucket.is_in_flight}
            specs = self._specs_of(parameters)
            ddp_model.check_layout(specs, parameters, flat)
            known = self._states[key] = self._plans.bucket(specs)
        return known

    def _specs_of(self, parameters: list[torch.Tensor]) -> Specs:
        for parameter in parameters:
            if parameter not in self._names:
                words = f"a bucket holds a parameter of shape {tuple(parameter.shape)}"
                raise ConfigError(f"{words}, which its model does not have; {ONE_EACH}")
            self.outside.pop(parameter, None)
        return tuple(ParameterSpec.of(self._names[parameter], parameter) for parameter in parameters)


class Switch:
    """The state of a DDP model's hook. DDP can't remove a hook, so its adapter is switched instead."""

    adapter_now: Callable[[], DDPAdapter | None]  # averages in this pass; None leaves gradients alone
    taken_by = ""  # the caller that has set it; "" if it is not used any more

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = weakref.ref(model)
        self._transport = _transport_of(model)  # now: `free` may come after `destroy_process_group`

    @property
    def engine(self) -> Engine | None:
        """The engine that averages the gradients of each step, if `attach` has set it."""
        adapter = self.adapter_now() if self.taken_by == ATTACHED else None
        return None if adapter is None else adapter.engine

    def free(self) -> None:
        """Average as DDP would without a hook, from the next pass on."""
        if (model := self.model()) is not None:  # otherwise the model is gone
            ddp_model.unguard(model)
            if (adapter := self.adapter_now()) is not None:
                adapter.remove_hooks()
            engine = Engine(AllReduce(), self._transport, ddp_model.specs_of(model))
            adapter = DDPAdapter(engine, model)
            self.adapter_now, self.taken_by = lambda: adapter, ""

    def hand_over(self, state: object, hook: Callable[..., Any]) -> None:
        """Let another hook average from the next pass on: DDP takes no second one."""
        if isinstance(state, Switch):
            self.__dict__ = state.__dict__  # both are one from now on
            return
        taken: Any = SimpleNamespace(run=partial(hook, state))
        self.adapter_now, self.taken_by = lambda: taken, "another hook"

    def __deepcopy__(self, memo: dict[int, object]) -> ddp_model.DetachedAdapter:
        """Return a stand-in: a copied model, as for weight averaging, has a reducer without a hook."""
        return ddp_model.DetachedAdapter()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.taken_by:
            raise ddp_model.not_pickled()
        return ddp_model.DetachedAdapter, ()


def switched(
    model: DistributedDataParallel, adapter_now: Callable[[], DDPAdapter | None], taken_by: str
) -> Switch:
    """Make adapters average a model's gradients, through its existing switch or a new one."""
    hooks = [state for _, state in comm_hooks(model) if isinstance(state, Switch) and not state.taken_by]
    switch = hooks[0] if hooks else Switch(model)
    if hooks:
        ddp_model.guard(model)
    else:
        ddp_model.register(model, switch, thinwire_hook)
    switch.adapter_now, switch.taken_by = adapter_now, taken_by
    return switch


@torch_private.not_compiled
def thinwire_hook(state: Switch, bucket: GradBucket) -> Future[torch.Tensor]:
    """Run the current adapter on a bucket: the hook that is registered with DDP."""
    adapter = state.adapter_now()  # the same one throughout a pass
    try:
        return completed_future(dense_buffer(bucket)) if adapter is None else adapter.run(bucket)
    except BaseException as error:
        ddp_model.leave_in_the_middle(state.model(), error)
        raise


# A bucket, and the future that DDP waits for.


def dense_buffer(bucket: GradBucket) -> torch.Tensor:
    """Return a bucket's flat gradients."""
    # The python reducer calls hooks as well, with gradients instead of buckets.
    if not isinstance(bucket, GradBucket):
        raise AttachError(ddp_model.PYTHON_REDUCER)
    flat = bucket.buffer()
    if flat.is_sparse:
        words = f"the gradient of a parameter of shape {tuple(flat.shape)} is sparse and can't be averaged"
        raise GradientError(f"{words}; build its Embedding with sparse=False")
    if flat.is_complex():
        words = f"DDP of torch {torch.__version__} passes {flat.dtype} gradients to its hook"
        remedy = "upgrade torch, or keep such parameters as real tensors (torch.view_as_real)"
        raise GradientError(f"{words}, torch 2.13 passes pairs of real numbers; {remedy}")
    return flat


def new_future(device: torch.device) -> Future[torch.Tensor]:
    """Return a future for DDP, of a tensor on `device`."""
    # With a device, the future makes DDP's stream wait for queued work. It does not accept a CPU.
    return Future(devices=None if device.type == "cpu" else [device])


def completed_future(flat: torch.Tensor) -> Future[torch.Tensor]:
    """Return a completed future of a bucket's gradients: nothing is averaged."""
    future = new_future(flat.device)
    future.set_result(flat)
    return future
