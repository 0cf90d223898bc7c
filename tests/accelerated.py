"""Accelerate in the processes of a pool, and what went wrong there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

from thinwire.advice import Auto
from training import told_by_all


@contextmanager
def several_processes() -> Iterator[None]:
    """What a launcher tells Accelerate; it takes over the group of the pool."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    try:
        with patch.dict(os.environ, {**variables, "OMP_NUM_THREADS": "1"}):
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def assert_chosen_alike(auto: Auto) -> None:
    """Both processes have come to the same choice, and bf16 has sent half of what exact averaging sends."""
    exact, cast, *_ = auto.trials
    assert auto.chosen is not None
    assert cast.sent_bytes == exact.sent_bytes / 2
    used = auto.chosen.name, str(auto.sync.algorithm), [trial.step_seconds for trial in auto.trials]
    assert told_by_all(used) == [used] * 2


def assert_knows_its_steps(auto: Auto) -> None:
    """The framework has told how long the run is: so short that no one has measured what few bits lose."""
    assert [trial.name for trial in auto.trials] == ["AllReduce()", 'Cast("bf16")']
    assert "The length of the run" not in str(auto)
