"""Stock Accelerate with Thinwire's handler: launched as users launch it, and in the pool's processes."""

from __future__ import annotations

import inspect
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType as StockHook
from accelerate.utils import DistributedDataParallelKwargs as StockKwargs
from packaging.version import Version
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

import thinwire
from accelerated import several_processes
from commands import EXAMPLES, assert_compressed_and_agreed, run_python, stand_ins
from pasted import handles, lines_for, run
from processes import in_each_process
from thinwire.algorithms import Algorithm
from thinwire.integrations.accelerate import DDPCommunicationHookType as Hook
from thinwire.integrations.accelerate import DistributedDataParallelKwargs, ParallelismConfig
from thinwire.sync import engine_of
from training import agreed, flat

AT_ONCE = {"start_powerSGD_iter": 0}
OPTIONS = "--multi_gpu --num_processes=2 --num_machines=1 --mixed_precision=no --dynamo_backend=no"
LAUNCH = ["accelerate.commands.launch", *OPTIONS.split()]


def test_the_example_runs_under_accelerates_launcher(tmp_path: Path) -> None:
    # Accelerate 1.6 takes no port 0.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with stand_ins() as stand_in:
        script = EXAMPLES / "accelerate_ddp.py"
        command = [*LAUNCH, f"--main_process_port={port}", *stand_in, str(script), "--folder", str(tmp_path)]
        ended = run_python(*command, environment={"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert_compressed_and_agreed(ended.stdout)


def new_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def new_handler(**settings: Any) -> DistributedDataParallelKwargs:
    settings = {"comm_hook": Hook.POWER_SGD, "comm_state_option": AT_ONCE} | settings
    return DistributedDataParallelKwargs(**settings)


def new_accelerator(handler: DistributedDataParallelKwargs, **settings: Any) -> Accelerator:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler], **settings)
    assert accelerator.num_processes == dist.get_world_size() == 2
    return accelerator


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, steps: range) -> Tensor:
    """The parameters afterwards."""
    for step in steps:
        torch.manual_seed(10 * step + dist.get_rank())
        accelerator.backward(model(torch.randn(8, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def prepared(accelerator: Accelerator) -> tuple[nn.Module, Any]:
    model = new_model()
    return tuple(accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def new_run(**settings: Any) -> tuple[DistributedDataParallelKwargs, Accelerator, tuple[nn.Module, Any]]:
    """A handler, its Accelerator, and a model with its optimizer."""
    handler = new_handler(**settings)
    accelerator = new_accelerator(handler)
    return handler, accelerator, prepared(accelerator)


POWER = thinwire.PowerSGD(matrix_rank=1, warmup_steps=0, min_compression_ratio=2)
BATCHED = thinwire.algorithms.BatchedPowerSGD(matrix_rank=1, warmup_steps=0, min_compression_ratio=2)
RANK_3 = {**AT_ONCE, "matrix_approximation_rank": 3, "random_seed": 5}
CHOICES = [
    (Hook.FP16, Hook.BF16, {}, thinwire.Cast("fp16"), 1.9),
    (Hook.BF16, Hook.NO, {}, thinwire.Cast("bf16"), 1.9),
    (Hook.POWER_SGD, Hook.NO, AT_ONCE, POWER, 15),
    (Hook.POWER_SGD, Hook.FP16, AT_ONCE, replace(POWER, wire_dtype="fp16"), 20),
    (Hook.POWER_SGD, Hook.BF16, RANK_3, replace(POWER, wire_dtype="bf16", matrix_rank=3, seed=5), 10),
    (Hook.BATCHED_POWER_SGD, Hook.NO, AT_ONCE, BATCHED, 20),
]


@pytest.mark.parametrize(("hook", "wrapper", "options", "algorithm", "least_ratio"), CHOICES)
@in_each_process(2)
def test_every_hook_and_wrapper(
    hook: Hook, wrapper: Hook, options: dict[str, Any], algorithm: Algorithm, least_ratio: float
) -> None:
    with several_processes():
        settings = {"comm_hook": hook, "comm_wrapper": wrapper, "comm_state_option": options}
        handler, accelerator, trained = new_run(**settings)
        train(accelerator, *trained, range(4))
        assert agreed(trained[0])
        assert "0.weight" in [name for route in handler.sync.plan.routes for name in route.names]
        assert handler.sync.algorithm == algorithm
        assert handler.sync.stats().compression_ratio > least_ratio


@in_each_process(4)
def test_attach_gets_its_settings() -> None:
    for options, over in (
        ({}, "over 4 processes"),  # the launcher tells of one machine
        ({"machines": [[0, 1], [2, 3]]}, "over 2 machines of 2 processes"),
        ({"machines": False, "on_nonfinite": "zero", "host_check": False}, "over 4 processes"),
    ):
        with several_processes():
            handler = new_handler(comm_state_option=options)
            accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
            is_scaled = "on_nonfinite" not in options
            # On CPUs it makes none of its own.
            accelerator.scaler = GradScaler("cpu", init_scale=8.0) if is_scaled else None
            accelerator.prepare(torch.nn.Linear(64, 64))
            assert over in str(handler.sync)
            settings = engine_of(handler.sync).settings
            assert (settings.loss_scale is None) == (not is_scaled)
            expected = ("nan", True) if is_scaled else ("zero", False)
            assert (settings.on_nonfinite, settings.host_check) == expected


@in_each_process(2)
def test_without_a_hook_or_in_one_process_nothing_is_attached() -> None:
    with several_processes():
        handler = DistributedDataParallelKwargs()
        model, _ = prepared(new_accelerator(handler))
        assert not cast(DistributedDataParallel, model)._comm_hooks
        with pytest.raises(thinwire.AttachError):
            _ = handler.sync
    try:
        handler = new_handler()
        assert isinstance(
            Accelerator(cpu=True, kwargs_handlers=[handler]).prepare(new_model()), nn.Sequential
        )
        with pytest.raises(thinwire.AttachError, match="several processes"):
            _ = handler.sync
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@in_each_process(2)
def test_saved_by_all_and_resumed(tmp_path: Path) -> None:
    """Collecting the state is collective: `save_state` must call it on every process, or this hangs."""
    with several_processes():
        _, accelerator, trained = new_run()
        train(accelerator, *trained, range(4))
        accelerator.save_state(str(tmp_path))
        accelerator.wait_for_everyone()
        straight = train(accelerator, *trained, range(4, 8))
    saved = torch.load(tmp_path / "custom_checkpoint_0.pkl", weights_only=True)
    assert sum(error.norm() for error in dict(saved["models"][0]["error"]).values()) > 0
    for is_forgetful in (False, True):
        with several_processes():
            handler, accelerator, trained = new_run()
            nothing = handler.state_dict()
            accelerator.load_state(str(tmp_path))
            if is_forgetful:
                handler.load_state_dict(nothing)
            resumed = train(accelerator, *trained, range(4, 8))
            assert torch.equal(straight, resumed) == (not is_forgetful)
            assert handler.sync.stats().compression_ratio > 15


@in_each_process(2)
@pytest.mark.parametrize("registers", ["before", "behind"])
def test_a_run_that_began_without_thinwire_is_resumed_with_it(registers: str, tmp_path: Path) -> None:
    def new(
        count: int, *handlers: DistributedDataParallelKwargs
    ) -> tuple[Accelerator, tuple[nn.Module, Any], nn.Parameter]:
        accelerator = Accelerator(cpu=True, kwargs_handlers=[*handlers])
        registered = nn.ParameterList([torch.tensor([float(count)])])
        if registers == "before":
            accelerator.register_for_checkpointing(registered)
        trained = prepared(accelerator)
        if registers == "behind":
            accelerator.register_for_checkpointing(registered)
        return accelerator, trained, registered[0]

    with several_processes():
        accelerator, trained, _ = new(7)
        train(accelerator, *trained, range(4))
        accelerator.save_state(str(tmp_path / "without"))
        accelerator.wait_for_everyone()
    for folder, is_warned in (("without", True), ("with", False)):
        with several_processes(), patch("thinwire.integrations.accelerate.logger.warning") as warned:
            handler = new_handler()
            accelerator, trained, counter = new(0, handler)
            accelerator.load_state(str(tmp_path / folder))
            assert (counter.item(), handler.sync.steps) == (7, 0 if is_warned else 4)
            train(accelerator, *trained, range(4, 8))
            assert handler.sync.stats().compression_ratio > 15
            accelerator.save_state(str(tmp_path / "with"))
            accelerator.wait_for_everyone()
        assert warned.called == is_warned


@in_each_process(2)
def test_the_lines_of_advice_run_as_they_are() -> None:
    with several_processes(), handles() as made:
        names: dict[str, Any] = {"accelerator": Accelerator(cpu=True), "model": new_model()}
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
        names["loop"] = lambda: train(names["accelerator"], names["model"], names["optimizer"], range(4))
        run(lines_for("Accelerate"), names)
        assert made[0].stats().compression_ratio > 5


@in_each_process(2)
def test_two_models_of_one_handler(tmp_path: Path) -> None:
    def steps_of(handler: DistributedDataParallelKwargs) -> list[int]:
        return [sync.steps for sync in handler.syncs]

    with several_processes():
        handler, accelerator, first = new_run()
        second = prepared(accelerator)
        train(accelerator, *first, range(3))
        train(accelerator, *second, range(2))
        assert steps_of(handler) == [3, 2]
        with pytest.raises(thinwire.AttachError, match=r"handler\.syncs"):
            _ = handler.sync
        accelerator.save_state(str(tmp_path))
        accelerator.wait_for_everyone()
    saved = torch.load(tmp_path / "custom_checkpoint_0.pkl", weights_only=True)
    assert [model["step"] for model in saved["models"]] == [3, 2]
    with several_processes():
        handler, accelerator, first = new_run()
        with pytest.raises(thinwire.StateError, match="of 1 models, got one of 2"):
            accelerator.load_state(str(tmp_path))
        second = prepared(accelerator)
        accelerator.load_state(str(tmp_path))
        assert steps_of(handler) == [3, 2]


@in_each_process(2)
def test_prepared_twice_and_prepared_again() -> None:
    with several_processes():
        handler, accelerator, (model, optimizer) = new_run()
        if Version(accelerate.__version__) >= Version("1.15"):  # others wrap it twice, as without Thinwire
            assert accelerator.prepare(model) is model
        train(accelerator, model, optimizer, range(2))
        assert (len(handler.syncs), handler.sync.stats().steps) == (1, 2)
        # As `find_executable_batch_size` has it: free everything, start again with a new model.
        model, optimizer = accelerator.free_memory(model, optimizer)
        model, optimizer = prepared(accelerator)
        assert len(handler.syncs) == len(handler.state_dict()["models"]) == 1
        assert handler.sync.stats().steps == 0


@in_each_process(2)
def test_misuse_is_refused() -> None:
    with several_processes():
        handler = new_handler()
        with pytest.raises(thinwire.AttachError, match=r"thinwire\.attach"):
            handler.register_comm_hook(DistributedDataParallel(new_model()))
        model = new_accelerator(handler).prepare(new_model())
        with pytest.raises(thinwire.ConfigError, match="one for each"):
            new_accelerator(handler).prepare(new_model())
        del model


def test_the_config_of_replicas_says_which_accelerate_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate, "__version__", "1.14.0")
    with pytest.raises(thinwire.MissingExtraError, match=r"ParallelismConfig needs accelerate 1\.15"):
        ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)


def test_the_names_and_settings_are_accelerates() -> None:
    assert Hook is StockHook
    ours, theirs = (
        inspect.signature(kind).parameters for kind in (DistributedDataParallelKwargs, StockKwargs)
    )
    assert [(name, ours[name].default) for name in ours] == [(name, theirs[name].default) for name in theirs]
    settings: dict[str, Any] = {"bucket_cap_mb": 3, "static_graph": True, "comm_hook": Hook.POWER_SGD}
    assert DistributedDataParallelKwargs(**settings).to_kwargs() == StockKwargs(**settings).to_kwargs()
    assert isinstance(DistributedDataParallelKwargs(), StockKwargs)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"comm_hook": "power_sgd"}, "NO, FP16, BF16, POWER_SGD, BATCHED_POWER_SGD, got 'power_sgd'"),
    ({"comm_wrapper": Hook.POWER_SGD}, "NO, FP16, BF16, got"),
    ({"comm_wrapper": Hook.FP16}, "comm_wrapper FP16 have no effect with comm_hook NO;"),
    ({"comm_hook": Hook.BF16, "comm_state_option": {"random_seed": 1}}, "no effect"),
    ({"comm_hook": Hook.POWER_SGD, "comm_state_option": {"matrix_rank": 1}}, "matrix_approximation_rank"),
    ({"comm_hook": Hook.POWER_SGD, "comm_state_option": {"random_seed": -1}}, "^random_seed .* got -1"),
]


def test_bad_settings_and_states_are_refused_at_once() -> None:
    for settings, message in MISTAKES:
        with pytest.raises(thinwire.ConfigError, match=message):
            DistributedDataParallelKwargs(**settings)
    states: list[Any] = [{}, {"models": [{}]}, [], None]
    for state in states:
        with pytest.raises(thinwire.StateError, match="of 0 models"):
            new_handler().load_state_dict(state)
