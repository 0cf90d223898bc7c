"""Lightning: a strategy that attaches, and a callback that logs and saves.

    from thinwire.integrations.lightning import ThinwireCallback, ThinwireStrategy

    trainer = Trainer(  # of `lightning`, or of `pytorch_lightning` if only that is installed
        strategy=ThinwireStrategy(thinwire.PowerSGD(matrix_rank=4)), callbacks=[ThinwireCallback()], ...
    )

docs/migrating.md says what behaves differently.
"""

from __future__ import annotations

import inspect
import logging
import math
from typing import Any, TypeAlias, cast

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.attach import attach
from thinwire.advice.automatic import Auto
from thinwire.algorithms import Algorithm, PowerSGD
from thinwire.checks import whole_number
from thinwire.comm import Layout
from thinwire.errors import ConfigError, MissingExtraError
from thinwire.hooks import PostLocalSGDState, PowerSGDState
from thinwire.integrations import SAVED_WITHOUT
from thinwire.integrations.all_gather import AllGatherGrad, all_gather_grad
from thinwire.integrations.ddp_hooks import check_period, checked_hook, register_ddp_comm_hook
from thinwire.integrations.local import (
    FollowedSchedule,
    Makes,
    checked_averaging,
    checked_step_options,
    makes_auto,
    makes_elastic,
    new_auto,
    new_local,
    steps_of_others,
)
from thinwire.local_sgd.averager import ModelAverager
from thinwire.sync import GradientSync, attached
from thinwire.sync.settings import HostCheck, OnNonfinite, StepOptions
from thinwire.watch.writers import metrics_of

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.callbacks import StochasticWeightAveraging
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    # The same package under its older name. If both are installed, Trainers of the two don't mix.
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]
        from pytorch_lightning.accelerators import Accelerator  # type: ignore[assignment]
        from pytorch_lightning.callbacks import StochasticWeightAveraging  # type: ignore[assignment]
        from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry  # type: ignore[assignment]
        from pytorch_lightning.trainer.states import TrainerFn  # type: ignore[assignment]
    except ImportError:
        raise MissingExtraError(
            "thinwire.integrations.lightning needs lightning or pytorch_lightning, 2.6 or later: "
            "pip install '.[lightning]' in a clone of Thinwire"
        ) from error

logger = logging.getLogger(__name__)

__all__ = [
    "AllGatherGrad",
    "ThinwireCallback",
    "ThinwireStrategy",
    "all_gather_grad",
    "register_ddp_comm_hook",
]

CHECKPOINT_KEY = "thinwire"

Remembering: TypeAlias = "GradientSync | PowerSGDState | ModelAverager"


class ThinwireStrategy(DDPStrategy):
    """DDP with Thinwire's averaging, on CPUs and GPUs; `strategy="thinwire"` is this with PowerSGD().

    Takes the arguments of `DDPStrategy`, by position or by name, and an algorithm; or instead a hook (see
    `register_ddp_comm_hook`), which `DDPStrategy` silently ignores on CPUs. With `post_localSGD_hook`, models
    are averaged every `model_averaging_period` steps after the state's `start_localSGD_iter`, by torch's
    `PeriodicModelAverager`. See docs/lightning.md.

    On GPUs Lightning builds DDP on one stream and trains on a second one. Torch warns of that
    ("AccumulateGrad node's stream does not match"): it is harmless.

    Args:
        positional: Optionally the algorithm; then the arguments of `DDPStrategy`.
        algorithm: How gradients become their mean; `thinwire.PowerSGD()` if neither it nor a hook is given.
            Or a function that makes a `thinwire.LocalSGD` around the training of a module with one optimizer,
            such as `functools.partial(thinwire.DiLoCo, every_steps=30)`, called as
            `make(model, optimizer, grad_scaler=…)`. Or `thinwire.auto`, alone or in a partial. Or text:
            "4 bits", "PowerSGD(matrix_rank=4)", "auto()".
        host_check: With an algorithm: see `thinwire.attach`, whose `grad_scaler` is the Trainer's own.
        on_nonfinite: With an algorithm: see `thinwire.attach`.
        machines: With an algorithm: see `thinwire.attach`.
        options: Those of `DDPStrategy` and of DDP.

    Attributes:
        algorithm: As given; None with a hook.
        local: The `LocalSGD` around the training, if the algorithm makes one, once the model is wrapped.
        auto: The `Auto` that chooses, if the algorithm is `thinwire.auto`; printing it shows why.

    Raises:
        ConfigError: Settings that exclude each other, would have no effect, or are unknown to `DDPStrategy`
            and DDP.
    """

    def __init__(
        self,
        *positional: Any,
        algorithm: Algorithm | Makes | str | None = None,
        host_check: HostCheck = "auto",
        on_nonfinite: OnNonfinite = "nan",
        machines: Layout = True,
        **options: Any,
    ) -> None:
        # DDPStrategy's own first argument is an accelerator or None: anything else is ours.
        if positional and algorithm is None and not isinstance(positional[0], Accelerator | None):
            algorithm, positional = positional[0], positional[1:]
        averaging = None if algorithm is None else checked_averaging(algorithm)
        # Arguments by DDPStrategy's names, whether given by position or by name.
        arguments = inspect.signature(DDPStrategy.__init__).bind(self, *positional, **options).arguments
        # DDP itself would raise only after the job has started; an algorithm's setting is easily put here.
        of_ddp = inspect.signature(DistributedDataParallel.__init__).parameters
        unknown = [name for name in arguments.get("kwargs", {}) if name not in of_ddp]
        if unknown:
            raise ConfigError(
                f"neither DDPStrategy nor DistributedDataParallel has a setting {unknown[0]!r}; pass an "
                "algorithm's settings to the algorithm: ThinwireStrategy(thinwire.PowerSGD(matrix_rank=4))"
            )
        state, hook = arguments.get("ddp_comm_state"), arguments.get("ddp_comm_hook")
        checked_hook(state, hook, arguments.get("ddp_comm_wrapper"))
        if averaging is not None and hook is not None:
            raise ConfigError("got both an algorithm and a ddp_comm_hook; pass the strategy only one of them")
        self.algorithm = PowerSGD() if averaging is None and hook is None else averaging
        is_attached = isinstance(self.algorithm, Algorithm)
        steps: StepOptions = {"host_check": host_check, "on_nonfinite": on_nonfinite, "machines": machines}
        self._steps = checked_step_options(steps, take_effect=is_attached)
        check_period(state, arguments.get("model_averaging_period"))
        super().__init__(*positional, **options)
        self.local: ModelAverager | None = None
        self.auto: Auto | None = None
        # Enters `local`, which is made before a checkpoint is restored and outlives the training.
        self._averages: _AveragesModels | None = None
        self._sync: GradientSync | None = None
        self._module: torch.nn.Module | None = None

    @property
    def sync(self) -> GradientSync:
        """The handle: it has the plan, statistics and state, and can switch the algorithm.

        Raises:
            AttachError: Training has not begun, or a hook was given instead of an algorithm.
        """
        return attached(
            self._sync,
            "nothing is attached: trainer.fit() attaches when it wraps the model, if the strategy has an "
            "algorithm; with a ddp_comm_hook its state has the statistics",
        )

    @property
    def remembering(self) -> Remembering:
        """The object with memory and statistics: the handle, a `PowerSGDState`, or `local`."""
        state = self._ddp_comm_state
        return self.local or (state if isinstance(state, PowerSGDState) else self.sync)

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        # None for now: if the model can't be attached, the old handle must not be mistaken for a new one.
        before, self._sync = self._sync, None
        self.local, self.auto, self._averages = None, None, None
        super().setup(trainer)
        # Lightning does this itself if it finds torch's own state.
        if isinstance(self._ddp_comm_state, PostLocalSGDState):
            self._enable_model_averaging()
            assert self._model_averager is not None
            # A second fit makes a new averager, which would start its warm-up again.
            self._model_averager.step = self._ddp_comm_state.iter
        if self.algorithm is None:
            return
        assert isinstance(self.model, DistributedDataParallel)  # Lightning has just made it
        if isinstance(self.algorithm, Algorithm):
            self._sync = attach(self.model, self.algorithm, grad_scaler=_scaler_of(self), **self._steps)
        elif len(self.optimizers) != 1:
            raise ConfigError(
                "expected a module with one optimizer, whose steps are counted, got "
                f"{len(self.optimizers)}; with several, enter thinwire.LocalSGD in your own loop, with the "
                "optimizer that steps last"
            )
        elif makes_auto(self.algorithm):
            model, (optimizer,), steps = self.model, self.optimizers, trainer.estimated_stepping_batches
            self.auto = new_auto(self.algorithm, model, optimizer, steps, grad_scaler=_scaler_of(self))
            self._sync = self.auto.sync
        else:
            self._make_local()
            return
        # The same module's next fit continues with the state of the last one.
        if before is not None and self._module is self.model.module:
            # Some parameters may have been frozen since the last fit.
            self._sync.load_state_dict(before.state_dict(), strict=False)
        self._module = self.model.module

    def _make_local(self) -> None:
        assert not isinstance(self.algorithm, Algorithm | None)
        self.local = new_local(self.algorithm, self.model, self.optimizers[0], _scaler_of(self))
        self._sync = self.local.sync

    def on_train_start(self) -> None:
        # Not in setup, because a checkpoint's states, ours and the optimizer's, are loaded after it.
        super().on_train_start()
        if self.local is None:
            return
        if self.local.has_state:  # a learning-rate finder has trained before
            self._make_local()
        assert self.lightning_module is not None
        self._averages = _AveragesModels(self.local)
        self._averages.begin(self.lightning_module.trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the averaged model's state. Collective in training, as checkpoints are.

        If an exception has ended the training, the state of this process's own model is returned.
        """
        # Lightning calls it on every process, before it collects the callbacks' states.
        if self._averages is not None:
            self._averages.average()
        return super().lightning_module_state_dict()

    def _register_ddp_hooks(self) -> None:
        if self.algorithm is None:
            assert isinstance(self.model, DistributedDataParallel)
            hook = (self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)
            register_ddp_comm_hook(self.model, *hook)


class _AveragesModels(Callback):
    """Averages models around a training: before validations and checkpoints, and at the end."""

    def __init__(self, local: ModelAverager) -> None:
        self._local, self._is_open = local, False

    def begin(self, trainer: Any) -> None:  # a Trainer does not declare its callbacks
        """Enter: all processes get the first one's model, unless a state was loaded. Collective."""
        if any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):
            raise ConfigError(
                "StochasticWeightAveraging averages each process's own model after epochs, so processes "
                "would end with different models; use WeightAveraging after averagings instead "
                "(docs/lightning.md)"
            )
        # First in the list: other callbacks load the best model or a moving average at the end.
        trainer.callbacks = [self, *trainer.callbacks]
        self._local.__enter__()
        self._is_open = True

    def average(self) -> None:
        """Average the models. Collective in training; before and after it, models are equal anyway."""
        if self._is_open:
            self._local.average()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.average()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Nothing is sent: other processes may be anywhere. Callbacks that save now run after this one.
        self._end(trainer, type(exception))

    def _end(self, trainer: Any, kind: type[BaseException] | None) -> None:
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]
        if self._is_open:
            self._is_open = False
            self._local.__exit__(kind, None, None)


class ThinwireCallback(Callback):
    """Logs statistics through the Trainer's loggers, and keeps Thinwire's state in the Trainer's checkpoints.

    It logs `thinwire/compression_ratio`, `thinwire/total_message_bytes`, `thinwire/total_nonfinite_steps`
    and `thinwire/total_waiting_seconds` of process 0 since the start of training; for figures of each
    record, see `thinwire.watch.MetricsWriter`. A checkpoint can be resumed on any number of processes; with
    other trainable parameters it needs the module's `strict_loading = False`. See docs/lightning.md.

    Args:
        log_every_n_steps: Optimizer steps from one log to the next.
        elastic: A function that makes an elastic member, such as `functools.partial(thinwire.elastic.DiLoCo,
            every_steps=30)`, for a Trainer of one process without a `ThinwireStrategy`. Training stops after
            the members have made `max_steps`; `local` is the member. `fit()` raises `LeftError` if it was
            asked to leave.

    Raises:
        ConfigError: `log_every_n_steps` is not a whole number of at least 1, or (when training begins)
            the Trainer's strategy is not a `ThinwireStrategy` with an algorithm or a `PowerSGDState`; or,
            with `elastic`, the Trainer has several processes.

    Cost: `GradientSync.stats` at each log; `GradientSync.state_dict`, a collective, at each checkpoint.
    """

    def __init__(self, log_every_n_steps: int = 50, elastic: Makes | None = None) -> None:
        self._log_every_n_steps = whole_number("log_every_n_steps", log_every_n_steps, minimum=1)
        if elastic is not None and not makes_elastic(elastic):
            raise ConfigError(
                "elastic must be a function that returns a member, such as "
                f"functools.partial(thinwire.elastic.DiLoCo, every_steps=30), got {elastic!r}"
            )
        self._make = elastic
        self.local: ModelAverager | None = None
        self._schedules: list[tuple[FollowedSchedule, int]] = []  # each with the batches between its steps
        self._logged_step = 0
        self._loaded: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._make is not None:
            if trainer.world_size > 1:
                raise ConfigError(
                    f"an elastic member is one process, got a Trainer of {trainer.world_size}; pass "
                    "Trainer(devices=1), and start each member separately"
                )
            return
        strategy = trainer.strategy
        is_ours = isinstance(strategy, ThinwireStrategy) and (
            strategy.algorithm is not None or isinstance(strategy._ddp_comm_state, PowerSGDState)
        )
        if stage == TrainerFn.FITTING and not is_ours:
            raise ConfigError(
                "expected Trainer(strategy=ThinwireStrategy(…)) with an algorithm or a PowerSGDState, got "
                f"{type(strategy).__name__}"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The model is wrapped, and has made no step; a LocalSGD is entered only after this.
        if self._make is None and self._loaded is not None:
            remembering = _remembering(trainer)
            options = {} if isinstance(remembering, ModelAverager) else {"strict": pl_module.strict_loading}
            remembering.load_state_dict(self._loaded, **options)
            self._loaded = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged_step = trainer.global_step  # another Trainer's fit counts from 0
        if self._make is None:
            return
        optimizer = trainer.optimizers if len(trainer.optimizers) > 1 else trainer.optimizers[0]
        self.local = new_local(self._make, pl_module, optimizer, _scaler_of(trainer))
        if self._loaded is not None:
            self.local.load_state_dict(self._loaded)
            self._loaded = None
        _AveragesModels(self.local).begin(trainer)
        self._began = self._others = trainer.global_step // len(trainer.optimizers)
        self._schedules = []
        batches = trainer.accumulate_grad_batches
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                every = math.lcm(config.frequency, batches)  # Lightning counts batches
                schedule = FollowedSchedule(config.scheduler, self.local.steps * batches // every)
                self._schedules.append((schedule, every))

    def on_train_batch_start(self, trainer: Trainer, *unused: Any) -> None:
        if self.local is None or self._others == (others := steps_of_others(self.local)):
            return
        self._others = others
        for schedule, every in self._schedules:
            schedule.follow(self.local.steps * trainer.accumulate_grad_batches // every)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.local = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.local = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *unused: Any) -> None:
        if self.local is not None:
            # Its Trainer counts the steps of each optimizer, and only those that this member has made.
            others = len(trainer.optimizers) * (steps_of_others(self.local) - self._began)
            if 0 <= trainer.max_steps <= trainer.global_step + others:
                trainer.should_stop = True
        # With gradient accumulation, several batches have the same step.
        step = trainer.global_step
        if step == self._logged_step or step % self._log_every_n_steps:
            return
        self._logged_step = step
        metrics = metrics_of((self.local or _remembering(trainer)).stats())
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        remembering = self.local or (_remembering(trainer) if self._make is None else None)
        # Before training there is no state: a learning-rate finder saves then.
        if remembering is None or (isinstance(remembering, ModelAverager) and not remembering.has_state):
            return
        # Lightning has just averaged models for the module's state, so both states belong together.
        checkpoint[CHECKPOINT_KEY] = remembering.state_dict()
        if self.local is not None and "state_dict" in checkpoint:  # a member averages only now
            checkpoint["state_dict"] = trainer.strategy.lightning_module_state_dict()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._loaded = checkpoint.get(CHECKPOINT_KEY)
        if self._loaded is None and trainer.state.fn == TrainerFn.FITTING:
            logger.warning(SAVED_WITHOUT, "the checkpoint")


def _scaler_of(owner: Trainer | ThinwireStrategy) -> GradScaler | None:
    """Return the scaler of 16-bit mixed precision; other precision plugins have none."""
    return getattr(owner.precision_plugin, "scaler", None)


def _remembering(trainer: Trainer) -> Remembering:
    return cast(ThinwireStrategy, trainer.strategy).remembering


# Importing this module registers the name; the registry refuses to register twice.
if "thinwire" not in StrategyRegistry:
    StrategyRegistry.register("thinwire", ThinwireStrategy, description="DDP with PowerSGD, by Thinwire")
