"""Watch: record what every step did, with a writer."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from statistics import fmean
from typing import Any

from thinwire.checks import whole_count
from thinwire.errors import ConfigError
from thinwire.plan import Route
from thinwire.sync import GradientSync, Synced, counter_of, engine_of
from thinwire.sync.handle import Counting
from thinwire.sync.stats import Stats
from thinwire.version import __version__
from thinwire.watch.records import FORMAT, RESERVED
from thinwire.watch.writers import JSONLWriter, Writer

logger = logging.getLogger(__name__)

# Sums of `Stats`; a record has the differences.
TIMES = ("arithmetic_seconds", "waiting_seconds", "exposed_seconds")
COUNTED = ("messages", "message_bytes", "inside_bytes", "gradient_bytes", *TIMES)
MIN_SAMPLES = 32  # a quarter of fewer samples is noise
MIN_STEPS = 1000
MAX_GROWTH, STILL_GROWING = 1.3, 1.1


class Watch:
    """Records what every step does, on this process; a context manager around the training loop.

    Nothing is sent to other processes, so it is usually enough to watch one; to watch several, give each its
    own file. A step sends the same on all processes; times and errors are this process's own.

    Args:
        sync: The handle from `attach`, a `LocalSGD`, or the `sync` of an adapter or integration.
        writer: A path, for lines of JSON that `thinwire report` reads; or any `Writer`.
        name: The run's name in a report; None for the file's name.
        every_steps: Steps from one record to the next; a record has the sums over these steps.
        norms_every_steps: Steps from one reading of residuals to the next, which costs a pass over them and a
            host synchronisation. Warns, with logger "thinwire", if they keep growing.

    A full disk, or another error of the writer, ends the watch with a warning, not the training. If the
    host does not learn which steps were not finite (see `host_check` in `thinwire.attach`), the records
    do not say so.

    Raises:
        ConfigError: `sync` is not a handle, `writer` not a writer, or an argument is out of range.
        OSError: The file can't be written.
    """

    def __init__(
        self,
        sync: GradientSync | Synced,
        writer: Writer | str | os.PathLike[str],
        *,
        name: str | None = None,
        every_steps: int = 1,
        norms_every_steps: int = 20,
    ) -> None:
        counter = counter_of(sync)
        if counter is None:
            got = type(sync).__name__
            raise ConfigError(f"Watch needs what attach() returned, or the sync of an adapter, got {got}")
        self._every_steps = whole_count("every_steps", every_steps, minimum=1)
        self._norms_every_steps = whole_count("norms_every_steps", norms_every_steps, minimum=1)
        # It counts steps as its user does: a LocalSGD counts the optimizer's.
        self._engine, self._watched = engine_of(sync), counter
        if isinstance(writer, str | os.PathLike):
            # After the other checks, so that a refused watch leaves no file behind.
            writer = JSONLWriter(writer)
        elif not all(callable(getattr(writer, name, None)) for name in ("write", "close")):
            do = "wrap a logger's function in a thinwire.watch.MetricsWriter"
            raise ConfigError(
                f"writer must be a path, or an object with write and close, got {writer!r}; {do}"
            )
        self._writer: Writer | None = writer
        self._residuals: list[float] = []  # under this plan, as multiples of what a step sends
        self._planned: tuple[object, object] = (None, None)
        self._routes: dict[str, Route] = {}  # last written, by label
        self._start = self._last_end = time.perf_counter()
        # Subtract the counts so far: a watch may begin in the middle of training.
        self._last = counter.counts()
        self._steps = self._nonfinite_steps = 0  # since the last record
        transport = self._engine.transport
        values = {"format": FORMAT, "name": name, "thinwire": __version__, "unix_seconds": time.time()}
        values |= {"processes": transport.size, "process_rank": transport.rank}
        # A writer's error is a warning in training, but raises now, while the user can still fix it.
        writer.write("run", counter.steps, values | {"machines": self._engine.inter_node.size})
        # Last: if the writer raises, no watch must stay registered.
        counter.observers.append(self._after_step)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching; may be called twice."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        self._watched.observers.remove(self._after_step)
        try:
            writer.close()
        except Exception as error:
            self._warn_of(error)

    def log(self, values: Mapping[str, float] | None = None, /, **named: float) -> None:
        """Record Python or NumPy numbers, by name, for the last finished step: call it after `backward()`.

        ConfigError if a value is not a number, or its name is "kind", "step" or "seconds".
        """
        plain = dict[str, float]()
        for name, value in {**(values or {}), **named}.items():
            if name in RESERVED:
                raise ConfigError(f"log can't take {name}=, which every record has; use a different name")
            # True is hardly meant as a number; a tensor would silently make the host wait.
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ConfigError(f"{name} must be a number, got {value!r}; for a tensor, pass value.item()")
            # Python's own types: JSON writers take no others.
            plain[name] = int(value) if isinstance(value, Integral) else float(value)
        self._write("log", {"seconds": time.perf_counter() - self._start, **plain})

    def _after_step(self, committed: bool) -> None:
        step = self._watched.steps
        self._steps += 1
        self._nonfinite_steps += not committed
        if step % self._every_steps == 0:
            # Before the step's record: readers of the file must know the step's plan.
            self._write_plan()
            now, counts = time.perf_counter(), self._watched.counts()
            values = {
                "seconds": now - self._start,
                "step_seconds": (now - self._last_end) / self._steps,
                "steps": self._steps,
                "nonfinite_steps": self._nonfinite_steps if self._engine.settings.host_check else None,
                **{name: getattr(counts, name) - getattr(self._last, name) for name in COUNTED},
                "compression_ratio": counts.compression_ratio,
            }
            self._write("step", values)
            if isinstance(self._watched, Counting):
                self.log(**self._watched.numbers())
            self._last, self._last_end = counts, now
            self._steps = self._nonfinite_steps = 0
        # A dropped step leaves memory alone: its errors would be those of the step before.
        if step % self._norms_every_steps == 0 and committed:
            self._write_norms()

    def _write_plan(self) -> None:
        algorithm, plan = self._engine.algorithm, self._engine.reporter.plan
        if (algorithm, plan) == self._planned:
            return
        routes = {route.label: route for route in plan.routes}
        was, self._planned = self._planned[0], (algorithm, plan)
        # A step that only leaves some parameters out has no new plan.
        if algorithm == was and routes.items() <= self._routes.items():
            return
        self._routes = {**self._routes, **routes} if algorithm == was else routes
        # Under a new plan the residual levels off elsewhere; growing to that level is no alarm.
        self._residuals = []
        shown = algorithm if self._watched is self._engine.reporter else self._watched
        recorded = ("label", "names", "detail", "is_compressed", "gradient_bytes", "message_bytes")
        listed = [{name: getattr(route, name) for name in recorded} for route in plan.routes]
        self._write("plan", {"algorithm": str(shown), "routes": listed})

    def _write_norms(self) -> None:
        stats = self._engine.reporter.stats()
        if not stats.error_norm:  # without a residual, or before the first step
            return
        self._write("norms", {"relative_error": stats.relative_error, "error_norm": stats.error_norm})
        self._residuals.append(_residual_in_steps(stats))
        growth = alarming_growth(self._residuals)
        if growth is not None and self._watched.steps >= MIN_STEPS:
            logger.warning(
                f"step {self._watched.steps}: the residual has grown {growth:.1f}-fold relative to what a "
                "step sends while the number of steps doubled, twice in succession: it keeps growing, most "
                f"of all for {max(stats.relative_error, key=stats.relative_error.__getitem__)}. Compress "
                "less, or lower the learning rate"
            )

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        if self._writer is None:  # an error has ended the watch, but the training loop still calls `log`
            return
        try:
            self._writer.write(kind, self._watched.steps, values)
        except Exception as error:
            self._warn_of(error)
            self._watched.observers.remove(self._after_step)
            self._writer = None

    def _warn_of(self, error: Exception) -> None:
        logger.warning("step %d: watching ends, training continues: %r", self._watched.steps, error)


def _residual_in_steps(stats: Stats) -> float:
    """Return the residual of all parameters as a multiple of what was sent in the last step, by norm."""
    # The message is orthogonal to the residual, so its norm follows from the relative error.
    sent = [
        stats.error_norm[label] * math.sqrt(max(0.0, 1 / relative**2 - 1)) if relative > 0 else 0.0
        for label, relative in stats.relative_error.items()
    ]
    return math.hypot(*stats.error_norm.values()) / math.hypot(*sent) if any(sent) else 0.0


def alarming_growth(residuals: Sequence[float]) -> float | None:
    """Return by what factor residuals grew while their number doubled, if they grow without bound.

    The mean of the second half is compared with that of the quarter before, twice in succession. Growth
    proportional to the number of steps doubles it; growth with its square root is 1.4 times. A residual that
    levels off, as it should with error feedback, stops growing within the second half.
    """
    count = len(residuals)
    if count < 2 * MIN_SAMPLES or count.bit_count() > 1:  # the number has not doubled since the last check
        return None
    growths = []
    for end in (count // 2, count):
        before, first, last = (fmean(residuals[end * i // 4 : end * (i + 1) // 4]) for i in (1, 2, 3))
        growths.append((first + last) / 2 / before if before > 0 else 1.0)
    return growths[-1] if min(growths) > MAX_GROWTH and last > STILL_GROWING * first else None
