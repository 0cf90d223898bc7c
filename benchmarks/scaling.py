"""A cost model of a training step, fitted to what `bench_network.py` measured, for any number of processes.

A step of N processes whose links carry R bytes a second, with messages of B₁ bytes that overlap the backward
pass and B₂ that do not, in n₁ and n₂ collectives:

    t(B, n) = n · 2 (N − 1) · latency + 2 (N − 1) / N · B · (1 / R + handling)
    step    = compute + arithmetic + max(0, t(B₁, n₁) − hidden · compute) + t(B₂, n₂)

The first is a ring all-reduce (Patarasuk and Yuan, 2009); with `tree`, 2 ⌈log₂ N⌉ messages follow each other
instead of 2 (N − 1), as in NCCL's trees. `handling` is the processor's time to send, receive and add a byte,
`hidden` the share of the compute that communication can hide behind. `arithmetic` has in it what DDP does to
its buckets, and the wait for the slower process.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch.nn.functional import softplus

from pages import RESULTS_FOLDER, markdown_table, page, save
from thinwire import AllReduce, Cast, PowerSGD
from thinwire.algorithms import Algorithm
from thinwire.algorithms.lowrank.config import LowRankRoute
from thinwire.demo.model import GPT, SIZES
from thinwire.plan import ParameterSpec

COMPUTE_ONLY = "compute only"
ALGORITHMS: dict[str, Algorithm] = {
    "AllReduce()": AllReduce(),
    'Cast("bf16")': Cast("bf16"),
    "PowerSGD(matrix_rank=1)": PowerSGD(matrix_rank=1),
    "PowerSGD(matrix_rank=4)": PowerSGD(matrix_rank=4),
    "PowerSGD(matrix_rank=4, alternating=True)": PowerSGD(matrix_rank=4, alternating=True),
}
# What is less is not told from the error of the model.
LEAST_GAIN = 0.05
# An accelerator beside one core of the lab, for the last table.
FASTER = 20
# What a long transfer reaches in the lab, bytes a second (docs/lab.md). Unshaped, only processors limit it.
RATES = {"100mbit": 95.3e6 / 8, "1gbit": 900e6 / 8, "unshaped": math.inf}
# DDP's buckets of the 43.7 MB of gradients: a small first one, then 25 MiB each.
NUM_BUCKETS = 3


class Messages(NamedTuple):
    """What one algorithm sends a step."""

    first_bytes: float
    first_count: int
    later_bytes: float
    later_count: int


@dataclass(frozen=True)
class Measurement:
    """The median step of one algorithm in one lab, beside the one that sends nothing."""

    algorithm: str
    processes: int
    bytes_per_second: float
    compute_seconds: float
    step_seconds: float


@dataclass(frozen=True)
class Costs:
    """What is fitted: seconds a message, seconds a byte, and shares of the compute."""

    latency_seconds: torch.Tensor
    handling_seconds: torch.Tensor
    hidden: torch.Tensor
    arithmetic: Mapping[str, torch.Tensor]
    tree: bool = False

    def step_seconds(
        self,
        algorithm: str,
        messages: Messages,
        processes: int,
        bytes_per_second: float,
        compute_seconds: float,
        slowdown: float = 1.0,
    ) -> torch.Tensor:
        """The model. `slowdown`: how many times slower the processors are than where it was fitted."""
        first = self._all_reduce(
            messages.first_bytes, messages.first_count, processes, bytes_per_second, slowdown
        )
        later = self._all_reduce(
            messages.later_bytes, messages.later_count, processes, bytes_per_second, slowdown
        )
        exposed = softplus((first - self.hidden * compute_seconds) / 1e-3) * 1e-3
        return compute_seconds * (1 + self.arithmetic[algorithm]) + exposed + later

    def _all_reduce(
        self, num_bytes: float, count: int, processes: int, bytes_per_second: float, slowdown: float
    ) -> torch.Tensor:
        in_a_row = 2 * math.ceil(math.log2(processes)) if self.tree else 2 * (processes - 1)
        byte_seconds = 1 / bytes_per_second + self.handling_seconds * slowdown
        sent_bytes = 2 * (processes - 1) / processes * num_bytes
        return count * in_a_row * self.latency_seconds * slowdown + sent_bytes * byte_seconds


def messages_of(algorithm: Algorithm, specs: Sequence[ParameterSpec]) -> Messages:
    """From the plan: the right factors go out after the backward pass, all else during it."""
    plan = algorithm.plan(specs)
    if not isinstance(algorithm, PowerSGD):
        return Messages(plan.message_bytes, NUM_BUCKETS, 0, 0)
    if algorithm.alternating:
        return Messages(plan.message_bytes, NUM_BUCKETS, 0, 0)
    later = sum(
        4 * route.matrix_rank * route.matrix_shape[1]
        for route in plan.routes
        if isinstance(route, LowRankRoute) and route.matrix_rank and route.matrix_shape
    )
    return Messages(plan.message_bytes - later, NUM_BUCKETS, later, 1)


def parameter_specs(size: str) -> list[ParameterSpec]:
    return [ParameterSpec.of(name, each) for name, each in GPT(SIZES[size]).named_parameters()]


def measurements_of(paths: Iterable[Path]) -> list[Measurement]:
    """Of the algorithms in the model, with links of a known rate."""
    rows = [row for path in paths for row in json.loads(path.read_text()) if row["rate"] in RATES]
    compute = {
        (row["hosts"], row["rate"]): median(row["step_ms"])
        for row in rows
        if row["algorithm"] == COMPUTE_ONLY
    }
    return [
        Measurement(
            row["algorithm"],
            row["hosts"],
            RATES[row["rate"]],
            compute[row["hosts"], row["rate"]] / 1e3,
            median(row["step_ms"]) / 1e3,
        )
        for row in rows
        if row["algorithm"] in ALGORITHMS
    ]


def has_all(path: Path) -> bool:
    """Whether a run of `bench_network.py` has each algorithm of the model: of others nothing is known."""
    return {row["algorithm"] for row in json.loads(path.read_text())} >= {COMPUTE_ONLY, *ALGORITHMS}


def fitted(measurements: Sequence[Measurement], messages: Mapping[str, Messages]) -> Costs:
    """The costs with the least mean squared relative error."""
    raw = torch.full((3 + len(ALGORITHMS),), -1.0, requires_grad=True)
    optimizer = torch.optim.Adam([raw], lr=0.05)
    for _ in range(3000):
        optimizer.zero_grad()
        ratios = [
            predicted(_costs(raw), each, messages, measurements) / each.step_seconds for each in measurements
        ]
        torch.autograd.backward(torch.stack(ratios).log().square().mean())
        optimizer.step()
    return _costs(raw.detach())


def _costs(raw: torch.Tensor) -> Costs:
    latency, handling, hidden, *arithmetic = softplus(raw)
    by_algorithm = {name: 0.1 * share for name, share in zip(ALGORITHMS, arithmetic, strict=True)}
    return Costs(1e-3 * latency, 1e-8 * handling, hidden, by_algorithm)


def predicted(
    costs: Costs,
    each: Measurement,
    messages: Mapping[str, Messages],
    measurements: Sequence[Measurement],
) -> torch.Tensor:
    """The model's step time of a measurement; more hosts share the lab's processors."""
    least = min(other.compute_seconds for other in measurements)
    return costs.step_seconds(
        each.algorithm,
        messages[each.algorithm],
        each.processes,
        each.bytes_per_second,
        each.compute_seconds,
        each.compute_seconds / least,
    )


def fit_table(
    measurements: Sequence[Measurement],
    messages: Mapping[str, Messages],
    costs: Costs,
    *,
    seen: Sequence[int],
) -> str:
    """Measured and predicted, one row a setting; what the fit has not seen is marked."""
    rows = []
    for each in measurements:
        seconds = predicted(costs, each, messages, measurements).item()
        rate = next(name for name, value in RATES.items() if value == each.bytes_per_second)
        rows.append(
            [
                each.algorithm,
                f"{each.processes}{'' if each.processes in seen else ' *'}",
                rate,
                f"{1e3 * each.step_seconds:.0f}",
                f"{1e3 * seconds:.0f}",
                f"{100 * (seconds / each.step_seconds - 1):+.0f} %",
            ]
        )
    return markdown_table(["", "hosts", "rate", "measured, ms", "predicted, ms", "error"], rows)


def errors(
    measurements: Sequence[Measurement], messages: Mapping[str, Messages], costs: Costs, processes: int
) -> list[float]:
    """Relative errors, without sign, of the measurements on that many hosts."""
    return sorted(
        abs(predicted(costs, each, messages, measurements).item() / each.step_seconds - 1)
        for each in measurements
        if each.processes == processes
    )


def outlook_table(costs: Costs, messages: Mapping[str, Messages], compute_seconds: float) -> str:
    """Predicted steps for more processes, each with processors of its own."""
    sixteen, low_rank = 'Cast("bf16")', "PowerSGD(matrix_rank=4)"
    rows = []
    for processes in (8, 64, 256, 1024):
        cells = []
        for gigabits in (1, 10, 25, 100):
            a, b = (
                costs.step_seconds(
                    name, messages[name], processes, gigabits * 1e9 / 8, compute_seconds
                ).item()
                for name in (sixteen, low_rank)
            )
            cells.append(f"{1e3 * a:.0f} / {1e3 * b:.0f}")
        even = break_even(costs, messages, processes, compute_seconds, sixteen, low_rank)
        rows.append([str(processes), *cells, even])
    header = ["processes", *[f"{rate} Gbit/s" for rate in (1, 10, 25, 100)], "break-even"]
    return markdown_table(header, rows)


def break_even(
    costs: Costs,
    messages: Mapping[str, Messages],
    processes: int,
    compute_seconds: float,
    baseline: str,
    candidate: str,
) -> str:
    """The link rate below which the candidate is faster by `LEAST_GAIN`."""

    def gain_seconds(bits_per_second: float) -> float:
        a, b = (
            costs.step_seconds(name, messages[name], processes, bits_per_second / 8, compute_seconds).item()
            for name in (baseline, candidate)
        )
        return (1 - LEAST_GAIN) * a - b

    low, high = 1e6, 1e12
    if gain_seconds(low) < 0:
        return "none"
    if gain_seconds(high) > 0:
        return "every rate"
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain_seconds(middle) > 0 else (low, middle)
    return f"{low / 1e9:.1f} Gbit/s"


def parsed_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    newest = [
        path
        for hosts in range(2, 100)
        for path in [*filter(has_all, sorted(RESULTS_FOLDER.glob(f"*-network-{hosts}-hosts.json")))][-1:]
    ]
    parser.add_argument(
        "--measured", type=Path, nargs="+", default=newest, help="what bench_network.py saved"
    )
    parser.add_argument("--fit-hosts", type=int, nargs="+", default=[2], help="the rest is predicted")
    parser.add_argument("--size", choices=sorted(SIZES), default="medium", help="of the measured model")
    parser.add_argument("--latency-us", type=float, default=25.0, help="of dedicated machines")
    arguments = parser.parse_args(given)
    if not arguments.measured:
        parser.error("there are no measurements: run bench_network.py first")
    for path in arguments.measured:
        if not has_all(path):
            parser.error(
                f"{path} lacks some of {', '.join(ALGORITHMS)}; measure all of them, or give another"
            )
    return arguments


def main() -> None:
    arguments = parsed_arguments()
    specs = parameter_specs(arguments.size)
    messages = {name: messages_of(algorithm, specs) for name, algorithm in ALGORITHMS.items()}
    measurements = measurements_of(arguments.measured)
    seen = [each for each in measurements if each.processes in arguments.fit_hosts]
    costs = fitted(seen, messages)
    compute_seconds = min(each.compute_seconds for each in measurements)
    dedicated = replace(costs, latency_seconds=torch.tensor(1e-6 * arguments.latency_us), tree=True)
    found = [
        ["latency of a message to the next process", f"{1e6 * costs.latency_seconds.item():.0f} µs"],
        ["handling", f"{1e9 * costs.handling_seconds.item():.2f} ns a byte"],
        ["hidden", f"{costs.hidden.item():.2f} of the compute"],
        *[
            [f"arithmetic, {name}", f"{100 * share.item():.1f} % of the compute"]
            for name, share in costs.arithmetic.items()
        ],
    ]
    accuracy = []
    for processes in sorted({each.processes for each in measurements}):
        relative = errors(measurements, messages, costs, processes)
        accuracy.append(
            f"{processes} hosts ({'fitted' if processes in arguments.fit_hosts else 'predicted'}): median "
            f"{100 * median(relative):.0f} %, largest {100 * relative[-1]:.0f} %"
        )
    text = page(
        "A cost model of a step, and what it says for many processes",
        f"From {', '.join(path.name for path in arguments.measured)}; hosts with a * are predicted.",
        markdown_table(["cost", "fitted"], found),
        "Error: " + "; ".join(accuracy) + ".",
        fit_table(measurements, messages, costs, seen=arguments.fit_hosts),
        f"## More processes\n\nThe same model ({1e3 * compute_seconds:.0f} ms of compute), each process "
        'with processors and a link of its own: ms per step with `Cast("bf16")` / `PowerSGD(matrix_rank=4)`, '
        f"and the link rate below which the latter is more than {LEAST_GAIN:.0%} faster, which is about the "
        "error of the model. A ring with the lab's latency, in which the "
        "hosts share processors:",
        outlook_table(costs, messages, compute_seconds),
        f"A tree with {arguments.latency_us:g} µs a message, as on dedicated machines (assumed):",
        outlook_table(dedicated, messages, compute_seconds),
        f"The same, with {FASTER} times less compute, arithmetic included, for the same gradients (assumed):",
        outlook_table(dedicated, messages, compute_seconds / FASTER),
    )
    print(text)
    print(save(text, "scaling"))


if __name__ == "__main__":
    main()
