"""Accelerators without float64, as Apple's and some of Intel's: all works, and says once what it costs."""

from __future__ import annotations

import warnings

import pytest
import torch

from catalog import buckets, random_gradients
from gpu_ready.counting import Alike, Counting, counted, gpt2_small, on_meta
from thinwire import PowerSGD, TopK
from thinwire.algorithms import Algorithm
from thinwire.algorithms.registry import REGISTRY
from thinwire.kernels import dispatch
from thinwire.simulation import Simulation
from thinwire.sync import Engine
from thinwire.tensors import accelerators

SHAPES = {name: shape for name, shape in gpt2_small().items() if name.startswith("h.0.")}


@pytest.fixture
def lacks_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "warned", set())
    monkeypatch.setattr(accelerators, "has_float64", lambda device: False)


@pytest.mark.usefixtures("lacks_float64")
@pytest.mark.filterwarnings("ignore:devices of type meta do not support float64")
@pytest.mark.parametrize(
    "algorithm", [*(registered.made() for registered in REGISTRY), TopK(bits=8)], ids=str
)
def test_no_step_and_no_figure_takes_float64(algorithm: Algorithm) -> None:
    engine = Engine(algorithm, Alike())
    steps = counted(engine, SHAPES)
    with on_meta(), Counting() as figures:
        engine.reporter.stats()
        engine.state.error_norm()
    assert [step.in_float64 for step in (*steps, figures)] == [[]] * 4


@pytest.mark.usefixtures("lacks_float64")
def test_bases_are_made_by_the_cpu_which_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit those of a device that has it."""
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    results = []
    for has in (False, True):
        monkeypatch.setattr(accelerators, "has_float64", lambda device, has=has: has)
        simulation = Simulation(PowerSGD(matrix_rank=2), buckets(), num_workers=2)
        for step in range(3):
            given = random_gradients(buckets(), num_workers=2, seed=step)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                simulation.step(given)
            assert len(caught) == (not has and step == 0)
        results.append(torch.cat(given[0]))
        if not has:
            assert "the CPU computes the bases" in accelerators.warned.pop()
    assert torch.equal(*results)


def test_a_device_is_asked_whether_it_has_float64() -> None:
    assert accelerators.has_float64(torch.device("cpu"))
    assert accelerators.widest_dtype(torch.device("cpu")) == torch.float64
    # What refuses a number of that type has none; here because there is no such device.
    if not torch.backends.mps.is_available():
        assert not accelerators.has_float64(torch.device("mps"))
        assert accelerators.widest_dtype(torch.device("mps")) == torch.float32
