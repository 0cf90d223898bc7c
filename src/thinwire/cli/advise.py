"""The `thinwire advise` command."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import typer

from thinwire.advice import Advice
from thinwire.advice.planned_steps import MAX_PARAMETERS, advise_by_size
from thinwire.advice.prediction import MAX_BUDGET_LOSS, checked_budget
from thinwire.errors import ConfigError
from thinwire.lab import SECONDS, LinkSpec, number_with_unit
from thinwire.probe import Probe
from thinwire.probe.measured_link import MeasuredLink

COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}
MAX_MACHINES = 10**6


def advise(  # noqa: PLR0913 - one for each fact of a run
    *,
    parameters: str = typer.Option(metavar="NUMBER", help="The model's parameters, such as 350M."),
    compute: str = typer.Option(metavar="TIME", help="A forward and backward pass, such as 0.8s."),
    rate: str | None = typer.Option(None, metavar="RATE", help="Each machine's link, such as 1gbit."),
    latency: str | None = typer.Option(
        None, metavar="TIME", help="A round trip between machines, with --rate.", show_default="0.2ms"
    ),
    machines: int | None = typer.Option(
        None, max=MAX_MACHINES, help="Number of machines, with --rate.", show_default="2"
    ),
    gpus: int | None = typer.Option(None, help="GPUs in each machine, with --rate.", show_default="1"),
    probe: Path | None = typer.Option(
        None, metavar="FILE", help="The link, as `thinwire probe --save` wrote it, instead of --rate."
    ),
    optimizer: str | None = typer.Option(
        None, help="The optimizer, such as AdamW.", show_default="the one that loses most"
    ),
    steps: int | None = typer.Option(
        None,
        max=10**9,
        help="Steps of the run: in short ones few bits lose more.",
        show_default="the fewest measured",
    ),
    budget_loss: str = typer.Option(
        "1%", metavar="SHARE", help="The largest loss to accept, such as 0.5%, or any."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the advice as JSON."),
) -> None:
    """Predict the step time with each algorithm and the loss it may cost, and print the line to add.

    The answer is immediate, from the size of a model and the rate of a link. `thinwire.advise` in Python
    makes the same table from timed steps of your own model.

    Example: `thinwire advise --parameters 350M --compute 0.8s --rate 1gbit --optimizer AdamW --steps 20000`

    Example: `thinwire advise --parameters 7B --compute 2s --rate 10gbit --machines 4 --gpus 8`

    Example: `thinwire advise --parameters 350M --compute 0.8s --probe probe.json --budget-loss 0.5%`
    """
    known = "--parameters must be like 350M, 7B or 124000000, from 1 to 1000B"
    count = number_with_unit(parameters.upper(), COUNTS, 1, MAX_PARAMETERS, known)
    known = "--compute, a forward and a backward pass, must be like 0.8s or 300ms, up to 3600s"
    compute_seconds = number_with_unit(compute.lower(), SECONDS, 0, 3600, known)
    budget = _share(budget_loss)
    stated = {"--rate": rate, "--latency": latency, "--machines": machines, "--gpus": gpus}
    if probe is not None:
        for name in (name for name, value in stated.items() if value is not None):
            raise ConfigError(f"{name} and --probe both describe the link; leave one of them out")
        link = MeasuredLink.of(Probe.load(probe))
    else:
        spec = LinkSpec(rate, (latency or "0.2ms").lower())
        if spec.bits_per_second is None:
            raise ConfigError("advise needs the link: --rate, such as 1gbit, or --probe, a file")
        sizes = 2 if machines is None else machines, 1 if gpus is None else gpus
        # A delay is one way.
        link = MeasuredLink.of_rate(spec.bits_per_second, 2 * spec.delays.seconds, *sizes)
    options = {"budget_loss": budget, "optimizer": optimizer, "total_steps": steps}
    advice = advise_by_size(round(count), compute_seconds, link, **options)  # type: ignore[arg-type]
    print(_as_json(advice) if as_json else advice)


def _share(text: str) -> float:
    try:
        if text == "any":
            return math.inf
        return checked_budget(float(text.removesuffix("%")) / (100 if text.endswith("%") else 1))
    except (ConfigError, ValueError) as error:
        most = f"from 0 to {MAX_BUDGET_LOSS:.0%}, such as 0.5%, or any"
        raise ConfigError(f"--budget-loss must be {most}; got {text!r:.50}") from error


def _as_json(advice: Advice) -> str:
    summary = {name: getattr(advice, name) for name in ("compress", "nothing_to_win", "headline", "lines")}
    summary |= {"best": asdict(advice.best), "tied": list(map(asdict, advice.tied))}
    # JSON has no infinity.
    summary |= {"budget_loss": None if math.isinf(advice.budget_loss) else advice.budget_loss}
    return json.dumps(asdict(advice) | summary)
