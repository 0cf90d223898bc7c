"""PyTorch's DDP communication hooks, with torch's names, signatures and defaults, on Thinwire's core.

Change `torch.distributed.algorithms.ddp_comm_hooks` to `thinwire.hooks` and register them as before:

    state = PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=100)
    ddp_model.register_comm_hook(state, powerSGD_hook)

What behaves differently is told in docs/powersgd.md.
"""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

import copy
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.amp.grad_scaler import GradScaler
from torch.futures import Future
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire.algorithms import AllReduce, BatchedPowerSGD, Bucket, Cast, Memory, PowerSGD
from thinwire.algorithms.cast import WireDtype
from thinwire.channel import ProcessGroupChannel
from thinwire.checks import number, true_or_false, whole_number
from thinwire.contributors import divide_by_contributors
from thinwire.ddp import BucketFront, dense_buffer, front_of, models_where
from thinwire.errors import AttachError, ConfigError, StateError
from thinwire.loss_scale import loss_scale_of
from thinwire.plan import Plan
from thinwire.post_local_sgd import PostLocalSGDState, post_localSGD_hook
from thinwire.state import checked_state, packed_state
from thinwire.stats import Stats
from thinwire.sync import GradientSync
from thinwire.version import __version__

__all__ = [
    "PostLocalSGDState",
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "post_localSGD_hook",
    "powerSGD_hook",
]

logger = logging.getLogger(__name__)

Hook: TypeAlias = Callable[[Any, GradBucket], Future[torch.Tensor]]


class PowerSGDState:
    """Settings and memory of `powerSGD_hook` or `batched_powerSGD_hook` on one model.

    Memory is kept by parameter, so compression may start at step 0. The state finds the model on which
    it is registered at the first step, and with it the names of the parameters. Where it can't (it is
    used inside a hook of your own), they are called by their position from the model's end, which is
    the same in every run only if the hook is registered before the first backward pass.

    Args:
        process_group: The model's process group, None for the default one.
        matrix_approximation_rank: Matrix rank of the factors.
        start_powerSGD_iter: Steps at the start that average whole gradients. With the default, a run
            of fewer than 1 000 steps never compresses; `stats()` shows it.
        min_compression_rate: A matrix is compressed only if that shrinks it more than this.
        use_error_feedback: Add to each gradient what earlier steps did not transmit.
        warm_start: Start each power iteration from the last step's factor.
        orthogonalization_epsilon: Accepted and not used: Thinwire's orthonormalisation is safe without.
        random_seed: Of the random factors, the same on all processes.
        compression_stats_logging_frequency: Every so many steps the statistics are logged, at level INFO.
        batch_tensors_with_same_shape: Accepted and not used: what gains from batching always is batched.
        grad_scaler: Not torch's: what scales the loss, so that a change of scale changes no result; see
            `thinwire.attach`. Without it the error is in units of the scaled loss, as in torch's own.

    Raises:
        ConfigError: A setting is of the wrong type or out of range.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        *,
        grad_scaler: GradScaler | Callable[[], float] | None = None,
    ) -> None:
        number("orthogonalization_epsilon", orthogonalization_epsilon, least=0)
        true_or_false("batch_tensors_with_same_shape", batch_tensors_with_same_shape)
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise ConfigError(
                f"process_group must be a torch.distributed process group or None, got {process_group!r}"
            )
        self.process_group = process_group
        self._settings: dict[str, Any] = {
            "matrix_rank": matrix_approximation_rank,
            "warmup_steps": start_powerSGD_iter,
            "min_compression_ratio": min_compression_rate,
            "error_feedback": use_error_feedback,
            "warm_start": warm_start,
            "seed": random_seed,
        }
        PowerSGD(**self._settings)
        self._log_every_steps = whole_number(
            "compression_stats_logging_frequency", compression_stats_logging_frequency, least=1
        )
        loss_scale_of(grad_scaler)
        self._grad_scaler = grad_scaler
        self._front: BucketFront | None = None
        self._loaded: dict[str, Any] | None = None
        self._strict = True

    def __deepcopy__(self, memo: dict[int, object]) -> "PowerSGDState":
        """A state with the same settings. What it has done stays behind: a copied model has no hook."""
        copied = PowerSGDState(self.process_group, grad_scaler=self._grad_scaler)
        copied._settings = dict(self._settings)
        copied._log_every_steps = self._log_every_steps
        copied._loaded, copied._strict = copy.deepcopy(self._loaded, memo), self._strict
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Before its first use it may be sent to the processes that will use it."""
        if self._front is not None:
            raise StateError("a PowerSGDState in use can't be pickled; save its state_dict() instead")
        return self.__dict__

    @property
    def plan(self) -> Plan:
        """Which parameter travels how; empty before the first step."""
        return Plan(()) if self._front is None else self._front.sync.plan

    @property
    def sync(self) -> GradientSync:
        """What averages; known from the first step on.

        Raises:
            AttachError: There was no step yet.
        """
        if self._front is None:
            raise AttachError(
                "this PowerSGDState has not been used yet; it attaches itself in the first step"
            )
        return self._front.sync

    def stats(self) -> Stats:
        """What has been done so far; see `thinwire.Stats`."""
        return Stats() if self._front is None else self._front.sync.stats()

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, the same on every process. Collective; see `GradientSync.state_dict`."""
        if self._front is not None:
            return self._front.sync.state_dict()
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        return packed_state(PowerSGD(**self._settings), Memory(), {}, {}, {}, skipped_steps=0)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue from a saved state; see `GradientSync.load_state_dict`.

        Raises:
            StateError: It is not such a state. That it belongs to another model shows at the first step.
        """
        if self._front is not None:
            self._front.sync.load_state_dict(state, strict=strict)
        else:
            checked_state(state, specs=None)
            self._loaded, self._strict = copy.deepcopy(dict(state)), strict

    def abandon(self) -> None:
        """Forget a step that an exception in the backward pass has ended, so that the state can be saved."""
        if self._front is not None:
            self._front.sync.abandon()

    def algorithm(
        self, kind: type[PowerSGD] | type[BatchedPowerSGD], wire_dtype: WireDtype | None = None
    ) -> PowerSGD | BatchedPowerSGD:
        """The settings as an algorithm, for `thinwire.attach`.

        Args:
            kind: PowerSGD for `powerSGD_hook`, BatchedPowerSGD for `batched_powerSGD_hook`.
            wire_dtype: What `fp16_compress_wrapper` or `bf16_compress_wrapper` would make of the messages.
        """
        return kind(**self._settings, wire_dtype=wire_dtype)

    def run(
        self,
        kind: type[PowerSGD] | type[BatchedPowerSGD],
        wire_dtype: WireDtype | None,
        bucket: GradBucket,
    ) -> Future[torch.Tensor]:
        """For hooks: exchange a bucket.

        Raises:
            ConfigError: The state has been used with another hook, wrapper or model.
            StateError: The loaded state is of another model.
        """
        algorithm = self.algorithm(kind, wire_dtype)
        if self._front is None:
            self._front = self._new_front(algorithm, bucket.buffer().device)
            self._loaded = None
        if self._front.sync.algorithm != algorithm:
            raise ConfigError(
                f"this PowerSGDState has been used with {self._front.sync.algorithm}, now with {algorithm}; "
                "make one state for each model and hook"
            )
        future = self._front.run(bucket)
        if bucket.is_last():
            self._log(self._front.sync)
        return future

    def _new_front(self, algorithm: PowerSGD | BatchedPowerSGD, device: torch.device) -> BucketFront:
        models = models_where(lambda state: state is self)
        if len(models) > 1:
            raise ConfigError(
                f"this PowerSGDState is registered on {len(models)} models; make one state for each model"
            )
        channel = ProcessGroupChannel(self.process_group, device)
        loss_scale = loss_scale_of(self._grad_scaler)
        if models:
            front = front_of(models[0], algorithm, channel, loss_scale)
        else:
            sync = GradientSync(algorithm, channel, loss_scale=loss_scale, may_be_unused=True)
            front = BucketFront(sync)
        if self._loaded is not None:
            front.sync.load_state_dict(self._loaded, strict=self._strict)
        return front

    def _log(self, sync: GradientSync) -> None:
        if logger.isEnabledFor(logging.INFO) and sync.steps % self._log_every_steps == 0:
            stats = sync.stats()
            logger.info("step %d: compression ratio %.1f, %s", stats.steps, stats.compression_ratio, stats)


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """PowerSGD layer by layer; see `thinwire.PowerSGD`."""
    return _checked(state).run(PowerSGD, None, bucket)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """PowerSGD on each bucket as one square matrix; see `thinwire.algorithms.BatchedPowerSGD`."""
    return _checked(state).run(BatchedPowerSGD, None, bucket)


def _checked(state: object) -> PowerSGDState:
    if not isinstance(state, PowerSGDState):
        raise ConfigError(
            "PowerSGD's hooks need a thinwire.hooks.PowerSGDState, got "
            f"{type(state).__module__}.{type(state).__name__}"
        )
    return state


def allreduce_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average whole gradients, as DDP does without a hook."""
    return _one_round(AllReduce(), process_group, bucket)


def fp16_compress_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average gradients in fp16; see `thinwire.Cast`."""
    return _one_round(Cast("fp16"), process_group, bucket)


def bf16_compress_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average gradients in bf16, on any backend that carries it, Gloo included; see `thinwire.Cast`."""
    return _one_round(Cast("bf16"), process_group, bucket)


# DDP refuses hooks of the usual name unless CUDA and NCCL are there.
bf16_compress_hook.__name__ = "thinwire_bf16_compress_hook"


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """`hook` with its messages in fp16: the factors of PowerSGD, not its memory, which stays fp32.

    Raises:
        ConfigError: Not one of this module's hooks: the messages of another can't be reached.
    """
    return _wrapped(hook, "fp16")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """`hook` with its messages in bf16; see `fp16_compress_wrapper`.

    Raises:
        ConfigError: Not one of this module's hooks.
    """
    return _wrapped(hook, "bf16")


def _wrapped(hook: Hook, wire_dtype: WireDtype) -> Hook:
    if hook is powerSGD_hook or hook is batched_powerSGD_hook:
        kind = PowerSGD if hook is powerSGD_hook else BatchedPowerSGD

        def low_rank_in_16_bits(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
            return _checked(state).run(kind, wire_dtype, bucket)

        return low_rank_in_16_bits
    if hook is allreduce_hook:
        return fp16_compress_hook if wire_dtype == "fp16" else bf16_compress_hook
    raise ConfigError(
        f"expected powerSGD_hook, batched_powerSGD_hook or allreduce_hook of thinwire.hooks, got {hook!r}; "
        "the messages of another hook can't be reached from outside: use torch's own wrapper for it"
    )


def _one_round(
    algorithm: AllReduce | Cast, process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> Future[torch.Tensor]:
    """One message a bucket, which DDP waits for; nothing is kept between steps."""
    flat = dense_buffer(bucket)
    channel = ProcessGroupChannel(process_group, flat.device)
    _agree(algorithm, channel, bucket.parameters())
    divide_by_contributors(bucket.parameters(), flat)
    rounds = algorithm.exchange(Bucket((), flat), Memory())
    message = next(rounds)
    if message is None:
        raise AssertionError(f"{algorithm} sent no message")

    def write_back(done: Future[torch.Tensor]) -> torch.Tensor:
        with suppress(StopIteration):
            rounds.send(done.value())
        return flat

    return channel.average_later(message, f"a bucket of {flat.numel()} gradients").then(write_back)


# By the first parameter of a bucket: gradients in other types would be summed as if they were of one.
_agreed = WeakTensorKeyDictionary()


def _agree(algorithm: AllReduce | Cast, channel: ProcessGroupChannel, parameters: list[torch.Tensor]) -> None:
    """Where a bucket is new to a hook: do all processes use the hook for it?"""
    agreed = (algorithm, channel.group.group_name)
    if parameters and (parameters[0] not in _agreed or _agreed[parameters[0]] != agreed):
        told = {"thinwire": __version__, "algorithm": repr(algorithm), "parameters": str(len(parameters))}
        channel.agree(told, "a bucket's first step")
        _agreed[parameters[0]] = agreed
