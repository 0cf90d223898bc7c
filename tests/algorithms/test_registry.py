"""The registry of algorithms: what is in it is public, tested, and made as it is written."""

from __future__ import annotations

import pytest
import torch

from catalog import ENTRIES
from thinwire import algorithms
from thinwire.algorithms.registry import REGISTRY, SLOTS, Registered
from thinwire.plan import ParameterSpec
from thinwire.simulation import Simulation


@pytest.mark.parametrize("registered", REGISTRY, ids=lambda registered: registered.name)
def test_what_is_registered_is_what_it_says(registered: Registered) -> None:
    made = registered.made()
    kind = type(made)
    assert kind.__name__ in algorithms.__all__
    assert any(type(entry.algorithm) is kind for entry in ENTRIES), "the catalog has it"
    assert registered.variants
    assert [slot for slot in kind.slots if SLOTS[slot.name] != slot] == []
    if registered.has_memory:
        assert kind.slots
    for variant in registered.variants:
        assert type(variant.algorithm) is kind
        assert eval(variant.code, vars(algorithms)) == variant.algorithm


@pytest.mark.parametrize("registered", REGISTRY, ids=lambda registered: registered.name)
def test_the_default_type_of_torch_changes_nothing(registered: Registered) -> None:
    """Who trains in bf16 may have set it for the whole process."""
    specs = (ParameterSpec.of("weight", torch.empty(40, 48)), ParameterSpec.of("bias", torch.empty(40)))
    gradients = torch.randn(3, 2, 40 * 49, generator=torch.Generator().manual_seed(0))
    found = []
    for default in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            simulation = Simulation(registered.variants[0].algorithm, [specs], num_workers=2)
            means = [[[flat.clone()] for flat in step] for step in gradients]
            for step in means:
                simulation.step(step)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(torch.stack([step[0][0] for step in means]))
    assert torch.equal(*found)
    assert found[0].dtype == torch.float32
