"""Stock Lightning with our strategy, hooks and callback: real Trainers in real processes."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision.amp import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock_power
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import thinwire
from accelerated import assert_chosen_alike, assert_knows_its_steps
from commands import EXAMPLES, assert_compressed_and_agreed, run_processes, run_python
from pasted import lines_for, run
from processes import in_each_process
from thinwire import ConfigError, PowerSGD, elastic, hooks
from thinwire.integrations.lightning import ThinwireCallback, ThinwireStrategy, register_ddp_comm_hook
from thinwire.sync import engine_of
from training import agreed, flat, gathered

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the package compiles functions with torch.jit as it is imported
    import torch.distributed.optim

POWER = PowerSGD(matrix_rank=2, warmup_steps=1)


class Regression(LightningModule):
    """A small network on random numbers, the same in every run."""

    lr = 0.1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.layers(batch) - batch.roll(1, dims=1)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def batches(count: int = 6) -> DataLoader[Tensor]:
    rows = torch.randn(count * 8 * 2, 32, generator=torch.Generator().manual_seed(0))
    return DataLoader(rows, batch_size=8)  # type: ignore[arg-type]


@contextmanager
def lightning_environment() -> Iterator[None]:
    """What torchrun would have set, and Lightning's own deprecations let through."""
    rank = str(dist.get_rank())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size())}
    with patch.dict(os.environ, variables), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


def fit(
    strategy: Any,
    folder: Path,
    *,
    resume: str | None = None,
    model: type[Regression] = Regression,
    validation: DataLoader[Tensor] | None = None,
    epochs: int = 2,
    **options: Any,
) -> tuple[Trainer, Regression]:
    with lightning_environment():
        trainer, module = new_trainer(folder, strategy=strategy, max_epochs=epochs, **options), model()
        trainer.fit(module, batches(), validation, ckpt_path=resume)
    return trainer, module


def fit_again(trainer: Trainer, module: Regression, epochs: int) -> None:
    trainer.fit_loop.max_epochs = epochs
    with lightning_environment():
        trainer.fit(module, batches())


def new_trainer(folder: Path, devices: int = 0, *, plugins: Sequence[Any] = (), **options: Any) -> Trainer:
    """Of the processes of the pool, or of so many."""
    return Trainer(
        accelerator="cpu",
        devices=devices or dist.get_world_size(),
        plugins=[*([] if devices else [TorchElasticEnvironment()]), *plugins],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "enable_checkpointing": False, **options},
    )


def test_the_example_compresses_and_logs_it(tmp_path: Path) -> None:
    assert_compressed_and_agreed(
        run_processes(EXAMPLES / "lightning_ddp.py", "--folder", str(tmp_path), "--epochs", "1")
    )
    assert "thinwire/compression_ratio" in next(tmp_path.rglob("metrics.csv")).read_text()


@in_each_process(2)
def test_a_checkpoint_is_resumed_and_so_is_one_made_without_thinwire(tmp_path: Path) -> None:
    callbacks = [ThinwireCallback(), ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)]
    _, straight = fit(ThinwireStrategy(POWER), tmp_path, callbacks=callbacks, enable_checkpointing=True)
    file = str(tmp_path / "epoch=0.ckpt")
    for is_ours in (True, False):
        resuming = ThinwireStrategy(POWER)
        with patch("thinwire.integrations.lightning.logger.warning") as warned:
            _, resumed = fit(resuming, tmp_path, resume=file, callbacks=[ThinwireCallback()])
        assert warned.called != is_ours
        assert torch.equal(flat(straight), flat(resumed)) == is_ours
        assert agreed(resumed)
        assert resuming.sync.stats().steps == (12 if is_ours else 6)
        assert resuming.sync.stats().compression_ratio > 2
        dist.barrier()
        if is_ours and dist.get_rank() == 0:
            saved = torch.load(file, weights_only=True)
            del saved["thinwire"]
            torch.save(saved, file)
        dist.barrier()


@in_each_process(2)
def test_facts_16_hooks_work_on_the_cpu(tmp_path: Path) -> None:
    """Lightning's own strategy ignores them there."""
    state = hooks.PowerSGDState(None, 2, start_powerSGD_iter=0)
    strategy = with_hook(hooks.powerSGD_hook, state, ddp_comm_wrapper=hooks.fp16_compress_wrapper)()
    _, model = fit(strategy, tmp_path, epochs=1, callbacks=[ThinwireCallback()])
    assert state.stats().compression_ratio > 4
    assert agreed(model)


@in_each_process(2)
def test_accumulation_and_clipping_and_attach_gets_its_settings(tmp_path: Path) -> None:
    strategy = ThinwireStrategy(PowerSGD(matrix_rank=2), on_nonfinite="zero", host_check=False)
    _, model = fit(strategy, tmp_path, epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.5)
    assert strategy.sync.stats().steps == 3
    assert strategy.sync.stats().compression_ratio > 2
    assert agreed(model)
    settings = engine_of(strategy.sync).settings
    assert (settings.on_nonfinite, settings.host_check) == ("zero", False)


class Overflowing(Regression):
    """Overflows in the second batch of one process."""

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        return super().training_step(batch) * (torch.inf if batch_idx == self.global_rank == 1 else 1)


class WithScaler(MixedPrecision):
    """Scales the loss, without 16-bit arithmetic."""

    def autocast_context_manager(self) -> Any:
        return torch.autocast("cpu", enabled=False)


@in_each_process(2)
def test_the_precision_plugins_scaler_is_the_one(tmp_path: Path) -> None:
    strategy, scaler = ThinwireStrategy(POWER), GradScaler("cpu", init_scale=8.0)
    plugins = [WithScaler("16-mixed", "cpu", scaler)]
    _, model = fit(strategy, tmp_path, epochs=1, plugins=plugins, model=Overflowing)
    stats, scale = strategy.sync.stats(), engine_of(strategy.sync).settings.loss_scale
    assert scale is not None
    assert scale(torch.device("cpu")) == scaler.get_scale() == 4
    assert (stats.steps, stats.nonfinite_steps) == (6, 1)
    assert stats.compression_ratio > 2
    assert agreed(model)


@in_each_process(2)
def test_the_callback_logs_and_a_second_fit_goes_on(tmp_path: Path) -> None:
    strategy = ThinwireStrategy(POWER)
    logger = CSVLogger(tmp_path, version="one")
    trainer, model = fit(strategy, tmp_path, epochs=1, callbacks=[ThinwireCallback(2)], logger=logger)
    assert strategy.sync.stats().steps == 6
    before = ref(strategy.sync)
    logger.save()
    if dist.get_rank() == 0:
        header, *rows = (tmp_path / "lightning_logs" / "one" / "metrics.csv").read_text().splitlines()
        assert {"thinwire/compression_ratio", "thinwire/total_message_bytes"} <= {*header.split(",")}
        assert len(rows) == 3
    fit_again(trainer, model, 2)
    assert strategy.sync.stats().steps == 12
    gc.collect()
    assert before() is None  # the memory of the first fit
    fit_again(trainer, Regression(), 3)
    assert strategy.sync.stats().steps == 6  # of a different model, from the start


def test_steps_of_a_second_trainer_are_logged_too() -> None:
    callback, logged = ThinwireCallback(2), list[int]()
    logger = SimpleNamespace(log_metrics=lambda metrics, step: logged.append(step))
    for _ in range(2):
        trainer: Any = SimpleNamespace(global_step=0, max_steps=-1, loggers=[logger])
        trainer.strategy = SimpleNamespace(remembering=SimpleNamespace(stats=thinwire.Stats))
        callback.on_train_start(trainer, Regression())
        trainer.global_step = 2
        callback.on_train_batch_end(trainer, Regression())
    assert logged == [2, 2]


@in_each_process(2)
def test_the_run_chooses_its_algorithm(tmp_path: Path) -> None:
    # The machine has to say which one is chosen.
    strategy: Any = ThinwireStrategy(
        partial(thinwire.auto, probe_steps=2, budget_loss=0, least_gain=0), find_unused_parameters=False
    )
    trainer, model = fit(strategy, tmp_path, epochs=4, callbacks=[ThinwireCallback(2)])
    first = strategy.auto
    assert_chosen_alike(first)
    assert_knows_its_steps(first)
    # A second fit of the same module goes on, and chooses again.
    fit_again(trainer, model, 5)
    assert strategy.auto is not first
    assert strategy.auto.is_choosing
    assert strategy.sync.stats().steps == 30


@in_each_process(2)
def test_register_ddp_comm_hook() -> None:
    power = hooks.PowerSGDState(None, 2, start_powerSGD_iter=0)
    machines = hooks.MachinesState(machines=[[0, 1]])
    for state, hook in ((power, hooks.powerSGD_hook), (machines, hooks.allreduce_hook)):
        model = DistributedDataParallel(nn.Linear(64, 64))
        register_ddp_comm_hook(model)
        register_ddp_comm_hook(model, state, hook, hooks.bf16_compress_wrapper)
        torch.autograd.backward(model(torch.ones(2, 64)).sum())
        with pytest.raises(thinwire.AttachError, match="only one"):
            register_ddp_comm_hook(model, None, hooks.allreduce_hook)
    assert power.stats().compression_ratio > 4
    assert (machines.sync.algorithm, machines.sync.steps) == (thinwire.Cast("bf16"), 1)


@in_each_process(2)
def test_models_are_averaged_with_the_local_hook(tmp_path: Path) -> None:
    """Every second step after two: after the third and the fifth; and at once in a second fit."""

    def new_strategy() -> ThinwireStrategy:
        state = hooks.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
        return with_hook(hooks.post_localSGD_hook, state, model_averaging_period=2)()

    _, five = fit(new_strategy(), tmp_path, epochs=1, limit_train_batches=5)
    trainer, six = fit(new_strategy(), tmp_path, epochs=1)
    assert agreed(five)
    assert not agreed(six)
    trainer.fit_loop.epoch_loop.max_steps = 7
    fit_again(trainer, six, 2)
    assert agreed(six)


@in_each_process(2)
def test_the_lines_of_advice_run_as_they_are(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    # The user's script, with a test's settings.
    names["Trainer"] = partial(new_trainer, tmp_path, max_steps=4)
    names["loop"] = lambda: names["trainer"].fit(Regression(), batches())
    with lightning_environment():
        run(lines_for("Lightning"), names)
    assert names["trainer"].strategy.sync.stats().compression_ratio > 5


class Looking(Regression):
    """Has a buffer, which DDP would send, and notes when the processes hold one model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.BatchNorm1d(32))
        self.same: list[bool] = []
        self.validated: list[bool] = []

    def on_train_batch_end(self, *unused: Any) -> None:
        self.same.append(agreed(self))

    def validation_step(self, batch: Tensor, index: int) -> None:
        if index == 0:
            self.validated.append(agreed(self))


class TwoOptimizers(Regression):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.layers.parameters()][:2]


@in_each_process(2)
def test_models_are_averaged_now_and_then(tmp_path: Path) -> None:
    """By DiLoCo every four steps, and before validation and checkpoints, which are of one model."""
    averaging = partial(thinwire.DiLoCo, every_steps=4)

    def trained(epochs: int, resume: str | None = None) -> tuple[Trainer, Any, Any]:
        strategy = ThinwireStrategy(averaging)
        options: dict[str, Any] = {"model": Looking, "callbacks": [ThinwireCallback()], "resume": resume}
        trainer, module = fit(strategy, tmp_path, epochs=epochs, validation=batches(1), **options)
        return trainer, module, strategy.local

    _, module, local = trained(2)
    assert module.same == [step % 4 == 0 for step in range(1, 13)]
    assert module.validated == [True, True, True]  # before training, and after each epoch of 6 steps
    assert local.stats().compression_ratio > 5
    first, *_ = trained(1)
    with lightning_environment():
        first.save_checkpoint(tmp_path / "local.ckpt")
    _, resumed, again = trained(2, str(tmp_path / "local.ckpt"))
    assert local.steps == again.steps == 12
    assert agreed(module)
    assert agreed(resumed)
    with pytest.raises(ConfigError, match="with one optimizer, whose steps are counted, got 2"):
        fit(ThinwireStrategy(averaging), tmp_path, model=TwoOptimizers)


class Zeros(Callback):
    """Puts other weights into the model when training ends, as those do that average or choose weights."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before = flat(pl_module)
        for parameter in pl_module.parameters():
            parameter.data.zero_()


@in_each_process(2)
def test_weights_that_another_callback_puts_in_at_the_end_stay(tmp_path: Path) -> None:
    zeros = Zeros()
    strategy: Any = ThinwireStrategy(partial(thinwire.DiLoCo, every_steps=4))
    trainer, module = fit(strategy, tmp_path, callbacks=[zeros], epochs=1)
    assert strategy.local.steps == 6
    assert torch.equal(*gathered(zeros.before))  # what was left is averaged before
    assert zeros.before.any()
    assert not flat(module).any()
    assert strategy.local.stats().compression_ratio > 2
    assert vars(trainer)["callbacks"] == [zeros]
    # This one would put in other weights on each process, after epochs whose ends are between averagings.
    again = ThinwireStrategy(strategy.algorithm)
    with pytest.raises(thinwire.ConfigError, match="StochasticWeightAveraging"):
        fit(again, tmp_path, callbacks=[StochasticWeightAveraging(swa_lrs=0.1)], epochs=1)


@pytest.mark.nightly
def test_with_pytorch_lightning_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("lightning", "thinwire")]:
    del sys.modules[name]
sys.modules["lightning"] = None
from pytorch_lightning.strategies import DDPStrategy
from thinwire.integrations.lightning import ThinwireStrategy
print(issubclass(ThinwireStrategy, DDPStrategy))
""")
    assert run_python(str(script)).stdout == "True\n"


def with_hook(hook: Any, state: Any = None, **options: Any) -> Callable[[], ThinwireStrategy]:
    return lambda: ThinwireStrategy(ddp_comm_hook=hook, ddp_comm_state=state, **options)


NO_PERIOD = hooks.PostLocalSGDState(None, None, 3)
BAD: list[tuple[Callable[[], Any], str]] = [
    (with_hook(None, ddp_comm_wrapper=hooks.fp16_compress_wrapper), "need a ddp_comm_hook"),
    (with_hook(stock_power.powerSGD_hook, ddp_comm_wrapper=hooks.fp16_compress_wrapper), "use torch's own"),
    (with_hook(hooks.allreduce_hook, ddp_comm_wrapper="fp16"), "'fp16'"),
    (with_hook(hooks.post_localSGD_hook, model_averaging_period=2), "and a PostLocalSGDState"),
    (with_hook(hooks.post_localSGD_hook, NO_PERIOD), "model_averaging_period="),
    (lambda: ThinwireStrategy(POWER, model_averaging_period=2), "has an effect only"),
    (with_hook(hooks.allreduce_hook, algorithm=POWER), "only one of them"),
    (
        with_hook(hooks.allreduce_hook, on_nonfinite="zero"),
        "no effect here; pass such settings to the hook's state",
    ),
    (lambda: ThinwireStrategy(matrix_rank=4), "DistributedDataParallel has.*matrix_rank"),
    (lambda: ThinwireStrategy("powersgd"), "'powersgd'"),
    (lambda: register_ddp_comm_hook(nn.Linear(2, 2), None, hooks.allreduce_hook), "got Linear"),  # type: ignore[arg-type]
    (lambda: ThinwireStrategy(POWER).sync, "nothing is attached"),
]


def test_mistakes_are_refused_at_once() -> None:
    for call, message in BAD:
        with pytest.raises(thinwire.ThinwireError, match=message):
            call()


@in_each_process(2)
def test_by_name_and_the_callback_refuses_a_strategy_with_nothing_to_log(tmp_path: Path) -> None:
    trainer, _ = fit("thinwire", tmp_path, epochs=1)
    assert isinstance(trainer.strategy, ThinwireStrategy)
    assert trainer.strategy.sync.stats().compression_ratio > 1.5
    assert trainer.strategy.algorithm == PowerSGD()
    with pytest.raises(thinwire.ConfigError, match="got DDPStrategy"):
        fit(DDPStrategy(), tmp_path, callbacks=[ThinwireCallback()])


def member() -> Any:
    """What makes a member that is alone."""
    group = elastic.InProcessGroup(elastic.InProcessLighthouse())
    return partial(elastic.DiLoCo, every_steps=4, algorithm=POWER, group=group)


def alone(folder: Path, callback: ThinwireCallback, resume: str | None = None) -> None:
    """Train in one process, for 12 steps of two batches each."""
    saving = ModelCheckpoint(folder, "at-{step}", every_n_train_steps=6, save_top_k=-1)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "max_steps": 12}
    options |= {"max_epochs": 4, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = new_trainer(folder, devices=1, callbacks=[callback, saving], **options)
        trainer.fit(Regression(), batches(), ckpt_path=resume)


def test_a_member_that_comes_and_goes_has_a_trainer_of_its_own_and_resumes(tmp_path: Path) -> None:
    looked = []

    class Looking(ThinwireCallback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            local: Any = self.local
            looked.append((local.steps, local.stats().compression_ratio > 2, flat(pl_module)))
            super().on_train_end(trainer, pl_module)

    alone(tmp_path, Looking(elastic=member()))
    saved = str(next(tmp_path.glob("*step=6.ckpt")))
    alone(tmp_path / "again", Looking(elastic=member()), saved)
    straight, resumed = looked
    assert straight[:2] == resumed[:2] == (12, True)
    assert torch.equal(straight[2], resumed[2])
    with pytest.raises(ConfigError, match="elastic must be a function"):
        ThinwireCallback(elastic=partial(thinwire.DiLoCo, every_steps=2))


class Manual(Regression):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        layers: Any = self.layers
        optimizers = [torch.optim.SGD(part.parameters(), lr=self.lr) for part in layers[::2]]
        schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
        return optimizers, [{"scheduler": schedule, "interval": "step"} for schedule in schedules]

    def training_step(self, batch: Tensor) -> Tensor:
        self.manual_backward(loss := super().training_step(batch))
        for kind in (self.optimizers(), self.lr_schedulers()):
            for stepping in cast(Any, kind):
                stepping.step()
        return loss


def test_schedule_and_end_follow_the_members_count_when_it_jumps(tmp_path: Path) -> None:
    class Ahead(ThinwireCallback):
        def on_train_batch_end(self, trainer: Trainer, *given: Any) -> None:
            local: Any = self.local
            super().on_train_batch_end(trainer, *given)
            rates.append(trainer.optimizers[1].param_groups[0]["lr"])
            if len(rates) == 2:
                local._contributor.steps += 2
                trainer.optimizers[1].param_groups[0]["lr"] = 9.0  # as the others'
            if len(rates) == 3:
                trainer.save_checkpoint(path)

    rates, path = list[float](), tmp_path / "fifth.ckpt"
    for resume in (None, path):  # its Trainer has counted 3 steps
        trainer = new_trainer(tmp_path, 1, callbacks=[Ahead(elastic=member())], max_steps=12)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(Manual(), batches(), ckpt_path=resume)
    assert rates == pytest.approx([0.1 * 0.9**step for step in (1, 2, 5, 6, 6)])
