"""The `thinwire advise` command."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from torch import nn

from thinwire.adapters.ddp_model import is_fsdp2
from thinwire.advice import Advice
from thinwire.advice import advise as predict
from thinwire.advice.planned_steps import MAX_PARAMETERS, StatedLink, advise_by_size
from thinwire.advice.prediction import MAX_BUDGET_LOSS, checked_budget
from thinwire.cli.common import alone, joined_job, run_here, shown_measuring, tell_without_numba
from thinwire.errors import ConfigError
from thinwire.lab import SECONDS, LinkSpec, number_with_unit
from thinwire.probe import Probe
from thinwire.probe.measured_link import MeasuredLink

COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}


def advise(  # noqa: PLR0913 - one for each fact of a run
    *,
    parameters: str | None = typer.Option(
        None, metavar="NUMBER", help="Of the model, such as 350M: an answer at once, without a model."
    ),
    compute: str | None = typer.Option(
        None, metavar="TIME", help="Of a forward and backward pass, such as 0.8s, with --parameters."
    ),
    rate: str | None = typer.Option(
        None, metavar="RATE", help="Of each machine's link, such as 1gbit, with --parameters."
    ),
    latency: str | None = typer.Option(
        None, metavar="TIME", help="A round trip between two machines, with --rate.", show_default="0.2ms"
    ),
    machines: int | None = typer.Option(None, help="How many machines, with --rate.", show_default="2"),
    gpus: int | None = typer.Option(None, help="Of each machine, with --rate.", show_default="1"),
    probe: Path | None = typer.Option(None, metavar="FILE", help="What `thinwire probe --save` wrote."),
    model: str | None = typer.Option(
        None, metavar="MODULE:FUNCTION", help="Returns the model; takes no arguments."
    ),
    step: str | None = typer.Option(
        None, metavar="MODULE:FUNCTION", help="Takes the model: batch, forward, backward."
    ),
    budget_seconds: float = typer.Option(30.0, help="About; at least ten steps with each algorithm."),
    budget_loss: str = typer.Option(
        "1%", metavar="SHARE", help="The largest loss gap that is advised, such as 0.5%; any: no limit."
    ),
    optimizer: str | None = typer.Option(
        None, help="What trains the model, such as AdamW.", show_default="the worst of all known"
    ),
    steps: int | None = typer.Option(
        None, help="Of the run: short ones lose more by few bits.", show_default="as few as were measured"
    ),
    sharded: int | None = typer.Option(
        None,
        metavar="SHARDS",
        help="Shard the model by FSDP2 over this many processes of each machine, which it starts here.",
        show_default="each process holds the whole model",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the advice as JSON."),
) -> None:
    """Predict how long a step takes with each algorithm, what it may lose, and the line to add.

    From the size of a model and the rate of a link, at once. Or measured, with your model, on the network
    that was probed: type it once, without torchrun, on a machine like those that will train. MODULE is found
    from the current folder: train:build is build() of train.py.

    Example: `thinwire advise --parameters 350M --compute 0.8s --rate 1gbit --optimizer AdamW --steps 20000`

    Example: `thinwire advise --parameters 7B --compute 2s --rate 10gbit --machines 4 --gpus 8`

    Example: `thinwire advise --probe probe.json --model my_pkg.models:build --step my_pkg.models:one_step`

    Example: `… --sharded 8`, with a probe of one process on each machine

    Example: `… --optimizer AdamW --steps 3000 --budget-loss 0.5%`
    """
    # Refuse whatever can be refused before anything is measured.
    rules: dict[str, Any] = {"budget_loss": _share(budget_loss), "optimizer": optimizer, "total_steps": steps}
    network = None if probe is None else Probe.load(probe)
    link = {"--rate": rate, "--latency": latency, "--machines": machines, "--gpus": gpus}
    measured = {"--model": model, "--step": step, "--sharded": sharded}
    if parameters is None:
        _refuse(link | {"--compute": compute}, "goes with --parameters; leave it out, or give those")
        if network is None or model is None or step is None:
            needs = "--parameters, --compute and --rate for an answer at once, or --probe, --model and --step"
            raise ConfigError(f"advise needs {needs} to measure")
        advice = _measured(network, model, step, sharded, budget_seconds, as_json=as_json, rules=rules)
    else:
        _refuse(measured, "asks for a measurement, --parameters for none; leave one of them out")
        if network is not None:
            _refuse(link, "is what --probe has measured; leave one of them out")
        stated = MeasuredLink.of(network) if network else _stated_link(rate, latency, machines, gpus)
        advice = advise_by_size(*_size(parameters, compute), stated, **rules)
    if sharded is None or os.environ["RANK"] == "0":
        print(_as_json(advice) if as_json else advice)
        # Without a model nothing of this machine was timed.
        if parameters is None:
            tell_without_numba()


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Refuse the first of some options that was given."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{name} {why}")


def _size(parameters: str, compute: str | None) -> tuple[int, float]:
    """Return the number of parameters, and the seconds of computing."""
    known = "--parameters is like 350M, 7B or 124000000, from 1 to 1000B"
    count = number_with_unit(parameters.upper(), COUNTS, 1, MAX_PARAMETERS, known)
    known = "--compute, a forward and a backward pass, is like 0.8s or 300ms, up to 3600s"
    return round(count), number_with_unit((compute or "").lower(), SECONDS, 0, 3600, known)


def _stated_link(rate: str | None, latency: str | None, machines: int | None, gpus: int | None) -> StatedLink:
    """Return the link that these options tell."""
    spec = LinkSpec(rate, (latency or "0.2ms").lower())
    if spec.bits_per_second is None:
        raise ConfigError("--parameters needs the link: --rate, such as 1gbit, or --probe, a file")
    # A delay is one way.
    round_trip_seconds = 2 * spec.delays.seconds
    return StatedLink.of_rate(
        spec.bits_per_second,
        round_trip_seconds,
        2 if machines is None else machines,
        1 if gpus is None else gpus,
    )


def _measured(
    network: Probe,
    model: str,
    step: str,
    sharded: int | None,
    budget_seconds: float,
    *,
    as_json: bool,
    rules: dict[str, Any],
) -> Advice:
    """Return the advice for a user's model, whose steps are timed here."""
    network.known_rate()
    # `python -m` does the same: a user's modules lie where the command is called.
    sys.path.insert(0, "")
    build, one_step = _function(model, "--model"), _function(step, "--step")
    run_here(sharded, "--sharded")
    with alone() if sharded is None else joined_job("advise", None) as device:
        # Within the group: a model may ask for it when it is built.
        built = build()
        if not isinstance(built, nn.Module):
            raise ConfigError(f"{model} must return a torch.nn.Module, got {built!r}")
        if device is not None and not is_fsdp2(built):
            _shard(built.to(device))
        # Progress goes where output that is parsed does not.
        is_first = sharded is None or os.environ["RANK"] == "0"
        console = Console(stderr=True, quiet=as_json or not is_first)
        with shown_measuring(console, budget_seconds) as progress:
            return predict(
                built, one_step, network, budget_seconds=budget_seconds, progress=progress, **rules
            )


def _shard(model: nn.Module) -> None:
    """Shard a model as its owner would: block by block, then the rest."""
    # DTensors take seconds to import.
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    # A list of modules is one of blocks that are alike, each of which is gathered by itself.
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = [block for modules in lists for block in modules if not isinstance(block, nn.ModuleList)]
    # From the inside out, as FSDP2 asks; a block may be in several lists.
    for module in (*reversed(dict.fromkeys(blocks)), model):
        fully_shard(module)


def _share(text: str) -> float:
    """Return the share that "0.5%" or "0.005" means; infinity for "any"."""
    if text == "any":
        return math.inf
    try:
        return checked_budget(float(text.removesuffix("%")) / (100 if text.endswith("%") else 1))
    except (ConfigError, ValueError) as error:
        most = f"from 0 to {MAX_BUDGET_LOSS:.0%}, such as 0.5%, or any"
        raise ConfigError(f"--budget-loss must be {most}; got {text!r:.50}") from error


def _function(path: str, option: str) -> Callable[..., Any]:
    """Return a user's function; a failure of any kind is told in one line, which says where to look."""
    module, _, name = path.partition(":")
    if not name or "/" in module or module.endswith(".py"):
        such = "such as train:build for build() of train.py in this folder"
        raise ConfigError(f"{option} must be MODULE:FUNCTION, {such}; got {path!r}")
    # A script that parses its arguments when it is imported ends by SystemExit.
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{option} {path} can't be imported ({reason}); give a file without side effects"
        ) from error

    def called(*args: Any) -> Any:
        try:
            return function(*args)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{path} failed: {type(error).__name__}: {error}") from error

    return called


def _as_json(advice: Advice) -> str:
    plain = asdict(advice) | {
        "compress": advice.compress,
        "nothing_to_win": advice.nothing_to_win,
        # JSON has no infinity.
        "budget_loss": None if math.isinf(advice.budget_loss) else advice.budget_loss,
        "headline": advice.headline,
        "lines": advice.lines,
    }
    return json.dumps(plain)
