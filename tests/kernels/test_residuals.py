"""Residuals are moved row by row: to their places in a healthy step, in any other nowhere."""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch

from thinwire.kernels import device_tables
from thinwire.kernels.device_tables import on_device
from thinwire.kernels.residual_layout import MOST_ROW, move_where, row_elements

SHAPES = [(8, 64), (4, 64), (12, 64), (4, 64)]


def buckets(*gaps: int) -> list[torch.Tensor]:
    """Four matrices in two buckets, with something else behind each."""
    matrices = []
    for some in (SHAPES[:2], SHAPES[2:]):
        flat = torch.randn(sum(map(math.prod, some)) + sum(gaps), generator=torch.Generator().manual_seed(0))
        start = 0
        for shape, gap in zip(some, gaps, strict=True):
            matrices.append(flat[start : start + math.prod(shape)].view(shape))
            start += math.prod(shape) + gap
    return matrices


def rooms_of(matrices: list[torch.Tensor], length: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Rooms in another order than the matrices', and the row behind them."""
    memory = torch.full((sum(matrix.numel() for matrix in matrices) + length,), 7.0)
    *rooms, spare = memory.split_with_sizes([*(matrix.numel() for matrix in reversed(matrices)), length])
    return [room.view(m.shape) for room, m in zip(reversed(rooms), matrices, strict=True)], spare


# Rows of whatever lies between; of what does not, so that a bucket goes in two; far apart.
@pytest.mark.parametrize(
    ("gaps", "length", "launches"), [((32, 0), 32, 2), ((5, 9), 256, 4), ((640, 0), 256, 4)], ids=str
)
@pytest.mark.parametrize("healthy", [True, False])
def test_rows_go_to_their_rooms_or_nowhere(
    healthy: bool, gaps: tuple[int, int], length: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices = buckets(*gaps)
    assert row_elements(matrices) == length
    rooms, spare = rooms_of(matrices, length)
    if not healthy:
        matrices[1][2, 3], matrices[3][0, 0] = torch.nan, torch.inf
    calls = []
    copy = torch.Tensor.index_copy_
    monkeypatch.setattr(torch.Tensor, "index_copy_", lambda *args: calls.append(copy(*args)))
    for _ in range(2):  # the second time by what the first has kept
        move_where(torch.tensor(healthy), matrices, rooms, spare)
    assert len(calls) == 2 * launches
    for matrix, room in zip(matrices, rooms, strict=True):
        assert torch.equal(room, matrix if healthy else torch.full_like(room, 7.0))


def test_rows_are_neither_short_nor_a_model_long() -> None:
    assert row_elements([torch.empty(3, 40), torch.empty(7, 40)]) == 40
    assert row_elements([torch.empty(3, 31), torch.empty(7, 31)]) == 0
    assert row_elements([torch.empty(2, 4099)]) == 0
    assert row_elements([torch.empty(1024, 1024)]) == MOST_ROW
    assert row_elements([torch.empty(0, 64)]) == 0


def test_tables_are_kept_but_for_those_of_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tables, "MAX_TABLES", 2)
    device_tables._kept.clear()
    made = [0]

    class Other(torch.Tensor):
        """As a mode's."""

    def table(number: int) -> torch.Tensor:
        made.append(number)
        return torch.tensor(number) if number < 9 else torch.tensor(number).as_subclass(Other)

    for number in (1, 2, 1, 3, 1, 2, 9, 9):
        assert on_device((number,), partial(table, number), torch.device("cpu")) == number
    assert made[1:] == [1, 2, 3, 2, 9, 9]


def test_a_table_is_not_dropped_while_another_thread_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As backward passes of two devices do: the other one comes when the first has just found its table."""
    cpu = torch.device("cpu")
    others: list[Thread] = []

    class Meeting(OrderedDict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            if found is not None and not others:
                others.append(Thread(target=on_device, args=(("second",), lambda: torch.tensor(2), cpu)))
                others[0].start()
                others[0].join(0.2)  # waits, if it must, for the first
            return found

    monkeypatch.setattr(device_tables, "MAX_TABLES", 1)
    monkeypatch.setattr(device_tables, "_kept", Meeting())
    for _ in range(2):
        assert on_device(("first",), lambda: torch.tensor(1), cpu) == 1
    others[0].join()
    assert [int(each) for each in device_tables._kept.values()] == [2]
