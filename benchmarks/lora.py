"""Fine-tuning with LoRA in the Transformers Trainer: a byte GPT-2 that knows Python's code reads its manual.

No weights are downloaded: the model is trained first, in one process, and kept in a file. Then two processes
fine-tune it, by a line of Thinwire beside the Trainer.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.utils.data import Dataset

from in_lab import leave_job
from pages import ROOT
from progress import Progress
from thinwire.demo.model import fixed_batches
from trainings import LOCAL, PER_STEP, text, windows

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
        method: Of `PER_STEP` or `LOCAL`.
        steps: Of the Trainer.
        seed: Of the adapters' start and the batches.
    """
    if not BASE_FILE.exists():
        train_base()
    with TemporaryDirectory() as folder:
        spawn(_fine_tune, (method, steps, seed, Path(folder)), nprocs=PROCESSES)  # type: ignore[no-untyped-call]
        loss, ratio = json.loads(Path(folder, "found.json").read_text())
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
    model = new_base()
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_RATE)
    with Progress(BASE_STEPS) as progress:
        for step in range(BASE_STEPS):
            progress.show(step, "the model that is fine-tuned")
            batch = windows(text().train, BASE_BATCH, CONTEXT_LENGTH, seed=0, step=step)
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


def _fine_tune(process_rank: int, method: str, steps: int, seed: int, folder: Path) -> None:
    """In each process: fine-tune; the first one writes what came of it."""
    launched = {"RANK": process_rank, "LOCAL_RANK": process_rank, "WORLD_SIZE": PROCESSES}
    launched["LOCAL_WORLD_SIZE"] = PROCESSES
    os.environ |= {name: str(value) for name, value in launched.items()} | {"HF_HUB_OFFLINE": "1"}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=process_rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    torch.set_num_threads(1)
    transformers, peft = import_module("transformers"), import_module("peft")
    base = new_base()
    base.load_state_dict(torch.load(BASE_FILE, weights_only=True))
    transformers.set_seed(seed)
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
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        warmup_steps=round(WARMUP_SHARE * steps),
        lr_scheduler_type="cosine",
        seed=seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
    )
    trainer = transformers.Trainer(adapted, settings, train_dataset=Windows(train))
    integration = import_module("thinwire.integrations.transformers")
    averaging = PER_STEP[method] if method in PER_STEP else LOCAL[method]
    callback = integration.attach(trainer, averaging)
    trainer.train()
    if dist.get_rank() == 0:
        loss = heldout_loss(adapted, heldout)
        averaged = callback.sync if callback.local is None else callback.local
        leave_job([loss, averaged.stats().compression_ratio], folder / "found.json")
    leave_job()


@torch.no_grad()
def heldout_loss(model: nn.Module, heldout: Tensor) -> float:
    model.eval()
    batches: Iterator[tuple[Tensor, Tensor]] = fixed_batches(
        heldout, batches=HELDOUT_BATCHES, batch_size=16, context_length=CONTEXT_LENGTH
    )
    return float(torch.stack([loss_of(model, *batch) for batch in batches]).mean())
