"""Checksums of tensors and plain values, to find damage that a file format does not."""

from __future__ import annotations

import ctypes
import json
import zlib
from collections.abc import Iterable

import torch

__all__ = ["checksum"]


def checksum(plain: object, tensors: Iterable[torch.Tensor]) -> str:
    """The CRC-32 of plain values and of the bytes, shapes and types of tensors.

    Cost: one read of the tensors, and a copy of those that are not on the CPU.

    >>> checksum({"step": 3}, [torch.zeros(2)])
    'crc32:7e71dcc7'
    """
    crc = zlib.crc32(json.dumps(plain, sort_keys=True).encode())
    for tensor in tensors:
        crc = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), crc)
        held = tensor.detach().cpu().contiguous()
        size = held.numel() * held.element_size()
        if size:
            crc = zlib.crc32((ctypes.c_char * size).from_address(held.data_ptr()), crc)
    return f"crc32:{crc:08x}"
