"""The limits of Triton's kernels, and whether they can be used; known without importing Triton."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch

# The largest matrix rank that is served.
FACTOR_ROWS = 32

GRADIENT_TYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

# PyTorch's nightly wheels, NVIDIA's containers and wheels for ROCm package it under different names.
PACKAGES = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")

# Torch 2.6 comes with it; older versions lack features that the kernels use. It divides without denormals: a
# block whose scale is above 8e37, which no training reaches, is sent as zeros in few bits. It also spills
# registers in some low-rank kernels; without the kernels there would be several times as many launches.
OLDEST = (3, 2)

# Compute capability of Ampere, the oldest GPUs for which tests compile the kernels.
OLDEST_CAPABILITY = (8, 0)


def serves(device: torch.device, dtype: torch.dtype, matrix_rank: int | None) -> bool:
    """Implement `Backend.serves`; warn if a supported device lacks a kernel for this."""
    if not reaches(device):
        return False
    if dtype not in GRADIENT_TYPES:
        return warn_fallback(f"Triton's kernels do not take {dtype}")
    if matrix_rank is not None and matrix_rank > FACTOR_ROWS:
        return warn_fallback(
            f"Triton's kernels take matrix ranks up to {FACTOR_ROWS}, this one is {matrix_rank}"
        )
    return True


def reaches(device: torch.device) -> bool:
    """Return whether the kernels are compiled for a device; warn if not."""
    # "meta" computes nothing, so nothing can be slow.
    if device.type in ("cpu", "meta"):
        return False
    out_of_reach = _why_out_of_reach(device)
    return warn_fallback(out_of_reach) if out_of_reach else True


def why_not(device: torch.device) -> str:
    """Return why no kernel serves an accelerator; "" if some do."""
    return _why_out_of_reach(device) or why_unusable()


@cache
def _why_out_of_reach(device: torch.device) -> str:
    if device.type != "cuda":
        return f"Triton's kernels are for CUDA and ROCm, and this device is of type {device.type}"
    # AMD's numbers have a different meaning, and no known lower bound.
    if not torch.version.hip and (capability := torch.cuda.get_device_capability(device)) < OLDEST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {capability}, which is below 8.0"
    return ""


def installed() -> str | None:
    """Return Triton's version, under any package name; None if it is not installed."""
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            return version(package)
    return None


@cache
def why_unusable() -> str:
    """Check that Triton is installed, new enough, and compiles a small kernel; return the problem or ""."""
    release = installed()
    if release is None:
        return "Triton is not installed"
    if tuple(int(part) for part in release.split(".")[:2]) < OLDEST:
        return f"Triton {release} is installed, expected {OLDEST[0]}.{OLDEST[1]} or later"
    try:
        # Imported here: Triton is optional.
        import_module("thinwire.kernels.triton.launcher").check()
    # Any error, such as a missing C compiler or cache folder: use PyTorch's kernels instead.
    except Exception as error:
        return f"Triton {release} is installed but does not compile ({''.join(str(error).splitlines()[:1])})"
    return ""


@cache
def warn_fallback(why: str) -> bool:
    """Warn once in this process that PyTorch's kernels are used, and why; return False."""
    warnings.warn(f"{why}: PyTorch's kernels are used, in several times as many launches", stacklevel=2)
    return False
