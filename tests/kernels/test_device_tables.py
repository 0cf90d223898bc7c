"""Tables on devices, which the backward passes of two devices share."""

from __future__ import annotations

from collections import OrderedDict
from threading import Thread
from typing import Any

import pytest
import torch

from thinwire.kernels.triton import launcher
from thinwire.kernels.triton.launcher import launch_table

CPU = torch.device("cpu")


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
