"""Launch kernels as on a GPU, but for the launch itself: Triton specialises and compiles what it is given.

A process of its own, which prints their names as JSON: where Triton's interpreter is on, nothing can
be compiled. Warnings are errors.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar
from unittest.mock import patch

import torch

# Triton's own, from importing it where there is no GPU.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

from gpu_ready.counting import Alike, by_triton
from thinwire import PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm
from thinwire.kernels.triton import launcher
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine, Settings
from thinwire.tensors import accelerators


class Driver:
    """Tells Triton of a GPU that is not there."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Compiling:
    """Stands for a kernel: compiles what would be launched."""

    compiled: ClassVar[list[str]] = []

    def __init__(self, kernel: Any, name: str) -> None:
        self._kernel, self._name = kernel, name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self._kernel.warmup(*arguments, grid=grid, **constants)
            self.compiled.append(self._name.partition(".")[2])

        return launch


def average(algorithm: Algorithm, dtype: torch.dtype, *, columns: int = 240, **settings: Any) -> None:
    """Average two steps, of which the first has no residual; nothing is computed."""
    specs = tuple(ParameterSpec.of(name, torch.empty(256, columns, dtype=dtype)) for name in "ab")
    engine = Engine(algorithm, Alike(), specs, Settings(host_check=False, **settings))
    for _ in range(2):
        engine.average([(specs, torch.ones(2 * 256 * columns, dtype=dtype))])
    assert engine.reporter.counts().compression_ratio > 1


def main(architecture: int, ranks: list[int], all_bits: list[int]) -> None:
    original = launcher._function
    driver.set_active(Driver(architecture))
    scaled: dict[str, Any] = {"loss_scale": lambda device: torch.tensor(2.0)}
    with (
        by_triton(),
        patch.object(accelerators, "is_accelerator", lambda device: True),
        patch.object(launcher, "_function", lambda kernel: Compiling(original(kernel), kernel)),
    ):
        with patch.object(torch, "zeros", lambda *size, dtype, device: torch.empty(size, dtype=dtype)):
            launcher.check()  # on what would be the GPU
        for rank in ranks:
            low_rank = PowerSGD(matrix_rank=rank, min_compression_ratio=0)
            for dtype in (torch.float32, torch.bfloat16):
                average(low_rank, dtype, **scaled)
            average(replace(low_rank, power_iterations=3), torch.float32, columns=239)
        for dtype in (torch.float32, torch.bfloat16):
            for columns in (240, 239):
                average(TopK(density=1 / 30), dtype, columns=columns, **scaled)
                for bits in all_bits:
                    average(Quantize(bits=bits), dtype, columns=columns)
            for bits, members in product(all_bits, (2, 3)):
                with patch.object(Alike, "size", members):
                    average(Quantize(bits=bits, error_feedback=True), dtype, **scaled)
    print(json.dumps(sorted(set(Compiling.compiled))))


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(json.loads, sys.argv[2:]))
