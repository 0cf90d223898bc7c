"""Bad input: an error at once that names what was got and what was expected, and nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from pool import Pool
from thinwire import AllReduce, AttachError, BatchedPowerSGD, Cast, ConfigError, PowerSGD
from thinwire.channel import ProcessGroupChannel


@pytest.mark.parametrize("kind", [PowerSGD, BatchedPowerSGD])
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("matrix_rank", 0),
        ("matrix_rank", -3),
        ("matrix_rank", "4"),
        ("matrix_rank", 4.0),
        ("matrix_rank", True),
        ("matrix_rank", None),
        ("min_compression_ratio", 0),
        ("min_compression_ratio", "2"),
        ("min_compression_ratio", float("nan")),
        ("warmup_steps", -1),
        ("warmup_steps", 1.5),
        ("error_feedback", "yes"),
        ("warm_start", 1),
        ("seed", -1),
        ("wire_dtype", "fp8"),
        ("wire_dtype", torch.float16),
        ("power_iterations", 0),
    ],
)
def test_a_bad_setting_is_named(kind: type[PowerSGD], setting: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**{setting: value})
    assert repr(value) in str(caught.value)
    assert setting in str(caught.value) or setting == "wire_dtype"


@pytest.mark.parametrize("value", ["fp32", "half", torch.float16, None, 16, ["fp16"]])
def test_cast_takes_two_types(value: Any) -> None:
    with pytest.raises(ConfigError, match='must be "fp16" or "bf16"'):
        Cast(value)


def test_settings_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        PowerSGD(4)  # type: ignore[call-arg]


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(AttachError, match="init_process_group"):
        ProcessGroupChannel(None)


def test_something_else_as_a_process_group(pool2: Pool) -> None:
    assert (
        pool2.run(_something_else) == ["expected a torch.distributed process group or None, got 'gloo'"] * 2
    )


def _something_else() -> str:
    try:
        ProcessGroupChannel("gloo")  # type: ignore[arg-type]
    except AttachError as error:
        return str(error)
    return ""


def test_bad_calls_of_attach(pool2: Pool) -> None:
    for messages in pool2.run(_bad_attach):
        assert "expected a DistributedDataParallel model, got Linear" in messages["not DDP"]
        assert "expected an algorithm" in messages["not an algorithm"]
        assert "'powersgd'" in messages["not an algorithm"]
        assert "<class" in messages["a class"]
        assert "grad_scaler must be" in messages["not a scaler"]
        assert "allows one only" in messages["twice"]
        assert "allows one only" in messages["after another hook"]
        assert messages["healthy"] == ""


def _bad_attach() -> dict[str, str]:
    ddp_model = DistributedDataParallel(nn.Linear(64, 64))
    hooked = DistributedDataParallel(nn.Linear(64, 64))
    hooked.register_comm_hook(None, thinwire.hooks.allreduce_hook)
    calls: dict[str, Any] = {
        "not DDP": lambda: thinwire.attach(nn.Linear(4, 4), AllReduce()),
        "not an algorithm": lambda: thinwire.attach(ddp_model, "powersgd"),  # type: ignore[arg-type]
        "a class": lambda: thinwire.attach(ddp_model, PowerSGD),  # type: ignore[arg-type]
        "not a scaler": lambda: thinwire.attach(ddp_model, AllReduce(), grad_scaler=2.0),  # type: ignore[arg-type]
        "healthy": lambda: thinwire.attach(ddp_model, AllReduce()),
        "twice": lambda: thinwire.attach(ddp_model, AllReduce()),
        "after another hook": lambda: thinwire.attach(hooked, AllReduce()),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
            messages[name] = ""
        except thinwire.ThinwireError as error:
            messages[name] = str(error)
    assert [len(model._comm_hooks) for model in (ddp_model, hooked)] == [1, 1]  # nothing was changed
    return messages


def test_a_switch_that_is_refused_changes_nothing(pool2: Pool) -> None:
    assert pool2.run(_bad_switch) == [True] * 2


def _bad_switch() -> bool:
    sync = thinwire.attach(DistributedDataParallel(nn.Linear(64, 64)), PowerSGD(matrix_rank=2))
    try:
        sync.use("exact")  # type: ignore[arg-type]
    except ConfigError:
        return sync.algorithm == PowerSGD(matrix_rank=2)
    return False
