"""A small byte-level GPT, written to be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from thinwire.demo.text import fixed_batches


@dataclass(frozen=True)
class GPTConfig:
    """The size of a model.

    Attributes:
        layers: Transformer blocks.
        heads: Attention heads per block; they share the width evenly.
        width: Numbers that stand for one byte between blocks.
        context_length: Bytes that the model sees at once.
        vocabulary: Different symbols; 256 for bytes.
    """

    layers: int
    heads: int
    width: int
    context_length: int = 128
    vocabulary: int = 256

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"got width={self.width} and heads={self.heads}: make width a multiple of heads")


SIZES = {
    "tiny": GPTConfig(layers=2, heads=2, width=64, context_length=64),
    "small": GPTConfig(layers=4, heads=4, width=192),
    "medium": GPTConfig(layers=6, heads=6, width=384),
}


class GPT(nn.Module):
    """A pre-norm transformer over bytes; called with `(batch, length)` int64, it returns next-byte logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context_length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # As in GPT-2: each block adds twice to the residual stream, so its last layers start smaller.
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits `(batch, length, vocabulary)` of the byte after each input byte."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.bytes(inputs) + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Block(nn.Module):
    """Attention, then a two-layer network; each adds to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.network_norm = nn.LayerNorm(config.width)
        self.network = Network(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what has the same shape, `(batch, length, width)`."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        mixed: Tensor = hidden + self.network(self.network_norm(hidden))
        return mixed


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.queries_keys_values = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what has the same shape, `(batch, length, width)`."""
        # One product for all three; (batch, length, 3, heads, width of a head), taken apart by the 3.
        split = self.queries_keys_values(hidden).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class Network(nn.Module):
    """Two linear layers, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.out = nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what has the same shape, `(batch, length, width)`."""
        out: Tensor = self.out(F.gelu(self.up(hidden)))
        return out


def next_byte_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte; an untrained model is near ln 256 = 5.55."""
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def heldout_loss(model: GPT, heldout: Tensor, *, batches: int = 16, batch_size: int = 16) -> float:
    """Return the mean loss in nats per byte over windows of text, the same ones every time."""
    length = model.config.context_length
    windows = fixed_batches(heldout, batches=batches, batch_size=batch_size, context_length=length)
    # Restored below: a caller may measure in the middle of training.
    was_training = model.training
    model.eval()
    losses = [next_byte_loss(model, inputs, targets).item() for inputs, targets in windows]
    model.train(was_training)
    return sum(losses) / len(losses)
