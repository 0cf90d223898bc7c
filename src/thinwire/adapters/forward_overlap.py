"""`thinwire.overlap_forward`: send means during the next forward pass, and step each layer when it is read.

One step, with buckets `a` (the last layers; ready first) and `b` (the first layers):

    backward pass      a, b: codes are sent to the ranks that average them     (first round)
    optimizer.step()   waits for the codes, averages, sends b's means, a's     (second round), steps nothing
    forward pass       first layers are read: waits for b's means, steps b's parameters
                       last layers are read: a's means have arrived by now; steps a's parameters

With more buckets, some means are sent during the backward pass already (`SENT_EARLY`). Each of two ranks
sends the other half of its codes in place of means.

Known as DeAR (Zhang et al., ICDCS 2023): reduce-scatter during the backward pass, all-gather during the next
forward pass. Each layer uses the same weights as with `attach`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.ddp import ATTACHED, DDPBuckets, attachable, completed_future, dense_buffer, switched
from thinwire.adapters.ddp_model import guard, names_in, specs_of, unaveraged
from thinwire.adapters.deferred_optimizer import (
    DeferredOptimizer,
    ReadParameters,
    forget_reads,
    read_all,
    why_whole,
)
from thinwire.adapters.setup import contributor_scales, log_start, new_engine
from thinwire.algorithms import Algorithm, Bucket, Quantize
from thinwire.algorithms.quantize import QuantizePlan
from thinwire.algorithms.requests import AllGather
from thinwire.checks import shown
from thinwire.comm import Message
from thinwire.errors import AttachError, ConfigError, StepError
from thinwire.sync import Engine, GradientSync, Settings
from thinwire.sync.bucket_plans import BucketState
from thinwire.sync.scheduler import Task
from thinwire.sync.step import Step
from thinwire.torch_private import (
    at_end_of_backward,
    backward_pass,
    children_and_parameters,
    is_compiled,
    put_parameters,
    version_of,
)

# Between the first messages of a backward pass the link often pauses, and can send means: those of every
# fourth bucket, when two more were started. More would delay the last buckets' first messages, for which
# `step()` waits. Decided by what was started, not by what has arrived, so that all ranks send in one order.
SENT_EARLY, SENT_MEANWHILE = 4, 2


def overlap_forward(
    model: nn.Module,
    algorithm: Algorithm,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    clip_norm: float | None = None,
    poison: bool = False,
) -> OverlappedSync:
    """Send low-bit means during the next forward pass too, and step each layer when it is read.

    Use it in place of `thinwire.attach` if communication takes most of the time. The training loop stays as
    it is, and every number is the same: nothing is one step late. (A step averages once; if gradients
    accumulate outside `no_sync()`, `attach` averages each pass, and so rounds more often.)

    `optimizer.step()` averages and sends. Each parameter is stepped, with the learning rate of that call,
    before it is read through its module: in the forward pass, in `parameters()`, `state_dict()`,
    `copy.deepcopy`. The optimizer's `state_dict()` steps all first, as does the handle's `flush()`: call that
    before you read a tensor that you hold, or the optimizer's `state`.

    Call it on every process that trains the model. Each process sends by itself, even on a shared machine.

    Args:
        model: A `DistributedDataParallel` model whose loss uses all trained parameters.
        algorithm: `thinwire.Quantize` without error feedback.
        optimizer: From `torch.optim`, with all trained parameters of the model and no others; or several
            that share them, such as Muon and AdamW, if `step()` of each is called in every step. It must step
            each parameter by itself, so not LBFGS. `step()` sets gradients to None, as `zero_grad()` does.
        clip_norm: Scale gradients so that the norm of all means is at most this, as `clip_grad_norm_` does.
            That function would run too early: between `backward()` and `step()`, gradients are not averaged
            yet. Costs a message of 8 bytes a step, and decoding all means once more.
        poison: Set parameters to NaN from `step()` until they are stepped, to test that your code never reads
            one too early. Costs a copy of the parameters.

    Returns:
        The handle. Its `detach()` steps all pending parameters and restores the optimizer.

    Cost: that of `attach`, and a copy of the gradients in memory. Half of the bytes, with many
    buckets 5/8, are sent during the backward pass, the rest during the next forward pass.

    Raises:
        AttachError: The model is no DDP model, or can't be averaged, or is compiled; or the optimizer is not
            of `torch.optim`, or has other parameters.
        ConfigError: `algorithm` or `clip_norm` does not work here; or DDP was built with
            `find_unused_parameters` or `static_graph`.
        StepError: (From `optimizer.step()`.) Gradients were changed since `backward()`, as a `GradScaler` or
            `clip_grad_norm_` does. (From `backward()`.) A parameter was used but not read through its module,
            nor was any other of its bucket. (From a read.) The means did not arrive.

    Examples:
        >>> import thinwire, torch
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> ddp_model = DistributedDataParallel(torch.nn.Linear(64, 32))  # in a process group
        >>> optimizer = torch.optim.AdamW(ddp_model.parameters())
        >>> sync = thinwire.overlap_forward(ddp_model, thinwire.Quantize(bits=4), optimizer, clip_norm=1.0)
        >>> for _ in range(2):
        ...     ddp_model(torch.ones(1, 64)).sum().backward()
        ...     optimizer.step()
        >>> sync.flush()  # no forward pass follows to apply the last step's means
        >>> sync.steps
        2
    """
    check_algorithm(algorithm)
    ddp_model, transport = attachable(model)
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    _check(model, ddp_model, clip_norm)
    _check_optimizers(ddp_model, optimizers)
    settings = Settings(of_adapter={"overlap_forward": f"with clip_norm={clip_norm and float(clip_norm)}"})
    engine = new_engine(algorithm, transport, specs_of(ddp_model), settings, False)
    deferred = [DeferredOptimizer(optimizer, poison=poison) for optimizer in optimizers]
    adapter = ForwardAdapter(engine, names_in(ddp_model), deferred, clip_norm)
    switch = switched(ddp_model, lambda: adapter, ATTACHED)  # type: ignore[arg-type,return-value]
    # Only now, so that a model whose hook is taken is left unchanged.
    adapter.install(ddp_model.module)
    guard(ddp_model)
    log_start(engine, ddp_model.parameters())
    return OverlappedSync(adapter, switch.free)


def check_algorithm(algorithm: object) -> None:
    """Refuse algorithms that keep state: they commit all buckets of a step together."""
    if not isinstance(algorithm, Quantize) or algorithm.remembers:
        raise ConfigError(
            "overlap_forward takes only Quantize without a residual or eigenbasis, got "
            f"{shown(algorithm)}; use thinwire.attach"
        )


def _check(model: nn.Module, ddp_model: DistributedDataParallel, clip_norm: float | None) -> None:
    """Refuse a model or setting that can't be stepped layer by layer."""
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(f"clip_norm must be above 0, got {clip_norm!r}; leave it out for no clipping")
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(ddp_model, option):
            raise ConfigError(
                f"the DDP model was built with {option}; build it without, or use thinwire.attach"
            )
    modules = (model, *ddp_model.modules())
    if any(is_compiled(module) or isinstance(module, torch.jit.ScriptModule) for module in modules):
        raise AttachError(
            "the model is compiled, so overlap_forward can't see reads of its parameters; use thinwire.attach"
        )


def _check_optimizers(model: DistributedDataParallel, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that step parameters jointly, or that hold other parameters than the model's."""
    stepped = set[int]()
    for optimizer in optimizers:
        kind = type(optimizer)
        if not f"{kind.__module__}.".startswith("torch.optim.") or isinstance(optimizer, torch.optim.LBFGS):
            raise AttachError(
                f"got {kind.__name__} for an optimizer, but overlap_forward steps parameters one by one; use "
                "optimizers of torch.optim other than LBFGS, several in a list, or use thinwire.attach"
            )
        if why := why_whole(optimizer):
            raise AttachError(why)
        for group in optimizer.param_groups:
            stepped |= {id(tensor) for tensor in group["params"] if tensor.requires_grad}
    trained = {id(tensor): name for name, tensor in model.named_parameters() if tensor.requires_grad}
    for missing in trained.keys() - stepped:
        raise AttachError(
            f"{trained[missing]} of the model is in no optimizer; pass all optimizers of the model"
        )
    if stepped - trained.keys():
        raise AttachError(
            f"the optimizer has {len(stepped - trained.keys())} parameters that the model does not train; "
            "build it with the parameters of the DDP model only"
        )


@dataclass
class PendingBucket:
    """A bucket from its backward pass until its parameters are stepped."""

    step: Step
    state: BucketState
    parameters: list[nn.Parameter]
    mean: torch.Tensor  # this process's gradients, then the mean
    task: Task | None = None  # waits for its mean, which is being sent

    def gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield each parameter with its part of the mean."""
        specs = self.state.specs
        parts = zip(self.parameters, specs, Bucket(specs, self.mean).gradients, strict=True)
        return ((parameter, part.as_strided(spec.shape, spec.stride)) for parameter, spec, part in parts)


class ForwardAdapter:
    """Sends codes from DDP's buckets, and steps the optimizer bucket by bucket as parameters are read."""

    def __init__(
        self,
        engine: Engine,
        names: dict[nn.Parameter, str],
        optimizers: Sequence[DeferredOptimizer],
        clip_norm: float | None,
    ) -> None:
        self.engine, self._optimizers, self._clip_norm = engine, optimizers, clip_norm
        self._names, self._buckets = names, DDPBuckets(engine, names)
        self._open: Step | None = None  # from its first bucket until its means are sent
        self._started: list[PendingBucket] = []  # the open step's buckets
        self._left_by_backward: list[tuple[nn.Parameter, torch.Tensor | None, int]] = []
        self._pending: dict[nn.Parameter, PendingBucket] = {}  # the sent step's parameters, until stepped
        self._scale: Callable[[], torch.Tensor] | None = None  # waits for the norm; the scale clips the means
        self._failure: BaseException | None = None  # why a mean did not arrive
        self._is_stepping = False
        self._installed = ExitStack()  # undoes `install`

    def install(self, root: nn.Module) -> None:
        """Replace the optimizer's step, and intercept reads of parameters."""
        self.engine.settle = self.flush
        for deferred in self._optimizers:
            self._installed.enter_context(deferred.replaced_step(self.send_means))
            target = deferred.optimizer
            for register in (target.register_state_dict_pre_hook, target.register_load_state_dict_pre_hook):
                self._installed.callback(register(lambda *_: self.flush()).remove)
        for module in root.modules():
            if parameters := children_and_parameters(module)[1]:
                put_parameters(module, ReadParameters(parameters, self._step_if_pending))
                self._installed.callback(forget_reads, module)
                if isinstance(module, nn.RNNBase):  # its forward pass reads its own list of weights
                    self._installed.callback(module.register_forward_pre_hook(read_all).remove)

    # The backward pass.

    def run(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Send a bucket's codes, and return a completed future to DDP."""
        flat = dense_buffer(bucket)
        if backward_pass() == -1 or next(iter(bucket.parameters())) in contributor_scales:
            raise StepError(
                "overlap_forward was used inside join, where processes without input take no optimizer "
                "step; use thinwire.attach for uneven inputs"
            )
        if self._pending:
            raise StepError(
                f"{self._names[next(iter(self._pending))]} was used without being read through its module, "
                "so the loss was computed before its last step; call flush() before such a forward pass"
            )
        if self._open is not None and self._left_by_backward:
            # No step followed the last backward pass: its gradients were accumulated into these, or dropped.
            self.forget()
        if self._open is None:
            self._open = self.engine.begin(in_turn=True)
        parameters: list[Any] = bucket.parameters()
        # A copy: until the mean arrives, the user may zero DDP's bucket or accumulate in it.
        pending = PendingBucket(self._open, self._buckets.of(parameters, flat), parameters, flat.clone())
        try:
            self._open.start(pending.state, pending.mean)
            earlier = len(self._started) - SENT_MEANWHILE
            if earlier >= 0 and earlier % SENT_EARLY == 0:
                self._open.send_mean(earlier)
        except BaseException:
            self.forget()
            raise
        self._started.append(pending)
        if bucket.is_last():
            at_end_of_backward(lambda: at_end_of_backward(self._note_gradients))
        return completed_future(flat)

    def _note_gradients(self) -> None:
        for parameter in self._parameters():
            self._left_by_backward.append((parameter, parameter.grad, version_of(parameter.grad)))

    def forget(self) -> None:
        """Drop the current step: parameters that still wait lose their means."""
        self.engine.abandon()
        self._open, self._started, self._left_by_backward = None, [], []
        self._scale = self._failure = None
        self._pending = {}
        for deferred in self._optimizers:
            deferred.forget()

    # `optimizer.step()`.

    def send_means(self) -> bool:
        """Average and send the means, if not done yet; return whether there are means to step with."""
        if self._open is None:
            if any(parameter.grad is not None for parameter in self._parameters()):
                raise StepError(
                    "there are gradients, but none were averaged: all passes were in no_sync(), or called "
                    "the module inside the DDP model; call the DDP model, the last time outside no_sync()"
                )
            return bool(self._pending)  # sent by another optimizer's step(); otherwise nothing to step
        if not self._left_by_backward:
            raise StepError("optimizer.step() was called inside the backward pass; call it after backward()")
        if self._are_changed():
            self.forget()
            raise StepError(
                "gradients were changed between backward() and step(), before they were averaged; train "
                "without GradScaler, clip with clip_norm=…, or use thinwire.attach"
            )
        step, buckets = self._open, self._started
        for outside, name in self._buckets.outside.items():
            if outside.requires_grad:
                raise unaveraged(name)
        for bucket, task in zip(buckets, step.collect(), strict=True):
            bucket.task = task
        if self._clip_norm is not None:
            self._scale = self._start_norm(buckets, self._clip_norm)
        step.send_means()
        for parameter in self._parameters():
            parameter.grad = None
        self._open, self._started, self._left_by_backward = None, [], []
        self._pending = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        return True

    def _are_changed(self) -> bool:
        """Return whether gradients were written to since the backward pass."""
        for parameter, gradient, version in self._left_by_backward:
            if parameter.grad is not gradient or version_of(parameter.grad) != version:
                return True
        for bucket in self._started:
            # A GradScaler's operator does not count versions, but scales all: any nonzero gradient shows it.
            for parameter, sent in sorted(bucket.gradients(), key=lambda pair: pair[1].numel()):
                if sent.any():
                    now = parameter.grad
                    if now is None or not torch.allclose(now, sent, rtol=0, atol=0, equal_nan=True):
                        return True
                    break
        return False

    def _parameters(self) -> Iterator[nn.Parameter]:
        for deferred in self._optimizers:
            yield from deferred.parameters()

    def _start_norm(self, buckets: Sequence[PendingBucket], clip_norm: float) -> Callable[[], torch.Tensor]:
        """Send the sum of squares of the means that this process has computed, before the last means.

        Return a function that waits for the sum over all processes, and returns the scale of the means.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self.engine.transport.data_device)
        for bucket in buckets:
            task = cast(Task, bucket.task)
            if isinstance(task.request, AllGather):  # otherwise the bucket is empty
                plan, rank = cast(QuantizePlan, bucket.state.plan), self.engine.transport.rank
                squares += plan.squared_norm(task.request.tensor, rank, task.answers).to(squares.device)
        flat = squares.view(1)
        work = self.engine.wire.start(Message("all_reduce", flat, flat, "the norm", "sum"))

        @cache  # needed for each bucket
        def scale() -> torch.Tensor:
            work.wait()
            return (clip_norm / (flat.sqrt() + 1e-6)).clamp(max=1.0)

        return scale

    # The next forward pass.

    def _step_if_pending(self, parameter: nn.Parameter | None) -> None:
        if parameter is None or parameter not in self._pending:
            return
        bucket = self._pending[parameter]
        if self._is_stepping:
            raise StepError(
                "an optimizer's step hook read parameters whose step is still pending; remove the hook"
            )
        # After a failure, every later read must raise too: the mean may have arrived in part.
        if self._failure is not None:
            raise StepError(
                "the last step's means did not reach all parameters; call abandon() and load a checkpoint, "
                "on all processes"
            ) from self._failure
        for deferred in self._optimizers:
            deferred.check_called()
        self._is_stepping = True
        try:
            self._apply(bucket)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._is_stepping = False
        for stepped in bucket.parameters:
            self._pending.pop(stepped)
        if not self._pending:
            bucket.step.end()
            for deferred in self._optimizers:
                deferred.is_deferred = False
            self._scale = None

    @torch.no_grad()
    @torch.inference_mode(False)
    def _apply(self, bucket: PendingBucket) -> None:
        bucket.step.take(cast(Task, bucket.task))
        if self._scale is not None:
            bucket.mean.mul_(self._scale().to(bucket.mean))
        for deferred in self._optimizers:
            deferred.step(dict(bucket.gradients()))

    def flush(self) -> None:
        """Step all pending parameters."""
        for parameter in list(self._pending):
            self._step_if_pending(parameter)

    def remove_hooks(self) -> None:
        """Restore the optimizer and the modules."""
        self.flush()
        self._installed.close()
        self.engine.settle = lambda: None  # it would keep this adapter until garbage is collected


class OverlappedSync(GradientSync):
    """The handle of `overlap_forward`. Its methods step all pending parameters first (`Engine.settle`)."""

    def __init__(self, adapter: ForwardAdapter, detach: Any) -> None:
        super().__init__(adapter.engine, detach)
        self._adapter = adapter

    def flush(self) -> None:
        """Step all pending parameters; call it before you read one other than through its module.

        Sends nothing, so processes need not call it together. Blocks until the means have arrived.
        """
        self._adapter.flush()

    def abandon(self) -> None:
        self._adapter.forget()

    @contextmanager
    def dry(self) -> Iterator[Callable[[], None]]:
        with super().dry() as keep:
            try:
                yield keep
            except BaseException:
                # Pending parameters are stepped in any case, and that must not count later. If they can't be,
                # the block's own error says why.
                with suppress(Exception):
                    self.flush()
                raise
            self.flush()

    def use(self, algorithm: Algorithm) -> None:
        check_algorithm(algorithm)
        super().use(algorithm)
