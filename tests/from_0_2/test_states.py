"""States of every kind that Thinwire 0.2 has saved: they load, and the next step is the one that 0.2 made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapters.test_sharded import runs_on_cpus
from from_0_2.runs import FILES, RUNS, go_on
from processes import Spawn

NAMES = [pytest.param(name, marks=[runs_on_cpus] if name.startswith("fsdp") else []) for name in RUNS]


@pytest.mark.parametrize("name", NAMES)
def test_the_next_step_is_as_0_2_made_it(name: str, spawn: Spawn) -> None:
    first, *_ = spawn(RUNS[name][0], go_on, name, Path(FILES, name))
    expected = torch.load(FILES / name / "then.pt", weights_only=True)
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)
