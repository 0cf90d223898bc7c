"""Parameter shapes of four well-known models, in their order; and a byte-level LSTM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from thinwire.plan import ParameterSpec

Shape: TypeAlias = tuple[int, ...]

BUCKET_BYTES = 25 << 20  # as of DDP
_BLOCK = {"c_attn": (768, 2304), "attn.c_proj": (768, 768), "c_fc": (768, 3072), "mlp.c_proj": (3072, 768)}
GPT2_SMALL: Mapping[str, Shape] = {  # by name, but for its norms
    "wte": (50257, 768),
    "wpe": (1024, 768),
    **{f"{layer}.{name}": shape for layer in range(12) for name, shape in _BLOCK.items()},
    **{f"{layer}.{name}.bias": shape[-1:] for layer in range(12) for name, shape in _BLOCK.items()},
}


def buckets_of(
    shapes: Mapping[str, Shape], dtype: torch.dtype = torch.float32
) -> list[tuple[ParameterSpec, ...]]:
    """The buckets that DDP would make."""
    buckets: list[list[ParameterSpec]] = [[]]
    # The backward pass makes the last layer's gradients first, so DDP fills its buckets from there.
    for name, shape in reversed(list(shapes.items())):
        if sum(spec.gradient_bytes for spec in buckets[-1]) >= BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(ParameterSpec.of(name, torch.empty(shape, dtype=dtype, device="meta")))
    return [tuple(bucket) for bucket in buckets]


def resnet18() -> Iterator[Shape]:
    """For ImageNet, as `resnet50`, of blocks of two convolutions."""
    yield from _convolution(64, 3, 7)
    inputs = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            yield from _convolution(width, inputs, 3)
            yield from _convolution(width, width, 3)
            if block == 0 and width > inputs:
                yield from _convolution(width, inputs, 1)
            inputs = width
    yield from _linear(1000, inputs)


def resnet50() -> Iterator[Shape]:
    """For ImageNet: convolutions (out, in, height, width), each with a batch norm, and a classifier."""
    yield from _convolution(64, 3, 7)
    inputs = 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            yield from _convolution(width, inputs, 1)
            yield from _convolution(width, width, 3)
            yield from _convolution(4 * width, width, 1)
            if block == 0:
                yield from _convolution(4 * width, inputs, 1)
            inputs = 4 * width
    yield from _linear(1000, inputs)


def gpt2_small_blocks() -> Iterator[Shape]:
    """The 12 transformer blocks of GPT-2 small, without its embeddings."""
    width = 768
    for _ in range(12):
        yield from ((width,), (width,))
        yield from _linear(3 * width, width)
        yield from _linear(width, width)
        yield from ((width,), (width,))
        yield from _linear(4 * width, width)
        yield from _linear(width, 4 * width)


def wikitext2_lstm() -> Iterator[Shape]:
    """The language model of the PowerSGD paper: 28 869 words, tied embeddings, three layers."""
    vocabulary, width = 28_869, 650
    yield (vocabulary, width)
    for _ in range(3):
        yield from ((4 * width, width), (4 * width, width), (4 * width,), (4 * width,))
    yield (vocabulary,)


SHAPE_SETS: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "gpt2-small-blocks": gpt2_small_blocks,
    "wikitext2-lstm": wikitext2_lstm,
}


def _convolution(outputs: int, inputs: int, kernel: int) -> Iterator[Shape]:
    yield from ((outputs, inputs, kernel, kernel), (outputs,), (outputs,))


def _linear(outputs: int, inputs: int) -> Iterator[Shape]:
    yield from ((outputs, inputs), (outputs,))


class LSTM(nn.Module):
    """As in the PowerSGD paper's second task: `(batch, length)` int64 bytes → next-byte logits."""

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
