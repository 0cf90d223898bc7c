"""The plan: how each parameter is sent, and in how many bytes. Made once from shapes, frozen, printable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from thinwire.errors import ConfigError
from thinwire.wire import compression_ratio

__all__ = ["BUCKET_SEPARATOR", "SHARD_MARK", "ParameterSpec", "Plan", "Route", "compression_ratio"]

BUCKET_SEPARATOR = " … "
SHARD_MARK = " @ shard "
"""Separates a parameter's name from its shard in a saved state: "weight @ shard 0 of 2"."""


class ParameterSpec(NamedTuple):
    """All that an algorithm needs to know of a parameter, except its values.

    Attributes:
        name: The parameter's name in the model, the key of all state about it.
        shape: Its shape.
        stride: Its strides in elements: the order in which a flat gradient holds its elements.
        dtype: The type of its gradient, a floating one.
        is_statistic: Whether it is a statistic, such as BatchNorm's variance, not a parameter. Statistics are
            sent uncompressed by every algorithm: an approximation could make a variance negative.
        start: For a part of a parameter: its first element, in the parameter's memory order.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_statistic: bool = False
    start: int = 0

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> ParameterSpec:
        """Return the spec of a tensor.

        Args:
            name: The parameter's name.
            tensor: The parameter, or a gradient of it.

        Examples:
            >>> ParameterSpec.of("weight", torch.zeros(3, 2).t()).stride
            (1, 2)

        Raises:
            ConfigError: The name contains a separator of saved states.
        """
        for mark in (BUCKET_SEPARATOR, SHARD_MARK):
            if mark in name:
                raise ConfigError(
                    f"parameter {name!r} has {mark!r} in its name, which separates names in saved states; "
                    "rename the module or the parameter"
                )
        tensor = tensor.detach()
        # DDP lays out complex gradients as real numbers with a last dimension of two, and gradients of
        # parameters whose memory has gaps or overlaps as contiguous.
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        if not _is_dense(shape, stride):
            stride = tuple(torch.empty(shape, device="meta").stride())
        return cls(name, shape, stride, tensor.dtype)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the uncompressed gradient."""
        return self.numel * self.dtype.itemsize

    @property
    def memory_dtype(self) -> torch.dtype:
        """The dtype of its residual and factors: fp64 for fp64, fp32 for all others."""
        # Never 16 bits: rounding would lose what the residual is there to keep.
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def matrix_shape(self) -> tuple[int, int] | None:
        """The gradient's shape as a matrix, (rows, columns), in memory order; None for vectors, statistics.

        Rows are the outermost dimension in memory: the output features of a linear layer or of a
        convolution, channels-last or not.
        """
        if len(self.shape) < 2 or self.numel == 0 or self.is_statistic:
            return None
        # In memory order the matrix is a view of the flat gradient. A matrix stored transposed is seen as its
        # transpose, which has the same matrix rank.
        rows = max(zip(self.shape, self.stride, strict=True), key=lambda dim: (dim[0] > 1, dim[1]))[0]
        return rows, self.numel // rows


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether memory is filled without gaps or overlaps, in any order of dimensions."""
    # From the innermost dimension outwards, each stride must equal the number of elements inside it. A
    # dimension of size one may have any stride.
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class Route:
    """How a gradient is sent.

    Attributes:
        names: The parameters sent together; several only if a whole bucket is compressed as one.
        gradient_bytes: Bytes a process would send per step without Thinwire.
        message_bytes: Bytes of its messages per step, in all rounds together, after any warm-up; counted as
            for an all-reduce, see `Stats`.
        detail: What is sent for the gradient, in a few words.
        is_compressed: Whether the gradient is approximated.
        rounds: Messages in a step that wait for one another: each costs a round trip of the network.
    """

    names: tuple[str, ...]
    gradient_bytes: int
    message_bytes: int
    detail: str = "uncompressed"
    is_compressed: bool = False
    rounds: int = 1

    @property
    def label(self) -> str:
        """The parameter's name, or the first and last of several."""
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]}{BUCKET_SEPARATOR}{self.names[-1]}"


@dataclass(frozen=True)
class Plan:
    """How each parameter is sent. Printing it gives a table.

    Attributes:
        routes: One for each parameter (or bucket, if the algorithm compresses a bucket as one).
        processes: How many processes of a machine share its messages; 1 if each process sends its own.
    """

    routes: tuple[Route, ...]
    processes: int = 1

    @property
    def gradient_bytes(self) -> int:
        """Bytes a process would send per step without Thinwire."""
        return sum(route.gradient_bytes for route in self.routes)

    @property
    def message_bytes(self) -> int:
        """Bytes a process, or a machine whose processes share messages, sends per step after any warm-up."""
        return sum(route.message_bytes for route in self.routes)

    @property
    def compression_ratio(self) -> float:
        """Uncompressed over compressed; 1.0 for a model without gradients."""
        return compression_ratio(self.gradient_bytes, self.message_bytes)

    @property
    def rounds(self) -> int:
        """Messages of a step that wait for one another, if all buckets are sent at the same time."""
        return max((route.rounds for route in self.routes), default=0)

    def __str__(self) -> str:
        rows = [("parameter", "travels as", "bytes before", "bytes after")]
        for route in self.routes:
            rows.append((route.label, route.detail, f"{route.gradient_bytes:,}", f"{route.message_bytes:,}"))
        rows.append(("total", "", f"{self.gradient_bytes:,}", f"{self.message_bytes:,}"))
        of = f"machine of {self.processes} processes" if self.processes > 1 else "process"
        rounds = f"{self.rounds} round{'' if self.rounds == 1 else 's'} a step"
        return _table(rows) + f"\ncompression ratio {self.compression_ratio:.1f} (of each {of}), {rounds}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for label, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([label.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines)
