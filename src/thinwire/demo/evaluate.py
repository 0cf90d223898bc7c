"""How well a model predicts text it was not trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.demo.model import GPT, next_byte_loss
from thinwire.demo.text import fixed_batches


@torch.no_grad()
def heldout_loss(model: GPT, heldout: Tensor, *, batches: int = 16, batch_size: int = 16) -> float:
    """Mean loss in nats a byte over the same evenly spread windows every time."""
    length = model.config.context_length
    windows = fixed_batches(heldout, batches=batches, batch_size=batch_size, context_length=length)
    was_training = model.training
    model.eval()
    losses = [next_byte_loss(model, inputs, targets).item() for inputs, targets in windows]
    model.train(was_training)
    return sum(losses) / len(losses)
