"""Stands for CUDA graphs on the CPU: operations are recorded as they are made, and made again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_ready.counting import tensors_in

# For these the host would wait for a device, which ends a recording.
WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "item"}


class _Noting(TorchDispatchMode):
    def __init__(self, calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.name.split("::")[1] in WAITS:
            raise RuntimeError(f"the host waits for {func} in a recording")
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, list(tensors_in((out,)))))
        return out


class RecordedGraph:
    """A graph whose first replay was the recording itself."""

    num_replays = 0  # of all, to see that there were any

    def __init__(self) -> None:
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []
        self._is_made = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        with _Noting(self._calls):
            yield

    def upload(self, made: torch.Tensor, device: torch.device) -> torch.Tensor:
        return made

    def replay(self) -> None:
        if not self._is_made:
            self._is_made = True
            return
        RecordedGraph.num_replays += 1
        for func, args, kwargs, outs in self._calls:
            found = list(tensors_in((func(*args, **kwargs),)))
            for new, out in zip(found, outs, strict=True):
                # A view, or what was written in place, is there already.
                if new.data_ptr() != out.data_ptr():
                    out.copy_(new)
