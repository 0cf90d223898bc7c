"""The process group of one that the docstrings' examples run in."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# They import Triton, which is no requirement; a test runs the first in a process of its own.
collect_ignore_glob = ["tests/triton_ready/ahead.py"]
if find_spec("triton") is None:
    collect_ignore_glob.append("src/thinwire/algorithms/kernels/triton/compiled_*.py")


@pytest.fixture
def _process_group_of_one(tmp_path: Path) -> Iterator[None]:
    import torch.distributed as dist  # noqa: PLC0415 - here, for the process that hands out tests needs no torch

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _group_for_examples(request: pytest.FixtureRequest) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        request.getfixturevalue("_process_group_of_one")
