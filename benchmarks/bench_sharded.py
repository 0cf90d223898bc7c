"""Whole steps of a sharded model over a slow network, in `thinwire lab`: two hosts, two shards on each.

FSDP2 shards a GPT inside each host; equal shards of the hosts meet over the slow link. The two processes of a
host share its network namespace, so what they send each other never passes its interface: the bytes counted
are those of the slow link alone. Contenders take turns within one run, see `bench_network.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import SGD

import thinwire
from bench_network import BATCH, COMPUTE_ONLY, EVERY_STEPS, IN_STEP, Batch
from in_lab import leave_job, run_in_lab
from pages import markdown_table, page, save, save_json
from progress import Kept, Progress
from thinwire.algorithms import Algorithm
from thinwire.demo.model import GPT, SIZES, load_text, next_byte_loss, sample_batch
from turns import Contender, Measured, take_turns, turns_done

HOSTS, SHARDS = 2, 2
RATES = ("100mbit", "1gbit")
# In the first one it is seen which gradients come when; the second one sends in that order.
UNTIMED_STEPS = 2
NATIVE, NATIVE_BF16 = "native HSDP", "native HSDP in bf16"


class Trainer:
    """A contender's model, and a step of it. This one sends nothing between hosts.

    Attributes:
        period_steps: Steps after which what it does begins again.
    """

    period_steps = 1
    reduce_dtype: torch.dtype | None = None

    def __init__(self, size: str, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.mesh = mesh
        self.model: Any = GPT(SIZES[size])
        policy = MixedPrecisionPolicy(reduce_dtype=self.reduce_dtype)
        for block in self.model.blocks:
            fully_shard(block, mesh=self.sharded_over, mp_policy=policy)
        fully_shard(self.model, mesh=self.sharded_over, mp_policy=policy)
        self.optimizer = SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.attach()

    @property
    def sharded_over(self) -> DeviceMesh:
        """What `fully_shard` is given."""
        return self.mesh["shard"]

    def attach(self) -> None:
        """Let the replicas meet in the contender's way."""

    def step(self, batch: Batch) -> None:
        torch.autograd.backward(next_byte_loss(self.model, *batch))
        self.optimizer.step()
        self.optimizer.zero_grad()


class InStep(Trainer):
    """Sends nothing, but hosts wait for each other: what synchronous training takes at least."""

    def step(self, batch: Batch) -> None:
        dist.barrier()
        super().step(batch)


class Native(Trainer):
    """PyTorch's own all-reduce between replicas."""

    @property
    def sharded_over(self) -> DeviceMesh:
        return self.mesh


class NativeBf16(Native):
    reduce_dtype = torch.bfloat16


def attached(algorithm: Algorithm) -> type[Trainer]:
    class Attached(Trainer):
        def attach(self) -> None:
            thinwire.attach(self.model, algorithm, replicas=self.mesh["replicate"])

    return Attached


class FourBitDiLoCo(Trainer):
    period_steps = EVERY_STEPS

    def attach(self) -> None:
        local = thinwire.DiLoCo(
            self.model, self.optimizer, every_steps=EVERY_STEPS, replicas=self.mesh["replicate"]
        )
        local.__enter__()


CONTENDERS: dict[str, Callable[[str, DeviceMesh], Trainer]] = {
    COMPUTE_ONLY: Trainer,
    IN_STEP: InStep,
    NATIVE: Native,
    NATIVE_BF16: NativeBf16,
    "AllReduce()": attached(thinwire.AllReduce()),
    'Cast("bf16")': attached(thinwire.Cast("bf16")),
    "Quantize(bits=8)": attached(thinwire.Quantize(bits=8)),
    "Quantize(bits=4)": attached(thinwire.Quantize(bits=4)),
    "Quantize(bits=2)": attached(thinwire.Quantize(bits=2)),
    "PowerSGD(matrix_rank=4)": attached(thinwire.PowerSGD(matrix_rank=4)),
    "DiLoCo, 4 bits": FourBitDiLoCo,
}


def start_shards() -> None:
    """On each host: start a process for each shard, and wait for them."""
    host = int(os.environ["RANK"])
    running = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env=os.environ
            | {
                "RANK": str(host * SHARDS + shard),
                "WORLD_SIZE": str(HOSTS * SHARDS),
                "THINWIRE_SHARD": str(shard),
            },
        )
        for shard in range(SHARDS)
    ]
    codes = [process.wait() for process in running]
    if any(codes):
        sys.exit(max(map(abs, codes)))


KEPT = Kept("sharded")


def work(arguments: argparse.Namespace) -> None:
    """In each process: time contenders."""
    names, size, out = arguments.contenders, arguments.size, arguments.work
    dist.init_process_group("gloo")
    assert dist.get_world_size() == HOSTS * SHARDS
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (HOSTS, SHARDS), mesh_dim_names=("replicate", "shard"))
    text = load_text()
    draws = torch.Generator().manual_seed(dist.get_rank())
    length = SIZES[size].context_length
    trainers = {name: CONTENDERS[name](size, mesh) for name in names}
    found = take_turns(
        {name: Contender(trainer.step, trainer.period_steps) for name, trainer in trainers.items()},
        lambda: sample_batch(text.train, batch_size=BATCH, context_length=length, generator=draws),
        rounds=arguments.rounds,
        steps=arguments.steps,
        kept=KEPT,
        setting=arguments.setting,
        untimed_steps=UNTIMED_STEPS,
    )
    if dist.get_rank() == 0:
        out.write_text(json.dumps({name: asdict(measured) for name, measured in found.items()}))
    leave_job()


def kept_as(rate: str, arguments: argparse.Namespace) -> str:
    """Return what tells turns from those of other settings."""
    return f"{rate}, {arguments.size}, {arguments.steps} steps"


def measured(
    rate: str, names: Sequence[str], arguments: argparse.Namespace, show: Callable[[object], None]
) -> dict[str, Measured]:
    """Run contenders in the lab."""
    with TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        script = [__file__, f"--work={out}", f"--rounds={arguments.rounds}"]
        script += [f"--steps={arguments.steps}", f"--size={arguments.size}", "--contenders", *names]
        script += [f"--setting={kept_as(rate, arguments)}"]
        run_in_lab(HOSTS, rate, script, meanwhile=lambda: show(rate))
        results = {name: Measured(**result) for name, result in json.loads(out.read_text()).items()}
    # Both shards of a host send half of the gradients each, of an all-reduce between two once.
    exact_bytes = 4 * sum(p.numel() for p in GPT(SIZES[arguments.size]).parameters())
    for name, result in results.items():
        sends_whole = result.sent_bytes > exact_bytes / 3
        is_whole = name in (NATIVE, NATIVE_BF16, "AllReduce()", 'Cast("bf16")')
        assert sends_whole == is_whole, f"{name}: {result.sent_bytes} bytes, exact {exact_bytes}"
    return results


def table(results: dict[str, Measured]) -> str:
    alone, native = median(results[COMPUTE_ONLY].step_ms), results[NATIVE_BF16]
    rows = [
        [
            name,
            f"{median(result.step_ms):.0f}",
            f"{min(result.step_ms):.0f}",
            f"{median(result.step_ms) / alone:.2f}",
            f"{median(native.step_ms) / median(result.step_ms):.2f}",
            f"{result.sent_bytes / 1e6:.3f}",
            f"{native.sent_bytes / result.sent_bytes:.1f}"
            if result.sent_bytes > native.sent_bytes / 1e3
            else "",
        ]
        for name, result in results.items()
    ]
    header = [
        "",
        "ms per step, median",
        "minimum",
        "× compute only",
        "faster than native in bf16",
        "MB over the slow link, per step and host",
        "fewer than native in bf16",
    ]
    return markdown_table(header, rows)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="of each contender in a round")
    parser.add_argument("--size", choices=sorted(SIZES), default="medium")
    parser.add_argument("--contenders", choices=tuple(CONTENDERS), nargs="+", help="some instead of all")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parsed_arguments()
    if arguments.work is not None:
        if "THINWIRE_SHARD" not in os.environ:
            start_shards()
        else:
            work(arguments)
        return
    always = (COMPUTE_ONLY, NATIVE_BF16)
    names = [name for name in CONTENDERS if name in (*always, *(arguments.contenders or CONTENDERS))]
    settings = [kept_as(rate, arguments) for rate in arguments.rates]
    before = turns_done(KEPT, settings, names, arguments.rounds)
    with Progress(len(settings) * len(names) * arguments.rounds - before, kept=KEPT.path) as progress:
        compare(
            names,
            arguments,
            lambda now: progress.show(turns_done(KEPT, settings, names, arguments.rounds) - before, now),
        )
    KEPT.finish()


def compare(names: Sequence[str], arguments: argparse.Namespace, show: Callable[[object], None]) -> None:
    num_parameters = sum(p.numel() for p in GPT(SIZES[arguments.size]).parameters())
    sections = [
        f"A GPT of {num_parameters / 1e6:.1f} M parameters, {HOSTS} hosts × {SHARDS} shards, {BATCH} "
        "sequences a process and step, SGD with momentum, Gloo, one thread a process. "
        f"{arguments.rounds} rounds of {arguments.steps} steps each; a turn of DiLoCo is {EVERY_STEPS} "
        "steps, with one averaging. Compute only is FSDP2 inside of each host, and nothing between them. MB "
        "are those of host 0's interface, which its two processes share. All processes share one machine's "
        "processors."
    ]
    raw = []
    for rate in arguments.rates:
        results = measured(rate, names, arguments, show)
        others = median(share for each in results.values() for share in each.others_share)
        busy = f"Other processes took {100 * others:.0f} % of the processors meanwhile, median of all turns."
        sections.append(f"## {rate}\n\n{table(results)}\n\n{busy}")
        print(sections[-1], flush=True)
        raw += [{"rate": rate, "algorithm": name} | asdict(each) for name, each in results.items()]
        # After each rate: what was measured stays where a later one fails.
        save_json(raw, "sharded", arguments.size)
        text = page("Whole steps of a sharded model over a slow network", *sections)
        print(save(text, "sharded", arguments.size), flush=True)


if __name__ == "__main__":
    main()
