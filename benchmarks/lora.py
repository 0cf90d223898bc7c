"""Fine-tuning with LoRA in the Transformers Trainer: a byte GPT-2 that knows Python's code reads its manual.

No weights are downloaded: the model is trained first, in one process, and kept in a file. Then two processes
fine-tune it, by a line of Thinwire beside the Trainer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import Dataset

from in_lab import leave_job
from known_methods import LOCAL, PER_STEP
from pages import ROOT
from progress import Progress
from thinwire.demo.model import batch_generator, fixed_batches, load_text, sample_batch
from thinwire.launch import LocalJob, join_local_job

__all__ = ["PROCESSES", "RATE", "fine_tuned"]

PROCESSES = 2
CONTEXT_LENGTH, BATCH = 64, 8
BASE = {"vocab_size": 256, "n_positions": CONTEXT_LENGTH, "n_embd": 128, "n_layer": 3, "n_head": 4}
BASE_STEPS, BASE_BATCH, BASE_RATE = 1_000, 16, 2e-3
LORA_RANK, RATE, WARMUP_SHARE = 8, 3e-3, 0.05
HELDOUT_EVERY_TOPICS, HELDOUT_BATCHES = 10, 32
TIMEOUT_SECONDS = 120.0
BASE_FILE = ROOT / "build" / f"base-gpt2-{BASE_STEPS}-steps.pt"


def fine_tuned(method: str, steps: int, seed: int) -> tuple[float, float]:
    """Fine-tune in processes of their own; return the held-out loss, and fp32's bytes over those sent.

    Args:
        method: Of `known_methods`.
        steps: Of the Trainer.
        seed: Of the adapters' start and the batches.

    Raises:
        RuntimeError: A process failed.
    """
    if not BASE_FILE.exists():
        train_base()
    with TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        script = [sys.executable, __file__, f"--method={method}", f"--steps={steps}", f"--seed={seed}"]
        with Path(folder, "log").open("w+b") as log:
            job = LocalJob([*script, f"--out={out}"], PROCESSES, errors=log)
            if job.run() is not None:
                raise KeyboardInterrupt
            if job.failure is not None:
                log.seek(0)
                raise RuntimeError(f"{job.failure}\n{log.read().decode(errors='replace')[-4000:]}")
        loss, ratio = json.loads(out.read_text())
        return loss, ratio


def new_base() -> Any:
    """Return a GPT-2 over bytes, in Transformers' architecture, without dropout."""
    transformers = import_module("transformers")
    config = transformers.GPT2Config(**BASE, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config.bos_token_id = config.eos_token_id = None
    return transformers.GPT2LMHeadModel(config)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of the next byte, in nats."""
    return F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())


def train_base() -> None:
    """Train the model that is fine-tuned on the standard library's sources; keep it."""
    torch.manual_seed(0)
    model, text = new_base(), load_text().train
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_RATE)
    with Progress(BASE_STEPS) as progress:
        for step in range(BASE_STEPS):
            progress.show(step, "the model that is fine-tuned")
            batch = sample_batch(
                text,
                batch_size=BASE_BATCH,
                context_length=CONTEXT_LENGTH,
                generator=batch_generator(seed=0, step=step, process_rank=0),
            )
            optimizer.param_groups[0]["lr"] = BASE_RATE * (1 + math.cos(math.pi * step / BASE_STEPS)) / 2
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, *batch))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    BASE_FILE.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), BASE_FILE)


def manual() -> tuple[Tensor, Tensor]:
    """Return the manual in the standard library as bytes: to train on, and every tenth topic to judge by."""
    topics: Mapping[str, str] = import_module("pydoc_data.topics").topics
    texts = [topics[name] for name in sorted(topics)]
    heldout = texts[HELDOUT_EVERY_TOPICS - 1 :: HELDOUT_EVERY_TOPICS]
    train = [text for number, text in enumerate(texts, start=1) if number % HELDOUT_EVERY_TOPICS]

    def as_bytes(parts: list[str]) -> Tensor:
        return torch.frombuffer(bytearray("".join(parts).encode()), dtype=torch.uint8)

    return as_bytes(train), as_bytes(heldout)


class Windows(Dataset[dict[str, Tensor]]):
    """A text in windows, as the Trainer takes them."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text) // CONTEXT_LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.text[index * CONTEXT_LENGTH :][:CONTEXT_LENGTH].long()
        return {"input_ids": window, "labels": window}


def work(arguments: argparse.Namespace) -> None:
    """In each process: fine-tune; the first one writes what came of it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    join_local_job("gloo", timeout_seconds=TIMEOUT_SECONDS)
    assert dist.get_world_size() == PROCESSES
    torch.set_num_threads(1)
    transformers, peft = import_module("transformers"), import_module("peft")
    base = new_base()
    base.load_state_dict(torch.load(BASE_FILE, weights_only=True))
    transformers.set_seed(arguments.seed)
    adapted = peft.get_peft_model(
        base,
        peft.LoraConfig(
            r=LORA_RANK,
            lora_alpha=2 * LORA_RANK,
            target_modules=["c_attn", "c_proj", "c_fc"],
            fan_in_fan_out=True,
            task_type="CAUSAL_LM",
        ),
    )
    train, heldout = manual()
    settings = transformers.TrainingArguments(
        output_dir=str(arguments.out.parent),
        max_steps=arguments.steps,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        warmup_steps=round(WARMUP_SHARE * arguments.steps),
        lr_scheduler_type="cosine",
        seed=arguments.seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
    )
    trainer = transformers.Trainer(adapted, settings, train_dataset=Windows(train))
    integration = import_module("thinwire.integrations.transformers")
    averaging = PER_STEP[arguments.method] if arguments.method in PER_STEP else LOCAL[arguments.method]
    callback = integration.attach(trainer, averaging)
    trainer.train()
    if dist.get_rank() == 0:
        loss = heldout_loss(adapted, heldout)
        averaged = callback.sync if callback.local is None else callback.local
        arguments.out.write_text(json.dumps([loss, averaged.stats().compression_ratio]))
    leave_job()


@torch.no_grad()
def heldout_loss(model: nn.Module, text: Tensor) -> float:
    model.eval()
    batches: Iterator[tuple[Tensor, Tensor]] = fixed_batches(
        text, batches=HELDOUT_BATCHES, batch_size=16, context_length=CONTEXT_LENGTH
    )
    return float(torch.stack([loss_of(model, *batch) for batch in batches]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=(*PER_STEP, *LOCAL), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    work(parser.parse_args())


if __name__ == "__main__":
    main()
