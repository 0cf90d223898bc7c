"""Accelerate in the processes of a pool, and what went wrong there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

from thinwire.advice import Auto


@contextmanager
def several_processes() -> Iterator[None]:
    """What a launcher tells Accelerate; it takes over the group of the pool."""
    told = {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
        "OMP_NUM_THREADS": "1",
    }
    os.environ.update(told)
    try:
        yield
    finally:
        for name in told:
            del os.environ[name]
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def assert_chosen_alike(auto: Auto) -> None:
    """Both processes have come to the same choice, and bf16 has sent half of what exact averaging sends."""
    exact, cast, *_ = auto.trials
    assert auto.chosen is not None
    assert cast.sent_bytes == exact.sent_bytes / 2
    told: list[Any] = [None, None]
    used = auto.chosen.name, str(auto.sync.algorithm), [each.step_seconds for each in auto.trials]
    dist.all_gather_object(told, used)
    assert told[0] == told[1]


def assert_knows_its_steps(auto: Auto) -> None:
    """The framework has told how long the run is: so short that no one has measured what few bits lose."""
    assert [each.name for each in auto.trials] == ["AllReduce()", 'Cast("bf16")']
    assert "The length of the run" not in str(auto)
