"""The training text: the source code of Python's own standard library, which is real and on every machine."""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Other people's packages, tests, and files that are tables of numbers rather than text.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
# Whole files: windows of one file would be too alike to judge by.
HELDOUT_EVERY_FILES = 10
MAX_TRAIN_BYTES = 16_000_000
MAX_HELDOUT_BYTES = 2_000_000


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes to judge by, from different files.

    Attributes:
        train: One flat uint8 tensor.
        heldout: One flat uint8 tensor; no file contributes to both.
    """

    train: Tensor
    heldout: Tensor


def source_files(folder: Path) -> list[Path]:
    """Return every Python source file under `folder` that is text worth reading, in one fixed order."""
    found = []
    for parent, folders, names in os.walk(folder):
        # In place: what is taken out of its list, `os.walk` does not look into.
        folders[:] = [each for each in folders if each not in SKIPPED_FOLDERS]
        found += [Path(parent, name).relative_to(folder) for name in names if name.endswith(".py")]
    # The order in which files are found is the file system's; what is trained on must not be.
    return [folder / path for path in sorted(found, key=Path.as_posix)]


def split_files(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Return training files and held-out files: every tenth file is held out."""
    heldout = files[HELDOUT_EVERY_FILES - 1 :: HELDOUT_EVERY_FILES]
    chosen = set(heldout)
    return [path for path in files if path not in chosen], heldout


def load_text(
    folder: Path | None = None,
    *,
    max_train_bytes: int = MAX_TRAIN_BYTES,
    max_heldout_bytes: int = MAX_HELDOUT_BYTES,
) -> Text:
    """Read the standard library of the running Python, split by file."""
    # It lies on every machine that has Python: nothing is downloaded, and all processes read the same.
    folder = folder or Path(sysconfig.get_path("stdlib"))
    train, heldout = split_files(source_files(folder))
    if not heldout:
        raise FileNotFoundError(
            f"found {len(train)} Python files under {folder}, expected at least {HELDOUT_EVERY_FILES}: "
            "run with a Python whose standard library is installed as source files"
        )
    return Text(_read(train, max_train_bytes), _read(heldout, max_heldout_bytes))


def batch_generator(*, seed: int, step: int, process_rank: int) -> torch.Generator:
    """Return the random numbers of one process's batch in one step, the same ones for every algorithm."""
    # Seeded by a text, which Python hashes: sums such as seed + step would give two runs the same batches.
    mixed = random.Random(f"{seed}/{step}/{process_rank}").getrandbits(63)
    return torch.Generator().manual_seed(mixed)


def sample_batch(
    data: Tensor, *, batch_size: int, context_length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return random windows of text: inputs and the bytes after them, (batch_size, context_length)."""
    starts = torch.randint(data.numel() - context_length, (batch_size,), generator=generator)
    return _windows(data, starts, context_length)


def fixed_batches(
    data: Tensor, *, batches: int, batch_size: int, context_length: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield windows spread evenly over a text, the same ones every time; as of `sample_batch`."""
    # In float64: float32 does not hold every position beyond 16 MB.
    starts = torch.linspace(0, data.numel() - context_length - 1, batches * batch_size, dtype=torch.float64)
    for chunk in starts.long().view(batches, batch_size):
        yield _windows(data, chunk, context_length)


def _windows(data: Tensor, starts: Tensor, context_length: int) -> tuple[Tensor, Tensor]:
    indices = starts[:, None] + torch.arange(context_length + 1)
    # One byte more than the model sees: targets are the inputs, moved by one.
    window = data[indices].long()
    return window[:, :-1], window[:, 1:]


def _read(files: list[Path], max_bytes: int) -> Tensor:
    content = bytearray()
    for path in files:
        content += path.read_bytes()
        # Not one file more than needed: reading is what the start of the demo takes.
        if len(content) >= max_bytes:
            break
    # Of a bytearray: of bytes, which can't be written, torch would warn.
    return torch.frombuffer(content[:max_bytes], dtype=torch.uint8)
