"""Launch kernels as on a GPU, but for the launch itself: Triton specialises and compiles what it is given.

A process of its own: where Triton's interpreter is on, nothing can be compiled. Warnings are errors.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any, ClassVar

import torch

# Triton's own, from importing it where there is no GPU.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

from kernel_calls import asked, wanted
from thinwire.kernels.matrices import Factors, MatrixGroup, Rows, Write
from thinwire.kernels.triton import launcher
from thinwire.kernels.triton.triton_kernels import LOW_RANK


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

    compiled: ClassVar[set[str]] = set()

    def __init__(self, kernel: Any, name: str) -> None:
        self._kernel, self._name = kernel, name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            found = self._kernel.warmup(*arguments, grid=grid, **constants)
            Compiling.compiled.add(f"{self._name} {found.hash}")

        return launch


def low_rank(matrix_rank: int, dtype: torch.dtype, *, aligned: bool, terms: int) -> None:
    columns = 48 if aligned else 47
    matrices, errors = (list(torch.ones(2, 40, columns)) for _ in range(2))
    group = MatrixGroup(["a", "b"], [each.to(dtype) for each in matrices], errors, matrix_rank)
    right = torch.ones(2, matrix_rank, columns)
    (left,) = LOW_RANK.products(asked([group], [right], None, add_error=True))
    (basis,) = LOW_RANK.orthonormal_rows([Rows(left)])
    (own,) = LOW_RANK.projections(asked([group], [basis], torch.tensor(2.0), add_error=False))
    found = [Factors(basis, own, own)] * terms
    flag = torch.tensor(True)
    LOW_RANK.reconstruct(wanted([group], [errors], [found], None, flag))
    LOW_RANK.write([Write(torch.ones(50), torch.ones(50), None, flag)])
    LOW_RANK.all_finite([torch.ones(50)])


def main(architecture: int, ranks: list[int]) -> None:
    original = launcher._function
    launcher._function = lambda kernel: Compiling(original(kernel), kernel)  # type: ignore[assignment]
    driver.set_active(Driver(architecture))
    for rank in ranks:
        for dtype in (torch.float32, torch.bfloat16):
            low_rank(rank, dtype, aligned=True, terms=1)
        low_rank(rank, torch.float32, aligned=False, terms=3)
    print(json.dumps(sorted(Compiling.compiled)))


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
