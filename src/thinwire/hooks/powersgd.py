"""PowerSGD's hooks with their state."""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.amp.grad_scaler import GradScaler
from torch.futures import Future

from thinwire.adapters.ddp import DDPAdapter, adapter_of_hook
from thinwire.adapters.ddp_model import dense_buffer
from thinwire.algorithms import BatchedPowerSGD, Memory, PowerSGD
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.exact import WireDtype
from thinwire.algorithms.lowrank.config import ELSEWHERE, LowRank, LowRankRoute, translated
from thinwire.algorithms.lowrank.slots import FACTOR
from thinwire.checks import number, true_or_false, whole_count
from thinwire.comm import Layout, ProcessGroupTransport
from thinwire.errors import ConfigError, StateError
from thinwire.hooks.stateless import checked_state
from thinwire.plan import Plan
from thinwire.sync import Engine, GradientSync, Settings, attached
from thinwire.sync.settings import HostCheck, OnNonfinite
from thinwire.sync.state import SavedState, pack, read_state, tensors_to_save
from thinwire.sync.stats import Stats

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

# The remedy for setting an attribute of torch's.
INSTEAD = {
    "orthogonalization_epsilon": "Thinwire's orthonormalisation is safe without, and does not use it",
    "batch_tensors_with_same_shape": "what gains from batching always is batched",
    "rng": "give random_seed= when the state is made",
    "iter": "it is counted; load_state_dict() goes on from a saved step, and start_powerSGD_iter says from "
    "which step on gradients are compressed",
    "error_dict": "load_state_dict() loads the residual, and switching use_error_feedback off sends it",
    "p_memory_dict": "left factors are not kept",
    "q_memory_dict": "load_state_dict() loads the factors",
    "next_stats_report": "it follows from compression_stats_logging_frequency",
}


class StepOptions(TypedDict, total=False):
    """Options that `thinwire.attach` takes, and torch's state does not."""

    grad_scaler: GradScaler | Callable[[], float] | None
    host_check: HostCheck
    on_nonfinite: OnNonfinite
    machines: Layout


def _setting(name: str, doc: str) -> property:
    """Return one of torch's attributes that is a setting of the algorithm."""
    ours = ELSEWHERE.get(name, name)
    return property(lambda state: state._get(ours), lambda state, value: state._change(name, value), doc=doc)


class PowerSGDState:
    """Settings and memory of `powerSGD_hook` or `batched_powerSGD_hook` on one model.

    Memory is kept by parameter, so compression may start at step 0. The state finds the model on which
    it is registered at the first step, and with it the names of the parameters. If it can't (because
    your own hook calls it), they are called by their position from the model's end, which is
    the same in every run only if the hook is registered before the first backward pass.

    Args:
        process_group: The model's process group, None for the default one.
        matrix_approximation_rank: Matrix rank of the factors.
        start_powerSGD_iter: Steps at the start that average uncompressed gradients. With the default, a run
            of fewer than 1 000 steps never compresses; `stats()` shows it.
        min_compression_rate: A matrix is compressed only if that shrinks it more than this.
        use_error_feedback: Add to each gradient what earlier steps did not transmit.
        warm_start: Start each power iteration from the last step's factor.
        orthogonalization_epsilon: Accepted and not used: Thinwire's orthonormalisation is safe without.
        random_seed: Of the random factors, the same on all processes.
        compression_stats_logging_frequency: Steps from one log of the statistics, at level INFO, to the
            next.
        batch_tensors_with_same_shape: Accepted and not used: what gains from batching always is batched.
        options: Not torch's: `grad_scaler`, `host_check`, `on_nonfinite` and `machines`, all by name, as of
            `thinwire.attach`. Without `grad_scaler` the error is in units of the scaled loss, as in torch's
            own; without `machines` each process sends by itself.

    torch's attributes can all be read. `matrix_approximation_rank`, `start_powerSGD_iter`,
    `min_compression_rate`, `use_error_feedback` and `warm_start` can be set, between steps and on every
    process alike: they hold from the next step on, and the residual is kept.
    `compression_stats_logging_frequency` can be set at any time, `process_group` before the first step. One
    state serves one hook on one model.

    Raises:
        ConfigError: A setting is of the wrong type or out of range; or an attribute is set that can't be.
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
        **options: "Unpack[StepOptions]",
    ) -> None:
        # Before what follows: setters look at it. A hook can know its model from the first step on only.
        self._adapter: DDPAdapter | None = None
        self._used_with = ""
        self.process_group = process_group
        settings = {
            "matrix_approximation_rank": matrix_approximation_rank,
            "start_powerSGD_iter": start_powerSGD_iter,
            "min_compression_rate": min_compression_rate,
            "use_error_feedback": use_error_feedback,
            "warm_start": warm_start,
            "random_seed": random_seed,
        }
        # Kept by the algorithm's names; torch's names are properties.
        self._settings = translated(settings)
        self._typed = {ELSEWHERE.get(name, name): name for name in settings}
        self._unused: dict[str, Any] = {
            "orthogonalization_epsilon": number(
                "orthogonalization_epsilon", orthogonalization_epsilon, minimum=0
            ),
            "batch_tensors_with_same_shape": true_or_false(
                "batch_tensors_with_same_shape", batch_tensors_with_same_shape
            ),
        }
        self.compression_stats_logging_frequency = compression_stats_logging_frequency
        # Kept as given, because a state may be pickled before its first use.
        self._steps: dict[str, Any] = dict(options)
        self._machines = self._steps.pop("machines", False)
        Settings.of(**self._steps)  # only to be checked
        self._loaded: dict[str, Any] | None = None
        self._strict = True
        self._numel_before, self._numel_after = 0, 0
        self._counted: tuple[object, int, int] = (None, 0, 0)

    matrix_approximation_rank = _setting(
        "matrix_approximation_rank", "Matrix rank of the factors; may be set."
    )
    start_powerSGD_iter = _setting(
        "start_powerSGD_iter", "Committed steps that average uncompressed gradients; may be set."
    )
    min_compression_rate = _setting(
        "min_compression_rate", "A matrix is compressed only if that shrinks it more than this; may be set."
    )
    use_error_feedback = _setting("use_error_feedback", "Whether errors are fed back; may be set.")
    warm_start = _setting("warm_start", "Whether a step starts from the last one's factor; may be set.")

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse what would have no effect, such as a mistyped setting: torch's own state takes any name."""
        if not name.startswith("_") and getattr(getattr(type(self), name, None), "fset", None) is None:
            why = INSTEAD.get(name, f"it has no setting {name!r}; see its constructor for those there are")
            raise ConfigError(f"{name} of a PowerSGDState can't be set: {why}")
        object.__setattr__(self, name, value)

    def _get(self, name: str) -> Any:
        """Return a setting of the algorithm in use, or as given last if that one has no such setting."""
        # `sync.use` may have switched to an algorithm that the settings do not describe.
        in_use = None if self._adapter is None else self._adapter.sync.algorithm
        return getattr(in_use, name, self._settings[name])

    def _change(self, name: str, value: object) -> None:
        """Set one, by torch's name, from the next step on."""
        change = translated({name: value})
        if self._adapter is not None:
            in_use = self._adapter.sync.algorithm
            # Other algorithms have no such setting, and `sync.use` says what they have.
            if not isinstance(in_use, LowRank):
                raise ConfigError(
                    f"{name} can't be set: sync.use() has put {in_use} in place of PowerSGD; switch with "
                    "sync.use() again"
                )
            algorithm = replace(in_use, **change)
            # Only a change: after `use` the next step compares all processes.
            if algorithm != in_use:
                self._adapter.sync.use(algorithm)
        # Last, so that a change that is refused leaves the settings as they were.
        self._settings |= change

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """As given; may be set before the first step."""
        return self._process_group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        if not isinstance(group, dist.ProcessGroup | None):
            raise ConfigError(
                f"process_group must be a torch.distributed process group or None, got {group!r}"
            )
        if self._adapter is not None:
            raise ConfigError("process_group can't be set after the first step; make a new state")
        self._process_group = group

    @property
    def compression_stats_logging_frequency(self) -> int:
        """Steps from one log of the statistics to the next; may be set."""
        return self._log_every_steps

    @compression_stats_logging_frequency.setter
    def compression_stats_logging_frequency(self, steps: int) -> None:
        self._log_every_steps = max(1, whole_count("compression_stats_logging_frequency", steps, minimum=0))

    @property
    def next_stats_report(self) -> int:
        """The step after which the statistics are logged next."""
        steps = 0 if self._adapter is None else self._adapter.sync.steps
        return (steps // self._log_every_steps + 1) * self._log_every_steps

    orthogonalization_epsilon = property(lambda state: state._unused["orthogonalization_epsilon"])
    batch_tensors_with_same_shape = property(lambda state: state._unused["batch_tensors_with_same_shape"])

    @property
    def rng(self) -> Any:
        """A new NumPy generator of `random_seed`; torch draws from its own, Thinwire from none."""
        import numpy as np  # noqa: PLC0415 (torch's state needs it, Thinwire does not)

        return np.random.RandomState(self._get("seed"))

    @property
    def iter(self) -> int:
        """Committed steps so far; below `start_powerSGD_iter`, gradients travel uncompressed."""
        if self._adapter is None:
            return 0 if self._loaded is None else int(self._loaded["step"])
        counts = self._adapter.engine.reporter.counts()
        return counts.steps - counts.nonfinite_steps

    @property
    def error_dict(self) -> Mapping[str, torch.Tensor]:
        """This process's residual, by parameter name, torch's by bucket: fp32, flat, unscaled; to read."""
        return MappingProxyType({} if self._adapter is None else self._adapter.engine.state.memory[ERROR])

    @property
    def q_memory_dict(self) -> Mapping[str, torch.Tensor]:
        """The last mean right factors, by name: fp32, shape (matrix rank, columns); to read."""
        return MappingProxyType({} if self._adapter is None else self._adapter.engine.state.memory[FACTOR])

    @property
    def p_memory_dict(self) -> Mapping[str, torch.Tensor]:
        """Nothing: left factors are not kept from step to step."""
        return MappingProxyType({})

    @property
    def total_numel_before_compression(self) -> int:
        """Elements of the gradients of all steps past the warm-up."""
        return self._numel_before

    @property
    def total_numel_after_compression(self) -> int:
        """Elements that were sent for them."""
        return self._numel_after

    def compression_stats(self) -> tuple[float, int, int]:
        """Return elements before over after compression, before, and after, since the warm-up.

        (0, 0, 0) until then. `stats()` has the bytes of all steps.
        """
        rate = self._numel_before / self._numel_after if self._numel_after else 0
        return rate, self._numel_before, self._numel_after

    def __deepcopy__(self, memo: dict[int, object]) -> "PowerSGDState":
        """Return a state with the same settings and no steps: a copied model has no hook."""
        copied = PowerSGDState(self.process_group, **self._unused, **self._steps, machines=self._machines)
        copied._log_every_steps = self._log_every_steps
        # Copy what is in use now: `sync.use` may have changed the settings.
        copied._settings = {name: self._get(name) for name in self._settings}
        copied._loaded, copied._strict = copy.deepcopy(self._loaded, memo), self._strict
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle: an unused state may be sent to the processes that will use it."""
        if self._adapter is not None:
            raise StateError("a PowerSGDState in use can't be pickled; save its state_dict() instead")
        return self.__dict__

    @property
    def plan(self) -> Plan:
        """Which parameter travels how; empty before the first step."""
        return Plan(()) if self._adapter is None else self._adapter.sync.plan

    @property
    def sync(self) -> GradientSync:
        """The handle that averages, from the first step on; `sync.use(…)` switches the next step's algorithm.

        Raises:
            AttachError: There was no step yet.
        """
        return attached(
            None if self._adapter is None else self._adapter.sync,
            "this PowerSGDState has not been used yet; it attaches itself in the first step",
        )

    def stats(self) -> Stats:
        """Return the statistics so far; see `thinwire.Stats`."""
        return Stats() if self._adapter is None else self._adapter.sync.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return the memory, the same on every process. Collective; see `GradientSync.state_dict`."""
        if self._adapter is not None:
            return self._adapter.sync.state_dict()
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        # An empty one: a checkpoint of before the first step has what a later one has.
        algorithm = PowerSGD(**self._settings)
        return pack(SavedState(repr(algorithm), 0, 0, {}, tensors_to_save(algorithm, Memory(), {}, {})))

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """See `GradientSync.load_state_dict`: a state of a different model shows at the first step."""
        if self._adapter is not None:
            self._adapter.sync.load_state_dict(state, strict=strict)
        else:
            # Check what can be checked without a model; the first step shows the rest.
            read_state(state)
            self._loaded, self._strict = copy.deepcopy(dict(state)), strict

    def abandon(self) -> None:
        """Forget a step that an exception in the backward pass has ended, so that the state can be saved."""
        if self._adapter is not None:
            self._adapter.sync.abandon()

    def algorithm(
        self, kind: type[PowerSGD] | type[BatchedPowerSGD], wire_dtype: WireDtype | None = None
    ) -> PowerSGD | BatchedPowerSGD:
        """Return the settings as an algorithm, for `thinwire.attach`.

        Args:
            kind: PowerSGD for `powerSGD_hook`, BatchedPowerSGD for `batched_powerSGD_hook`.
            wire_dtype: What `fp16_compress_wrapper` or `bf16_compress_wrapper` would make of the messages.
        """
        return kind(**self._settings, wire_dtype=wire_dtype)

    def run(
        self, kind: type[PowerSGD] | type[BatchedPowerSGD], wire_dtype: WireDtype | None, bucket: GradBucket
    ) -> Future[torch.Tensor]:
        """As `DDPAdapter.run`, for a hook, which must always be the same."""
        used_with = kind.__name__ if wire_dtype is None else f"{kind.__name__} in {wire_dtype}"
        if self._adapter is None:
            transport = ProcessGroupTransport(self.process_group, dense_buffer(bucket).device)
            settings = Settings.of(**self._steps, typed=self._typed)
            algorithm = self.algorithm(kind, wire_dtype)
            adapter = adapter_of_hook(self, algorithm, transport, settings, self._machines)
            if self._loaded is not None:
                adapter.sync.load_state_dict(self._loaded, strict=self._strict)
            adapter.engine.reporter.observers.append(partial(self._after_step, adapter.engine))
            # Only now: if the adapter was refused, the state is still there for a second try.
            self._adapter, self._loaded, self._used_with = adapter, None, used_with
        # Under two hooks, buckets of one step could be averaged in two ways.
        if self._used_with != used_with:
            raise ConfigError(
                f"this PowerSGDState has been used with {self._used_with}, now with {used_with}; make one "
                "state for each model and hook, or switch with state.sync.use(…)"
            )
        return self._adapter.run(bucket)

    def _after_step(self, engine: Engine, committed: bool) -> None:
        """Count and log."""
        # The number of steps before this one: `iter` counts it already if it was committed.
        if self.iter - committed >= self._get("warmup_steps"):
            # Count again only if something has changed: it goes through all parameters.
            counted_for = (engine.algorithm, engine.plan)
            if self._counted[0] != counted_for:
                self._counted = (counted_for, *_elements(engine))
            self._numel_before += self._counted[1]
            self._numel_after += self._counted[2]
        # Statistics cost norms and a host synchronisation, so only for those who read them.
        if logger.isEnabledFor(logging.INFO) and engine.steps % self._log_every_steps == 0:
            stats = engine.reporter.stats()
            logger.info("step %d: compression ratio %.1f, %r", stats.steps, stats.compression_ratio, stats)


def _elements(engine: Engine) -> tuple[int, int]:
    """Return a compressed step's elements before and after compression, as torch counts them."""
    plan = engine.plan
    in_buckets = {name for route in plan.routes for name in route.names}
    numel = {spec.name: spec.numel for spec in engine.specs if spec.name in in_buckets}
    after = 0.0
    for route in plan.routes:
        if isinstance(route, LowRankRoute) and route.matrix_shape and route.matrix_rank:
            pairs = getattr(engine.algorithm, "factor_pairs", 1)
            after += route.matrix_rank * sum(route.matrix_shape) * pairs
        else:
            after += sum(numel[name] for name in route.names)
    return sum(numel.values()), int(after)


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average by PowerSGD, layer by layer; see `thinwire.PowerSGD`.

    Args:
        state: Settings and memory.
        bucket: Of DDP.

    Raises:
        ConfigError: The state is of a different kind, or was used with a different hook or model.
        ThinwireError: As of `DDPAdapter.run`.
    """
    return checked_state(PowerSGDState, state).run(PowerSGD, None, bucket)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """As `powerSGD_hook`, on each bucket as one square matrix; see `thinwire.algorithms.BatchedPowerSGD`."""
    return checked_state(PowerSGDState, state).run(BatchedPowerSGD, None, bucket)
