"""The front for DistributedDataParallel: one communication hook, and what it drives can be switched."""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NoReturn

import torch
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.algorithms import Algorithm, AllReduce
from thinwire.channel import Layout, Machines, ProcessGroupTransport, Transport, machines_of
from thinwire.errors import AttachError, ConfigError, NonfiniteError, StateError, StepError
from thinwire.fronts.averaged_twice import refuse_averaged_twice
from thinwire.fronts.contributors import divide_by_contributors
from thinwire.fronts.ddp_model import (
    DetachedFront,
    check_options,
    completed_future,
    ddp_model_of,
    ddp_models_with,
    dense_buffer,
    guard,
    names_of,
    new_future,
    plain_name,
    refuse_training_of_copies,
    register,
    unguard,
    wrong_model,
)
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine, GradientSync, Settings
from thinwire.sync.lanes import Lane
from thinwire.sync.places import Specs
from thinwire.sync.step import Step

PATIENCE_SECONDS = 10.0


def attach_ddp(
    ddp_model: torch.nn.Module, algorithm: Algorithm, settings: Settings, layout: Layout
) -> GradientSync:
    """Do what `thinwire.attach` does, with a DDP model."""
    model = _checked_model(ddp_model)
    # Gradients are on the parameters' device, which is known on CPUs too, where DDP has no device_ids.
    transport = ProcessGroupTransport(model.process_group, next(model.parameters()).device)
    refuse_averaged_twice(model.parameters(), transport, AttachError)
    machines, why_flat = machines_of(transport, layout)
    front = front_of(model, algorithm, transport, settings, machines)
    if why_flat:
        front.engine.shortfalls[why_flat] = None
    switch = switched(model, lambda: front, ATTACHED)
    owner = weakref.ref(model)

    def detach() -> None:
        if (still_there := owner()) is not None:
            switch.free(still_there)

    # Not the front's own: what a handle holds leads back to the front.
    return GradientSync(front.engine, detach)


def front_of(
    model: DistributedDataParallel,
    algorithm: Algorithm,
    transport: Transport,
    settings: Settings = Settings(),  # noqa: B008 - frozen
    machines: Machines | None = None,
) -> "BucketFront":
    """Return a front that knows the model's parameters by name; not registered yet."""
    check_options(model)
    names = names_of(model.module, model.parameters_to_ignore)
    specs = [ParameterSpec.of(name, each) for each, name in names.items() if each.requires_grad]
    settings = replace(settings, may_be_unused=model.find_unused_parameters)
    engine = Engine(algorithm, transport, specs, settings, machines=machines)
    return BucketFront(engine, names, model)


def front_of_hook(
    hook_state: object,
    algorithm: Algorithm,
    transport: ProcessGroupTransport,
    settings: Settings,
    layout: Layout,
) -> "BucketFront":
    """Return a front for a hook that the user has registered with this state. Collective."""
    # DDP hands a hook its state and a bucket, and neither leads to the model.
    models = ddp_models_with(lambda state: state is hook_state)
    if len(models) > 1:
        raise ConfigError(
            f"this {type(hook_state).__name__} is registered on {len(models)} models; make one state for "
            "each model"
        )
    machines, why_flat = machines_of(transport, layout)
    if models:
        front = front_of(models[0], algorithm, transport, settings, machines)
        # DDP copies no hook, and the copy would train uncompressed without a word.
        refuse_training_of_copies(models[0])
    else:
        # Inside a hook of the user's own: the model's options are not known, so the costlier is assumed.
        settings = replace(settings, may_be_unused=True)
        front = BucketFront(Engine(algorithm, transport, settings=settings, machines=machines))
    if why_flat:
        front.engine.shortfalls[why_flat] = None
    return front


class BucketFront:
    """Feeds DDP's buckets to an `Engine` and hands their means back as futures.

    The work of all buckets is finished inside the call for the last one, on the thread that runs the
    backward pass: no collective is ever issued from a future's callback. In the first step of a static
    graph, where DDP calls every bucket its first, the last one is the one that completes the parameters.
    """

    def __init__(
        self,
        engine: Engine,
        names: dict[torch.nn.Parameter, str] | None = None,
        model: DistributedDataParallel | None = None,
    ) -> None:
        self.engine, self.sync = engine, GradientSync(engine)
        # Weak: the model holds the hook's state, and with it this.
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
        self._specs: dict[tuple[int, ...], Specs] = {}
        self._lanes: dict[tuple[int, ...], Lane] = {}
        # In no bucket that was seen; None to look anew.
        self._outside: list[tuple[torch.Tensor, str]] | None = None
        self._step: Step | None = None
        self._waiting: list[tuple[Future[torch.Tensor], torch.Tensor]] = []

    def run(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Take a bucket, and finish them all at the last one; return a future of its mean."""
        flat = dense_buffer(bucket)
        if self._is_left_out(bucket):
            return completed_future(flat)
        try:
            self._watch_pass()
            divide_by_contributors(bucket.parameters(), flat)
            # Timed as one: while a lane is opened, and processes agree, the gradients are ready and wait.
            with self.engine.clock.inside(self.engine.traffic):
                lane = self._lane_of(bucket)
                step = self._open_step(bucket)
                step.start(lane, flat)
            future = new_future(flat.device)
            self._waiting.append((future, flat))
            if self._has_all(bucket):
                self._refuse_outside()
                # Here, and not in a callback of a future: those run on threads of their own, so that
                # processes could issue collectives in different orders and wait for each other for ever.
                self._finish(step)
                self._release()
        except BaseException:
            # Leave the futures unset: the exception ends the backward pass before DDP waits for them.
            self._waiting = []
            self.engine.abandon()
            raise
        return future

    def _open_step(self, bucket: GradBucket) -> Step:
        """Return the step under way, or begin one."""
        if self._step is None or not self._step.is_open:
            # The model of a user's own hook is unknown; it may average within a machine only.
            if self._model is not None:
                refuse_averaged_twice(bucket.parameters(), self.engine.transport, StepError)
            self._step, self._num_taken = self.engine.begin(pipelined=True), 0
        return self._step

    def _is_left_out(self, bucket: GradBucket) -> bool:
        """Return whether a static graph's bucket is frozen: after the others it would begin a new step."""
        if self._num_expected is None:
            self._num_expected = self._num_in_first_step(bucket.parameters())
            self._is_static = self._num_expected > 0
        if not self._is_static or _num_trained(bucket.parameters()):
            return False
        is_begun = self._step is not None and self._step.is_open
        return not (bucket.is_last() and is_begun)

    def _has_all(self, bucket: GradBucket) -> bool:
        """Count a bucket that was started; return whether it is the step's last."""
        self._num_taken += _num_trained(bucket.parameters())
        # In a static graph's first pass DDP calls every bucket its first, and none the last.
        if not bucket.is_last() and not 0 < (self._num_expected or 0) == self._num_taken:
            return False
        self._num_expected, self._all_named = 0, True
        return True

    def _num_in_first_step(self, parameters: Iterable[torch.Tensor]) -> int:
        """Return how many parameters complete a static graph's first step; 0 if DDP says which is last."""
        model = ddp_model_of(parameters) if self._model is None else self._model()
        # Then it is unknown whether the graph is static, so trust DDP on which bucket is the last.
        if model is None:
            return 0
        check_options(model)
        return _num_trained(model._module_parameters) if model.static_graph else 0

    def _watch_pass(self) -> None:
        """Check at the end of each backward pass, also of a nested one, that all buckets came."""
        # -1: outside of any pass, where a process without input shadows the others.
        current = torch._C._current_graph_task_id()
        if current not in (-1, self._watched_pass):
            self._watched_pass = current
            Variable._execution_engine.queue_callback(self._check_finished)

    def _check_finished(self) -> None:
        """Be sure, at the end of a backward pass whose buckets have not all come, that it ends.

        If more are to come in another pass, DDP does nothing now. If it thinks that all have come, it goes on
        to wait for their futures, for ever.
        """
        num_started = 0 if self._step is None or not self._step.is_open else self._step.num_parameters
        # Inside another pass, such as a checkpoint's: the outer one has an end of its own.
        if not num_started or torch._C._current_autograd_node() is not None:
            return
        # On a thread of its own: this one will block in DDP's code until the futures have results.
        alarm = threading.Timer(PATIENCE_SECONDS, self._give_up)
        # A daemon, so that a process that fails meanwhile can end.
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

        # Queued from here, it runs behind DDP's own end of the step, which waits for the futures.
        Variable._execution_engine.queue_callback(after_ddp)

    def _give_up(self) -> None:
        # Before the release: the pass goes on at once then, and looks.
        self._was_given_up = True
        self._release()

    def _finish(self, step: Step) -> None:
        try:
            committed = step.finish()
            self.engine.raise_unless(committed)
            if not committed:
                self.engine.warn_of_nonfinite()
        except NonfiniteError as error:
            refusal = error

            def raise_it() -> NoReturn:
                raise refusal

            # Raised here it would leave DDP in the middle of its step. DDP queues that step's end when the
            # hook has returned: what our callback queues comes behind it, and the model stays usable.
            queue_callback = Variable._execution_engine.queue_callback
            queue_callback(lambda: queue_callback(raise_it))

    def _release(self) -> None:
        # Emptied first: a result may run callbacks at once, and the alarm may call this from its own thread.
        waiting, self._waiting = self._waiting, []
        for future, flat in waiting:
            future.set_result(flat)

    def _lane_of(self, bucket: GradBucket) -> Lane | Specs:
        """Return the bucket's lane; if none is open, its parameters."""
        parameters = bucket.parameters()
        # Look up by identity, which `_names` keeps valid: this runs in every step, and names are slower.
        key = tuple(map(id, parameters))
        lane = self._lanes.get(key)
        if lane is None or not lane.is_current:
            if key not in self._specs:
                # DDP fills buckets from the model's end, and lists each one's parameters from its start.
                self._name(reversed(parameters))
                self._outside = None
                self._specs[key] = tuple(ParameterSpec.of(self._names[id(p)][1], p) for p in parameters)
            lane = self.engine.opened(self._specs[key])
            if lane is None:
                return self._specs[key]
            self._lanes[key] = lane
        return lane

    def _refuse_outside(self) -> None:
        """Refuse parameters that are trained and not averaged, which DDP leaves to drift apart."""
        # DDP makes buckets of what is trained when it is built. What is frozen later stays in them.
        if self._outside is None:
            inside = {each for key in self._specs for each in key}
            self._outside = [known for each, known in self._names.items() if each not in inside]
        trained = [name for parameter, name in self._outside if parameter.requires_grad]
        if trained:
            raise StepError(
                f"{trained[0]} is trained, and DDP averages no gradient of it: it was frozen, or not there, "
                "when the DDP model was built; unfreeze or add parameters first, then build a new DDP model "
                "of the module and attach that"
            )

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
    """Return how many are trained: those frozen after the model was wrapped still lie in a bucket."""
    return sum(parameter.requires_grad for parameter in parameters)


class Switch:
    """The state of a DDP model's hook. DDP takes one and never lets go of it, so what it does is switched.

    Attributes:
        front_now: Returns what averages the gradients of this pass; None leaves them alone.
        taken_by: Who has put it there; "" if nobody needs it any more.
    """

    front_now: Callable[[], BucketFront | None]
    taken_by = ""

    def run(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """As `BucketFront.run`, of the front whose turn it is."""
        # Asked at every bucket: the same answer throughout a pass.
        front = self.front_now()
        return completed_future(dense_buffer(bucket)) if front is None else front.run(bucket)

    def free(self, model: DistributedDataParallel) -> None:
        """Average as DDP would without a hook, from the next pass on."""
        unguard(model)
        transport = ProcessGroupTransport(model.process_group, next(model.parameters()).device)
        names = names_of(model.module, model.parameters_to_ignore)
        front = BucketFront(Engine(AllReduce(), transport), names, model)
        self.front_now, self.taken_by = lambda: front, ""

    def __deepcopy__(self, memo: dict[int, object]) -> DetachedFront:
        """Return a stand-in: a copied model has a reducer of its own, without a hook.

        Weight averaging makes copies.
        """
        return DetachedFront()

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a DDP model whose gradients Thinwire averages can't be pickled whole; save "
            "model.module.state_dict(), and the state_dict() of what attach returned, or of the LocalSGD"
        )


ATTACHED = "attach"


def switched(
    model: DistributedDataParallel, front_now: Callable[[], BucketFront | None], taken_by: str
) -> Switch:
    """Let fronts average a model's gradients, by the hook that it has from before, or a new one."""
    hooks = [state for _, state in model._comm_hooks if isinstance(state, Switch) and not state.taken_by]
    switch = hooks[0] if hooks else Switch()
    if hooks:
        guard(model)
    else:
        register(model, switch, thinwire_hook)
    switch.front_now, switch.taken_by = front_now, taken_by
    return switch


def thinwire_hook(state: Switch, bucket: GradBucket) -> Future[torch.Tensor]:
    """As `Switch.run`: the hook that it is registered with."""
    return state.run(bucket)


def _checked_model(ddp_model: object) -> DistributedDataParallel:
    """Return the DDP model, after refusing what can't be attached."""
    # torch.compile's wrapper: the hook is on the DDP model inside.
    model = getattr(ddp_model, "_orig_mod", ddp_model)
    if not isinstance(model, DistributedDataParallel):
        raise AttachError(wrong_model(ddp_model))
    # DDP refuses such a model; its parameters were frozen since.
    if not _num_trained(model._module_parameters):
        raise AttachError("no parameter of the model is trained, so there is nothing to average")
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
