"""The Hugging Face Trainer: one line between making it and training.

    from thinwire.integrations.transformers import attach

    trainer = Trainer(model, TrainingArguments(...), train_dataset=...)
    thinwire_callback = attach(trainer, thinwire.PowerSGD(matrix_rank=4, warmup_steps=100))
    trainer.train()

Or, if other code makes the Trainer and takes callbacks (LLaMA-Factory, Unsloth, TRL):

    run_exp(args, callbacks=[ThinwireCallback("4 bits")])

The Trainer wraps its model in DDP, or shards it, inside `train`, so attaching happens there. Thinwire's state
is saved in the Trainer's checkpoints, and its logs show the compression.
"""

from __future__ import annotations

import json
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from typing_extensions import Unpack

from thinwire.adapters.attach import attach as attach_model
from thinwire.adapters.setup import ALONE, live_objects
from thinwire.advice.automatic import Auto
from thinwire.algorithms import Algorithm
from thinwire.checkpoint import LOCAL_NAME, load, load_local, save, save_local
from thinwire.checks import shown
from thinwire.errors import AttachError, ConfigError, MissingExtraError, StateError
from thinwire.integrations import SAVED_WITHOUT
from thinwire.integrations.local import (
    FollowedSchedule,
    Makes,
    checked_averaging,
    checked_step_options,
    makes_auto,
    makes_elastic,
    new_auto,
    new_local,
)
from thinwire.local_sgd.averager import ModelAverager
from thinwire.sync import GradientSync, attached
from thinwire.sync.settings import StepOptions
from thinwire.watch.writers import metrics_of

try:
    from transformers import (
        DefaultFlowCallback,
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise MissingExtraError(
        "thinwire.integrations.transformers needs transformers 4.51 or later and accelerate: "
        "pip install '.[transformers]' in a clone of Thinwire"
    ) from error

logger = logging.getLogger(__name__)

__all__ = ["STATE_NAME", "ThinwireCallback", "attach"]

STATE_NAME = "thinwire.pt"


def attach(
    trainer: Trainer,
    algorithm: Algorithm | Makes | str,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    strict: bool = True,
    **steps: Unpack[StepOptions],
) -> ThinwireCallback:
    """Average with `algorithm` whenever `trainer` trains in several processes.

    Call it before `trainer.train()`, on every process. In a run of one process there is nothing to attach.

    Args:
        trainer: Any `transformers.Trainer` that trains with DDP; or with FSDP2 over replicas and shards
            (`ParallelismConfig(dp_replicate_size=…, dp_shard_size=…)`, for averaged models that of
            `thinwire.integrations.accelerate`; see docs/sharded.md). DeepSpeed is not supported.
        algorithm: How gradients, or models, are averaged; see `ThinwireCallback`.
        checkpoint: See `ThinwireCallback`.
        strict: See `ThinwireCallback`.
        steps: See `ThinwireCallback`.

    Returns:
        The callback that has been added; its `sync` is the handle once training has begun.

    Raises:
        ConfigError: `trainer` is not a Trainer, or see `ThinwireCallback`.
        AttachError: The trainer is attached already, or FSDP leaves no replicas to Thinwire. (For a model
            that can't be attached, `train` raises.)
    """
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"expected a transformers.Trainer, got {shown(trainer)}")
    callback = ThinwireCallback(algorithm, checkpoint=checkpoint, strict=strict, **steps)
    callback.enter(trainer)
    return callback


class ThinwireCallback(TrainerCallback):
    """Attaches the wrapped model, and adds to the Trainer's checkpoints and logs.

    `attach` makes one for a Trainer. If other code makes the Trainer, pass one in its `callbacks=[…]`: it
    finds its Trainer when that is made or trains. docs/transformers.md lists what logs and checkpoints have.

    Args:
        algorithm: How gradients are averaged, such as `thinwire.PowerSGD(matrix_rank=4)`. Or a function that
            makes a `thinwire.LocalSGD`, such as `functools.partial(thinwire.DiLoCo, every_steps=30)`, called
            as `make(model, optimizer, grad_scaler=…)`; with FSDP2 also with `replicas=…`, unless a partial
            has them. DDP is then built without `find_unused_parameters`, unless `args` set it. Or
            `thinwire.auto`, alone or in a partial. Or a function that makes an elastic member, such as
            `functools.partial(thinwire.elastic.DiLoCo, every_steps=30)`, in a Trainer of one process. It
            stops after the members have made `max_steps`; `train()` raises `LeftError` if it was asked to
            leave. Or text: "4 bits", "PowerSGD(matrix_rank=4)", "auto()".
        checkpoint: The folder that will be given as `train(resume_from_checkpoint=…)`, if it is not in
            `args.output_dir`: a Trainer does not pass it to its callbacks.
        strict: Whether a checkpoint must have exactly the parameters trained now.
        steps: `host_check`, `on_nonfinite` and `machines` of `thinwire.attach`, whose `grad_scaler` is the
            Trainer's own. `host_check=False` needs `ddp_find_unused_parameters=False` in the arguments.

    Attributes:
        local: The `LocalSGD` or member around the training, if `algorithm` makes one, once training begins.
        auto: The `Auto` that chooses, if `algorithm` is `thinwire.auto`; printing it shows why.

    Raises:
        ConfigError: `algorithm` is none of these, or a setting is invalid or would have no effect.
    """

    def __init__(
        self,
        algorithm: Algorithm | Makes | str,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        strict: bool = True,
        **steps: Unpack[StepOptions],
    ) -> None:
        self.algorithm = checked_averaging(algorithm)
        is_attached = isinstance(self.algorithm, Algorithm)
        self._averages_models = not is_attached and not makes_auto(self.algorithm)
        if self._averages_models and not strict:
            raise ConfigError("strict has no effect on models that are averaged; leave it out")
        self._steps = checked_step_options(steps, take_effect=is_attached)
        self._checkpoint, self._strict = checkpoint, strict
        self._trainer: Trainer | None = None
        self._model: torch.nn.Module | None = None
        self._sync: GradientSync | None = None
        self.local: ModelAverager | None = None
        self.auto: Auto | None = None

    @property
    def sync(self) -> GradientSync:
        """The handle: it has the plan and statistics, and can switch the algorithm.

        Raises:
            AttachError: Training has not begun, or runs in one process.
        """
        return attached(
            self._sync, "nothing is attached: trainer.train() attaches, in a run of several processes"
        )

    def on_init_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **unused: Any) -> None:
        # In one process nothing is attached, and there is nothing to find.
        if args.world_size > 1 or self._averages_models:
            self.enter(self._found(state))

    def _found(self, state: TrainerState) -> Trainer:
        """Return the Trainer of a state; callbacks do not get their Trainer."""
        for trainer in live_objects(Trainer):
            if getattr(trainer, "state", None) is state:
                return trainer
        raise AttachError(
            "the callback was not called by a transformers.Trainer; pass it to a Trainer, in callbacks=[…]"
        )

    def enter(self, trainer: Trainer) -> None:
        """Take the right place among a Trainer's callbacks, to attach when it trains.

        Raises:
            AttachError: See `attach`.
        """
        callbacks = trainer.callback_handler.callbacks
        if any(isinstance(callback, ThinwireCallback) and callback is not self for callback in callbacks):
            raise AttachError(
                "the trainer is already attached; switch the algorithm with callback.sync.use(…)"
            )
        if makes_elastic(self.algorithm) and trainer.args.world_size > 1:
            raise AttachError(
                "an elastic member is one process, but this job has several; start each member separately"
            )
        if trainer.is_fsdp_enabled:
            # Accelerate has it from 1.10 on.
            config = getattr(trainer.accelerator, "parallelism_config", None)
            # PyTorch's own averaging of gradients can be disabled; models can't be averaged then.
            if (
                config is None
                or not config.dp_replicate_enabled
                or (self._averages_models and len(config.fsdp_dim_names) > 1)
            ):
                raise AttachError(
                    "the Trainer's FSDP leaves no replicas for Thinwire to average; pass "
                    "TrainingArguments(fsdp=True, parallelism_config=…) with a ParallelismConfig of "
                    "thinwire.integrations.accelerate"
                )
        if self._averages_models and trainer.args.ddp_find_unused_parameters is None:
            # The Trainer's default makes DDP communicate in every step, which LocalSGD refuses.
            trainer.args.ddp_find_unused_parameters = False
            if trainer.accelerator.ddp_handler is not None:  # Transformers 4 makes it when it trains
                trainer.accelerator.ddp_handler.find_unused_parameters = False
        if self in callbacks:
            callbacks.remove(self)
        # Before the callbacks that report logs, because this one adds to them; but after the one that decides
        # when to save and evaluate, because models are averaged for that.
        first = int(isinstance(callbacks[0], DefaultFlowCallback)) if callbacks else 0
        callbacks.insert(first, self)
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **unused: Any) -> None:
        if args.world_size == 1 and not makes_elastic(self.algorithm):
            logger.warning(ALONE)
            return
        if state.is_hyper_param_search:
            raise AttachError(
                "hyperparameter_search is not supported: it saves checkpoints in folders of its own"
            )
        if self._trainer is None or self._trainer.state is not state:
            self.enter(self._found(state))
        trainer = cast(Trainer, self._trainer)
        model, optimizer, scaler = trainer.model_wrapped, trainer.optimizer, trainer.accelerator.scaler
        options: dict[str, Any] = {}
        if trainer.is_fsdp_enabled and "replicas" not in getattr(self.algorithm, "keywords", {}):
            options["replicas"] = trainer.accelerator.torch_device_mesh["dp_replicate"]
        # If the Trainer has resumed, the step is already the checkpoint's.
        folder = self._resumed_folder(args, state) if state.global_step > 0 else None
        if self._averages_models:
            self._average_models(trainer, partial(cast(Makes, self.algorithm), **options), folder)
            return
        # A second train() continues with the same model.
        if model is not self._model:
            if isinstance(self.algorithm, Algorithm):
                options |= self._steps
                self._sync = attach_model(model, self.algorithm, grad_scaler=scaler, **options)
            elif makes_auto(self.algorithm):
                make, total_steps = self.algorithm, state.max_steps
                self.auto = new_auto(make, model, optimizer, total_steps, grad_scaler=scaler, **options)
                self._sync = self.auto.sync
            self._model = model
        if folder is not None:
            load_local(self.sync, folder, strict=self._strict)

    def _average_models(self, trainer: Trainer, make: Makes, folder: Path | None) -> None:
        # A failed train() has left its own open. Nothing is sent: other processes may be anywhere.
        if self.local is not None:
            self.local.__exit__(AttachError, None, None)
        local = new_local(make, trainer.model_wrapped, trainer.optimizer, trainer.accelerator.scaler)
        if folder is not None:
            local.load_state_dict(load(folder / STATE_NAME))
        self.local, self._sync = local, local.sync
        local.__enter__()
        if makes_elastic(self.algorithm):
            self._schedule = FollowedSchedule(trainer.lr_scheduler, local.steps)

    def on_step_begin(self, *_: Any, **unused: Any) -> None:
        if self.local is not None and makes_elastic(self.algorithm):
            self._schedule.follow(self.local.steps)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **unused: Any) -> None:
        if self.local is None:
            return
        # A joining member gets the others' step count, which differs from its Trainer's.
        if makes_elastic(self.algorithm) and self.local.steps >= state.max_steps:
            control.should_training_stop = True
        if control.should_evaluate or control.should_save or control.should_training_stop:
            self.local.average()

    # The end of an epoch decides in the same way.
    on_epoch_end = on_step_end

    def on_train_end(self, *_: Any, **unused: Any) -> None:
        if self.local is not None:
            self.local.__exit__(None, None, None)

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **unused: Any) -> None:
        # A checkpoint of only weights can't be resumed; a search saves elsewhere, and attaches nothing.
        if args.save_only_model or state.is_hyper_param_search:
            return
        folder, stale = _folder(args, state), list[Path]()
        if self.local is None:
            stale.append(folder / STATE_NAME)
        if self.local is not None or self._sync is None:
            stale += folder.glob(LOCAL_NAME.format("[0-9]*"))
        for file in stale if args.should_save else ():  # of an earlier run, in a folder of the same name
            file.unlink(missing_ok=True)
        if self.local is not None:
            remembered = self.local.state_dict()  # collective, so on all processes, although one writes
            if args.should_save:
                save(remembered, folder / STATE_NAME)
        elif self._sync is not None:
            save_local(self._sync, folder)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **unused: Any
    ) -> None:
        if self._sync is None or logs is None or "loss" not in logs:
            return
        metrics = metrics_of((self.local or self._sync).stats(), "thinwire_")
        # The Trainer has already copied the log into its history before it calls callbacks.
        logs.update(metrics)
        state.log_history[-1].update(metrics)

    def _resumed_folder(self, args: TrainingArguments, state: TrainerState) -> Path | None:
        """Return the checkpoint's folder; None if it was saved without Thinwire."""
        folder = _folder(args, state) if self._checkpoint is None else Path(self._checkpoint)
        # Compare the loss logs: folders have the same names in every run.
        file, loaded = folder / "trainer_state.json", json.dumps(state.log_history)
        if not file.exists() or json.dumps(TrainerState.load_from_json(str(file)).log_history) != loaded:
            resumes = f"training resumes at step {state.global_step}, but not from {folder}"
            raise StateError(f"{resumes}; pass the checkpoint: attach(…, checkpoint=…)")
        files = STATE_NAME if self._averages_models else LOCAL_NAME.format("*")
        if not any(folder.glob(files)):
            logger.warning(SAVED_WITHOUT, folder)
            return None
        return folder


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
