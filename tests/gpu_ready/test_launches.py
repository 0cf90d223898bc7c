"""Bounds on what a step costs an accelerator and its host, and the same bits in every run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from catalog import specs_of
from gpu_ready.counting import Alike, buckets_of, by_triton, counted, gpt2_small, on_meta
from kernel_calls import asked
from thinwire import PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm
from thinwire.algorithms.registry import REGISTRY
from thinwire.comm import Machines
from thinwire.kernels import torch_entries
from thinwire.kernels.dispatch import all_finite
from thinwire.kernels.matrices import MatrixGroup, Rows
from thinwire.kernels.triton import launcher, triton_kernels
from thinwire.sync import Engine, Settings
from thinwire.tensors import accelerators

GPT2 = gpt2_small()
ONE_LAYER, THREE_LAYERS = (
    {name: shape for name, shape in GPT2.items() if name.startswith(layers)}
    for layers in (("h.0.",), ("h.0.", "h.1.", "h.2."))
)
RANK_4 = PowerSGD(matrix_rank=4)


@pytest.mark.parametrize(
    ("algorithm", "has_triton", "host_check", "most_launches"),
    [
        (RANK_4, True, False, 46),
        (Quantize(bits=4, error_feedback=True), True, True, 82),
        (RANK_4, False, True, 210),
    ],
    ids=str,
)
def test_a_later_step_takes_few_launches_and_waits_once_or_never(
    algorithm: Algorithm, has_triton: bool, host_check: bool, most_launches: int
) -> None:
    shapes = GPT2 if has_triton else THREE_LAYERS
    engine = Engine(algorithm, Alike(), specs_of(buckets_of(shapes)), Settings(host_check=host_check))
    with by_triton() if has_triton else nullcontext():
        *_, later = counted(engine, shapes)
    assert later.launches.total() <= most_launches, later.launches
    assert later.waits.total() == int(host_check), later.waits
    assert engine.reporter.counts().compression_ratio > 1.5


class OfTwoBackends(Alike):
    """A group whose messages for the host lie on the CPU: of Gloo beside NCCL, which is torch's default."""

    data_device = torch.device("meta")


@pytest.mark.parametrize("who", ["a machine", "a replica's shards", "members of a weight"])
@pytest.mark.parametrize("host_check", [True, False])
def test_that_others_count_too_makes_the_host_wait_no_more(who: str, host_check: bool) -> None:
    others, settings = OfTwoBackends(), dict[str, Any]()
    if who == "a replica's shards":
        settings["health_group"] = others
    elif who == "members of a weight":
        settings["weight"] = lambda: 3.0
    engine = Engine(
        RANK_4,
        others,
        specs_of(buckets_of(ONE_LAYER)),
        Settings(host_check=host_check, **settings),
        machines=Machines(others, Alike()) if who == "a machine" else None,
    )
    *_, later = counted(engine, ONE_LAYER)
    assert later.waits.total() == int(host_check), later.waits


@pytest.mark.parametrize(
    "algorithm",
    [
        *(registered.made() for registered in REGISTRY),
        PowerSGD(matrix_rank=2, alternating=True),
        Quantize(bits=4, error_feedback=True),
        TopK(error_decay=1, merge="members"),
    ],
    ids=str,
)
def test_every_algorithm_has_the_same_bits_in_every_run(
    algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What one member has sent is added at places that are all different.
    monkeypatch.setattr(torch_entries, "_add", lambda *_: None)
    engine = Engine(algorithm, Alike(), specs_of(buckets_of(ONE_LAYER)), Settings(host_check=False))
    for step in counted(engine, ONE_LAYER):
        assert step.unordered == []


def test_kernels_that_get_an_address_get_a_whole_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has arrived is often a part of each row of a message."""
    arrived = torch.empty(2, 10)[:, :4]
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    with by_triton(), patch.object(launcher, "launch") as launched:
        all_finite(arrived)
    assert launched.call_args.args[2][0][0, 0] != arrived.data_ptr()


def test_what_kernels_write_to_by_address_is_fp32_whatever_the_default_type() -> None:
    group = MatrixGroup(["a"], [torch.empty(64, 48, device="meta")], [None], 4)
    factor = torch.empty(1, 4, 48, device="meta")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with on_meta():
            (left,) = triton_kernels.products(asked([group], [factor], None, add_error=False))
            (basis,) = triton_kernels.orthonormal_rows([Rows(left)])
    finally:
        torch.set_default_dtype(torch.float32)
    assert left.dtype == basis.dtype == torch.float32
