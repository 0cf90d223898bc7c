"""PowerSGD's hooks with their state."""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

import copy
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.amp.grad_scaler import GradScaler
from torch.futures import Future
from typing_extensions import Unpack

from thinwire.algorithms import BatchedPowerSGD, Memory, PowerSGD
from thinwire.algorithms.exact import WireDtype
from thinwire.algorithms.lowrank.config import ELSEWHERE, LowRank, translated
from thinwire.checks import number, true_or_false, whole_count
from thinwire.errors import ConfigError, StateError
from thinwire.hooks.stateless import HookState, checked_state
from thinwire.plan import Plan
from thinwire.sync import Settings, engine_of
from thinwire.sync.settings import StepOptions
from thinwire.sync.state import SavedState, pack, read_state, tensors_to_save, updated
from thinwire.sync.stats import Stats
from thinwire.torch_private import not_compiled

logger = logging.getLogger(__name__)


class HookOptions(StepOptions, total=False):
    """Options of `thinwire.attach` that torch's state does not have."""

    grad_scaler: GradScaler | Callable[[], float] | None


# Every other public name is refused: as in torch, whose state has slots, no name may be set without effect.
SETTABLE = (
    "process_group",
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
    "iter",
)


def _setting(name: str) -> property:
    """Return a property to read and set a setting of the algorithm by torch's name."""
    return property(lambda state: state._get(name), lambda state, value: state._set(name, value))


class PowerSGDState(HookState):
    """Settings and memory of `powerSGD_hook` or `batched_powerSGD_hook` on one model.

    Memory is kept by parameter, so compression may start at step 0. At the first step the state finds the
    model on which it is registered, and so the parameters' names; if your own hook calls it, the DDP model
    that holds the parameters.

    Args:
        process_group: The model's process group, None for the default one.
        matrix_approximation_rank: Matrix rank of the factors.
        start_powerSGD_iter: Steps at the start that average uncompressed gradients. With the default, a run
            of fewer than 1 000 steps never compresses; `stats()` shows it.
        min_compression_rate: A matrix is compressed only if that shrinks it by more than this factor.
        use_error_feedback: Add to each gradient what earlier steps did not transmit.
        warm_start: Start each power iteration from the last step's factor.
        orthogonalization_epsilon: Accepted but not used: Thinwire's orthonormalisation does not need it.
        random_seed: The seed of the random factors, the same on all processes.
        compression_stats_logging_frequency: The statistics are logged at level INFO every this many steps.
        batch_tensors_with_same_shape: Accepted but not used: matrices are always batched where that helps.
        options: Not in torch: `grad_scaler`, `host_check`, `on_nonfinite` and `machines`, by name, as in
            `thinwire.attach`. Without `grad_scaler` the error is in units of the scaled loss, as in torch's
            state; without `machines` each process sends by itself.

    `matrix_approximation_rank`, `start_powerSGD_iter`, `min_compression_rate`, `use_error_feedback` and
    `warm_start` can be set between steps, to the same value on every process. They take effect from the next
    step on, and the residual is kept. `compression_stats_logging_frequency` can be set at any time,
    `process_group` and `iter` (where the count of steps begins) before the first step. One state serves one
    hook on one model.

    Raises:
        ConfigError: A setting is of the wrong type or out of range.
        StepError: A setting is set during a backward pass.
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
        **options: Unpack[HookOptions],
    ) -> None:
        if not isinstance(process_group, dist.ProcessGroup | None):
            raise ConfigError(
                f"process_group must be a torch.distributed process group or None, got {process_group!r}"
            )
        self.process_group = process_group
        settings = {
            "matrix_approximation_rank": matrix_approximation_rank,
            "start_powerSGD_iter": start_powerSGD_iter,
            "min_compression_rate": min_compression_rate,
            "use_error_feedback": use_error_feedback,
            "warm_start": warm_start,
            "random_seed": random_seed,
        }
        # Keyed by the algorithm's names; torch's names are properties.
        self._settings = translated(settings)
        self._names_given = {ELSEWHERE.get(name, name): name for name in settings}
        epsilon, frequency = orthogonalization_epsilon, compression_stats_logging_frequency
        self.orthogonalization_epsilon = number("orthogonalization_epsilon", epsilon, minimum=0)
        self.compression_stats_logging_frequency = whole_count(
            "compression_stats_logging_frequency", frequency, minimum=0
        )
        self.batch_tensors_with_same_shape = true_or_false(
            "batch_tensors_with_same_shape", batch_tensors_with_same_shape
        )
        # Stored as given, because a state may be pickled before its first use.
        self._options: dict[str, Any] = dict(options)
        self._machines = self._options.pop("machines", False)
        Settings.of(**self._options)  # only to be checked
        self._loaded: dict[str, Any] | None = None
        self._strict = True

    matrix_approximation_rank = _setting("matrix_approximation_rank")
    start_powerSGD_iter = _setting("start_powerSGD_iter")
    min_compression_rate = _setting("min_compression_rate")
    use_error_feedback = _setting("use_error_feedback")
    warm_start = _setting("warm_start")

    def _get(self, name: str) -> Any:
        # Read from the algorithm in use; if `sync.use` switched to one without this setting, the last known.
        ours = ELSEWHERE.get(name, name)
        in_use = None if self._adapter is None else self._adapter.sync.algorithm
        return getattr(in_use, ours, self._settings[ours])

    def _set(self, name: str, value: object) -> None:
        change = translated({name: value})
        if self._adapter is not None:
            in_use = self._adapter.sync.algorithm
            if not isinstance(in_use, LowRank):
                raise ConfigError(
                    f"{name} can't be set: sync.use() has replaced PowerSGD by {in_use}; switch with "
                    "sync.use() again"
                )
            algorithm = replace(in_use, **change)
            # Only if it changes: after `use`, the next step compares all processes.
            if algorithm != in_use:
                self._adapter.sync.use(algorithm)
        # Last, so that a refused change leaves the settings as they were.
        self._settings = self._settings | change  # a new dict: a copied state shares the old one

    @property
    def iter(self) -> int:
        """Committed steps so far; below `start_powerSGD_iter`, gradients are sent uncompressed."""
        if self._adapter is None:
            return int((self._loaded or {"step": 0})["step"])
        counts = self._adapter.engine.reporter.counts()
        return counts.steps - counts.nonfinite_steps

    @iter.setter
    def iter(self, value: int) -> None:
        step = whole_count("iter", value, minimum=0)
        if self._adapter is not None:
            raise ConfigError(
                "iter can't be set after the first step, where it counts the steps; set start_powerSGD_iter "
                "to start compression earlier or later"
            )
        self._loaded = self.state_dict() | {"step": step}

    def __setattr__(self, name: str, value: object) -> None:
        if not (name.startswith("_") or name in SETTABLE):
            raise AttributeError(
                f"{name} can't be set on a PowerSGDState; its settings have the names of its arguments, its "
                "memory is in state_dict()"
            )
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"a PowerSGDState has no {name}; its memory is in state_dict(), its statistics are in stats()"
            )

    def __getstate__(self) -> dict[str, Any]:
        # An unused state may be pickled, to send it to the processes that will use it.
        if self._adapter is not None:
            raise StateError("a PowerSGDState in use can't be pickled; save its state_dict() instead")
        return self.__dict__

    @property
    def plan(self) -> Plan:
        """How each parameter is sent; empty before the first step."""
        return Plan(()) if self._adapter is None else self._adapter.sync.plan

    def stats(self) -> Stats:
        """Return the statistics so far; see `thinwire.Stats`."""
        return Stats() if self._adapter is None else self._adapter.sync.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return the memory, the same on every process. Collective; see `GradientSync.state_dict`."""
        if self._adapter is not None:
            return self._adapter.sync.state_dict()
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        # An empty state: a checkpoint before the first step has the same entries as a later one.
        algorithm = PowerSGD(**self._settings)
        return pack(SavedState(repr(algorithm), 0, 0, {}, tensors_to_save(algorithm, Memory(), {})))

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """See `GradientSync.load_state_dict`; a state of a different model is refused at the first step."""
        if self._adapter is not None:
            self._adapter.sync.load_state_dict(state, strict=strict)
        else:
            # Check what can be checked without a model; the first step checks the rest.
            read_state(state)
            self._loaded, self._strict = copy.deepcopy(dict(updated(state))), strict

    def abandon(self) -> None:
        """Drop a step that an exception in the backward pass has ended, so that the state can be saved."""
        if self._adapter is not None:
            self._adapter.sync.abandon()

    def algorithm(
        self, kind: type[PowerSGD] | type[BatchedPowerSGD], wire_dtype: WireDtype | None = None
    ) -> PowerSGD | BatchedPowerSGD:
        """Return the settings as an algorithm, for `thinwire.attach`; a wrapper gives `wire_dtype`."""
        return kind(**self._settings, wire_dtype=wire_dtype)

    def run(
        self, kind: type[PowerSGD] | type[BatchedPowerSGD], wire_dtype: WireDtype | None, bucket: GradBucket
    ) -> Future[torch.Tensor]:
        """Average a bucket for a hook."""
        adapter = self._adapter
        if adapter is None:
            settings = Settings.of(**self._options, names_given=self._names_given)
            adapter = self._new_adapter(self.algorithm(kind, wire_dtype), settings, bucket)
            if self._loaded is not None:
                adapter.sync.load_state_dict(self._loaded, strict=self._strict)
                # Only now: if making the adapter fails, the loaded state is kept for a second try.
                self._loaded = None
            # A cycle would keep the residual of a deleted model until garbage is collected.
            adapter.engine.reporter.observers.append(partial(PowerSGDState._log, weakref.proxy(self)))
        used_with = kind.__name__ if wire_dtype is None else f"{kind.__name__} in {wire_dtype}"
        return self._average(adapter, used_with, bucket)

    def _log(self, committed: bool) -> None:
        engine = engine_of(self)
        # Statistics cost norms and a host synchronisation, so compute them only if they are logged.
        every = max(1, self.compression_stats_logging_frequency)
        if logger.isEnabledFor(logging.INFO) and engine.steps % every == 0:
            stats = engine.reporter.stats()
            logger.info("step %d: compression ratio %.1f, %r", stats.steps, stats.compression_ratio, stats)


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average by PowerSGD, layer by layer; see `thinwire.PowerSGD`.

    Raises:
        ConfigError: The state is of a different kind, or was used with a different hook or model.
        ThinwireError: See `DDPAdapter.run`.
    """
    return low_rank(PowerSGD, state, bucket, None)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average each bucket as one square matrix; see `thinwire.algorithms.BatchedPowerSGD`."""
    return low_rank(BatchedPowerSGD, state, bucket, None)


@not_compiled
def low_rank(
    kind: type[PowerSGD] | type[BatchedPowerSGD], state: object, bucket: GradBucket, wire: WireDtype | None
) -> Future[torch.Tensor]:
    """Average as the two hooks do, with messages in the `wire` dtype if given."""
    # torch's wrapper casts the input gradients; we cast the factors, and the residual keeps the rounding.
    return checked_state(PowerSGDState, state).run(kind, wire, bucket)
