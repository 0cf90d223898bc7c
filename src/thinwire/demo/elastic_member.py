"""One member of the elastic demo, which `thinwire.demo.elastic` starts with its options as JSON."""

from __future__ import annotations

import os
import sys
import time
import zlib
from pathlib import Path

import torch

import thinwire
from thinwire import elastic
from thinwire.demo.model import GPT, SIZES, heldout_loss, next_byte_loss
from thinwire.demo.options import DemoOptions
from thinwire.demo.text import batch_generator, load_text, sample_batch
from thinwire.elastic.torchft_group import MEMBER
from thinwire.local_job import LOOK_EVERY_SECONDS

EVERY_STEPS = 10
BATCH_SIZE = 8
LEARNING_RATE = 2e-3
TIMEOUT_SECONDS = 30.0  # of a message; longer than a busy computer lets any member stand still
WAIT_SECONDS = 120.0


def may_join(options: DemoOptions) -> Path:
    """Return the file that is there once the last member may join."""
    return options.output / "may-join"


def main() -> None:
    """Train with whoever is there, and record every step; the first member measures the held-out loss."""
    options, member = DemoOptions.from_json(sys.argv[1]), int(os.environ[MEMBER])
    torch.set_num_threads(1)  # they share the cores of one machine
    text = load_text()
    # Each from a seed of its own: all start from the first one's model, or from that of those who are there.
    torch.manual_seed(options.seed + member)
    model = GPT(SIZES[options.model_size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    # Started with the others, though it joins later: what a process loads first takes longer than they train.
    # Before its group, which announces it to the others.
    while member == options.processes and not may_join(options).exists():
        time.sleep(LOOK_EVERY_SECONDS)
    group = elastic.TorchftGroup(timeout_seconds=TIMEOUT_SECONDS, wait_seconds=WAIT_SECONDS)
    path = options.output / f"member-{member}.jsonl"
    with (
        elastic.DiLoCo(model, optimizer, every_steps=EVERY_STEPS, group=group) as local,
        thinwire.Watch(local, path, name=f"member {member}") as watch,
    ):
        while local.steps < options.steps:
            inputs, targets = sample_batch(
                text.train,
                batch_size=BATCH_SIZE,
                context_length=model.config.context_length,
                generator=batch_generator(seed=options.seed, step=local.steps, process_rank=member),
            )
            optimizer.zero_grad()
            loss = next_byte_loss(model, inputs, targets)
            torch.autograd.backward(loss)
            optimizer.step()
            watch.log(loss=loss.item())
        with local.averaged():
            held = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            logged = {"checksum": float(zlib.crc32(held.numpy().tobytes()))}
            if member == 0:
                logged["heldout_loss"] = heldout_loss(model, text.heldout)
            watch.log(**logged)


if __name__ == "__main__":
    main()
