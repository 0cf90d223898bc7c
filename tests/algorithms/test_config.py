"""Bad input: an error at once that names what was got and what was expected, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire import AllReduce, AttachError, Cast, ConfigError, PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm, BatchedPowerSGD

LOW_RANK: dict[str, list[Any]] = {
    "matrix_rank": [0, -3, "4", 4.0, True, None],
    "min_compression_ratio": [-1, "2", float("nan")],
    "warmup_steps": [-1, 1.5],
    "error_feedback": ["yes"],
    "warm_start": [2, [True]],
    "seed": [-1],
    "wire_dtype": ["fp8", torch.float32],
    "power_iterations": [0],
}
BAD: dict[type[Algorithm], dict[str, list[Any]]] = {
    PowerSGD: {**LOW_RANK, "matrix_ranks": [3, {"head": 0}]},
    BatchedPowerSGD: LOW_RANK,
    TopK: {
        "density": [0, -0.5, 1.5, "1/64", float("nan")],
        "bits": [1, 3, 32, 2.0],
        "chunk": [0, 65_537, 64.5],
        "error_decay": [0, 1.01, None],
        "merge": ["mean", None],
    },
    Quantize: {
        "bits": [7, 16, 4.0, True],
        "block": [0, 24, 4112],
        "error_feedback": [2],
    },
}


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [(kind, name, value) for kind, settings in BAD.items() for name in settings for value in settings[name]],
)
def test_a_bad_setting_is_named(kind: type[Algorithm], setting: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**{setting: value})
    assert repr(value) in str(caught.value) or setting == "matrix_ranks"
    assert setting.replace("_ranks", "") in str(caught.value).replace(" ", "_") or setting == "wire_dtype"


@pytest.mark.parametrize("value", ["fp32", "half", torch.float32, None, 16, ["fp16"]])
def test_cast_takes_two_types(value: Any) -> None:
    with pytest.raises(ConfigError, match='must be "fp16" or "bf16"'):
        Cast(value)


@pytest.mark.parametrize("value", [torch.bfloat16, "bfloat16", "bf16"])
def test_a_16_bit_type_may_be_told_as_torch_tells_it(value: Any) -> None:
    assert repr(Cast(value)) == repr(Cast("bf16"))
    assert repr(PowerSGD(wire_dtype=value)) == repr(PowerSGD(wire_dtype="bf16"))


@pytest.mark.parametrize(
    ("kind", "setting", "value", "kept"),
    [
        (PowerSGD, "matrix_rank", np.int64(4), 4),
        (PowerSGD, "matrix_ranks", {"head": np.int32(8)}, (("head", 8),)),
        (PowerSGD, "warmup_steps", 1e3, 1000),
        (PowerSGD, "min_compression_ratio", np.float32(0.5), 0.5),
        (PowerSGD, "alternating", np.True_, True),
    ],
)
def test_settings_are_kept_as_pythons_own_types(
    kind: type[Algorithm], setting: str, value: Any, kept: Any
) -> None:
    """So that processes, one of which was given an int and one NumPy's, agree."""
    algorithm: Any = kind(**{setting: value})
    assert repr(algorithm) == repr(kind(**{setting: kept}))
    assert type(getattr(algorithm, setting)) is type(kept)
    assert replace(algorithm) == algorithm


@pytest.mark.parametrize(
    ("call", "spelling"),
    [
        (lambda: PowerSGD(4), r"got 4 without a name; write PowerSGD\(matrix_rank=4\)"),  # type: ignore[call-arg]
        (lambda: PowerSGD(rank=4), r"no setting 'rank'; write PowerSGD\(matrix_rank=4\)"),  # type: ignore[call-arg]
        (
            lambda: PowerSGD(start_powerSGD_iter=9),  # type: ignore[call-arg]
            r"'start_powerSGD_iter'; write PowerSGD\(warmup_steps=9\)",
        ),
        (lambda: TopK(ratio=0.1), "TopK has no setting 'ratio'; it has density, bits"),  # type: ignore[call-arg]
        (lambda: AllReduce(4), r"AllReduce has no settings, got 4; write AllReduce\(\)"),
    ],
)
def test_settings_that_are_spelt_otherwise_are_told_how(call: Callable[[], object], spelling: str) -> None:
    with pytest.raises(ConfigError, match=spelling):
        call()


def test_a_plain_module_without_a_process_group_is_told_to_make_the_group_first() -> None:
    assert not dist.is_initialized()
    with pytest.raises(
        AttachError, match=r"got Linear; call torch.distributed.init_process_group\(\), then wrap"
    ):
        thinwire.attach(nn.Linear(4, 4), AllReduce())
