"""Integers of a few bits, without gaps: eight codes of b bits in b bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from thinwire.errors import ConfigError

MAX_BITS = 16
GROUP = 8  # codes: the fewest that fill whole bytes, whatever the bits


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes that codes take.

    Examples:
        >>> packed_bytes(100, 3), packed_bytes(64, 12)
        (38, 96)
    """
    return -(-count * bits // 8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Write codes one behind the other, the lowest bit first, as one stream of bits.

    Returns:
        The bytes, uint8, shape (…, `packed_bytes(count, bits)`); the last one is filled up with zeros.

    Examples:
        >>> pack(torch.tensor([1, 2, 3, 4, 5]), bits=3).tolist()
        [209, 88]
    """
    _check_bits(bits)
    count = codes.shape[-1]
    if bits == 8 or not codes.numel():
        shape = (*codes.shape[:-1], packed_bytes(count, bits))
        return codes.to(torch.uint8) if bits == 8 else codes.new_empty(shape, dtype=torch.uint8)
    wide = codes.to(torch.uint8 if bits < 8 else torch.int32)
    groups = -(-count // GROUP)
    if count % GROUP:
        wide = torch.nn.functional.pad(wide, (0, groups * GROUP - count))
    if bits <= 4:
        # The eight bytes of a group are one whole number, in which its codes are pushed together.
        # Codes below 16 leave the sign bit alone, so that shifts to the right bring in zeros.
        words = wide.contiguous().view(torch.int64)
        for width in (8, 16, 32):
            used = bits * width // 8
            words = (words | (words >> (width - used))) & _fields(2 * width, 2 * used)
        together = words.view(torch.uint8).view(*codes.shape[:-1], groups, GROUP)[..., :bits]
        return together.flatten(-2)[..., : packed_bytes(count, bits)]
    columns = wide.reshape(*wide.shape[:-1], groups, GROUP).unbind(-1)
    packed = torch.zeros((*codes.shape[:-1], groups, bits), dtype=torch.uint8, device=codes.device)
    for code, byte, shift in _overlaps(bits):
        part = columns[code] << shift if shift >= 0 else columns[code] >> -shift
        packed[..., byte] |= (part & 0xFF).to(torch.uint8)
    return packed.flatten(-2)[..., : packed_bytes(count, bits)]


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Read codes back.

    Returns:
        The codes, shape (…, count), uint8 up to 8 bits and int32 above.
    """
    _check_bits(bits)
    if packed.shape[-1] != packed_bytes(count, bits):
        raise ConfigError(
            f"got {packed.shape[-1]} bytes, expected the {packed_bytes(count, bits)} that {count} codes of "
            f"{bits} bits take"
        )
    if bits == 8 or not packed.numel():
        dtype = torch.uint8 if bits <= 8 else torch.int32
        return packed if bits == 8 else packed.new_empty((*packed.shape[:-1], count), dtype=dtype)
    groups = -(-count // GROUP)
    if packed.shape[-1] != groups * bits:
        packed = torch.nn.functional.pad(packed, (0, groups * bits - packed.shape[-1]))
    if bits <= 4:
        # As `pack`, backwards: halves are pulled apart, then quarters, then single codes.
        words = packed.new_zeros(*packed.shape[:-1], groups, GROUP)
        words[..., :bits] = packed.reshape(*packed.shape[:-1], groups, bits)
        apart = words.flatten(-2).view(torch.int64)
        for width in (32, 16, 8):
            used = bits * width // 8
            apart = (apart | (apart << (width - used))) & _fields(width, used)
        return apart.view(torch.uint8)[..., :count]
    dtype = torch.uint8 if bits < 8 else torch.int32
    columns = packed.to(dtype).reshape(*packed.shape[:-1], groups, bits).unbind(-1)
    codes = torch.zeros((*packed.shape[:-1], groups, GROUP), dtype=dtype, device=packed.device)
    mask = (1 << bits) - 1
    for code, byte, shift in _overlaps(bits):
        codes[..., code] |= (columns[byte] >> shift if shift >= 0 else columns[byte] << -shift) & mask
    return codes.flatten(-2)[..., :count]


def _overlaps(bits: int) -> Iterator[tuple[int, int, int]]:
    """Yield each code and byte of a group that share bits, and how far to shift the code to the left."""
    for code in range(GROUP):
        first = code * bits
        for byte in range(first // 8, (first + bits - 1) // 8 + 1):
            yield code, byte, first - 8 * byte


def _fields(width: int, used: int) -> int:
    """Return the mask of the lowest bits of every field of a number of 64 bits, none of which is the last."""
    return sum(((1 << used) - 1) << start for start in range(0, 64, width))


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= MAX_BITS:
        raise ConfigError(f"bits must be 1 to {MAX_BITS}, got {bits!r}")
