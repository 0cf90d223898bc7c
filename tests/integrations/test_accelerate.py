"""Stock Accelerate with Thinwire's handler: launched as users launch it, and in the pool's processes."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType as StockHook
from accelerate.utils import DistributedDataParallelKwargs as StockKwargs
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

import thinwire
from accelerated import several_processes
from launcher import (
    EXAMPLES,
    TOLD,
    assert_compressed_and_agreed,
    run_processes,
    run_python,
)
from pasted import handles, lines_for, run
from pool import Pool
from stand_ins import stand_ins
from thinwire.algorithms import Algorithm
from thinwire.integrations.accelerate import DDPCommunicationHookType as Hook
from thinwire.integrations.accelerate import DistributedDataParallelKwargs
from thinwire.sync import engine_of
from training import agreed, raised_by

AT_ONCE = {"start_powerSGD_iter": 0}
LAUNCH = [
    *("accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
    *("--main_process_port=0", "--mixed_precision=no", "--dynamo_backend=no"),
]
# What that launcher tells the processes that it starts, besides what torchrun tells.
LAUNCHED = {
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
}


def test_the_example_resumes_where_it_stopped(tmp_path: Path) -> None:
    with stand_ins() as stand_in:
        command = [*LAUNCH, *stand_in, str(EXAMPLES / "accelerate_ddp.py"), "--folder", str(tmp_path)]
        ended = run_python(*command, environment={"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"})
    straight = ended.stdout
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert_compressed_and_agreed(straight)
    arguments = ("--folder", str(tmp_path), "--resume")
    resumed = run_processes(EXAMPLES / "accelerate_ddp.py", *arguments, environment=LAUNCHED)
    assert_compressed_and_agreed(resumed, least_ratio=20)
    assert "batch 20" not in resumed
    checksums = {checksum for _, _, checksum in TOLD.findall(straight + resumed)}
    assert len(checksums) == 1


@pytest.mark.parametrize("how", ["as-it-is", "compress"])
def test_accelerates_own_script(how: str) -> None:
    script = Path(__file__).parents[1] / "accelerate_own_script.py"
    output = run_processes(script, how, environment=LAUNCHED)
    told = re.findall(r"ratios \[([^]]*)\]", output)
    assert len(told) == 2, output
    fp16, bf16, *low_rank = (float(ratio) for ratio in told[0].split(","))
    assert fp16 == bf16 == 2
    assert len(low_rank) == 7
    assert min(low_rank) > 6 if how == "compress" else max(low_rank) <= 2


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


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, steps: range) -> list[Tensor]:
    for step in steps:
        torch.manual_seed(10 * step + dist.get_rank())
        accelerator.backward(model(torch.randn(8, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def prepared(accelerator: Accelerator) -> tuple[nn.Module, Any]:
    model = new_model()
    return cast(
        tuple[nn.Module, Any], accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    )


POWER = thinwire.PowerSGD(matrix_rank=1, warmup_steps=0, min_compression_ratio=2)
CHOICES = [
    (Hook.FP16, Hook.NO, {}, thinwire.Cast("fp16"), 1.9),
    (Hook.BF16, Hook.NO, {}, thinwire.Cast("bf16"), 1.9),
    (Hook.FP16, Hook.BF16, {}, thinwire.Cast("fp16"), 1.9),
    (Hook.BF16, Hook.FP16, {}, thinwire.Cast("bf16"), 1.9),
    (Hook.POWER_SGD, Hook.NO, AT_ONCE, POWER, 15),
    (Hook.POWER_SGD, Hook.FP16, AT_ONCE, dataclasses.replace(POWER, wire_dtype="fp16"), 20),
    (
        Hook.POWER_SGD,
        Hook.BF16,
        {**AT_ONCE, "matrix_approximation_rank": 3, "random_seed": 5},
        dataclasses.replace(POWER, wire_dtype="bf16", matrix_rank=3, seed=5),
        10,
    ),
    (
        Hook.BATCHED_POWER_SGD,
        Hook.NO,
        AT_ONCE,
        thinwire.algorithms.BatchedPowerSGD(matrix_rank=1, warmup_steps=0, min_compression_ratio=2),
        20,
    ),
]


@pytest.mark.parametrize(("hook", "wrapper", "options", "algorithm", "least_ratio"), CHOICES)
def test_every_hook_and_wrapper(
    pool2: Pool, hook: Hook, wrapper: Hook, options: dict[str, Any], algorithm: Algorithm, least_ratio: float
) -> None:
    results = pool2.run(_trained, hook, wrapper, options)
    assert len(results) == 2
    for used, ratio, parameters, names in results:
        assert used == algorithm
        assert ratio > least_ratio
        assert "0.weight" in names
        for mine, theirs in zip(parameters, results[0][2], strict=True):
            assert torch.equal(mine, theirs)


def _trained(
    hook: Hook, wrapper: Hook, options: dict[str, Any]
) -> tuple[Algorithm, float, list[Tensor], list[str]]:
    with several_processes():
        handler = new_handler(comm_hook=hook, comm_wrapper=wrapper, comm_state_option=options)
        accelerator = new_accelerator(handler)
        parameters = train(accelerator, *prepared(accelerator), range(4))
        names = [name for route in handler.sync.plan.routes for name in route.names]
        return handler.sync.algorithm, handler.sync.stats().compression_ratio, parameters, names


def test_the_handler_takes_machines(pool4: Pool) -> None:
    for found, given, off in pool4.run(_on_machines):
        assert "over 2 machines of 2 processes" in given
        assert "over 4 processes" in found  # the launcher tells of one machine
        assert "over 4 processes" in off


def _on_machines() -> list[str]:
    shown = []
    for machines in ({}, {"machines": [[0, 1], [2, 3]]}, {"machines": False}):
        with several_processes():
            handler = new_handler(comm_state_option=machines)
            Accelerator(cpu=True, kwargs_handlers=[handler]).prepare(torch.nn.Linear(64, 64))
            shown.append(str(handler.sync))
    return shown


def test_without_a_hook_ddp_averages(pool2: Pool, tmp_path: Path) -> None:
    assert pool2.run(_no_hook, str(tmp_path)) == [(0, 0, "AttachError", False)] * 2
    for refused, steps in pool2.run(_move_to_thinwire, str(tmp_path)):
        assert "custom checkpoints" in refused
        assert steps == 2


def _move_to_thinwire(folder: str) -> tuple[str, int]:
    """As docs/migrating.md tells: an older checkpoint gets an empty state."""
    with several_processes():
        handler = new_handler()
        accelerator = new_accelerator(handler)
        model, optimizer = prepared(accelerator)
        refused = raised_by(lambda: accelerator.load_state(folder))[1]
        accelerator.save(handler.state_dict(), f"{folder}/custom_checkpoint_0.pkl")
        accelerator.wait_for_everyone()
        accelerator.load_state(folder)
        train(accelerator, model, optimizer, range(2))
        return refused, handler.sync.stats().steps


def _no_hook(folder: str) -> tuple[int, int, str, bool]:
    with several_processes():
        handler = DistributedDataParallelKwargs()
        accelerator = new_accelerator(handler)
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, range(1))
        accelerator.save_state(folder)
        files = os.listdir(folder)
        hooks = len(cast(DistributedDataParallel, model)._comm_hooks)
        return (
            hooks,
            len(handler.syncs),
            raised_by(lambda: handler.sync)[0],
            "custom_checkpoint_0.pkl" in files,
        )


def test_one_process_has_nothing_to_attach(pool2: Pool) -> None:
    for kind, name, message in pool2.run(_one_process):
        assert kind == "Sequential"
        assert name == "AttachError"
        assert "several processes" in message


def _one_process() -> tuple[str, str, str]:
    try:
        handler = new_handler()
        model = Accelerator(cpu=True, kwargs_handlers=[handler]).prepare(new_model())
        return type(model).__name__, *raised_by(lambda: handler.sync)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_saved_by_all_and_resumed(pool2: Pool, tmp_path: Path) -> None:
    """Collecting the state is collective: `save_state` must call it on every process, or this hangs."""
    for straight, resumed, fresh, owed, ratio in pool2.run(_resume, str(tmp_path)):
        assert ratio > 15
        assert owed > 0
        for mine, theirs, forgetful in zip(straight, resumed, fresh, strict=True):
            assert torch.equal(mine, theirs)
            assert mine.dim() == 1 or not torch.equal(mine, forgetful)


def _resume(folder: str) -> tuple[list[Tensor], list[Tensor], list[Tensor], float, float]:
    with several_processes():
        accelerator = new_accelerator(new_handler())
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, range(4))
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        straight = train(accelerator, model, optimizer, range(4, 8))
    saved = torch.load(Path(folder, "custom_checkpoint_0.pkl"), weights_only=True)
    owed = sum(error.norm().item() for error in dict(saved["models"][0]["error"]).values())

    with several_processes():
        handler = new_handler()
        accelerator = new_accelerator(handler)
        model, optimizer = prepared(accelerator)
        accelerator.load_state(folder)
        resumed = train(accelerator, model, optimizer, range(4, 8))
        ratio = handler.sync.stats().compression_ratio

    with several_processes():
        handler = new_handler()
        accelerator = new_accelerator(handler)
        model, optimizer = prepared(accelerator)
        nothing = handler.state_dict()
        accelerator.load_state(folder)
        handler.load_state_dict(nothing)
        fresh = train(accelerator, model, optimizer, range(4, 8))
    return straight, resumed, fresh, owed, ratio


def test_accumulated_batches_are_one_step(pool2: Pool) -> None:
    for steps, message_bytes, straight, accumulated in pool2.run(_accumulated):
        assert steps == (4, 4)
        assert message_bytes[0] == message_bytes[1] > 0
        for mine, theirs in zip(straight, accumulated, strict=True):
            torch.testing.assert_close(mine, theirs)


def _accumulated() -> tuple[tuple[int, ...], tuple[int, ...], list[Tensor], list[Tensor]]:
    results, stats = [], []
    for parts in (1, 2):
        with several_processes():
            handler = new_handler()
            accelerator = new_accelerator(handler, gradient_accumulation_steps=parts)
            model, optimizer = prepared(accelerator)
            for step in range(4):
                torch.manual_seed(10 * step + dist.get_rank())
                for part in torch.randn(8, 64).chunk(parts):
                    with accelerator.accumulate(model):
                        accelerator.backward(model(part).square().mean())
                        optimizer.step()
                        optimizer.zero_grad()
            results.append([p.detach().clone() for p in model.parameters()])
            stats.append(handler.sync.stats())
    return tuple(s.steps for s in stats), tuple(s.message_bytes for s in stats), results[0], results[1]


def test_the_error_is_in_units_of_the_unscaled_loss(pool2: Pool) -> None:
    """FACTS 4. On CPUs Accelerate makes no scaler of its own; here it has been given one."""
    for plain, scaled in pool2.run(_scaled):
        assert plain.keys() == scaled.keys() == {"0.weight", "1.weight"}
        for name, error in plain.items():
            assert error.norm() > 0
            assert torch.equal(error, scaled[name])


def _scaled() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    errors = []
    for scaler in (None, GradScaler("cpu", init_scale=2.0**10)):
        with several_processes():
            handler = new_handler()
            accelerator = new_accelerator(handler)
            accelerator.scaler = scaler
            train(accelerator, *prepared(accelerator), range(3))
            errors.append(dict(handler.sync.state_dict()["error"]))
    return errors[0], errors[1]


def test_without_a_scaler_gradients_that_are_not_finite_can_be_zeros(pool2: Pool) -> None:
    for nonfinite_steps, gradients_are_zeros in pool2.run(_zeros):
        assert nonfinite_steps == 1
        assert gradients_are_zeros


def _zeros() -> tuple[int, bool]:
    with several_processes():
        handler = new_handler(comm_state_option={**AT_ONCE, "on_nonfinite": "zero", "host_check": False})
        accelerator = new_accelerator(handler)
        model, _ = prepared(accelerator)
        loss = model(torch.ones(8, 64)).square().mean()
        accelerator.backward(loss * torch.inf if dist.get_rank() == 1 else loss)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        assert not engine_of(handler.sync).settings.host_check
        return handler.sync.stats().nonfinite_steps, not any(bool(each.any()) for each in gradients)


def test_models_are_averaged_now_and_then(pool2: Pool, tmp_path: Path) -> None:
    """By DiLoCo around the loop, as docs/migrating.md has it, and resumed as docs/accelerate.md has it.

    Batches are accumulated, steps are counted.
    """
    for same, steps, ratio, straight, resumed in pool2.run(_averaged_models, str(tmp_path)):
        assert same == [True, False, False, True, True, False, False, True]
        assert steps == 4
        assert ratio > 5
        assert all(map(torch.equal, straight, resumed))


def _averaged_models(folder: str) -> tuple[list[bool], int, float, list[Tensor], list[Tensor]]:
    same: list[bool] = []
    ends = []
    for first in (0, 4):
        with several_processes():
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            assert accelerator.num_processes == 2
            model, optimizer = prepared(accelerator)
            local = thinwire.DiLoCo(accelerator.unwrap_model(model), optimizer.optimizer, every_steps=2)
            accelerator.register_for_checkpointing(local)
            if first > 0:
                accelerator.load_state(folder)
            with local:
                for batch in range(first, 8):
                    with accelerator.accumulate(model), cast(Any, model).no_sync():
                        end = train(accelerator, model, optimizer, range(batch, batch + 1))
                    if first == 0:
                        same.append(agreed(model))
                    if batch == 3 and first == 0:
                        accelerator.save_state(folder)
                        accelerator.wait_for_everyone()
            ends.append(end)
            stats = local.stats()
    return same, stats.steps, stats.compression_ratio, ends[0], ends[1]


def test_the_lines_of_advice_run_as_they_are(pool2: Pool) -> None:
    for world_size, ratios in pool2.run(_pasted, lines_for("Accelerate")):
        assert world_size == 2
        assert len(ratios) == 2
        assert min(ratios) > 5


def _pasted(lines: list[str]) -> tuple[int, list[float]]:
    with several_processes(), handles() as made:
        accelerator = Accelerator(cpu=True)
        for text in lines:
            model = new_model()
            names: dict[str, Any] = {"accelerator": accelerator, "model": model}
            names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
            names["loop"] = lambda names=names: train(
                accelerator, names["model"], names["optimizer"], range(4)
            )
            run(text, names)
        return accelerator.num_processes, [each.stats().compression_ratio for each in made]


def test_the_run_chooses_its_algorithm(pool2: Pool) -> None:
    """What `prepare` has wrapped, as docs/choosing.md has it."""
    first, second = pool2.run(_chosen)
    assert first["world"] == 2
    assert first["used"] == second["used"]
    exact_bytes, cast_bytes = first["bytes"][:2]
    assert cast_bytes == exact_bytes / 2


def _chosen() -> dict[str, Any]:
    with several_processes():
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator)
        # All are tried, for messages are waited for; what is chosen then, the machine has to say.
        chooser = thinwire.auto(
            model, optimizer, probe_steps=2, budget_loss=0, least_gain=0, grad_scaler=accelerator.scaler
        )
        train(accelerator, model, optimizer, range(24))
        assert chooser.chosen is not None
        return {
            "world": accelerator.num_processes,
            "used": (
                chooser.chosen.name,
                str(chooser.sync.algorithm),
                [each.step_seconds for each in chooser.trials],
            ),
            "bytes": [each.message_bytes for each in chooser.trials],
        }


def test_two_models_of_one_handler(pool2: Pool, tmp_path: Path) -> None:
    for steps, error, saved, refused, again in pool2.run(_two_models, str(tmp_path)):
        assert steps == [3, 2]
        assert error[0] == "AttachError"
        assert "handler.syncs" in error[1]
        assert saved == [3, 2]
        assert refused[0] == "StateError"
        assert "of 1 models, got one of 2" in refused[1]
        assert again == [3, 2]


def _two_models(folder: str) -> tuple[list[int], tuple[str, str], list[int], tuple[str, str], list[int]]:
    with several_processes():
        handler = new_handler()
        accelerator = new_accelerator(handler)
        first, second = prepared(accelerator), prepared(accelerator)
        train(accelerator, *first, range(3))
        train(accelerator, *second, range(2))
        steps = [sync.stats().steps for sync in handler.syncs]
        error = raised_by(lambda: handler.sync)
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
    saved = torch.load(Path(folder, "custom_checkpoint_0.pkl"), weights_only=True)
    with several_processes():
        handler = new_handler()
        accelerator = new_accelerator(handler)
        third = prepared(accelerator)
        refused = raised_by(lambda: accelerator.load_state(folder))
        fourth = prepared(accelerator)
        accelerator.load_state(folder)
        again = [sync.stats().steps for sync in handler.syncs]
        del third, fourth
    return steps, error, [model["step"] for model in saved["models"]], refused, again


def test_prepared_twice_and_prepared_anew(pool2: Pool) -> None:
    for same, twice, steps, anew, saved in pool2.run(_prepared_twice):
        assert same
        assert saved == 1
        assert twice == 1
        assert steps == 2
        assert anew == (1, 0)


def _prepared_twice() -> tuple[bool, int, int, tuple[int, int], int]:
    with several_processes():
        handler = new_handler()
        accelerator = new_accelerator(handler)
        model, optimizer = prepared(accelerator)
        same = accelerator.prepare(model) is model
        train(accelerator, model, optimizer, range(2))
        twice, steps = len(handler.syncs), handler.sync.stats().steps
        # As `find_executable_batch_size` has it: free everything, start again with a new model.
        model, optimizer = accelerator.free_memory(model, optimizer)
        model, optimizer = prepared(accelerator)
        anew = len(handler.syncs), handler.sync.stats().steps
        return same, twice, steps, anew, len(handler.state_dict()["models"])


def test_misuse_is_refused(pool2: Pool) -> None:
    for by_hand, shared in pool2.run(_misuse):
        assert by_hand[0] == "AttachError"
        assert "thinwire.attach" in by_hand[1]
        assert shared[0] == "ConfigError"
        assert "one for each" in shared[1]


def _misuse() -> tuple[tuple[str, str], tuple[str, str]]:
    with several_processes():
        handler = new_handler()
        by_hand = raised_by(lambda: handler.register_comm_hook(DistributedDataParallel(new_model())))
        model = new_accelerator(handler).prepare(new_model())
        shared = raised_by(lambda: new_accelerator(handler).prepare(new_model()))
        del model
        return by_hand, shared


def test_the_names_and_settings_are_accelerates() -> None:
    assert Hook is StockHook
    ours, theirs = (
        inspect.signature(each).parameters for each in (DistributedDataParallelKwargs, StockKwargs)
    )
    assert {name: each.default for name, each in ours.items()} == {n: e.default for n, e in theirs.items()}
    settings: dict[str, Any] = {"bucket_cap_mb": 3, "static_graph": True, "comm_hook": Hook.POWER_SGD}
    assert DistributedDataParallelKwargs(**settings).to_kwargs() == StockKwargs(**settings).to_kwargs()
    assert isinstance(DistributedDataParallelKwargs(), StockKwargs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"comm_hook": "power_sgd"}, "NO, FP16, BF16, POWER_SGD, BATCHED_POWER_SGD, got 'power_sgd'"),
        ({"comm_hook": None}, "got None"),
        ({"comm_wrapper": Hook.POWER_SGD}, "NO, FP16, BF16, got"),
        ({"comm_hook": Hook.POWER_SGD, "comm_wrapper": "fp16"}, "got 'fp16'"),
        ({"comm_wrapper": Hook.FP16}, "comm_wrapper FP16, which would have no effect with comm_hook NO;"),
        ({"comm_hook": Hook.BF16, "comm_state_option": {"random_seed": 1}}, "no effect"),
        ({"comm_state_option": {"matrix_approximation_rank": 1}}, "no effect"),
        ({"comm_hook": Hook.POWER_SGD, "comm_state_option": {"matrix_rank": 1}}, "matrix_approximation_rank"),
        ({"comm_hook": Hook.POWER_SGD, "comm_state_option": {"process_group": None}}, "unknown"),
        ({"comm_hook": Hook.POWER_SGD, "comm_state_option": {"random_seed": -1}}, "^random_seed .* got -1"),
        ({"comm_hook": Hook.POWER_SGD, "comm_state_option": None}, "must map"),
    ],
)
def test_bad_settings_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(thinwire.ConfigError, match=message):
        DistributedDataParallelKwargs(**settings)


@pytest.mark.parametrize("state", [{}, {"models": [{}]}, [], None])
def test_a_state_of_another_kind_is_refused(state: Any) -> None:
    with pytest.raises(thinwire.StateError, match="of 0 models"):
        new_handler().load_state_dict(state)
