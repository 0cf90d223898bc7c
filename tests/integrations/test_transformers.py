"""The stock Hugging Face Trainer with Thinwire: launched as users launch it, and in the pool's processes."""

from __future__ import annotations

import ast
import os
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
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
from accelerated import error_of, several_processes
from launcher import EXAMPLES, TOLD, assert_compressed_and_agreed, run_processes
from pasted import lines_for, run
from pool import Pool
from thinwire import elastic
from thinwire.integrations.transformers import STATE_NAME, ThinwireCallback, attach
from thinwire.sync import engine_of
from training import agreed, flat

ALGORITHM = thinwire.PowerSGD(matrix_rank=1)

pytestmark = pytest.mark.usefixtures("_offline")


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_the_example_resumes_where_it_stopped(tmp_path: Path) -> None:
    example = EXAMPLES / "transformers_trainer.py"
    straight = run_processes(example, "--folder", str(tmp_path))
    assert_compressed_and_agreed(straight)
    resumed = run_processes(
        example, "--folder", str(tmp_path), "--resume", str(tmp_path / "checkpoint-6"), timeout_seconds=60
    )
    assert_compressed_and_agreed(resumed, least_ratio=15)
    checksums = {checksum for _, _, checksum in TOLD.findall(straight + resumed)}
    assert len(checksums) == 1
    assert [round(log["thinwire_compression_ratio"]) for log in logs_of(straight)] == [3, 5, 6]
    assert [round(log["thinwire_compression_ratio"]) for log in logs_of(resumed)] == [20, 20]


def logs_of(output: str) -> list[dict[str, float]]:
    lines = [ast.literal_eval(line) for line in output.splitlines() if line.startswith("{'loss'")]
    return [{name: float(value) for name, value in line.items()} for line in lines]


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


def new_trainer(folder: str, **settings: Any) -> Trainer:
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
    return Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Tokens(), callbacks=[Reporter()])


def parameters_of(trainer: Trainer) -> list[Tensor]:
    return [p.detach().clone() for p in cast(torch.nn.Module, trainer.model).parameters()]


def test_checkpoint_and_resume(pool2: Pool, tmp_path: Path) -> None:
    for straight, resumed, forgetful, step in pool2.run(_resume, str(tmp_path)):
        assert step == 6
        assert all(map(torch.equal, straight, resumed))
        assert not all(map(torch.equal, straight, forgetful))


def _resume(folder: str) -> tuple[list[Tensor], list[Tensor], list[Tensor], int]:
    with several_processes():
        trainer = new_trainer(folder)
        attach(trainer, ALGORITHM)
        trainer.train()
        straight = parameters_of(trainer)
    dist.barrier()
    checkpoint = f"{folder}/checkpoint-3"
    with several_processes():
        trainer = new_trainer(folder)
        callback = attach(trainer, ALGORITHM)
        trainer.train(resume_from_checkpoint=checkpoint)
        resumed, step = parameters_of(trainer), callback.sync.stats().steps
    with several_processes():
        elsewhere = new_trainer(f"{folder}/elsewhere")
        callback = attach(
            elsewhere, thinwire.PowerSGD(matrix_rank=1, error_feedback=False), checkpoint=checkpoint
        )
        elsewhere.train(resume_from_checkpoint=checkpoint)
        forgetful = parameters_of(elsewhere)
    return straight, resumed, forgetful, step


def test_logs_reach_the_other_callbacks(pool2: Pool, tmp_path: Path) -> None:
    for reported, history, message_bytes in pool2.run(_logged, str(tmp_path)):
        losses = [log for log in reported if "loss" in log]
        assert len(losses) == 3
        assert all(log["thinwire_compression_ratio"] > 2 for log in losses)
        assert losses[-1]["thinwire_total_message_bytes"] == message_bytes
        assert losses[-1]["thinwire_total_nonfinite_steps"] == 0
        assert [log for log in history if "loss" in log][-1]["thinwire_total_message_bytes"] == message_bytes


def _logged(folder: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    with several_processes():
        trainer = new_trainer(folder, save_strategy="no")
        callback = attach(trainer, ALGORITHM)
        trainer.train()
        (reporter,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, Reporter))
        return reporter.logs, trainer.state.log_history, callback.sync.stats().message_bytes


def test_without_a_scaler_gradients_that_are_not_finite_can_be_zeros(pool2: Pool, tmp_path: Path) -> None:
    """Of a step after training, so that one process can be given what is infinite."""
    for nonfinite_steps, gradients_are_zeros in pool2.run(_nonfinite, str(tmp_path)):
        assert nonfinite_steps == 1
        assert gradients_are_zeros


def _nonfinite(folder: str) -> tuple[int, bool]:
    with several_processes():
        trainer = new_trainer(folder, max_steps=1, save_strategy="no", ddp_find_unused_parameters=False)
        callback = attach(trainer, ALGORITHM, on_nonfinite="zero", host_check=False)
        trainer.train()
        model = trainer.model_wrapped
        model.zero_grad()
        tokens = torch.zeros(1, 8, dtype=torch.long)
        loss = model(input_ids=tokens, labels=tokens).loss
        torch.autograd.backward(loss * (torch.inf if dist.get_rank() == 1 else 1.0))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        assert not engine_of(callback.sync).settings.host_check
        return callback.sync.stats().nonfinite_steps, not any(bool(each.any()) for each in gradients)


def test_models_are_averaged_now_and_then(pool2: Pool, tmp_path: Path) -> None:
    """By DiLoCo every four steps, and before the checkpoint in mid-round, which has one model for all."""
    results = pool2.run(_averaged_models, str(tmp_path))
    assert len(results) == 2
    for same, steps, ratio, saved_is_averaged, second in results:
        assert same == [False, False, True, True, False, True]  # by step: 3 is saved, 4 is due, 6 ends
        assert steps == 6
        assert ratio > 5
        assert saved_is_averaged
        assert second == ([True, False, True], 6)


class Looking(TrainerCallback):
    """Notes after each step whether the processes hold one model, and what it holds."""

    def __init__(self) -> None:
        self.agreed: list[bool] = []
        self.weights: list[Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.agreed.append(agreed(model))
        self.weights.append(flat(model))


def _averaged_models(folder: str) -> tuple[Any, ...]:
    averaging = partial(thinwire.DiLoCo, every_steps=4)
    with several_processes():
        trainer, look = new_trainer(folder), Looking()
        trainer.add_callback(look)
        callback = attach(trainer, averaging)
        trainer.train()
        local = callback.local
        assert local is not None
        assert callback.sync is local.sync
        stats = local.stats()
    dist.barrier()
    with several_processes():
        trainer, again = new_trainer(folder), Looking()
        trainer.add_callback(again)
        callback = attach(trainer, averaging)
        load_from_checkpoint = trainer._load_from_checkpoint
        loaded = []

        def noting(*args: Any, **kwargs: Any) -> None:
            load_from_checkpoint(*args, **kwargs)
            loaded.append(flat(cast(torch.nn.Module, trainer.model)))

        trainer._load_from_checkpoint = noting  # type: ignore[method-assign]
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
        assert callback.local is not None
        second = again.agreed, callback.local.steps
    return (
        look.agreed,
        stats.steps,
        stats.compression_ratio,
        torch.equal(look.weights[2], loaded[0]),
        second,
    )


def test_the_lines_of_advice_run_as_they_are(pool2: Pool, tmp_path: Path) -> None:
    for world_size, ratios in pool2.run(_pasted, lines_for("Trainer"), str(tmp_path)):
        assert world_size == 2
        assert len(ratios) == 2
        assert min(ratios) > 5


def _pasted(lines: list[str], folder: str) -> tuple[int, list[float]]:
    ratios = []
    for text in lines:
        with several_processes():
            trainer = new_trainer(folder, max_steps=4, save_strategy="no")
            names: dict[str, Any] = {"trainer": trainer, "loop": trainer.train}
            run(text, names)
            ratios.append(names["thinwire_callback"].sync.stats().compression_ratio)
    return dist.get_world_size(), ratios


def test_training_again_goes_on_with_the_same_memory(pool2: Pool, tmp_path: Path) -> None:
    assert pool2.run(_again, str(tmp_path)) == [(True, 12)] * 2


def _again(folder: str) -> tuple[bool, int]:
    with several_processes():
        trainer = new_trainer(folder, save_strategy="no")
        callback = attach(trainer, ALGORITHM)
        trainer.train()
        first = callback.sync
        trainer.train()
        return callback.sync is first, callback.sync.stats().steps


def test_the_run_chooses_its_algorithm(pool2: Pool, tmp_path: Path) -> None:
    first, second = pool2.run(_chosen, str(tmp_path))
    assert first["world"] == 2
    assert first["used"] == second["used"]
    assert (first["told"], second["told"]) == (1, 0)
    exact_bytes, cast_bytes = first["bytes"][:2]
    assert cast_bytes == exact_bytes / 2
    # Of the checkpoint at step 30; from there the run chooses anew.
    assert first["resumed"] == (40, True)
    assert first["refused"][0] == "ConfigError"
    assert "functools.partial(thinwire.auto" in first["refused"][1]


def _chosen(folder: str) -> dict[str, Any]:
    told: list[str] = []
    # All are tried, for messages are waited for; what is chosen then, the machine has to say.
    averaging = partial(thinwire.auto, probe_steps=2, budget_loss=0, least_gain=0, log=told.append)
    with several_processes():
        trainer = new_trainer(folder, max_steps=40, save_steps=30)
        callback = attach(trainer, averaging)
        trainer.train()
        assert callback.auto is not None
        chosen, trials = callback.auto.chosen, callback.auto.trials
        assert chosen is not None
        assert callback.auto.sync is callback.sync
    dist.barrier()
    with several_processes():
        trainer = new_trainer(folder, max_steps=40)
        resumed = attach(trainer, averaging)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-30")
        assert resumed.auto is not None
    return {
        "world": dist.get_world_size(),
        "used": (chosen.name, str(callback.sync.algorithm), [each.step_seconds for each in trials]),
        "told": len(told),
        "bytes": [each.message_bytes for each in trials],
        "resumed": (resumed.sync.stats().steps, resumed.auto.is_choosing),
        "refused": error_of(lambda: attach(new_trainer(folder), averaging, on_nonfinite="zero")),
    }


def test_a_checkpoint_that_does_not_fit_is_refused(pool2: Pool, tmp_path: Path) -> None:
    for without, elsewhere, mistaken in pool2.run(_unfit, str(tmp_path)):
        assert without[0] == elsewhere[0] == mistaken[0] == "StateError"
        assert f"has no {STATE_NAME}" in without[1]
        assert "checkpoint=" in elsewhere[1]
        assert "checkpoint=" in mistaken[1]


def _unfit(folder: str) -> tuple[tuple[str, str], ...]:
    """Without our file; from a folder not the trainer's; and where that has a checkpoint of another run."""
    errors = []
    for trained, attached, resumed in (("a", "a", "a"), ("b", "c", "b"), ("b", "a", "b")):
        with several_processes():
            new_trainer(f"{folder}/{trained}", logging_steps=1 if trained == "a" else 2, max_steps=3).train()
            dist.barrier()
        with several_processes():
            trainer = new_trainer(f"{folder}/{attached}")
            attach(trainer, ALGORITHM)
            path = f"{folder}/{resumed}/checkpoint-3"
            errors.append(error_of(lambda t=trainer, p=path: t.train(resume_from_checkpoint=p)))
            dist.barrier()
    return tuple(errors)


def test_the_error_is_in_units_of_the_unscaled_loss(pool2: Pool, tmp_path: Path) -> None:
    """On CPUs a Trainer has no scaler; here it has been given one."""
    for plain, scaled in pool2.run(_scaled, str(tmp_path)):
        assert plain.keys() == scaled.keys() != set()
        for name, error in plain.items():
            assert error.norm() > 0
            assert torch.equal(error, scaled[name])


def _scaled(folder: str) -> list[dict[str, Tensor]]:
    errors = []
    for scaler in (None, GradScaler("cpu", init_scale=2.0**10)):
        with several_processes():
            trainer = new_trainer(folder, save_strategy="no", max_grad_norm=0)
            callback = attach(trainer, ALGORITHM)
            trainer.accelerator.scaler = scaler
            trainer.train()
            errors.append(dict(callback.sync.state_dict()["error"]))
    return errors


def test_a_hyper_parameter_search_is_refused(pool2: Pool, tmp_path: Path) -> None:
    for name, message in pool2.run(_search, str(tmp_path)):
        assert name == "AttachError"
        assert "hyperparameter_search" in message


def _search(folder: str) -> tuple[str, str]:
    with several_processes():
        trainer = new_trainer(folder)
        callback = attach(trainer, ALGORITHM)
        state = TrainerState(is_hyper_param_search=True)
        return error_of(lambda: callback.on_train_begin(trainer.args, state, trainer.control))


def test_only_weights_are_saved_when_asked(pool2: Pool, tmp_path: Path) -> None:
    assert pool2.run(_only_weights, str(tmp_path)) == [True] * 2
    files = os.listdir(tmp_path / "checkpoint-6")
    assert "model.safetensors" in files
    assert STATE_NAME not in files


def _only_weights(folder: str) -> bool:
    with several_processes():
        trainer = new_trainer(folder, save_only_model=True)
        callback = attach(trainer, ALGORITHM)
        trainer.train()
        return callback.sync.stats().compression_ratio > 2


def test_one_process_has_nothing_to_attach(tmp_path: Path) -> None:
    trainer = new_trainer(str(tmp_path), save_strategy="no", max_steps=1)
    callback = attach(trainer, ALGORITHM)
    trainer.train()
    with pytest.raises(thinwire.AttachError, match="several processes"):
        _ = callback.sync


def test_misuse_is_refused(tmp_path: Path) -> None:
    trainer = new_trainer(str(tmp_path))
    with pytest.raises(thinwire.ConfigError, match=r"expected a transformers\.Trainer"):
        attach(cast(Any, trainer.model), ALGORITHM)
    for given in ("powersgd", thinwire.PowerSGD):
        with pytest.raises(thinwire.ConfigError, match=r"an algorithm.*functools\.partial\(thinwire\.DiLoCo"):
            attach(trainer, cast(Any, given))
    with pytest.raises(thinwire.ConfigError, match="no effect"):
        attach(trainer, thinwire.DiLoCo, strict=False)
    callback = attach(trainer, ALGORITHM)
    assert isinstance(callback, ThinwireCallback)
    with pytest.raises(thinwire.AttachError, match="attached already"):
        attach(trainer, ALGORITHM)


def test_a_member_that_comes_and_goes_has_a_trainer_of_its_own_and_resumes(tmp_path: Path) -> None:
    def trained(folder: Path, checkpoint: str | None = None) -> tuple[list[Tensor], int]:
        group = elastic.InProcessGroup(elastic.InProcessLighthouse())
        make = partial(elastic.DiLoCo, every_steps=2, algorithm=ALGORITHM, group=group)
        trainer = new_trainer(str(folder), gradient_accumulation_steps=2)
        callback = attach(trainer, make, checkpoint=checkpoint)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert isinstance(callback.local, elastic.DiLoCo)
        assert callback.local.stats().compression_ratio > 1
        return parameters_of(trainer), callback.local.steps

    straight, steps = trained(tmp_path)
    assert steps == 6
    resumed, steps = trained(tmp_path / "again", str(tmp_path / "checkpoint-3"))
    assert steps == 6
    assert all(map(torch.equal, straight, resumed))
