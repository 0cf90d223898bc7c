"""The stock Hugging Face Trainer with Thinwire: launched as users launch it, and in the pool's processes."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import lr_scheduler
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

import thinwire
from accelerated import assert_chosen_alike, assert_knows_its_steps, several_processes
from commands import EXAMPLES, assert_compressed_and_agreed, run_processes
from pasted import lines_for, run
from processes import in_each_process
from thinwire import elastic
from thinwire.integrations.transformers import ThinwireCallback, attach
from thinwire.sync import engine_of
from training import agreed, flat

ALGORITHM = thinwire.PowerSGD(matrix_rank=1)

pytestmark = pytest.mark.usefixtures("_offline")

IS_FIVE = Version(transformers.__version__) >= Version("5")
if not IS_FIVE:
    # It loads its optimizer's state to "cpu:0", which torch does not know: it resumes on accelerators only.
    torch.serialization.register_package(
        0, lambda _: None, lambda storage, where: storage if where == "cpu:0" else None
    )


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_the_example_compresses_and_logs_it(tmp_path: Path) -> None:
    output = run_processes(EXAMPLES / "transformers_trainer.py", "--folder", str(tmp_path))
    assert_compressed_and_agreed(output)
    assert "'thinwire_compression_ratio'" in output


class Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Reporter(TrainerCallback):
    """Like those for TensorBoard or wandb: it was there before Thinwire."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def new_trainer(folder: str, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=32, n_layer=1, n_head=2)
    config.bos_token_id = config.eos_token_id = None
    settings = {"max_steps": 6, "save_steps": 3, "logging_steps": 2} | settings
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **settings,
    )
    datasets: dict[str, Any] = {"train_dataset": Tokens(), "eval_dataset": Tokens()}
    return Trainer(GPT2LMHeadModel(config), arguments, callbacks=[Reporter(), *callbacks], **datasets)


def trained(
    folder: str | Path,
    algorithm: Any = ALGORITHM,
    resume: str | None = None,
    *callbacks: TrainerCallback,
    **settings: Any,
) -> tuple[Trainer, Any]:
    """Return a Trainer that has trained, and what was attached to it."""
    trainer = new_trainer(str(folder), *callbacks, **settings)
    callback = attach(trainer, algorithm)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, callback


def model_of(trainer: Trainer) -> torch.nn.Module:
    return cast(torch.nn.Module, trainer.model)


@in_each_process(2)
def test_checkpoint_and_resume(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoint-3")
    with several_processes():
        trainer, _ = trained(tmp_path)
        straight = flat(model_of(trainer))
    dist.barrier()
    with several_processes():
        trainer, callback = trained(tmp_path, resume=checkpoint)
        assert torch.equal(flat(model_of(trainer)), straight)
        assert callback.sync.stats().steps == 6
    with several_processes():
        forgetful = new_trainer(str(tmp_path / "elsewhere"))
        without = thinwire.PowerSGD(matrix_rank=1, error_feedback=False)
        attach(forgetful, without, checkpoint=checkpoint)
        forgetful.train(resume_from_checkpoint=checkpoint)
        assert not torch.equal(flat(model_of(forgetful)), straight)


@in_each_process(2)
def test_logs_reach_other_callbacks_and_training_again_goes_on_with_the_same_memory(tmp_path: Path) -> None:
    with several_processes():
        trainer, callback = trained(tmp_path, save_strategy="no")
        message_bytes = callback.sync.stats().message_bytes
        (reporter,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, Reporter))
        for logs in (reporter.logs, trainer.state.log_history):
            losses = [log for log in logs if "loss" in log]
            assert len(losses) == 3
            assert all(log["thinwire_compression_ratio"] > 2 for log in losses)
            assert losses[-1]["thinwire_total_message_bytes"] == message_bytes
            assert losses[-1]["thinwire_total_nonfinite_steps"] == 0
        first = callback.sync
        trainer.train()
        assert callback.sync is first
        assert first.stats().steps == 12
        searching = TrainerState(is_hyper_param_search=True)
        with pytest.raises(thinwire.AttachError, match="hyperparameter_search"):
            callback.on_train_begin(trainer.args, searching, trainer.control)


@in_each_process(2)
def test_a_callback_finds_its_trainer_and_does_what_attach_does(tmp_path: Path) -> None:
    """Given to a Trainer that somebody else makes, or added to one; with text, and with checkpoints."""
    with several_processes():
        attached, callback = trained(tmp_path / "a", thinwire.Quantize(bits=4))
        message_bytes, weights = callback.sync.stats().message_bytes, flat(model_of(attached))
    for number, added in enumerate((False, True)):
        callback = ThinwireCallback("4 bits")
        with several_processes():
            trainer = new_trainer(str(tmp_path / f"b{number}"), *([] if added else [callback]))
            if added:
                trainer.add_callback(callback)
            trainer.train()
            assert callback.sync.stats().message_bytes == message_bytes
            assert callback.sync.stats().compression_ratio > 5
            assert torch.equal(flat(model_of(trainer)), weights)
            # The reporters, which came first, get its numbers.
            (reporter,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, Reporter))
            assert reporter.logs[0]["thinwire_compression_ratio"] > 5
            with pytest.raises(thinwire.AttachError, match="already attached"):
                attach(trainer, "4 bits")
        dist.barrier()
    with several_processes():
        # The callback of an earlier Trainer goes on with a new one.
        trainer = new_trainer(str(tmp_path / "b0"), callback)
        trainer.train(resume_from_checkpoint=str(tmp_path / "b0" / "checkpoint-3"))
        assert callback.sync.stats().steps == 6
        assert torch.equal(flat(model_of(trainer)), weights)


class Looking(TrainerCallback):
    """Notes after each step whether the processes hold one model, and what it holds."""

    def __init__(self) -> None:
        self.agreed: list[bool] = []
        self.weights: list[Tensor] = []
        self.begun = Tensor()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.begun = flat(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.agreed.append(agreed(model))
        self.weights.append(flat(model))


@in_each_process(2)
def test_models_are_averaged_now_and_then(tmp_path: Path) -> None:
    """By DiLoCo every four steps, and before the checkpoint in mid-round, which has one model for all."""
    averaging, look, again = partial(thinwire.DiLoCo, every_steps=4), Looking(), Looking()
    with several_processes():
        _, callback = trained(tmp_path, averaging, None, look)
        assert look.agreed == [False, False, True, True, False, True]  # 3 is saved, 4 is due, 6 ends
        assert callback.sync is callback.local.sync
        assert callback.local.steps == 6
        assert callback.local.stats().compression_ratio > 5
    dist.barrier()
    with several_processes():
        _, callback = trained(tmp_path, averaging, str(tmp_path / "checkpoint-3"), again)
        assert torch.equal(look.weights[2], again.begun)
        assert again.agreed == [True, False, True]
        assert callback.local.steps == 6


class Judge(TrainerCallback):
    """Whatever is learnt, the first checkpoint is the best; keeps what the model was then."""

    def __init__(self) -> None:
        self.best, self.last = Tensor(), Tensor()

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, model: Any = None, **kwargs: Any
    ) -> None:
        metrics["eval_loss"] = float(state.global_step)
        self.best = flat(model) if state.global_step == 2 else self.best
        self.last = flat(model)


@in_each_process(2)
def test_the_best_model_is_the_one_at_the_end(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
    averaging, judge = partial(thinwire.DiLoCo, every_steps=4), Judge()
    with several_processes():
        trainer, callback = trained(tmp_path, averaging, None, judge, learning_rate=0.01, **settings)
    assert callback.local.stats().compression_ratio > 2
    assert (judge.last - judge.best).norm() > 0.1
    assert torch.equal(flat(model_of(trainer)), judge.best)


@in_each_process(2)
def test_the_lines_of_advice_run_as_they_are(tmp_path: Path) -> None:
    with several_processes():
        trainer = new_trainer(str(tmp_path), max_steps=4, save_strategy="no")
        names: dict[str, Any] = {"trainer": trainer, "loop": trainer.train}
        run(lines_for("Trainer"), names)
        assert names["thinwire_callback"].sync.stats().compression_ratio > 5


@in_each_process(2)
def test_the_run_chooses_its_algorithm(tmp_path: Path) -> None:
    # The machine has to say which one is chosen.
    averaging = "auto(probe_steps=2, budget_loss=0, least_gain=0)"
    with several_processes():
        _, callback = trained(tmp_path, averaging, max_steps=24, save_steps=18)
        assert callback.auto.sync is callback.sync
        assert_chosen_alike(callback.auto)
        assert_knows_its_steps(callback.auto)
    with several_processes():
        # From the checkpoint the run chooses again.
        _, callback = trained(tmp_path, averaging, str(tmp_path / "checkpoint-18"), max_steps=24)
        assert callback.auto.is_choosing
        assert callback.sync.stats().steps == 24
    with pytest.raises(thinwire.ConfigError, match=r"functools\.partial\(thinwire\.auto"):
        ThinwireCallback(averaging, on_nonfinite="zero")


@in_each_process(2)
def test_a_run_that_began_without_thinwire_is_resumed_with_it(tmp_path: Path) -> None:
    for algorithm in (ALGORITHM, partial(thinwire.DiLoCo, every_steps=4), ALGORITHM):
        with several_processes():
            trained(tmp_path, algorithm, max_steps=3)
        dist.barrier()
    assert not (tmp_path / "checkpoint-3" / "thinwire.pt").exists()  # of the run before
    if dist.get_rank() == 0:  # one process, which averages nothing, in the folder of the earlier run
        trained(tmp_path, max_steps=3)
    dist.barrier()
    for algorithm in (ALGORITHM, partial(thinwire.DiLoCo, every_steps=4)):
        with several_processes(), patch("thinwire.integrations.transformers.logger.warning") as warned:
            checkpoint = str(tmp_path / "checkpoint-3")
            trainer, callback = trained(tmp_path, algorithm, checkpoint, save_strategy="no")
            assert (callback.local or callback.sync).stats().compression_ratio > 5
            assert (callback.local or callback.sync).steps == 3  # of six
            assert agreed(model_of(trainer))
        warned.assert_called_once()


@in_each_process(2)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """With a part of our files; from a folder not the trainer's, or that has a different run's checkpoint."""
    for folder, steps in (("a", 1), ("b", 2)):
        with several_processes():
            trained(tmp_path / folder, logging_steps=steps, max_steps=3)
            dist.barrier()
    if dist.get_rank() == 0:
        files = tmp_path / "a" / "checkpoint-3"
        (files / "thinwire_0.pt").unlink()
        (files / "thinwire_1.pt").rename(files / "thinwire_7.pt")
    dist.barrier()
    for resumed, attached, message in (
        ("a", "a", r"the states of all processes, got those of ranks 1 of 2"),
        ("b", "c", "checkpoint="),
        ("b", "a", "checkpoint="),
    ):
        with several_processes():
            with pytest.raises(thinwire.StateError, match=message):
                trained(tmp_path / attached, resume=f"{tmp_path}/{resumed}/checkpoint-3")
            dist.barrier()


@in_each_process(2)
def test_only_weights_are_saved_when_asked_and_attach_gets_its_settings(tmp_path: Path) -> None:
    with several_processes():
        trainer = new_trainer(str(tmp_path), save_only_model=True, ddp_find_unused_parameters=False)
        callback = attach(trainer, ALGORITHM, on_nonfinite="zero", host_check=False)
        trainer.train()
        settings = engine_of(callback.sync).settings
        assert (settings.on_nonfinite, settings.host_check, settings.loss_scale) == ("zero", False, None)
        assert callback.sync.stats().compression_ratio > 2
        # On CPUs a Trainer has no scaler; here it is given one.
        scaled = new_trainer(str(tmp_path / "scaled"), save_strategy="no", max_steps=1)
        callback, scaled.accelerator.scaler = attach(scaled, ALGORITHM), GradScaler("cpu", init_scale=8.0)
        scaled.train()
        scale = engine_of(callback.sync).settings.loss_scale
        assert scale is not None
        assert scale(torch.device("cpu")) == 8
    dist.barrier()
    files = os.listdir(tmp_path / "checkpoint-6")
    assert "model.safetensors" in files
    assert not any("thinwire" in name for name in files)


def test_one_process_has_nothing_to_attach_and_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = new_trainer(str(tmp_path), save_strategy="no", max_steps=1)
    callback = attach(trainer, ALGORITHM)
    trainer.train()
    with pytest.raises(thinwire.AttachError, match="several processes"):
        _ = callback.sync
    assert "nothing is averaged" in caplog.text


@pytest.mark.skipif(not IS_FIVE, reason="not tried with the Trainer of Transformers 4")
@in_each_process(2)
def test_a_model_that_was_evaluated_before_training_is_refused(tmp_path: Path) -> None:
    with several_processes():
        trainer = new_trainer(str(tmp_path))
        attach(trainer, ALGORITHM)
        trainer.evaluate()  # from now on the Trainer does not wrap its model in DDP, also without Thinwire
        with pytest.raises(thinwire.AttachError, match="eval_on_start"):
            trainer.train()


def test_misuse_is_refused(tmp_path: Path) -> None:
    trainer = new_trainer(str(tmp_path))
    with pytest.raises(thinwire.ConfigError, match=r"expected a transformers\.Trainer"):
        attach(cast(Any, trainer.model), ALGORITHM)
    with pytest.raises(thinwire.ConfigError, match=r"an algorithm.*functools\.partial\(thinwire\.DiLoCo"):
        attach(trainer, cast(Any, thinwire.PowerSGD))
    with pytest.raises(thinwire.ConfigError, match="did you mean PowerSGD"):
        ThinwireCallback("PowerSDG")
    with pytest.raises(thinwire.ConfigError, match="no effect"):
        attach(trainer, thinwire.DiLoCo, strict=False)
    attach(trainer, ALGORITHM)
    with pytest.raises(thinwire.AttachError, match="already attached"):
        attach(trainer, ALGORITHM)


def test_a_member_that_comes_and_goes_has_a_trainer_of_its_own_and_resumes(tmp_path: Path) -> None:
    def alone(folder: Path, checkpoint: str | None = None) -> tuple[Tensor, int]:
        group = elastic.InProcessGroup(elastic.InProcessLighthouse())
        make = partial(elastic.DiLoCo, every_steps=2, algorithm=ALGORITHM, group=group)
        trainer = new_trainer(str(folder), gradient_accumulation_steps=2)
        callback = attach(trainer, make, checkpoint=checkpoint)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert isinstance(callback.local, elastic.DiLoCo)
        assert callback.local.stats().compression_ratio > 1
        return flat(model_of(trainer)), callback.local.steps

    straight, steps = alone(tmp_path)
    assert steps == 6
    resumed, steps = alone(tmp_path / "again", str(tmp_path / "checkpoint-3"))
    assert steps == 6
    assert torch.equal(straight, resumed)


SCHEDULES: list[Any] = [
    partial(lr_scheduler.ExponentialLR, gamma=0.9),
    partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=20),
    lambda its: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(its, 0.9)]),
]


@pytest.mark.parametrize("make", SCHEDULES)
def test_a_members_schedule_follows_the_others_count(tmp_path: Path, make: Any) -> None:
    class Ahead(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 2:
                cast(Any, callback.local)._contributor.steps += 2
                given["optimizer"].param_groups[0]["lr"] = 9.0  # as the others', before its schedule steps
                given["lr_scheduler"].step()

    trainers: list[Any] = [new_trainer(str(tmp_path), *given) for given in ([Ahead()], [])]
    for trainer in trainers:
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)
        trainer.lr_scheduler = make(trainer.optimizer)
    group = elastic.InProcessGroup(elastic.InProcessLighthouse())
    callback = attach(trainers[0], partial(elastic.DiLoCo, every_steps=2, group=group))
    trainers[0].train()
    for _ in range(6):
        trainers[1].optimizer.step()
        trainers[1].lr_scheduler.step()
    rates = [trainer.lr_scheduler.get_last_lr() for trainer in trainers]
    assert (trainers[0].state.global_step, rates[0]) == (4, pytest.approx(rates[1]))
