"""How much of their time do members compute, if they average their models every 100 steps over slow links?

Thinwire's DiLoCo beside torchft's, in `thinwire lab`: two hosts, a GPT of 3.3 M parameters, most of which are
a large vocabulary's. The share is a turn of steps that send nothing, over a turn with one averaging.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.optim import SGD, Optimizer

import thinwire
from in_lab import leave_job, run_in_lab
from pages import markdown_table, page, save
from progress import Kept, Progress
from thinwire.algorithms import Algorithm
from thinwire.demo.model import GPT, GPTConfig, sample_batch
from torchft_diloco import OUTER_LR, OUTER_MOMENTUM, torchft_diloco
from trainings import text
from turns import Contender, Measured, take_turns, turns_done
from whole_steps import BATCH, COMPUTE_ONLY, Trainer

EVERY_STEPS, HOSTS = 100, 2
CONFIG = GPTConfig(layers=2, heads=2, width=64, context_length=64, vocabulary=25_000)
KEPT = Kept("torchft")
# Users of torchft have published these for a model of this size, every 100 steps, over 64, 6.4, 3.2 and 0.64
# Mbit/s. By these shares their 100 steps took about 100 s. Ours take a twelfth, so our links are faster.
PUBLISHED = {"750mbit": "1.0", "75mbit": "0.86", "37mbit": "0.73", "7.5mbit": "fails"}

Averaging = Callable[[GPT, Optimizer], AbstractContextManager[object]]


OUTER = thinwire.Nesterov(lr=OUTER_LR, momentum=OUTER_MOMENTUM)
# Momentum would move an entry on in all the steps in which nothing was sent of it.
PLAIN = thinwire.Nesterov(lr=1.0, momentum=0.0)


def diloco(algorithm: Algorithm, outer: thinwire.Nesterov = OUTER, *, delay_steps: int = 0) -> Averaging:
    """Return Thinwire's way."""

    def averaging(model: GPT, optimizer: Optimizer) -> AbstractContextManager[object]:
        return thinwire.DiLoCo(
            model,
            optimizer,
            every_steps=EVERY_STEPS,
            algorithm=algorithm,
            outer=outer,
            streaming=thinwire.Streaming(delay_steps=delay_steps),
        )

    return averaging


CONTENDERS: dict[str, Averaging | None] = {
    COMPUTE_ONLY: None,
    "torchft DiLoCo": lambda model, optimizer: torchft_diloco(
        model, optimizer, [model], every_steps=EVERY_STEPS
    ),
    "DiLoCo, exact": diloco(thinwire.AllReduce()),
    "DiLoCo, 4 bits": diloco(thinwire.Quantize(bits=4)),
    "DiLoCo, 4 bits, 50 steps late": diloco(thinwire.Quantize(bits=4), delay_steps=50),
    "DiLoCo, a 64th of the entries": diloco(thinwire.TopK(), PLAIN),
}


class Member(Trainer):
    """A model that is averaged now and then, or never."""

    def __init__(self, averaging: Averaging | None) -> None:
        torch.manual_seed(0)
        self.model: GPT = GPT(CONFIG)
        self.optimizer = SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        # Kept: a generator's context that nobody holds is closed, and then nothing is averaged.
        self._context = None if averaging is None else averaging(self.model, self.optimizer)
        if self._context is not None:
            self._context.__enter__()


def work(arguments: argparse.Namespace) -> NoReturn:
    """On each host: take turns."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    members = {name: Member(CONTENDERS[name]) for name in arguments.contenders}
    draws = torch.Generator().manual_seed(dist.get_rank())
    found = take_turns(
        {name: Contender(member.step, EVERY_STEPS) for name, member in members.items()},
        lambda: sample_batch(
            text().train, batch_size=BATCH, context_length=CONFIG.context_length, generator=draws
        ),
        rounds=arguments.rounds,
        steps=EVERY_STEPS,
        kept=KEPT,
        setting=arguments.setting,
        untimed_steps=EVERY_STEPS,
    )
    leave_job({name: asdict(each) for name, each in found.items()}, arguments.work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="+", default=list(PUBLISHED))
    parser.add_argument("--latency", default="20ms", help="a round trip between hosts")
    parser.add_argument("--rounds", type=int, default=2, help="timed turns of each")
    parser.add_argument("--contenders", nargs="+", choices=tuple(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(arguments)
    settings = {rate: f"{rate}, {arguments.latency}" for rate in arguments.rates}
    names = list(dict.fromkeys([COMPUTE_ONLY, *arguments.contenders]))
    progress = Progress(len(settings) * len(names) * arguments.rounds, kept=KEPT.path)
    measured: dict[str, dict[str, Measured]] = {}
    with progress:
        for rate, setting in settings.items():

            def tell(setting: str = setting) -> None:
                done = turns_done(KEPT, list(settings.values()), names, arguments.rounds)
                progress.show(done, setting)

            script = [__file__, f"--rounds={arguments.rounds}", f"--setting={setting}"]
            found: dict[str, Any] = run_in_lab(
                HOSTS,
                rate,
                [*script, "--contenders", *names],
                latency=arguments.latency,
                meanwhile=tell,
            )
            measured[rate] = {name: Measured(**each) for name, each in found.items()}
            print(rate, {name: round(share(measured[rate], name), 3) for name in names}, flush=True)
    print(save(result_page(measured, names, arguments), "torchft"))
    KEPT.finish()


def share(results: dict[str, Measured], name: str) -> float:
    """Return the share of its time that a member computes."""
    return median(results[COMPUTE_ONLY].step_ms) / median(results[name].step_ms)


def result_page(
    measured: dict[str, dict[str, Measured]], names: list[str], arguments: argparse.Namespace
) -> str:
    rows = [
        [name, f"{next(iter(measured.values()))[name].sent_bytes * EVERY_STEPS / 1e6:.2f}"]
        + [f"{share(results, name):.2f}" for results in measured.values()]
        for name in names
        if name != COMPUTE_ONLY
    ]
    rows.append(["torchft, as published", "", *(PUBLISHED.get(rate, "") for rate in measured)])
    num_parameters = sum(each.numel() for each in GPT(CONFIG).parameters())
    alone = [median(results[COMPUTE_ONLY].step_ms) for results in measured.values()]
    others = 100 * median(
        share for of_rate in measured.values() for each in of_rate.values() for share in each.others_share
    )
    return page(
        "Models averaged every 100 steps, beside torchft",
        f"{HOSTS} hosts in `thinwire lab`, round trips of {arguments.latency}; a GPT of "
        f"{num_parameters / 1e6:.1f} M parameters, {BATCH} windows a step, one thread. A turn is "
        f"{EVERY_STEPS} steps with one averaging; {arguments.rounds} turns of each, in a different order "
        "each time. The table has the share of their time that members compute: steps that send nothing took "
        f"{min(alone):.0f} to {max(alone):.0f} ms. Bytes are those of host 0's interface. Other processes "
        f"took {others:.0f} % of the processors. torchft 0.2.0, its DiLoCo in fp32. "
        "Its published shares are of links of 64, 6.4, 3.2 and 0.64 Mbit/s, and of steps that took about "
        "twelve times as long.",
        markdown_table(["", "MB an averaging", *measured], rows),
    )


if __name__ == "__main__":
    main()
