"""Imported last by the server of forked processes: in huge pages its memory is forked four times as fast."""

from __future__ import annotations

import ctypes
from pathlib import Path

MADV_COLLAPSE = 25  # since Linux 6.1; older ones refuse it, and fork as before
SIZE = 2**21

libc = ctypes.CDLL(None)
for line in Path("/proc/self/maps").read_text().splitlines():
    addresses, access, _, _, inode = line.split()[:5]
    begin, end = (int(address, 16) for address in addresses.split("-"))
    first, last = -(-begin // SIZE) * SIZE, end // SIZE * SIZE
    if access == "rw-p" and inode == "0" and first < last:
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_COLLAPSE)
