"""What Triton's kernels serve, and whether they can be used here: known without importing Triton."""

from __future__ import annotations

from contextlib import suppress
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch

from thinwire.algorithms.accelerators import note_shortfall

__all__ = ["FACTOR_ROWS", "OLDEST_CAPABILITY", "can_be_used", "installed", "reaches", "tell"]

# The largest matrix rank that is served.
FACTOR_ROWS = 32

# PyTorch's nightly wheels, NVIDIA's containers and wheels for ROCm come with one of their own.
PACKAGES = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")

# That of torch 2.6. Older ones lack what the kernels are written with.
OLDEST = (3, 2)

# Compute capability of Ampere: the oldest GPUs that the kernels are compiled for in tests.
OLDEST_CAPABILITY = (8, 0)


# Asked for every group of every step, and a device does not change.
@cache
def reaches(device: torch.device) -> bool:
    """Return whether the kernels are compiled for a device; say so once if not.

    Args:
        device: Where the tensors lie.
    """
    if device.type != "cuda":
        # "meta" has nothing to compute, and so nothing that could be slow.
        if device.type not in ("cpu", "meta"):
            tell(f"Triton's kernels are for CUDA and ROCm, and this device is of type {device.type}")
        return False
    # AMD's numbers mean something else, and no lower bound of theirs is known.
    capability = (9, 0) if torch.version.hip else torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        tell(f"{torch.cuda.get_device_name(device)} has compute capability {capability}, which is below 8.0")
    return capability >= OLDEST_CAPABILITY


def installed() -> str | None:
    """Return Triton's version, by whatever name it was packaged; None without it."""
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            return version(package)
    return None


@lru_cache(maxsize=1)
def can_be_used() -> bool:
    """Return whether Triton is there, new enough, and compiles; say so once if not.

    Cost: a small kernel is compiled and launched on the current device, once.
    """
    found = installed()
    if found is None:
        tell("Triton is not installed")
        return False
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        tell(f"Triton {found} is installed, expected {OLDEST[0]}.{OLDEST[1]} or later")
        return False
    try:
        # Not at the head of this file: Triton is no requirement.
        import_module("thinwire.algorithms.kernels.triton.launcher").check()
    # Whatever it is, a missing compiler of C or a cache without a place: PyTorch's kernels do without.
    except Exception as error:
        tell(f"Triton {found} is installed but does not compile ({''.join(str(error).splitlines()[:1])})")
        return False
    return True


def tell(why: str) -> None:
    """Say once why PyTorch's kernels serve, and keep it for `stats()`.

    Args:
        why: The beginning of the sentence.
    """
    note_shortfall(f"{why}: PyTorch's kernels serve, in several times as many launches")
