"""Do members that come and go stay together while their averagings fill a slow link for minutes?

In `thinwire lab`: the first host has the lighthouse, all have a member. Heartbeats and questions to the
lighthouse share the link with the models. Members do nothing but average; once a newcomer joins, once a
member leaves and hands over its residual. Every half second it is noted how old each heartbeat is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

import thinwire
from in_lab import own_address, run_in_lab
from pages import markdown_table, page, save
from thinwire import elastic
from thinwire.algorithms import Algorithm
from thinwire.lab import Link

PORT = 29510
LOOK_EVERY_SECONDS = 0.5
JOINING_SECONDS = 5.0
EXACT = thinwire.AllReduce()
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Case:
    """What happens in a run; `seconds` is what one exact copy of the model takes on the link."""

    words: str
    seconds: float
    algorithm: Algorithm = EXACT
    hosts: int = 2
    averagings: int = 2
    joins_after: int = 0  # averagings, of the last host's member
    leaves_after: int = 0


CASES = {
    "long": Case("two members average exactly", 200),
    "join": Case("a third member joins after the first averaging", 60, hosts=3, averagings=3, joins_after=1),
    "leave": Case(
        "the third member leaves after two averagings of 8 bits, and hands over its residual",
        60,
        thinwire.Quantize(bits=8, error_feedback=True),
        hosts=3,
        averagings=4,  # the last without it
        leaves_after=2,
    ),
}


class Heartbeats(threading.Thread):
    """Reads the lighthouse's page; keeps the oldest heartbeat of each member that had not left."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.oldest: dict[str, float] = {}
        self._folder = folder

    def run(self) -> None:
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/status") as answer:
                    text = answer.read().decode()
            except OSError:  # it has ended
                return
            for name, number, unit in re.findall(r"(member\d)\S*: seen ([\d.]+)([mµn]?s) ago", text):
                if not (self._folder / f"{name}.json").exists():
                    self.oldest[name] = max(self.oldest.get(name, 0.0), float(number) * UNITS[unit])
            time.sleep(LOOK_EVERY_SECONDS)


def wait_for(paths: list[Path]) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(LOOK_EVERY_SECONDS)


def take_part(arguments: argparse.Namespace) -> None:
    """On each host: be a member."""
    os.environ["RUST_LOG"] = "error"  # else torchft notes every question
    case, folder, rank = CASES[arguments.case], arguments.work.parent, int(os.environ["RANK"])
    is_special = case.hosts == 3 and rank == 2
    watched, server = Heartbeats(folder), None
    if rank == 0:
        # Here, for it reads the environment when it is imported.
        server = import_module("torchft.coordination").LighthouseServer(
            bind=f"[::]:{PORT}", min_replicas=1, join_timeout_ms=60_000
        )
        watched.start()
        (folder / "lighthouse").touch()
    wait_for([folder / ("averaged" if is_special and case.joins_after else "lighthouse")])
    parameter = nn.Parameter(torch.zeros(arguments.elements // 1024, 1024))
    model = nn.Module()
    model.register_parameter("weight", parameter)
    group = elastic.TorchftGroup(
        f"http://{os.environ['MASTER_ADDR']}:{PORT}",
        min_members=2,
        timeout_seconds=5 * case.seconds,
        hostname=own_address(),
        name=f"member{rank}",
    )
    found = averaged(case, group, model, is_special, folder)
    (folder / f"member{rank}.json").write_text(json.dumps(found))
    if server is not None:
        files = [folder / f"member{each}.json" for each in range(case.hosts)]
        wait_for(files)
        time.sleep(LOOK_EVERY_SECONDS)
        members = [json.loads(file.read_text()) for file in files]
        arguments.work.write_text(json.dumps({"members": members, "oldest": watched.oldest}))
        server.shutdown()
    sys.stdout.flush()


def averaged(
    case: Case, group: elastic.TorchftGroup, model: nn.Module, is_special: bool, folder: Path
) -> dict[str, Any]:
    """Average until all is done; return what this member has seen."""
    optimizer, seconds = SGD(model.parameters(), lr=0.1), []
    local = elastic.DiLoCo(model, optimizer, every_steps=1, algorithm=case.algorithm, group=group)
    if is_special:
        (folder / "joining").touch()
    with local:
        while local.steps < case.averagings:
            if is_special and case.leaves_after and local.steps == case.leaves_after:
                local.leave()
            for parameter in model.parameters():
                parameter.data.add_(0.01)
            if case.joins_after and local.steps == case.joins_after:
                wait_for([folder / "joining"])  # or all would be done before it is there
                time.sleep(JOINING_SECONDS)
            start = time.perf_counter()
            optimizer.step()  # averages
            seconds.append(time.perf_counter() - start)
            (folder / "averaged").touch()
            print(f"step {local.steps} after {seconds[-1]:.0f} s: {local.membership()}", flush=True)
    return {"seconds": seconds, **asdict(local.membership())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="+", default=["1mbit", "10mbit"])
    parser.add_argument("--latency", default="80ms", help="a round trip between hosts")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--elements", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        take_part(arguments)
        return
    rows = []
    for rate in arguments.rates:
        for name in arguments.cases:
            elements = int(CASES[name].seconds * (Link(rate).bits_per_second or 0) / 32)
            script = [__file__, f"--case={name}", f"--elements={elements}"]
            found = run_in_lab(CASES[name].hosts, rate, script, latency=arguments.latency)
            rows.append(row(rate, CASES[name], elements, found))
            print(rows[-1], flush=True)
    header = ["", "link", "model, MB", "longest averaging, s", "oldest heartbeat, s", "averagings"]
    table = markdown_table([*header, "tried again", "lost", "joined", "left"], rows)
    explanation = (
        f"`elastic.DiLoCo`, every member a host of its own, round trips of {arguments.latency}, the "
        "lighthouse on the first host. The lighthouse takes a member for dead whose heartbeat is 5 s old. An "
        "averaging that a newcomer joins lasts until it has what it starts from. The first member counts."
    )
    print(
        save(page("Members over a link that is full", explanation, table), "elastic-link", *arguments.rates)
    )


def row(rate: str, case: Case, elements: int, found: Mapping[str, Any]) -> list[str]:
    first, *_ = members = found["members"]
    longest = max(seconds for member in members for seconds in member["seconds"])
    counts = [str(first[name]) for name in ("averagings", "retries", "losses", "joins", "leaves")]
    oldest = f"{max(found['oldest'].values()):.1f}"
    return [case.words, rate, f"{elements * 4 / 1e6:.1f}", f"{longest:.0f}", oldest, *counts]


if __name__ == "__main__":
    main()
