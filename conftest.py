"""Which files' docstrings have examples, and the process group of one that those run in."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples only where there are some: to import and search the other files takes seconds."""
    collected = yield
    has_examples = bool(collected) and ">>> " in file_path.read_text()
    return [each for each in collected if has_examples or type(each) is pytest.Module]


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
