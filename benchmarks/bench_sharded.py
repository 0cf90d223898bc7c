"""Whole steps of a sharded model over a slow network, in `thinwire lab`: two hosts, two shards on each.

FSDP2 shards a GPT inside each host; equal shards of the hosts meet over the slow link. The two processes of a
host share its network namespace, so what they send each other never passes its interface: the bytes counted
are those of the slow link alone. Contenders take turns within one run, see `bench_network.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import SGD

import thinwire
import whole_steps
from pages import page, save, save_json
from progress import Kept
from thinwire.algorithms import Algorithm
from thinwire.demo.gpt import GPT, SIZES
from whole_steps import BATCH, COMPUTE_ONLY, EVERY_STEPS, IN_STEP, Batch, Runs, Setting

HOSTS, SHARDS = 2, 2
RATES = ("100mbit", "1gbit")
# In the first one it is seen which gradients come when; the second one sends in that order.
UNTIMED_STEPS = 2
NATIVE, NATIVE_BF16 = "native HSDP", "native HSDP in bf16"
KEPT = Kept("sharded")


class Trainer(whole_steps.Trainer):
    """A contender's model, and a step of it. This one sends nothing between hosts."""

    reduce_dtype: torch.dtype | None = None

    def __init__(self, size: str, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.mesh = mesh
        self.model: Any = GPT(SIZES[size])
        policy = MixedPrecisionPolicy(reduce_dtype=self.reduce_dtype)
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=self.sharded_over, mp_policy=policy)
        self.optimizer = SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.attach()

    @property
    def sharded_over(self) -> DeviceMesh:
        """What `fully_shard` is given."""
        return self.mesh["shard"]

    def attach(self) -> None:
        """Let the replicas meet in the contender's way."""


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


WHOLE = (NATIVE, NATIVE_BF16, "AllReduce()", 'Cast("bf16")')


def main() -> None:
    arguments = whole_steps.parser_of(__doc__, CONTENDERS, RATES, rounds=2).parse_args()
    if arguments.work is not None:
        whole_steps.start_work()
        mesh = init_device_mesh("cpu", (HOSTS, SHARDS), mesh_dim_names=("replicate", "shard"))
        trainers = {name: CONTENDERS[name](arguments.size, mesh) for name in arguments.contenders}
        whole_steps.take_part(arguments, trainers, KEPT, UNTIMED_STEPS)
    chosen = (COMPUTE_ONLY, NATIVE_BF16, *(arguments.contenders or CONTENDERS))
    names = [name for name in CONTENDERS if name in chosen]
    settings = [Setting(HOSTS, rate, SHARDS) for rate in arguments.rates]
    runs = Runs(__file__, arguments, names, settings, KEPT, WHOLE)
    with runs.progress:
        sections, by_rate = runs.compared(settings, NATIVE_BF16, "native in bf16")
    explanation = (
        f"A GPT of {runs.num_parameters / 1e6:.1f} M parameters, {HOSTS} hosts × {SHARDS} shards, {BATCH} "
        "sequences a process and step, SGD with momentum, Gloo, one thread a process. "
        f"{arguments.rounds} rounds of {arguments.steps} steps each; a turn of DiLoCo is {EVERY_STEPS} "
        "steps, with one averaging. Compute only is FSDP2 inside of each host, and nothing between them. MB "
        "are those of host 0's interface, which its two processes share. All processes share one machine's "
        "processors."
    )
    raw = [
        {"rate": rate, "algorithm": name} | asdict(each)
        for rate, results in by_rate.items()
        for name, each in results.items()
    ]
    save_json(raw, "sharded", arguments.size)
    text = page("Whole steps of a sharded model over a slow network", explanation, *sections)
    print(save(text, "sharded", arguments.size), flush=True)
    KEPT.finish()


if __name__ == "__main__":
    main()
