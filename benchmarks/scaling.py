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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    later_bytes: float = 0
    later_count: int = 0


@dataclass(frozen=True)
class Measurement:
    """The median step of one algorithm in one lab, beside the one that sends nothing."""

    algorithm: str
    processes: int
    rate: str
    compute_seconds: float
    step_seconds: float


@dataclass(frozen=True)
class Costs:
    """The model: what is fitted are seconds a message, seconds a byte, and shares of the compute.

    Attributes:
        messages: By algorithm.
        least_seconds: Compute where it was fitted; more hosts share the lab's processors and are slower.
        tree: Whether messages follow each other as in a tree, else as in a ring.
    """

    latency_seconds: torch.Tensor
    handling_seconds: torch.Tensor
    hidden: torch.Tensor
    arithmetic: Mapping[str, torch.Tensor]
    messages: Mapping[str, Messages]
    least_seconds: float
    tree: bool = False

    def of(self, each: Measurement) -> torch.Tensor:
        """The step of a measurement."""
        slowdown, rate = each.compute_seconds / self.least_seconds, RATES[each.rate]
        return self.step_seconds(each.algorithm, each.processes, rate, each.compute_seconds, slowdown)

    def step_seconds(
        self,
        algorithm: str,
        processes: int,
        bytes_per_second: float,
        compute_seconds: float,
        slowdown: float = 1.0,
    ) -> torch.Tensor:
        """`slowdown`: how many times slower the processors are than where it was fitted."""
        in_a_row = 2 * math.ceil(math.log2(processes)) if self.tree else 2 * (processes - 1)
        byte_seconds = 1 / bytes_per_second + self.handling_seconds * slowdown

        def all_reduce(num_bytes: float, count: int) -> torch.Tensor:
            sent_bytes = 2 * (processes - 1) / processes * num_bytes
            return count * in_a_row * self.latency_seconds * slowdown + sent_bytes * byte_seconds

        sent = self.messages[algorithm]
        hidden_seconds = self.hidden * compute_seconds
        exposed = softplus((all_reduce(*sent[:2]) - hidden_seconds) / 1e-3) * 1e-3
        return compute_seconds * (1 + self.arithmetic[algorithm]) + exposed + all_reduce(*sent[2:])


def messages_of(algorithm: Algorithm, specs: Sequence[ParameterSpec]) -> Messages:
    """From the plan: the right factors go out after the backward pass, all else during it."""
    plan = algorithm.plan(specs)
    if not isinstance(algorithm, PowerSGD) or algorithm.alternating:
        return Messages(plan.message_bytes, NUM_BUCKETS)
    later = sum(
        4 * route.matrix_rank * route.matrix_shape[1]
        for route in plan.routes
        if isinstance(route, LowRankRoute) and route.matrix_rank and route.matrix_shape
    )
    return Messages(plan.message_bytes - later, NUM_BUCKETS, later, 1)


def measurements_of(paths: Iterable[Path]) -> list[Measurement]:
    """Of the algorithms in the model, with links of a known rate."""
    rows = [row for path in paths for row in json.loads(path.read_text()) if row["rate"] in RATES]
    seconds = {
        (row["hosts"], row["rate"], row["algorithm"]): median(row["step_ms"]) / 1e3
        for row in rows
        if row["algorithm"] in (COMPUTE_ONLY, *ALGORITHMS)
    }
    return [
        Measurement(algorithm, hosts, rate, seconds[hosts, rate, COMPUTE_ONLY], step_seconds)
        for (hosts, rate, algorithm), step_seconds in seconds.items()
        if algorithm != COMPUTE_ONLY
    ]


def has_all(path: Path) -> bool:
    """Whether a run of `bench_network.py` has each algorithm of the model: of others nothing is known."""
    return {row["algorithm"] for row in json.loads(path.read_text())} >= {COMPUTE_ONLY, *ALGORITHMS}


def fitted(measurements: Sequence[Measurement], messages: Mapping[str, Messages], least: float) -> Costs:
    """The costs with the least mean squared relative error."""

    def costs(raw: torch.Tensor) -> Costs:
        latency, handling, hidden, *arithmetic = softplus(raw)
        by_algorithm = {name: 0.1 * share for name, share in zip(ALGORITHMS, arithmetic, strict=True)}
        return Costs(1e-3 * latency, 1e-8 * handling, hidden, by_algorithm, messages, least)

    raw = torch.full((3 + len(ALGORITHMS),), -1.0, requires_grad=True)
    optimizer = torch.optim.Adam([raw], lr=0.05)
    for _ in range(3000):
        optimizer.zero_grad()
        ratios = [costs(raw).of(each) / each.step_seconds for each in measurements]
        torch.autograd.backward(torch.stack(ratios).log().square().mean())
        optimizer.step()
    return costs(raw.detach())


def fit_table(measurements: Sequence[Measurement], costs: Costs, seen: Sequence[int]) -> str:
    """Measured and predicted, one row a setting; what the fit has not seen is marked."""
    rows = []
    for each in measurements:
        seconds = costs.of(each).item()
        rows.append(
            [
                each.algorithm,
                f"{each.processes}{'' if each.processes in seen else ' *'}",
                each.rate,
                f"{1e3 * each.step_seconds:.0f}",
                f"{1e3 * seconds:.0f}",
                f"{100 * (seconds / each.step_seconds - 1):+.0f} %",
            ]
        )
    return markdown_table(["", "hosts", "rate", "measured, ms", "predicted, ms", "error"], rows)


def accuracy(measurements: Sequence[Measurement], costs: Costs, seen: Sequence[int]) -> str:
    """Relative errors, by the number of hosts."""
    parts = []
    for processes in sorted({each.processes for each in measurements}):
        of_these = [each for each in measurements if each.processes == processes]
        errors = sorted(100 * abs(costs.of(each).item() / each.step_seconds - 1) for each in of_these)
        how = "fitted" if processes in seen else "predicted"
        parts.append(f"{processes} hosts ({how}): median {median(errors):.0f} %, largest {errors[-1]:.0f} %")
    return f"Error: {'; '.join(parts)}."


SIXTEEN_BIT, LOW_RANK = 'Cast("bf16")', "PowerSGD(matrix_rank=4)"


def outlook_table(costs: Costs, compute_seconds: float) -> str:
    """Predicted steps for more processes, each with processors of its own."""

    def both(processes: int, bits_per_second: float) -> list[float]:
        return [
            costs.step_seconds(name, processes, bits_per_second / 8, compute_seconds).item()
            for name in (SIXTEEN_BIT, LOW_RANK)
        ]

    rows, rates = [], (1, 10, 25, 100)
    for processes in (8, 64, 256, 1024):
        steps = [both(processes, 1e9 * rate) for rate in rates]
        cells = [f"{1e3 * sixteen:.0f} / {1e3 * low_rank:.0f}" for sixteen, low_rank in steps]
        rows.append([str(processes), *cells, break_even(partial(both, processes))])
    return markdown_table(["processes", *[f"{rate} Gbit/s" for rate in rates], "break-even"], rows)


def break_even(both: Callable[[float], list[float]]) -> str:
    """The link rate below which the second of two steps is faster by `LEAST_GAIN`."""

    def gains(bits_per_second: float) -> bool:
        baseline, candidate = both(bits_per_second)
        return (1 - LEAST_GAIN) * baseline > candidate

    low, high = 1e6, 1e12
    if not gains(low):
        return "none"
    if gains(high):
        return "every rate"
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gains(middle) else (low, middle)
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
    specs = [ParameterSpec.of(name, each) for name, each in GPT(SIZES[arguments.size]).named_parameters()]
    messages = {name: messages_of(algorithm, specs) for name, algorithm in ALGORITHMS.items()}
    measurements, seen = measurements_of(arguments.measured), arguments.fit_hosts
    least = min(each.compute_seconds for each in measurements)
    of_fit = [each for each in measurements if each.processes in seen]
    costs = fitted(of_fit, messages, min(each.compute_seconds for each in of_fit))
    costs = replace(costs, least_seconds=least)
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
    text = page(
        "A cost model of a step, and what it says for many processes",
        f"From {', '.join(path.name for path in arguments.measured)}; hosts with a * are predicted.",
        markdown_table(["cost", "fitted"], found),
        accuracy(measurements, costs, seen),
        fit_table(measurements, costs, seen),
        f"## More processes\n\nThe same model ({1e3 * least:.0f} ms of compute), each process with "
        f"processors and a link of its own: ms per step with `{SIXTEEN_BIT}` / `{LOW_RANK}`, and the link "
        f"rate below which the latter is more than {LEAST_GAIN:.0%} faster, which is about the error of the "
        "model. A ring with the lab's latency, in which the hosts share processors:",
        outlook_table(costs, least),
        f"A tree with {arguments.latency_us:g} µs a message, as on dedicated machines (assumed):",
        outlook_table(dedicated, least),
        f"The same, with {FASTER} times less compute, arithmetic included, for the same gradients (assumed):",
        outlook_table(dedicated, least / FASTER),
    )
    print(text)
    print(save(text, "scaling"))


if __name__ == "__main__":
    main()
