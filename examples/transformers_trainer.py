"""Hugging Face's Trainer with 4 bits. Run: torchrun --nproc-per-node 2 examples/transformers_trainer.py."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import thinwire
from thinwire.integrations.transformers import attach

CONTEXT = 64


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of Python's standard library, as bytes."""

    def __init__(self) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
        self.text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.text) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.text[index * CONTEXT :][:CONTEXT].long()
        return {"input_ids": window, "labels": window}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("trainer-output"), help="for checkpoints")
    parser.add_argument("--resume", type=Path, help="a checkpoint in that folder")
    options = parser.parse_args()

    set_seed(0)
    no_tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=128, n_layer=2, n_head=4, **no_tokens)
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=str(options.folder),
        max_steps=12,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=4,
        save_steps=6,
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, arguments, train_dataset=Windows())
    thinwire_callback = attach(trainer, thinwire.Quantize(bits=4))
    trainer.train(resume_from_checkpoint=str(options.resume) if options.resume else None)

    checksum = sum(p.detach().double().sum().item() for p in model.parameters())
    ratio = thinwire_callback.sync.stats().compression_ratio
    told = f"compression ratio {ratio:.2f}, checksum {checksum:.9f}"
    print(f"process {arguments.process_index}: {told}", flush=True)


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()  # its threads must end before Python does
