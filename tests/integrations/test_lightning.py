"""Stock Lightning with our strategy, hooks and callback: real Trainers in real processes."""

from __future__ import annotations

import gc
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision.amp import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock_power
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import thinwire
from launcher import EXAMPLES, assert_compressed_and_agreed, run_processes, run_python
from pasted import lines_for, run
from pool import Pool
from thinwire import ConfigError, PowerSGD, elastic, hooks
from thinwire.integrations.lightning import ThinwireCallback, ThinwireStrategy, register_ddp_comm_hook
from thinwire.sync import engine_of
from training import agreed as agreed_on

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the package compiles functions with torch.jit as it is imported
    import torch.distributed.optim

POWER = PowerSGD(matrix_rank=2, warmup_steps=1)


class Regression(LightningModule):
    """A small network on random numbers, the same in every run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.layers(batch) - batch.roll(1, dims=1)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(count: int = 6) -> DataLoader[Tensor]:
    rows = torch.randn(count * 8 * 2, 32, generator=torch.Generator().manual_seed(0))
    return DataLoader(rows, batch_size=8)  # type: ignore[arg-type]


@contextmanager
def lightning_environment() -> Iterator[None]:
    """What torchrun would have set, and Lightning's own deprecations let through."""
    world_size = dist.get_world_size()
    variables = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": world_size}
    texts = {name: str(value) for name, value in variables.items()}
    with patch.dict(os.environ, texts), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


def fit(
    strategy: Any,
    folder: Path,
    *,
    epochs: int = 2,
    resume: str | None = None,
    model: type[Regression] = Regression,
    plugins: Sequence[Any] = (),
    data: DataLoader[Tensor] | None = None,
    validation: DataLoader[Tensor] | None = None,
    **options: Any,
) -> tuple[Trainer, Regression]:
    with lightning_environment():
        trainer = new_trainer(folder, strategy=strategy, plugins=plugins, max_epochs=epochs, **options)
        module = model()
        trainer.fit(module, data or batches(), validation, ckpt_path=resume)
    return trainer, module


def new_trainer(folder: Path, *, plugins: Sequence[Any] = (), **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        plugins=[TorchElasticEnvironment(), *plugins],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "enable_checkpointing": False, **options},
    )


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)


def test_the_example_and_its_resume_end_with_the_same_model(tmp_path: Path) -> None:
    straight = run_processes(EXAMPLES / "lightning_ddp.py", str(tmp_path / "one"))
    assert_compressed_and_agreed(straight)
    checkpoint = str(tmp_path / "one" / "epoch=0.ckpt")
    resumed = run_processes(EXAMPLES / "lightning_ddp.py", str(tmp_path / "two"), "--resume", checkpoint)
    assert_compressed_and_agreed(resumed)
    checksums = [set(re.findall(r"checksum (-?\d+\.\d{9})", output)) for output in (straight, resumed)]
    assert checksums[0] == checksums[1]
    metrics = next((tmp_path / "one").rglob("metrics.csv")).read_text()
    assert "thinwire/compression_ratio" in metrics


@pytest.mark.parametrize("kind", ["ours", "made without Thinwire"])
def test_checkpoint_and_resume(pool2: Pool, tmp_path: Path, kind: str) -> None:
    results = pool2.run(_resumed, tmp_path, kind)
    for straight, resumed, steps, ratio in results:
        assert steps == (12 if kind == "ours" else 6)
        assert ratio > 2
        if kind == "ours":
            assert_same(straight, resumed)
        assert_same(resumed, results[0][1])


def save(folder: Path) -> None:
    """By hand, after one epoch."""
    trainer, _ = fit(ThinwireStrategy(POWER), folder, epochs=1, callbacks=[ThinwireCallback()])
    with lightning_environment():
        trainer.save_checkpoint(folder / "checkpoint.ckpt")


def _resumed(folder: Path, kind: str) -> tuple[list[Tensor], list[Tensor], int, float]:
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    callbacks = [ThinwireCallback(), saving]
    _, straight = fit(ThinwireStrategy(POWER), folder, callbacks=callbacks, enable_checkpointing=True)
    file = str(folder / "epoch=0.ckpt")
    if kind == "made without Thinwire" and dist.get_rank() == 0:
        saved = torch.load(file, weights_only=True)
        del saved["thinwire"]
        torch.save(saved, file)
    dist.barrier()
    resuming = ThinwireStrategy(POWER)
    _, resumed = fit(resuming, folder, resume=file, callbacks=[ThinwireCallback()])
    stats = resuming.sync.stats()
    return parameters_of(straight), parameters_of(resumed), stats.steps, stats.compression_ratio


def test_resume_on_another_number_of_processes(pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    pool2.run(save, tmp_path)
    for steps, owed in pool4.run(_resume_on_four, tmp_path):
        assert steps > 6
        assert owed > 0


def _resume_on_four(folder: Path) -> tuple[int, float]:
    strategy = ThinwireStrategy(POWER)
    fit(strategy, folder, resume=str(folder / "checkpoint.ckpt"), callbacks=[ThinwireCallback()])
    error = dict(strategy.sync.state_dict()["error"])
    return strategy.sync.stats().steps, sum(float(each.norm()) for each in error.values())


def test_facts_16_hooks_work_on_the_cpu(pool2: Pool, tmp_path: Path) -> None:
    """Lightning's own strategy ignores them there."""
    for ratio, agreed in pool2.run(_hooked, tmp_path):
        assert ratio > 4
        assert agreed


def _hooked(folder: Path) -> tuple[float, bool]:
    state = hooks.PowerSGDState(None, 2, start_powerSGD_iter=0)
    strategy = ThinwireStrategy(
        ddp_comm_state=state,
        ddp_comm_hook=hooks.powerSGD_hook,
        ddp_comm_wrapper=hooks.fp16_compress_wrapper,
    )
    _, model = fit(strategy, folder, epochs=1, callbacks=[ThinwireCallback()])
    mine = torch.cat([p.view(-1) for p in parameters_of(model)])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return state.stats().compression_ratio, torch.equal(everyone[0], everyone[1])


def test_accumulation_and_clipping(pool2: Pool, tmp_path: Path) -> None:
    results = pool2.run(_accumulated, tmp_path)
    for steps, ratio, parameters in results:
        assert steps == 3
        assert ratio > 2
        assert_same(parameters, results[0][2])


def _accumulated(folder: Path) -> tuple[int, float, list[Tensor]]:
    strategy = ThinwireStrategy(PowerSGD(matrix_rank=2))
    _, model = fit(strategy, folder, epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.5)
    stats = strategy.sync.stats()
    return stats.steps, stats.compression_ratio, parameters_of(model)


def test_16_bit_mixed_precision_tells_the_loss_scale(pool2: Pool, tmp_path: Path) -> None:
    """An overflow on one process: one step skipped on all, the scale halves, and training goes on."""
    results = pool2.run(_mixed, tmp_path)
    for steps, skipped, scale, error, parameters in results:
        assert (steps, skipped) == (6, 1)
        assert scale == 2.0**9
        assert 0 < error < 100  # in scaled units it would be hundreds of times as much
        assert_same(parameters, results[0][4])
        assert all(parameter.isfinite().all() for parameter in parameters)


class Overflowing(Regression):
    """Infinite in the third batch of process 1."""

    def training_step(self, batch: Tensor) -> Tensor:
        loss = super().training_step(batch)
        return loss * torch.inf if self.global_rank == 1 and self.trainer.global_step == 2 else loss


def _mixed(folder: Path) -> tuple[int, int, float, float, list[Tensor]]:
    strategy, scaler = ThinwireStrategy(PowerSGD(matrix_rank=2)), GradScaler("cpu", init_scale=2.0**10)
    with lightning_environment():
        precision = MixedPrecision("16-mixed", "cpu", scaler)
    _, model = fit(strategy, folder, epochs=1, plugins=[precision], model=Overflowing)
    stats = strategy.sync.stats()
    error = sum(float(each.norm()) for each in dict(strategy.sync.state_dict()["error"]).values())
    return stats.steps, stats.nonfinite_steps, scaler.get_scale(), error, parameters_of(model)


def test_without_a_scaler_gradients_that_are_not_finite_can_be_zeros(pool2: Pool, tmp_path: Path) -> None:
    for steps, nonfinite_steps, parameters in pool2.run(_zeros, tmp_path):
        assert (steps, nonfinite_steps) == (6, 1)
        assert all(parameter.isfinite().all() for parameter in parameters)


def _zeros(folder: Path) -> tuple[int, int, list[Tensor]]:
    strategy = ThinwireStrategy(PowerSGD(matrix_rank=2), on_nonfinite="zero", host_check=False)
    _, model = fit(strategy, folder, epochs=1, model=Overflowing)
    assert not engine_of(strategy.sync).settings.host_check
    stats = strategy.sync.stats()
    return stats.steps, stats.nonfinite_steps, parameters_of(model)


def test_the_callback_logs_and_a_second_fit_goes_on(pool2: Pool, tmp_path: Path) -> None:
    results = pool2.run(_logged, tmp_path)
    for steps, _, is_gone in results:
        assert steps == [6, 12, 6]  # of another model anew
        assert is_gone  # the memory of the first fit, in the second
    lines = results[0][1].splitlines()
    assert "thinwire/compression_ratio" in lines[0]
    assert "thinwire/total_message_bytes" in lines[0]
    assert "thinwire/message_bytes" not in lines[0]  # of a record, in MetricsWriter
    assert len(lines) == 1 + 3


def _logged(folder: Path) -> tuple[list[int], str, bool]:
    strategy = ThinwireStrategy(POWER)
    logger = CSVLogger(folder, version="one")
    trainer, model = fit(strategy, folder, epochs=1, callbacks=[ThinwireCallback(2)], logger=logger)
    steps, before = [strategy.sync.stats().steps], ref(strategy.sync)
    logger.save()
    file = folder / "lightning_logs" / "one" / "metrics.csv"
    text = file.read_text() if dist.get_rank() == 0 else ""
    with lightning_environment():
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, batches())
        steps.append(strategy.sync.stats().steps)
        gc.collect()
        is_gone = before() is None
        trainer.fit_loop.max_epochs = 3
        trainer.fit(Regression(), batches())
        steps.append(strategy.sync.stats().steps)
    return steps, text, is_gone


def test_the_run_chooses_its_algorithm(pool2: Pool, tmp_path: Path) -> None:
    first, second = pool2.run(_chosen, tmp_path)
    assert first["world"] == 2
    assert first["used"] == second["used"]
    exact_bytes, cast_bytes = first["bytes"][:2]
    assert cast_bytes == exact_bytes / 2
    # A second fit of the same module goes on, and chooses anew.
    assert first["again"] == (30, True, True)


def _chosen(folder: Path) -> dict[str, Any]:
    # All are tried, for messages are waited for; what is chosen then, the machine has to say.
    strategy = ThinwireStrategy(
        partial(thinwire.auto, probe_steps=2, budget_loss=0, least_gain=0), find_unused_parameters=False
    )
    trainer, model = fit(strategy, folder, epochs=4, callbacks=[ThinwireCallback(2)])
    assert strategy.auto is not None
    first, sync = strategy.auto, strategy.sync
    assert first.chosen is not None
    with lightning_environment():
        trainer.fit_loop.max_epochs = 5
        trainer.fit(model, batches())
    assert strategy.auto is not None
    return {
        "world": dist.get_world_size(),
        "used": (
            first.chosen.name,
            str(sync.algorithm),
            [each.step_seconds for each in first.trials],
        ),
        "bytes": [each.message_bytes for each in first.trials],
        "again": (strategy.sync.stats().steps, strategy.auto.is_choosing, strategy.auto is not first),
    }


def test_by_name(pool2: Pool, tmp_path: Path) -> None:
    for ratio, algorithm in pool2.run(_by_name, tmp_path):
        assert ratio > 1.5
        assert algorithm == PowerSGD()


def _by_name(folder: Path) -> tuple[float, Any]:
    trainer, _ = fit("thinwire", folder, epochs=1)
    assert isinstance(trainer.strategy, ThinwireStrategy)
    return trainer.strategy.sync.stats().compression_ratio, trainer.strategy.algorithm


def test_register_ddp_comm_hook(pool2: Pool) -> None:
    for ratio, twice in pool2.run(_registered):
        assert ratio > 4
        assert "one only" in twice


def _registered() -> tuple[float, str]:
    model = DistributedDataParallel(nn.Linear(64, 64))
    state = hooks.PowerSGDState(None, 2, start_powerSGD_iter=0)
    register_ddp_comm_hook(model, state, hooks.powerSGD_hook, hooks.bf16_compress_wrapper)
    torch.autograd.backward(model(torch.ones(2, 64)).sum())
    register_ddp_comm_hook(model)
    with pytest.raises(thinwire.AttachError) as raised:
        register_ddp_comm_hook(model, None, hooks.allreduce_hook)
    return state.stats().compression_ratio, str(raised.value)


def test_the_documents_third_example(pool2: Pool) -> None:
    for iters, equal in pool2.run(_third_example):
        assert iters == 2
        assert equal == [True, True, False]


def _third_example() -> tuple[int, list[bool]]:
    model = DistributedDataParallel(nn.Linear(64, 64))
    alone = [dist.new_group([process_rank]) for process_rank in range(2)][dist.get_rank()]
    state = hooks.PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=2)
    register_ddp_comm_hook(model, state, hooks.post_localSGD_hook)
    equal = []
    for _ in range(3):
        model.zero_grad()
        torch.autograd.backward(model(torch.ones(2, 64) * (dist.get_rank() + 1)).sum())
        assert model.module.weight.grad is not None
        equal.append(all_same(model.module.weight.grad))
    return state.iter, equal


def all_same(tensor: Tensor) -> bool:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return torch.equal(everyone[0], everyone[1])


def test_models_are_averaged_with_the_local_hook(pool2: Pool, tmp_path: Path) -> None:
    """Every second step after two: after the third and the fifth; and at once in a second fit."""
    assert pool2.run(_averaged, tmp_path) == [(True, False, True)] * 2


def _averaged(folder: Path) -> tuple[bool, bool, bool]:
    def new_strategy() -> ThinwireStrategy:
        state = hooks.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
        return ThinwireStrategy(
            ddp_comm_state=state, ddp_comm_hook=hooks.post_localSGD_hook, model_averaging_period=2
        )

    _, five = fit(new_strategy(), folder, epochs=1, limit_train_batches=5)
    trainer, six = fit(new_strategy(), folder, epochs=1)
    after = [all_same(torch.cat([p.view(-1) for p in parameters_of(model)])) for model in (five, six)]
    with lightning_environment():
        trainer.fit_loop.max_epochs = 2
        trainer.fit_loop.epoch_loop.max_steps = 7
        trainer.fit(six, batches())
    return after[0], after[1], all_same(torch.cat([p.view(-1) for p in parameters_of(six)]))


def test_models_are_averaged_now_and_then(pool2: Pool, tmp_path: Path) -> None:
    """By DiLoCo every four steps, and before validation and checkpoints, which are of one model."""
    results = pool2.run(_averaged_models, tmp_path)
    assert len(results) == 2
    for same, validated, (straight, steps, ratio), (resumed, resumed_steps), message in results:
        assert same == [step % 4 == 0 for step in range(1, 13)]
        assert validated == [True, True, True]  # before training, and after each epoch of 6 steps
        assert steps == resumed_steps == 12
        assert ratio > 5
        assert_same(straight, results[0][2][0])
        assert_same(resumed, results[0][3][0])
        assert message.startswith("expected a module with one optimizer, whose steps are counted, got 2")


def test_the_lines_of_advice_run_as_they_are(pool2: Pool, tmp_path: Path) -> None:
    for world_size, ratios in pool2.run(_pasted, lines_for("Lightning"), tmp_path):
        assert world_size == 2
        assert len(ratios) == 2
        assert min(ratios) > 5


def _pasted(lines: list[str], folder: Path) -> tuple[int, list[float]]:
    ratios = []
    for text in lines:
        names: dict[str, Any] = {}
        # As in the user's script, besides what a test needs.
        names["Trainer"] = partial(new_trainer, folder, max_steps=4)
        names["loop"] = lambda names=names: names["trainer"].fit(Regression(), batches())
        with lightning_environment():
            run(text, names)
        ratios.append(names["trainer"].strategy.sync.stats().compression_ratio)
    return dist.get_world_size(), ratios


class Looking(Regression):
    """Has a buffer, which DDP would send, and notes where the processes hold one model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.BatchNorm1d(32))
        self.same: list[bool] = []
        self.validated: list[bool] = []

    def on_train_batch_end(self, *unused: Any) -> None:
        self.same.append(agreed_on(self))

    def validation_step(self, batch: Tensor, index: int) -> None:
        if index == 0:
            self.validated.append(agreed_on(self))


class TwoOptimizers(Regression):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([each], lr=0.1) for each in self.layers.parameters()][:2]


def _averaged_models(folder: Path) -> tuple[Any, ...]:
    averaging = partial(thinwire.DiLoCo, every_steps=4)

    def trained(epochs: int, resume: Path | None = None) -> tuple[Trainer, Any]:
        return fit(
            ThinwireStrategy(averaging),
            folder,
            epochs=epochs,
            resume=None if resume is None else str(resume),
            model=Looking,
            callbacks=[ThinwireCallback()],
            validation=batches(1),
        )

    straight, module = trained(2)
    local: Any = straight.strategy.local  # type: ignore[attr-defined]
    stats = local.stats()
    first, _ = trained(1)
    with lightning_environment():
        first.save_checkpoint(folder / "local.ckpt")
    again, resumed = trained(2, folder / "local.ckpt")
    steps = again.strategy.local.steps  # type: ignore[attr-defined]
    with pytest.raises(thinwire.ConfigError) as refused:
        fit(ThinwireStrategy(averaging), folder, model=TwoOptimizers)
    whole = parameters_of(module), stats.steps, stats.compression_ratio
    return module.same, module.validated, whole, (parameters_of(resumed), steps), str(refused.value)


def test_an_exception_saves_a_process_s_own_model(pool2: Pool, tmp_path: Path) -> None:
    """Nothing is sent: the other processes might be anywhere."""
    for message, averagings, saved in pool2.run(_ended, tmp_path):
        assert message == "no more"
        assert averagings == 0
        assert saved


class Ending(Regression):
    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        if index == 2:
            raise RuntimeError("no more")


def _ended(folder: Path) -> tuple[str, int, bool]:
    strategy = ThinwireStrategy(partial(thinwire.LocalSGD, every_steps=4))
    kept = OnExceptionCheckpoint(folder)
    with pytest.raises(RuntimeError) as raised, patch.object(kept, "teardown"):  # which removes it
        fit(strategy, folder, model=Ending, callbacks=[kept], enable_checkpointing=True)
    dist.barrier()
    local: Any = strategy.local
    return str(raised.value), local.sync.steps, Path(kept.ckpt_path).exists()


def test_positional_arguments_are_the_stock_strategys() -> None:
    devices, state = [torch.device("cpu")], hooks.PowerSGDState(None)
    stock = DDPStrategy(None, devices, None, None, None, state, hooks.powerSGD_hook)
    same = ThinwireStrategy(None, devices, None, None, None, state, hooks.powerSGD_hook)
    assert same.algorithm is None
    assert same.parallel_devices == stock.parallel_devices == devices
    assert same.remembering is state
    for ours in (ThinwireStrategy(POWER, None, devices), ThinwireStrategy(None, devices, algorithm=POWER)):
        assert ours.algorithm is POWER
        assert ours.parallel_devices == devices
    assert ThinwireStrategy(CPUAccelerator(), devices).algorithm == PowerSGD()
    with pytest.raises(TypeError):
        ThinwireStrategy(*[None] * 20)


def test_with_pytorch_lightning_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("lightning", "thinwire")]:
    del sys.modules[name]
sys.modules["lightning"] = None
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from thinwire import hooks
from thinwire.integrations.lightning import ThinwireStrategy, register_ddp_comm_hook
from pytorch_lightning.strategies import DDPStrategy
assert issubclass(ThinwireStrategy, DDPStrategy)
dist.init_process_group("gloo", init_method="file://{tmp_path}/rendezvous", rank=0, world_size=1)
model, state = DistributedDataParallel(torch.nn.Linear(64, 64)), hooks.PowerSGDState(None, 2, 0)
register_ddp_comm_hook(model, state, hooks.powerSGD_hook)
model(torch.ones(2, 64)).sum().backward()
print("ratio", state.stats().compression_ratio)
dist.destroy_process_group()
""")
    ended = run_python(str(script))
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout.split()[-1]) > 4


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "a wrapper without a hook": (
        lambda: ThinwireStrategy(ddp_comm_wrapper=hooks.fp16_compress_wrapper),
        "need a ddp_comm_hook",
    ),
    "a state without a hook": (
        lambda: ThinwireStrategy(ddp_comm_state=hooks.PowerSGDState(None)),
        "need a ddp_comm_hook",
    ),
    "a wrapper around no hook": (
        lambda: ThinwireStrategy(
            ddp_comm_hook=stock_power.powerSGD_hook, ddp_comm_wrapper=hooks.fp16_compress_wrapper
        ),
        "use torch's own wrapper",
    ),
    "a wrapper that is none": (
        lambda: ThinwireStrategy(ddp_comm_hook=hooks.allreduce_hook, ddp_comm_wrapper="fp16"),
        "'fp16'",
    ),
    "a hook that is none": (lambda: ThinwireStrategy(ddp_comm_hook="powersgd"), "'powersgd'"),
    "no state": (lambda: ThinwireStrategy(ddp_comm_hook=hooks.powerSGD_hook), "PowerSGDState"),
    "torch's state": (
        lambda: ThinwireStrategy(
            ddp_comm_state=stock_power.PowerSGDState(None),
            ddp_comm_hook=hooks.powerSGD_hook,
        ),
        "torch.distributed",
    ),
    "a state for a hook without": (
        lambda: ThinwireStrategy(
            ddp_comm_state=hooks.PowerSGDState(None), ddp_comm_hook=hooks.fp16_compress_hook
        ),
        "process group or None",
    ),
    "a local hook without its state": (
        lambda: ThinwireStrategy(ddp_comm_hook=hooks.post_localSGD_hook, model_averaging_period=2),
        "needs a thinwire.hooks.PostLocalSGDState",
    ),
    "a local hook without averaging": (
        lambda: ThinwireStrategy(
            ddp_comm_state=hooks.PostLocalSGDState(None, None, 3), ddp_comm_hook=hooks.post_localSGD_hook
        ),
        "model_averaging_period=",
    ),
    "averaging without a local hook": (
        lambda: ThinwireStrategy(POWER, model_averaging_period=2),
        "would have no effect",
    ),
    "an algorithm and a hook": (
        lambda: ThinwireStrategy(POWER, ddp_comm_hook=hooks.allreduce_hook),
        "not both",
    ),
    "what auto takes itself": (
        lambda: ThinwireStrategy(thinwire.auto, on_nonfinite="zero"),
        "functools.partial",
    ),
    "no choice for what is not finite": (
        lambda: ThinwireStrategy(POWER, on_nonfinite="skip"),  # type: ignore[arg-type]
        'on_nonfinite must be "nan", "zero" or "raise", got',
    ),
    "a hook, which has its state's choice for what is not finite": (
        lambda: ThinwireStrategy(ddp_comm_hook=hooks.allreduce_hook, on_nonfinite="zero"),
        "on_nonfinite would have no effect here; give it to the hook's state",
    ),
    "an algorithm's setting": (
        lambda: ThinwireStrategy(matrix_rank=4),
        "DistributedDataParallel has.*matrix_rank",
    ),
    "a mistyped setting of DiLoCo": (
        lambda: ThinwireStrategy(partial(thinwire.DiLoCo, every_step=30)),  # type: ignore[call-arg]
        "DiLoCo got an unexpected keyword argument 'every_step'; it takes model, optimizer, every_steps,",
    ),
    "a mistyped setting of auto": (
        lambda: ThinwireStrategy(partial(thinwire.auto, budget=0.1)),
        "auto got an unexpected keyword argument 'budget'; it takes model, optimizer, .*on_nonfinite",
    ),
    "no algorithm": (lambda: ThinwireStrategy("powersgd"), "'powersgd'"),
    "no steps": (lambda: ThinwireCallback(0), "log_every_n_steps.*0"),
    "not DDP": (lambda: register_ddp_comm_hook(nn.Linear(2, 2), None, hooks.allreduce_hook), "got Linear"),  # type: ignore[arg-type]
    "before fit": (lambda: ThinwireStrategy(POWER).sync, "nothing is attached"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_refused_at_once(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(thinwire.ThinwireError, match=message):
        call()


def test_the_callback_refuses_a_strategy_with_nothing_to_log(pool2: Pool, tmp_path: Path) -> None:
    for message in pool2.run(_wrong_strategy, tmp_path):
        assert "got DDPStrategy" in message


def _wrong_strategy(folder: Path) -> str:
    with pytest.raises(thinwire.ConfigError) as raised:
        fit(DDPStrategy(), folder, callbacks=[ThinwireCallback()])
    return str(raised.value)


def member(**settings: Any) -> Any:
    """What makes a member that is alone."""
    group = elastic.InProcessGroup(elastic.InProcessLighthouse())
    return partial(elastic.DiLoCo, every_steps=4, algorithm=POWER, group=group, **settings)


def alone(folder: Path, callback: ThinwireCallback, resume: str | None = None, **options: Any) -> Trainer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            callbacks=[callback, ModelCheckpoint(folder, "at-{step}", every_n_train_steps=6, save_top_k=-1)],
            num_sanity_val_steps=0,
            **options,
        )
        trainer.fit(Regression(), batches(), ckpt_path=resume)
    return trainer


def test_a_member_that_comes_and_goes_has_a_trainer_of_its_own_and_resumes(tmp_path: Path) -> None:
    looked = []

    class Looking(ThinwireCallback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            assert self.local is not None
            looked.append((self.local.steps, self.local.stats().compression_ratio))
            super().on_train_end(trainer, pl_module)

    clipped: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "max_steps": 12}
    trainer = alone(tmp_path, Looking(elastic=member()), max_epochs=4, **clipped)
    assert trainer.global_step == 12
    assert looked[0][0] == 12
    assert looked[0][1] > 2
    saved = str(next(tmp_path.glob("*step=6.ckpt")))
    again = alone(tmp_path / "again", Looking(elastic=member()), saved, max_epochs=4, **clipped)
    assert again.global_step == 12
    assert trainer.model is not None
    assert again.model is not None
    assert_same(parameters_of(trainer.model), parameters_of(again.model))
    with pytest.raises(ConfigError, match="elastic must make a member"):
        ThinwireCallback(elastic=partial(thinwire.DiLoCo, every_steps=2))
