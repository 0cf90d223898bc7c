"""The Hugging Face Trainer: one line between making it and training.

    from thinwire.integrations.transformers import attach

    trainer = Trainer(model, TrainingArguments(...), train_dataset=...)
    thinwire_callback = attach(trainer, thinwire.PowerSGD(matrix_rank=4, warmup_steps=100))
    trainer.train()

The Trainer wraps its model in DDP inside `train`, so attaching happens there. What is remembered goes
into the Trainer's checkpoints, and compression shows in its logs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from thinwire.algorithms import Algorithm
from thinwire.checkpoint import load, save
from thinwire.errors import AttachError, ConfigError, MissingExtraError, StateError
from thinwire.fronts.attach import attach as attach_model
from thinwire.sync import GradientSync
from thinwire.sync.nonfinite import OnNonfinite, checked_on_nonfinite
from thinwire.watch.writers import metrics_of

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise MissingExtraError(
        "thinwire.integrations.transformers needs transformers 5 or later and accelerate: "
        "pip install '.[transformers]' in a clone of Thinwire"
    ) from error

__all__ = ["STATE_NAME", "ThinwireCallback", "attach"]

STATE_NAME = "thinwire.pt"


def attach(
    trainer: Trainer,
    algorithm: Algorithm,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    strict: bool = True,
    on_nonfinite: OnNonfinite = "nan",
) -> ThinwireCallback:
    """Let `algorithm` average the gradients whenever `trainer` trains in several processes.

    To be called before `trainer.train()`, on every process alike. In a run of one process there is
    nothing to attach.

    Args:
        trainer: Any `transformers.Trainer` that trains with DDP (not with FSDP or DeepSpeed).
        algorithm: Such as `thinwire.PowerSGD(matrix_rank=4)`.
        checkpoint: The folder that `train(resume_from_checkpoint=…)` is going to be given. Only needed if
            it is not one of `args.output_dir`: a Trainer does not pass it to its callbacks.
        strict: Whether a checkpoint must be of just the parameters that are trained now.
        on_nonfinite: What becomes of a step that is not finite; see `thinwire.attach`.

    Returns:
        The callback that has been added; its `sync` is the handle once training has begun.

    Raises:
        ConfigError: `trainer` or `algorithm` is not one, or `on_nonfinite` no choice.
        AttachError: The trainer is attached already. (A model that can't be attached shows in `train`.)
    """
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"expected a transformers.Trainer, got {trainer!r}")
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"expected an algorithm such as thinwire.PowerSGD(matrix_rank=4), got {algorithm!r}"
        )
    callbacks = trainer.callback_handler.callbacks
    if any(isinstance(callback, ThinwireCallback) for callback in callbacks):
        raise AttachError("the trainer is attached already; switch the algorithm with callback.sync.use(…)")
    callback = ThinwireCallback(trainer, algorithm, checkpoint, strict, checked_on_nonfinite(on_nonfinite))
    # Not add_callback: what this one adds to the logs must be there when the others report them.
    callbacks.insert(0, callback)
    return callback


class ThinwireCallback(TrainerCallback):
    """Attaches the model that the Trainer has wrapped, and follows its checkpoints and logs.

    A log of the training loss also has `thinwire_compression_ratio`, `thinwire_total_message_bytes`,
    `thinwire_total_nonfinite_steps` and `thinwire_total_waiting_seconds`, of this process, since the start of
    training. A checkpoint has one file more, `thinwire.pt`, the same for any number of processes.

    Args:
        trainer: Whose model to attach.
        algorithm: What averages.
        checkpoint: See `attach`.
        strict: See `attach`.
        on_nonfinite: See `attach`.
    """

    def __init__(
        self,
        trainer: Trainer,
        algorithm: Algorithm,
        checkpoint: str | os.PathLike[str] | None = None,
        strict: bool = True,
        on_nonfinite: OnNonfinite = "nan",
    ) -> None:
        self._trainer = trainer
        self._algorithm = algorithm
        self._checkpoint = checkpoint
        self._strict = strict
        self._on_nonfinite = on_nonfinite
        self._model: torch.nn.Module | None = None
        self._sync: GradientSync | None = None

    @property
    def sync(self) -> GradientSync:
        """The handle: plan, statistics, and switching the algorithm.

        Raises:
            AttachError: Training has not begun, or runs in one process.
        """
        if self._sync is None:
            raise AttachError("nothing is attached: trainer.train() attaches, in a run of several processes")
        return self._sync

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach the model, which is wrapped now, and load what a checkpoint holds beside it.

        Args:
            args: The Trainer's.
            state: The Trainer's.
            control: The Trainer's, left as it is.
            kwargs: What else the Trainer passes.

        Raises:
            AttachError: The Trainer's model is not DDP's, or a hyper-parameter search is run.
            StateError: The checkpoint can't be found, or has no state of this model.
        """
        if args.world_size == 1:
            return
        if state.is_hyper_param_search:
            raise AttachError(
                "hyperparameter_search is not supported: its checkpoints have folders of their own"
            )
        model = self._trainer.model_wrapped
        if model is not self._model:  # a second train() goes on with the same one
            scaler = self._trainer.accelerator.scaler
            self._sync = attach_model(
                model, self._algorithm, grad_scaler=scaler, on_nonfinite=self._on_nonfinite
            )
            self._model = model
        if state.global_step > 0:
            self.sync.load_state_dict(self._saved_state(args, state), strict=self._strict)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put what is remembered into the checkpoint. Collective: the Trainer calls it on every process.

        Args:
            args: The Trainer's.
            state: The Trainer's.
            control: The Trainer's, left as it is.
            kwargs: What else the Trainer passes.

        Raises:
            CheckpointError: The file can't be written.
        """
        if self._sync is None or args.save_only_model:
            return
        remembered = self._sync.state_dict()
        if args.should_save:
            save(remembered, _folder(args, state) / STATE_NAME)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the compression to a log of the loss.

        Args:
            args: The Trainer's.
            state: The Trainer's.
            control: The Trainer's, left as it is.
            logs: Written, if it has the loss.
            kwargs: What else the Trainer passes.
        """
        if self._sync is None or logs is None or "loss" not in logs:
            return
        metrics = metrics_of(self._sync.stats(), "thinwire_")
        logs.update(metrics)
        state.log_history[-1].update(metrics)

    def _saved_state(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
        folder = _folder(args, state) if self._checkpoint is None else Path(self._checkpoint)
        # By the log of its losses: folders have the same names in every run.
        file, loaded = folder / "trainer_state.json", json.dumps(state.log_history)
        if not file.exists() or json.dumps(TrainerState.load_from_json(str(file)).log_history) != loaded:
            raise StateError(
                f"training resumes at step {state.global_step}, but not from {folder}; "
                "tell where from: attach(trainer, algorithm, checkpoint=…)"
            )
        if not (folder / STATE_NAME).exists():
            raise StateError(
                f"{folder} has no {STATE_NAME}: it was saved without Thinwire, or not to its end; resume "
                "from another, or start anew from its weights: Model.from_pretrained(folder)"
            )
        return load(folder / STATE_NAME)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
