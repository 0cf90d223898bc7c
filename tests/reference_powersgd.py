"""PowerSGD of the reference package, written from its README and the paper, in NumPy's float64.

Independent of Thinwire: plain loops, one matrix at a time, QR for orthogonalisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class ReferencePowerSGD:
    """All workers of a group at once.

    A matrix is compressed if its elements are more than `least_rate` times what it is counted to send: by the
    sizes of the parameter's own shape, of which a convolution has four. The first `start_after` steps average
    whole gradients. `factors` begin as left bases, (rows, r), by parameter.
    """

    shapes: list[tuple[int, ...]]
    matrix_rank: int
    iterations: int
    least_rate: float
    start_after: int
    factors: dict[int, Array]
    rounds: int = 0
    steps: int = 0

    def is_compressed(self, shape: tuple[int, ...]) -> bool:
        if len(shape) < 2:
            return False
        counted = 0.5 * self.iterations * min(self.matrix_rank, *shape) * sum(shape)
        return float(np.prod(shape)) / counted > self.least_rate

    def step(self, gradients: list[list[Array]]) -> list[Array]:
        """Gradients (with error) by worker and parameter, left with the new error; returns the means."""
        self.steps += 1
        means = []
        for index, shape in enumerate(self.shapes):
            of_workers = [worker[index] for worker in gradients]
            if self.is_compressed(shape) and self.steps > self.start_after:
                means.append(self._low_rank(index, shape, of_workers))
            else:
                means.append(np.mean(of_workers, axis=0))
                for gradient in of_workers:
                    gradient[...] = 0
        if self.steps > self.start_after:
            self.rounds += self.iterations
        return means

    def _low_rank(self, index: int, shape: tuple[int, ...], of_workers: list[Array]) -> Array:
        matrices = [gradient.reshape(shape[0], -1) for gradient in of_workers]
        total = np.zeros_like(matrices[0])
        for iteration in range(self.iterations):
            basis = np.linalg.qr(self.factors[index])[0]
            left = (self.rounds + iteration) % 2 == 0
            own = [matrix.T @ basis if left else matrix @ basis for matrix in matrices]
            for matrix, projection in zip(matrices, own, strict=True):
                np.subtract(matrix, basis @ projection.T if left else projection @ basis.T, out=matrix)
            mean = np.mean(own, axis=0)
            total += basis @ mean.T if left else mean @ basis.T
            self.factors[index] = mean
        return total.reshape(shape)
