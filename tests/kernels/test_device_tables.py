"""Tables on devices are kept from step to step, whatever thread asks for them."""

from __future__ import annotations

from collections import OrderedDict
from threading import Thread
from typing import Any

import pytest
import torch

from thinwire.kernels.triton import launcher
from thinwire.kernels.triton.launcher import TableRows, launch_table, workspace

CPU = torch.device("cpu")


def test_tables_are_kept_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MAX_TABLES", 2)
    launcher._tables.clear()
    made: list[int] = []

    for number in (1, 2, 1, 3, 1, 2):

        def make(number: int = number) -> TableRows:
            made.append(number)
            return [(number, 7), (8, 9)], [2, 1]

        table = launch_table(number, make, CPU)
        assert table.rows.tolist() == [[number, 7], [8, 9]]
        assert table.tiles.tolist() == [[0, 0], [0, 1], [1, 0]]
        assert table.programs == 3
    assert made == [1, 2, 3, 2]


def test_a_table_is_not_dropped_while_another_thread_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As backward passes of two devices do: the other one comes when the first has just found its table."""
    others: list[Thread] = []

    class Meeting(OrderedDict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            if found is not None and not others:
                others.append(Thread(target=launch_table, args=("second", lambda: ([(2,)], [1]), CPU)))
                others[0].start()
                others[0].join(0.2)  # waits, if it must, for the first
            return found

    monkeypatch.setattr(launcher, "MAX_TABLES", 1)
    monkeypatch.setattr(launcher, "_tables", Meeting())
    for _ in range(2):
        assert launch_table("first", lambda: ([(1,)], [1]), CPU).rows.tolist() == [[1]]
    others[0].join()
    assert [table.rows.tolist() for table in launcher._tables.values()] == [[[2]]]


def test_a_workspace_stays_until_a_call_needs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_workspaces", {})
    first, smaller, larger = (workspace("sums", numel, torch.float32, CPU) for numel in (8, 5, 9))
    assert smaller.data_ptr() == first.data_ptr() != larger.data_ptr()
    assert [len(first), len(smaller), len(larger)] == [8, 5, 9]
    assert workspace("grams", 5, torch.float32, CPU).data_ptr() != larger.data_ptr()
