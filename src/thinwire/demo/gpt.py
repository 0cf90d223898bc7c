"""The demo's model and text: a small byte-level GPT on Python's standard library, written to be read."""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

# Other people's packages, tests, and files that are tables of numbers rather than text.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
HELDOUT_EVERY_FILES = 10  # whole files: windows of one file would be too similar to evaluate with


class Text(NamedTuple):
    """Bytes to train on and bytes to evaluate with, from different files, as flat uint8 tensors."""

    train: Tensor
    heldout: Tensor


def load_text(
    folder: Path | None = None, *, max_train_bytes: int = 16_000_000, max_heldout_bytes: int = 2_000_000
) -> Text:
    """Read the useful Python files of a folder, split by file.

    By default the standard library: every machine with Python has it, so nothing is downloaded, and all
    processes read the same.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    train = []
    for place, folders, files in os.walk(folder):
        folders[:] = set(folders) - SKIPPED_FOLDERS  # site-packages may have a hundred times as many files
        train += [Path(place, name) for name in files if name.endswith(".py")]
    train.sort()  # the order of found files depends on the file system
    heldout = train[HELDOUT_EVERY_FILES - 1 :: HELDOUT_EVERY_FILES]
    if not heldout:
        count = f"found {len(train)} Python files under {folder}, expected at least {HELDOUT_EVERY_FILES}"
        raise FileNotFoundError(f"{count}: run with a Python whose standard library is there as source files")
    del train[HELDOUT_EVERY_FILES - 1 :: HELDOUT_EVERY_FILES]
    return Text(_read(train, max_train_bytes), _read(heldout, max_heldout_bytes))


def _read(files: list[Path], max_bytes: int) -> Tensor:
    content = bytearray()
    for path in files:
        content += path.read_bytes()
        # Read no more files than needed: reading takes most of the demo's start.
        if len(content) >= max_bytes:
            break
    # From a bytearray: torch would warn of read-only bytes.
    return torch.frombuffer(content[:max_bytes], dtype=torch.uint8)


def batch_generator(*, seed: int, step: int, process_rank: int) -> torch.Generator:
    """Return the generator of one process's batch in one step, the same one for every algorithm."""
    # Seeded with text, which Python hashes: sums such as seed + step would give different runs equal batches.
    mixed = random.Random(f"{seed}/{step}/{process_rank}").getrandbits(63)
    return torch.Generator().manual_seed(mixed)


def sample_batch(
    data: Tensor, *, batch_size: int, context_length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return random windows of text: inputs and the bytes after them, (batch_size, context_length)."""
    starts = torch.randint(data.numel() - context_length, (batch_size,), generator=generator, device="cpu")
    return _windows(data, starts, context_length)


def fixed_batches(
    data: Tensor, *, batches: int, batch_size: int, context_length: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield windows spread evenly over a text, the same ones every time, as `sample_batch` does."""
    # In float64: float32 does not hold every position beyond 16 MB.
    starts = torch.linspace(
        0, data.numel() - context_length - 1, batches * batch_size, dtype=torch.float64, device="cpu"
    )
    for chunk in starts.long().view(batches, batch_size):
        yield _windows(data, chunk, context_length)


def _windows(data: Tensor, starts: Tensor, context_length: int) -> tuple[Tensor, Tensor]:
    # One byte more than the model sees: targets are the inputs shifted by one.
    window = data[starts[:, None] + torch.arange(context_length + 1, device="cpu")].long()
    return window[:, :-1], window[:, 1:]


@dataclass(frozen=True)
class GPTConfig:
    """The size of a model: `width` numbers represent a byte between blocks; `heads` share them evenly."""

    layers: int
    heads: int
    width: int
    context_length: int = 128
    vocabulary: int = 256


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
        sizes = config.width, config.heads, 4 * config.width
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(*sizes, **options)  # type: ignore[arg-type]
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        # Each block adds to the residual stream twice, so its last layers start smaller, like GPT-2's.
        for name, parameter in self.named_parameters():
            is_last = name.endswith(("out_proj.weight", "linear2.weight"))
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5 if is_last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=inputs.device)
        hidden = self.bytes(inputs) + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden, mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def next_byte_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte; an untrained model is near ln 256 = 5.55."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def heldout_loss(model: GPT, heldout: Tensor, *, batches: int = 16, batch_size: int = 16) -> float:
    """Return the mean loss in nats per byte over windows of text, the same ones every time."""
    length = model.config.context_length
    windows = fixed_batches(heldout, batches=batches, batch_size=batch_size, context_length=length)
    losses = [next_byte_loss(model, inputs, targets).item() for inputs, targets in windows]
    return sum(losses) / len(losses)
