"""Tables on devices are kept from step to step, whatever thread asks for them."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch

from thinwire.kernels import device_tables
from thinwire.kernels.device_tables import on_device


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
