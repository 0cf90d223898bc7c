"""The `thinwire advise` command."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from thinwire.advice.measure import advise as measure
from thinwire.advice.result import Advice
from thinwire.cli.job import alone
from thinwire.errors import ConfigError
from thinwire.probe import Probe

__all__ = ["advise", "show"]


def advise(
    *,
    probe: Annotated[Path, typer.Option(metavar="FILE", help="What `thinwire probe --save` wrote.")],
    model: Annotated[
        str, typer.Option(metavar="MODULE:FUNCTION", help="Builds the model; called without arguments.")
    ],
    step: Annotated[
        str,
        typer.Option(metavar="MODULE:FUNCTION", help="Runs forward and backward on the model it is given."),
    ],
    budget_seconds: Annotated[float, typer.Option(help="About how long it may take.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the advice as JSON.")] = False,
) -> None:
    """Predict what each algorithm would make of a step of your model on the network that was probed.

    Runs on one process, on a machine like those that will train.

    Example: `thinwire advise --probe probe.json --model my_pkg.models:build --step my_pkg.models:one_step`
    """
    found = Probe.load(probe)
    sys.path.insert(0, "")
    build, one_step = _function(model, "--model"), _function(step, "--step")
    with alone():
        built = _called(build, model)
        if not isinstance(built, nn.Module):
            raise ConfigError(f"{model} must return a torch.nn.Module, got {built!r}")
        console = Console(stderr=True, quiet=as_json)
        with console.status("measuring …") as status:
            advice = measure(
                built,
                lambda given: _called(lambda: one_step(given), step),
                found,
                budget_seconds=budget_seconds,
                progress=status.update,
            )
    if as_json:
        print(json.dumps(_plain(advice)))
    else:
        show(advice, Console())


def _function(place: str, option: str) -> Callable[..., Any]:
    """Return a user's function.

    Args:
        place: As MODULE:FUNCTION.
        option: That named it.

    Raises:
        ConfigError: It can't be imported, or is none.
    """
    module, _, name = place.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(
            f"{option} {place} can't be imported ({type(error).__name__}: {error}); expected MODULE:FUNCTION"
        ) from error
    if not callable(function):
        raise ConfigError(f"{option} {place} must be a function, got {function!r}")
    return cast(Callable[..., Any], function)


def _called(function: Callable[[], Any], place: str) -> Any:
    """Call a user's function.

    Args:
        function: To be called without arguments.
        place: What the user has called it.

    Raises:
        ConfigError: It failed; in one line.
    """
    try:
        return function()
    except Exception as error:
        raise ConfigError(f"{place} failed: {type(error).__name__}: {error}") from error


def _plain(advice: Advice) -> dict[str, Any]:
    bits = advice.break_even_bits_per_second
    return asdict(advice) | {
        "compress": advice.compress,
        "nothing_to_win": advice.nothing_to_win,
        "break_even_bits_per_second": None if math.isinf(bits) else bits,
    }


def show(advice: Advice, console: Console) -> None:
    """Print a table, in which less is better everywhere, and what follows in words.

    Args:
        advice: What was predicted.
        console: Where to.
    """
    table = Table(title="Predicted steps, fastest first")
    for name in ("", "ms", "between", "% of 16 bits", "MB sent", "MB kept"):
        table.add_column(name, justify="right" if name else "left", no_wrap=bool(name))
    for each in advice.predictions:
        table.add_row(
            each.name,
            f"{1e3 * each.step_seconds:.1f}",
            f"{1e3 * each.low_seconds:.1f} – {1e3 * each.high_seconds:.1f}",
            f"{100 * each.step_seconds / advice.baseline.step_seconds:.0f}",
            f"{each.message_bytes / 1e6:.2f}",
            f"{each.memory_bytes / 1e6:.1f}",
        )
    console.print(table)
    console.print(_verdict(advice), highlight=False, soft_wrap=True)


def _verdict(advice: Advice) -> str:
    bits, gained = advice.break_even_bits_per_second, f"{advice.least_gain:.0%} over 16 bits"
    where = (
        f"links below {bits / 1e6:,.0f} Mbit/s"
        if 0 < bits < math.inf
        else "every link"
        if bits
        else "no link"
    )
    lines = [_advised(advice), f"Compressed messages win more than {gained} on {where}."]
    if len(advice.tied) > 1:
        is_all = len(advice.tied) == len(advice.predictions)
        names = "all of them" if is_all else ", ".join(each.name for each in advice.tied)
        lines.insert(1, f"Not distinguishable from the fastest: {names}.")
        if advice.best in advice.tied:
            gap = "the smallest loss gap of those that win enough" if advice.best.is_lossy else "no loss gap"
            lines[1] += f" {advice.best.name} has {gap}."
    return "\n".join(lines if advice.nothing_to_win else [*lines, "", f"    {advice.best.code}"])


def _advised(advice: Advice) -> str:
    best = advice.best
    if best.is_lossy:
        share = best.step_seconds / advice.baseline.step_seconds
        what = "Average less often" if best.averages_less_often else "Compress"
        return f"{what}: a step with {best.name} takes {share:.0%} of one with 16 bits. Compare losses, too."
    if advice.compressed_bytes >= advice.baseline.message_bytes:
        return (
            "Nothing to win by compressing: compressed messages of this model are "
            f"{advice.compressed_bytes:,.0f} bytes per step, 16 bits {advice.baseline.message_bytes:,.0f}."
        )
    if advice.nothing_to_win:
        return (
            f"Nothing to win: a step takes {1e3 * best.step_seconds:.1f} ms with {best.name}, "
            f"{1e3 * advice.compute_seconds:.1f} ms without any averaging."
        )
    return (
        f"Do not compress: no approximation wins more than {advice.least_gain:.0%} over {best.name} for sure."
    )
