"""Codes of a few bits on the wire, against NumPy's bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.tensors.coded import pack, packed_bytes, unpack


def bits_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """The stream of bits as NumPy packs it: every code's lowest bit first."""
    stream = (codes[..., None] >> np.arange(bits)) & 1
    return np.packbits(stream.reshape(*codes.shape[:-1], -1).astype(np.uint8), axis=-1, bitorder="little")


@pytest.mark.parametrize("bits", range(1, 17))
def test_packs_as_one_stream_of_bits_and_back(bits: int) -> None:
    random = np.random.default_rng(bits)
    for shape in [(0,), (1,), (7,), (8,), (129,), (3, 50), (2, 3, 11)]:
        codes = random.integers(0, 1 << bits, shape)
        packed = pack(torch.from_numpy(codes), bits)
        assert packed.dtype == torch.uint8
        assert packed.shape[-1] == packed_bytes(shape[-1], bits)
        np.testing.assert_array_equal(packed.numpy(), bits_of(codes, bits))
        np.testing.assert_array_equal(unpack(packed, bits, shape[-1]).numpy(), codes)


@pytest.mark.parametrize("bits", [0, 17])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match="bits must be 1 to 16, got"):
        pack(torch.zeros(8, dtype=torch.uint8), bits)


def test_another_number_of_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 5 bytes, expected the 4 that 10 codes of 3 bits take"):
        unpack(torch.zeros(5, dtype=torch.uint8), 3, 10)
