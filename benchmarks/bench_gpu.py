"""Whole steps of a large GPT on one GPU: what each algorithm adds to DDP's, beside nothing that is sent.

One process over NCCL, so that messages take no time; bf16 autocast, fused AdamW. Contenders take turns, a few
steps each and in a different order every time.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

import thinwire
from pages import markdown_table, page, save
from thinwire import AllReduce, Cast, PowerSGD, Quantize
from thinwire.algorithms import Algorithm
from thinwire.demo.gpt import GPT, GPTConfig, next_byte_loss
from thinwire.sync.settings import HostCheck

# GPT-2 small, but that its head has weights of its own.
CONFIG = GPTConfig(layers=12, heads=12, width=768, context_length=1024, vocabulary=50_257)
UNTIMED_STEPS = 7
PLAIN = "DDP without a hook"


class Way(NamedTuple):
    """A way to average."""

    algorithm: Algorithm | None
    scales: bool = False  # with a `GradScaler`
    host_check: HostCheck = "auto"


WAYS: dict[str, Way] = {
    PLAIN: Way(None),
    f"{PLAIN}, again": Way(None),
    "AllReduce()": Way(AllReduce()),
    'Cast("bf16")': Way(Cast("bf16")),
    **{f"Quantize(bits={bits})": Way(Quantize(bits=bits)) for bits in (8, 4, 2)},
    **{f"PowerSGD(matrix_rank={rank})": Way(PowerSGD(matrix_rank=rank)) for rank in (1, 4, 32)},
    "PowerSGD(matrix_rank=4), GradScaler": Way(PowerSGD(matrix_rank=4), scales=True),
    "PowerSGD(matrix_rank=4), host_check=True": Way(PowerSGD(matrix_rank=4), host_check=True),
}


class Trainer:
    """A model, and its steps."""

    def __init__(self, way: Way, batch: int) -> None:
        torch.manual_seed(0)
        self.way, self.model = way, DistributedDataParallel(GPT(CONFIG).cuda(), gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.scaler = GradScaler("cuda", init_scale=2.0**10, enabled=way.scales)
        self.tokens = torch.randint(CONFIG.vocabulary, (batch, CONFIG.context_length + 1), device="cuda")
        self.sync = None
        if way.algorithm is not None:
            scaler = self.scaler if way.scales else None
            self.sync = thinwire.attach(
                self.model, way.algorithm, grad_scaler=scaler, host_check=way.host_check
            )

    def steps(self, number: int) -> float:
        """Return the milliseconds of a step."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(number):
            with torch.autocast("cuda", torch.bfloat16):
                loss = next_byte_loss(self.model, self.tokens[:, :-1], self.tokens[:, 1:])
            torch.autograd.backward(self.scaler.scale(loss))
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--batch", type=int, default=8, help="windows of 1 024 tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of each in a round")
    parser.add_argument("--save", action="store_true", help="as a result page of today")
    asked = parser.parse_args()
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    trainers = {name: Trainer(WAYS[name], asked.batch) for name in dict.fromkeys([PLAIN, *asked.ways])}
    for trainer in trainers.values():
        trainer.steps(UNTIMED_STEPS)
    milliseconds: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(asked.rounds):
        for name in random.Random(number).sample(list(trainers), len(trainers)):
            milliseconds[name].append(trainers[name].steps(asked.steps))
    text = result_page(trainers, milliseconds, asked)
    print(text)
    if asked.save:
        print(f"saved as {save(text, 'gpu')}")
    dist.destroy_process_group()


def result_page(
    trainers: dict[str, Trainer], milliseconds: dict[str, list[float]], asked: argparse.Namespace
) -> str:
    rows = []
    for name, trainer in trainers.items():
        pairs = zip(milliseconds[name], milliseconds[PLAIN], strict=True)
        more = sorted(each - plain for each, plain in pairs)
        ratio = "" if trainer.sync is None else f"{trainer.sync.stats().compression_ratio:.1f}"
        spread = f"{more[0]:+.2f} to {more[-1]:+.2f}"
        rows.append([name, f"{median(milliseconds[name]):.2f}", f"{median(more):+.2f}", spread, ratio])
    num_parameters = sum(each.numel() for each in trainers[PLAIN].model.parameters())
    return page(
        "Whole steps on one GPU",
        f"{torch.cuda.get_device_name()}; a GPT of {num_parameters / 1e6:.0f} M parameters in fp32, bf16 "
        f"autocast, fused AdamW, {asked.batch} windows of {CONFIG.context_length:,} tokens. One process over "
        "NCCL: what is added is arithmetic and the host's time, no message's. "
        f"{asked.rounds} rounds of {asked.steps} steps each; differences are taken round by round.",
        markdown_table(["", "ms a step", "more than DDP's", "least and most", "compression ratio"], rows),
    )


if __name__ == "__main__":
    main()
