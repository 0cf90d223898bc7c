"""Is the advice right? `thinwire.advise` against real steps, in `thinwire lab`.

In every setting the processes probe their network, predict the step of every algorithm, and then take real
steps with each, in turn.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import plots
import thinwire
from in_lab import leave_job, run_in_lab
from models import new_lstm
from pages import markdown_table, page, save, save_json
from progress import Kept, Progress
from thinwire.advice.losses import BASELINE
from thinwire.advice.priced import priced
from thinwire.demo.gpt import GPT, SIZES
from thinwire.probe import probe

UNTIMED_ROUNDS = 3
PROBE_SECONDS = 20.0  # in a fifth, round trips of 80 ms leave no time for messages that tell the rate
ADVICE_SECONDS = 8.0
ACCURATE, CLOSE = 0.15, 0.1
BYTES = 64


def new_convolutions() -> nn.Module:
    """A small convolutional network for images of 32 × 32."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128), (128, 256), (256, 256)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=1 if inputs == 3 else 2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 4, 256), nn.ReLU(), nn.Linear(256, 100))


def on_bytes(model: nn.Module) -> None:
    """A step on random bytes: their values change no time."""
    inputs = torch.randint(256, (8, BYTES + 1))
    logits = model(inputs[:, :-1])
    torch.autograd.backward(nn.functional.cross_entropy(logits.flatten(0, 1), inputs[:, 1:].flatten()))


def on_images(model: nn.Module) -> None:
    """A step on random images."""
    logits = model(torch.randn(16, 3, 32, 32))
    torch.autograd.backward(nn.functional.cross_entropy(logits, torch.randint(100, (16,))))


OneStep = Callable[[nn.Module], None]
MODELS: dict[str, tuple[Callable[[], nn.Module], OneStep]] = {
    "tiny GPT": (lambda: GPT(SIZES["tiny"]), on_bytes),
    "GPT": (lambda: GPT(SIZES["small"]), on_bytes),
    "LSTM": (new_lstm, on_bytes),
    "convolutions": (new_convolutions, on_images),
}


@dataclass(frozen=True)
class Setting:
    """A model on a network."""

    model: str
    hosts: int
    rate: str
    latency: str = "0ms"

    def __str__(self) -> str:
        late = "" if self.latency == "0ms" else f", round trips of {self.latency}"
        return f"{self.model}, {self.hosts} hosts, {self.rate}{late}"


@dataclass(frozen=True)
class Comparison:
    """Seconds a step by algorithm, and what was advised."""

    predicted: dict[str, float]
    measured: dict[str, float]
    advised: str

    @property
    def errors(self) -> dict[str, float]:
        """Relative."""
        return {name: self.predicted[name] / seconds - 1 for name, seconds in self.measured.items()}

    @property
    def regret(self) -> float:
        """How much slower the advised one is than the fastest measured."""
        return self.measured[self.advised] / min(self.measured.values()) - 1


def work(setting: Setting, arguments: argparse.Namespace) -> NoReturn:
    """On each host: predict, then measure."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    build, one_step = MODELS[setting.model]
    torch.manual_seed(0)
    found = probe(budget_seconds=PROBE_SECONDS)
    # Any loss: this is about time.
    advice = thinwire.advise(build(), one_step, found, budget_seconds=ADVICE_SECONDS, budget_loss=math.inf)
    predicted = {each.name: each.step_seconds for each in advice.predictions}
    measured = averaging_seconds(build, one_step, arguments.rounds)
    leave_job(asdict(Comparison(predicted, measured, advice.best.name)), arguments.work)


def averaging_seconds(build: Callable[[], nn.Module], one_step: OneStep, rounds: int) -> dict[str, float]:
    """Of a step with each algorithm: medians. They take turns, in another order each time.

    A large message leaves the link's burst allowance empty for whoever comes next.
    """
    models = {}
    for name, variant in priced().items():
        models[name] = DistributedDataParallel(build())
        thinwire.attach(models[name], variant.algorithm)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(UNTIMED_ROUNDS + rounds):
        names = list(models)
        random.Random(number).shuffle(names)
        for name in names:
            dist.barrier()
            start = time.perf_counter()
            models[name].zero_grad()
            one_step(models[name])
            if number >= UNTIMED_ROUNDS:
                seconds[name].append(time.perf_counter() - start)
    return {name: median(each) for name, each in seconds.items()}


def compared(setting: Setting, arguments: argparse.Namespace, meanwhile: Callable[[], None]) -> Comparison:
    """Run one setting in the lab."""
    script = [__file__, f"--models={setting.model}", f"--hosts={setting.hosts}", f"--rates={setting.rate}"]
    script += [f"--rounds={arguments.rounds}"]
    found = run_in_lab(setting.hosts, setting.rate, script, latency=setting.latency, meanwhile=meanwhile)
    return Comparison(**found)


def table(comparisons: dict[Setting, Comparison]) -> str:
    rows = []
    for setting, each in comparisons.items():
        errors = sorted(abs(error) for error in each.errors.values())
        rows.append(
            [
                str(setting),
                f"{100 * median(errors):.0f} %",
                f"{100 * errors[-1]:.0f} %",
                f"`{each.advised}`",
                f"{100 * each.regret:.0f} %",
                f"{each.measured[BASELINE] / each.measured[each.advised]:.2f}",
            ]
        )
    header = ["", "median error", "largest", "advised", "slower than the best", "faster than 16 bits"]
    return markdown_table(header, rows)


def details(comparisons: dict[Setting, Comparison]) -> str:
    rows = [
        [
            str(setting),
            name,
            f"{1e3 * each.measured[name]:.0f}",
            f"{1e3 * each.predicted[name]:.0f}",
            f"{100 * error:+.0f} %",
        ]
        for setting, each in comparisons.items()
        for name, error in each.errors.items()
    ]
    return markdown_table(["", "algorithm", "measured, ms", "predicted, ms", "error"], rows)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--hosts", type=int, nargs="+", default=[2])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "200mbit", "500mbit", "1gbit"])
    words = "round trips between hosts, such as 20ms"
    parser.add_argument("--latencies", nargs="+", default=["0ms"], help=words)
    parser.add_argument("--rounds", type=int, default=6, help="timed steps with each algorithm, in turn")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parsed_arguments()
    settings = [
        Setting(*each)
        for each in product(arguments.models, arguments.hosts, arguments.rates, arguments.latencies)
    ]
    if arguments.work is not None:
        work(settings[0], arguments)
    kept = Kept("advice")
    found = {setting: kept.find(**asdict(setting), rounds=arguments.rounds) for setting in settings}
    missing = [setting for setting in settings if found[setting] is None]
    with Progress(len(missing), kept=kept.path) as progress:
        for number, setting in enumerate(missing):
            comparison = compared(setting, arguments, partial(progress.show, number, setting))
            kept.add(asdict(comparison), **asdict(setting), rounds=arguments.rounds)
            found[setting] = asdict(comparison)
            print(f"{setting}\n{table({setting: comparison})}", flush=True)
    comparisons = {setting: Comparison(**found[setting]) for setting in settings}
    late = "latency" if len(arguments.latencies) > 1 else None
    errors = [abs(error) for each in comparisons.values() for error in each.errors.values()]
    accurate = sum(error <= ACCURATE for error in errors)
    points = {
        str(setting): [(1e3 * each.measured[name], 1e3 * each.predicted[name]) for name in each.measured]
        for setting, each in comparisons.items()
    }
    figure = plots.predicted_against_measured(points, late)[0]
    text = page(
        "Predicted and measured steps",
        f"{len(settings)} settings in `thinwire lab`; {PROBE_SECONDS:g} s of probing and "
        f"{ADVICE_SECONDS:g} s of advice in each, then {arguments.rounds} steps with each of {len(priced())} "
        f"algorithms in turn. Any loss was accepted: this is about time. Over all {len(errors)} "
        f"predictions the median error is {100 * median(errors):.0f} %, and {accurate} are within "
        f"{ACCURATE:.0%}. The advised algorithm was "
        f"at most {100 * max(each.regret for each in comparisons.values()):.0f} % slower than the fastest "
        f"measured one, and at most {CLOSE:.0%} slower in "
        f"{sum(each.regret <= CLOSE for each in comparisons.values())} settings. "
        "The hosts share one machine's processors.",
        table(comparisons),
        details(comparisons),
    )
    save_json([asdict(setting) | asdict(each) for setting, each in comparisons.items()], "advice", late)
    kept.finish()
    print(save(f"{text}\n![predicted against measured]({figure})\n", "advice", late))


if __name__ == "__main__":
    main()
