"""Saved state: what it holds, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

from algorithms.test_conformance import assert_same_state
from catalog import averaged, buckets, resumed, spec
from sync.test_local_state import damaged
from thinwire import PowerSGD
from thinwire.algorithms import Algorithm, Memory, Slot
from thinwire.comm import InProcessTransport
from thinwire.comm.in_process import run_members
from thinwire.comm.metered import Wrapped
from thinwire.comm.transport import Message, Work
from thinwire.errors import CommunicationError, StateError
from thinwire.simulation import Simulation
from thinwire.sync import algorithm_state

POWER = PowerSGD(matrix_rank=2)


def trained(num_workers: int = 2, steps: int = 3, algorithm: PowerSGD = POWER) -> Simulation:
    simulation = Simulation(algorithm, buckets(), num_workers=num_workers)
    for seed in range(steps):
        averaged(simulation, seed)
    return simulation


@cache
def saved() -> dict[str, Any]:
    return trained().state_dicts()[0]


@pytest.fixture
def state() -> dict[str, Any]:
    return copy.deepcopy(saved())


def test_holds_tensors_by_parameter_name_and_plain_values(state: dict[str, Any]) -> None:
    compressed = {"head.weight", "body.weight", "conv.weight"}
    error, factor = dict(state["error"]), dict(state["factor"])
    assert set(error) == set(factor) == compressed
    assert error["conv.weight"].shape == (40, 6, 3, 3)
    assert factor["conv.weight"].shape == (2, 54)
    assert state["step"] == 3
    assert state["algorithm"] == repr(POWER)


def loaded(state: dict[str, Any], num_workers: int = 2, algorithm: Algorithm = POWER) -> Simulation:
    return resumed(Simulation(algorithm, buckets(), num_workers=num_workers), state)


def test_is_a_copy(state: dict[str, Any]) -> None:
    """When it is saved and when it is loaded."""
    before = copy.deepcopy(state)
    for simulation in (trained(), loaded(state)):
        saved = simulation.state_dicts()[0]
        averaged(simulation, 9)
        assert_same_state(saved, before)
    assert_same_state(state, before)
    simulation = trained()
    for _, tensor in (pair for slot in ("error", "factor") for pair in simulation.state_dicts()[0][slot]):
        tensor.zero_()
    assert_same_state(simulation.state_dicts()[0], before)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_saved_twice_it_is_the_same_twice(num_workers: int) -> None:
    """A mean of equal numbers is not always that number: x/3 + x/3 + x/3."""
    simulation = trained(num_workers)
    first, second = simulation.state_dicts()[0], simulation.state_dicts()[-1]
    assert first["error"]
    assert_same_state(first, second)
    for state in loaded(first, num_workers).state_dicts():
        assert_same_state(state, first)


Change = Callable[[dict[str, Any]], Any]


def put(key: str, name: str, value: Any) -> Change:
    """Put a value among the pairs of a key."""

    def apply(state: dict[str, Any]) -> None:
        state[key] = tuple((dict(state[key]) | {name: value}).items())

    return apply


error, factor = partial(put, "error", "head.weight"), partial(put, "factor", "head.weight")


def meant(**values: Any) -> Change:
    """Replace values."""
    return lambda state: state.update(values)


def without_scale(state: dict[str, Any]) -> None:
    state["parameters"] = [(name, shape) for name, shape in state["parameters"] if name != "scale"]


OTHER, OF_A_BUCKET = (("enc.weight", (3, 4)),), "head.weight … body.weight"
BAD: dict[str, tuple[Change, str]] = {
    "not a mapping": (lambda s: [1, 2], "made by state_dict.*list"),
    "a key too few": (lambda s: s.pop("slots") and None, "made by state_dict"),
    "a slot too few": (lambda s: s.pop("error") and None, "can't be read.*'error'"),
    "a later version": (meant(version=6), "version 6"),
    "an earlier version": (meant(version=3), "version 3.*reads version 5"),
    "another shape of a parameter": (put("parameters", "head.bias", [3]), r"head.bias has shape \(3,\)"),
    "another model": (
        meant(parameters=OTHER, error=(), factor=()),
        "not train enc.weight, and the state has no",
    ),
    "a parameter more": (put("parameters", "new.bias", (3,)), "this model does not train new.bias;"),
    "a parameter less": (without_scale, "different model: the state has no scale;.*strict=False"),
    "parameters without shapes": (put("parameters", "scale", 3), "can't be read.*not iterable"),
    "a negative step": (meant(step=-1), "step.*-1"),
    "an error that is no tensor": (error(3), "floating tensors.*int"),
    "a sparse error": (error(torch.zeros(64, 32).to_sparse()), "can't be read"),
    "an error without values": (error(torch.zeros(64, 32, device="meta")), "can't be read.*meta"),
    "an error too many": (put("error", "stranger", torch.ones(2)), "stranger"),
    "another shape": (error(torch.ones(32, 64)), r"\(32, 64\).*\(64, 32\)"),
    "an error of NaN": (error(torch.full((64, 32), torch.nan)), "error of head.weight is not finite"),
    "a factor of another bucket": (
        put("factor", "head.weight … tail", torch.ones(2, 64)),
        "head.weight … tail",
    ),
    "a factor of three dimensions": (factor(torch.ones(1, 2, 3)), r"factor of head.weight.*\(1, 2, 3\)"),
    "a factor of another width": (factor(torch.ones(2, 33)), r"shape \(2, 33\)"),
    "a bucket's factor too wide": (put("factor", OF_A_BUCKET, torch.ones(1, 5_000)), r"shape \(1, 5000\)"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_a_state_that_does_not_fit_is_refused_and_nothing_changed(
    state: dict[str, Any], change: Change, message: str
) -> None:
    bad = copy.deepcopy(state)
    replaced = change(bad)
    simulation = trained()
    for sync in simulation.syncs:
        with pytest.raises(StateError, match=message):
            sync.load_state_dict(bad if replaced is None else replaced)
    assert_same_state(simulation.state_dicts()[0], state)


@pytest.mark.filterwarnings("ignore:.*a different matrix rank")
def test_any_damage_is_refused_in_words_or_loads(state: dict[str, Any]) -> None:
    simulation, draw, refused = loaded(state, num_workers=1), random.Random(0), 0
    for _ in range(100):
        try:
            simulation.syncs[0].load_state_dict(damaged(state, draw))
        except StateError:
            refused += 1
            assert_same_state(simulation.state_dicts()[0], state)
        else:
            simulation.syncs[0].load_state_dict(state)
    assert refused > 50


def test_a_message_that_fails_leaves_every_slot_as_it_was() -> None:
    """Of an algorithm with two local slots, the second one's mean is lost."""
    first, second = (Slot(name, is_local=True, is_elementwise=True) for name in ("first", "second"))
    transports = InProcessTransport.group(2)

    def average(rank: int) -> list[float]:
        class Failing(Wrapped):
            def start(self, message: Message) -> Work:
                if "second from" in message.purpose:
                    raise CommunicationError("lost")
                return super().start(message)

        memory = Memory()
        memory[first]["w"], memory[second]["w"] = torch.full((2, 2), 1.0 + rank)
        with pytest.raises(CommunicationError):
            algorithm_state.average_local(
                memory, [spec("w", 2)], torch.device("cpu"), Failing(transports[rank]), "saving"
            )
        return [*memory[first]["w"].tolist(), *memory[second]["w"].tolist()]

    assert run_members(2, average) == [[1.0] * 4, [2.0] * 4]
