"""PowerSGD of the reference package, written from its README and the paper, in NumPy's float64.

Independent of Thinwire: plain loops, one matrix at a time, QR for orthogonalisation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class ReferencePowerSGD:
    """All workers of a group at once.

    Args:
        shapes: Of the parameters.
        matrix_rank: r.
        iterations: Rounds a step.
        least_rate: A matrix is compressed if its elements are more than this times what it is counted to
            send: by the sizes of the parameter's own shape, of which a convolution has four.
        start_after: Steps that average whole gradients.
        bases: The left basis to start from, by parameter, (rows, r).
    """

    def __init__(
        self,
        shapes: list[tuple[int, ...]],
        matrix_rank: int,
        iterations: int,
        least_rate: float,
        start_after: int,
        bases: dict[int, Array],
    ) -> None:
        self.shapes, self.iterations, self.start_after = shapes, iterations, start_after
        self.compressed = [self._is_compressed(shape, matrix_rank, least_rate) for shape in shapes]
        self.factors = dict(bases)
        self.rounds = 0
        self.steps = 0

    def _is_compressed(self, shape: tuple[int, ...], matrix_rank: int, least_rate: float) -> bool:
        if len(shape) < 2:
            return False
        counted = 0.5 * self.iterations * min(matrix_rank, *shape) * sum(shape)
        return float(np.prod(shape)) / counted > least_rate

    def step(self, gradients: list[list[Array]]) -> list[Array]:
        """Gradients (with error) by worker and parameter, left with the new error; returns the means."""
        self.steps += 1
        means = []
        for index, shape in enumerate(self.shapes):
            of_workers = [worker[index] for worker in gradients]
            if self.compressed[index] and self.steps > self.start_after:
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
