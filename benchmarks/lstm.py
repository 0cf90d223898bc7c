"""A small byte-level LSTM, the kind of model of the PowerSGD paper's second task."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["LSTM", "new_lstm"]


class LSTM(nn.Module):
    """Called with `(batch, length)` int64 bytes, it returns next-byte logits."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.layers = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.layers(self.bytes(inputs))[0]
        logits: Tensor = self.head(hidden)
        return logits


def new_lstm() -> LSTM:
    """Of 1.2 M parameters."""
    model = LSTM(width=256, layers=2)
    with torch.no_grad():
        model.bytes.weight.mul_(0.1)
    return model
