"""Writers of records."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from thinwire.errors import ConfigError, MissingExtraError
from thinwire.sync.stats import Stats
from thinwire.watch.records import check_first_line


class Writer(Protocol):
    """A destination of records."""

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write the record of a step; docs/watching.md lists the kinds and their values."""

    def close(self) -> None:
        """Finish: no more records will follow."""


class JSONLWriter:
    """Writes a line of JSON for each record immediately, for `thinwire report`; see docs/watching.md.

    Numbers that are not finite become null. An existing file is continued, as when training resumes; a
    truncated last line is removed.

    Raises:
        ConfigError: The file exists and is not a `Watch`'s; or its folder does not exist.
        OSError: It can't be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        if not path.parent.is_dir():
            raise ConfigError(f"{path} can't be written: there is no folder {path.parent}; make it first")
        if path.is_file() and path.stat().st_size > 0:
            with path.open("r+b") as file:
                check_first_line(path, file.readline())  # before anything is cut off
                # A killed process may have left half a line, which would make later records unreadable.
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        # Line-buffered, so that the records of a killed process can be read.
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_finite({"kind": kind, "step": step, **values})) + "\n")

    def close(self) -> None:
        self._file.close()


class MetricsWriter:
    """Passes records as named numbers to any logger: "thinwire/message_bytes" and so on.

    They mean the same as in the file, see docs/watching.md. Numbers from `Watch.log` keep their names. `log`
    is called with the numbers and the step; it may be `trainer.logger.log_metrics`, `accelerator.log` or
    `wandb.log`. ConfigError if it can't be called.
    """

    def __init__(self, log: Callable[[Any, int], object]) -> None:
        if not callable(log):
            raise ConfigError(f"log must be a function such as trainer.logger.log_metrics, got {log!r}")
        self._log = log

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind == "log":
            # `seconds` is for the file: loggers have their own clocks.
            self._log({name: float(value) for name, value in values.items() if name != "seconds"}, step)
        elif kind in ("step", "norms"):
            self._log(dict(_named("thinwire", values)), step)

    def close(self) -> None:
        pass  # the logger is the caller's


class TensorBoardWriter(MetricsWriter):
    """Writes the numbers of `MetricsWriter` for TensorBoard; in a clone, `pip install '.[tensorboard]'`.

    `log_dir` is that of `torch.utils.tensorboard.SummaryWriter`. MissingExtraError if that is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an optional package
        except ImportError as error:
            raise MissingExtraError(
                "TensorBoardWriter needs tensorboard: pip install '.[tensorboard]' in a clone of Thinwire"
            ) from error
        self._summary: Any = SummaryWriter(os.fspath(log_dir))

        def log(metrics: Mapping[str, float], step: int) -> None:
            for name, value in metrics.items():
                self._summary.add_scalar(name, value, step)

        super().__init__(log)

    def close(self) -> None:
        self._summary.close()


def metrics_of(stats: Stats, prefix: str = "thinwire/") -> dict[str, float]:
    """Return the numbers of a run so far by name, for loggers; sums since the start are `total_…`."""
    return {
        f"{prefix}compression_ratio": stats.compression_ratio,
        f"{prefix}total_message_bytes": stats.message_bytes,
        f"{prefix}total_nonfinite_steps": stats.nonfinite_steps,
        f"{prefix}total_waiting_seconds": stats.waiting_seconds,
    }


def _named(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record, including those in mappings, under path-like names."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _named(f"{prefix}/{key}", value)
        elif isinstance(value, int | float):
            yield f"{prefix}/{key}", float(value)


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return value if not isinstance(value, float) or math.isfinite(value) else None
