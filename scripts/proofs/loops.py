"""Small training loops as people write them, for `without_code.py`: `loops.py NAME [in-code]`.

Each prints its losses. With `in-code` it attaches by itself; without, nothing here knows of Thinwire.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

STEPS, VOCABULARY = 6, 96
IN_CODE = "in-code" in sys.argv


class TinyGPT(nn.Module):
    """Predicts the next token; returns the loss, as nanoGPT's model does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1)
        logits = self.head(self.block(self.embedding(tokens[:, :-1]), mask, is_causal=True))
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def texts(rank: int, rows: int) -> torch.Tensor:
    """Return tokens that follow from each other, others on each rank."""
    start = torch.randint(VOCABULARY, (rows, 1), generator=torch.Generator().manual_seed(rank))
    return (start + 3 * torch.arange(17)) % VOCABULARY


def rows() -> Any:
    """Return the texts as a data set, which frameworks divide between the ranks."""
    return list(texts(0, 16 * STEPS))


def nanogpt() -> None:
    """Train as nanoGPT's train.py: DDP, AdamW, micro-steps that send nothing, a scaler, clipping."""
    dist.init_process_group("gloo")
    rank, micro_steps = dist.get_rank(), 2
    model = DistributedDataParallel(TinyGPT())
    if IN_CODE:
        attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    losses: list[float] = []
    for batch in texts(rank, 8 * STEPS * micro_steps).chunk(STEPS * micro_steps):
        is_last = len(losses) % micro_steps == micro_steps - 1
        model.require_backward_grad_sync = is_last
        loss = model(batch) / micro_steps
        scaler.scale(loss).backward()
        losses.append(loss.item())
        if is_last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    show(losses, rank)
    dist.destroy_process_group()


def accelerated() -> None:
    """Train as Accelerate's examples do, for `accelerate launch`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    module = TinyGPT()
    batches: Any = torch.utils.data.DataLoader(rows(), batch_size=4)
    model, optimizer, batches = accelerator.prepare(
        module, torch.optim.AdamW(module.parameters(), lr=1e-2), batches
    )
    if IN_CODE:
        attach(model)
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    show(losses, accelerator.process_index)
    accelerator.end_training()


def lightning() -> None:
    """Train with Lightning, which starts the second process itself."""
    from lightning.pytorch import LightningModule, Trainer

    losses = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = TinyGPT()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch)
            losses.append(loss.item())
            return loss

        def validation_step(self, batch: torch.Tensor) -> None:
            self.model(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    strategy: Any = "ddp"
    if IN_CODE:
        from thinwire import Quantize
        from thinwire.integrations.lightning import ThinwireStrategy

        strategy = ThinwireStrategy(Quantize(bits=4))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    loader = torch.utils.data.DataLoader(rows(), batch_size=4)
    trainer.fit(Module(), loader, loader)
    show(losses, trainer.global_rank)


def transformers() -> None:
    """Train a small random GPT-2 with the Transformers Trainer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=32)
    arguments = TrainingArguments(
        "unused",
        max_steps=STEPS,
        learning_rate=1e-2,
        logging_steps=1,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
    )
    examples: Any = [{"input_ids": row, "labels": row} for row in rows()]
    callbacks: list[Any] = []
    if IN_CODE:
        from thinwire.integrations.transformers import ThinwireCallback

        callbacks = [ThinwireCallback("4 bits")]
    torch.manual_seed(0)
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=examples, callbacks=callbacks)
    trainer.train()
    show([log["loss"] for log in trainer.state.log_history if "loss" in log], arguments.process_index)


def ray_train() -> None:
    """Train with Ray Train, two workers on this machine."""
    import ray
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

    def loop() -> None:
        torch.manual_seed(0)
        rank = train.get_context().get_world_rank()
        model = prepare_model(TinyGPT())
        if IN_CODE:
            attach(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for batch in texts(rank, 8 * STEPS).chunk(STEPS):
            loss = model(batch)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        show(losses, rank)

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=True)
    scaling = train.ScalingConfig(num_workers=2, use_gpu=False)
    TorchTrainer(loop, scaling_config=scaling, torch_config=TorchConfig(backend="gloo")).fit()
    ray.shutdown()


def attach(model: nn.Module) -> None:
    import thinwire

    thinwire.attach(model, thinwire.Quantize(bits=4))


def show(losses: list[float], rank: int) -> None:
    if rank == 0:
        print("losses", losses, flush=True)


LOOPS = (nanogpt, accelerated, lightning, transformers, ray_train)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    {loop.__name__: loop for loop in LOOPS}[sys.argv[1]]()
