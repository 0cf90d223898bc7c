"""What the server of forked processes has before it forks: packages, and the compiled arithmetic.

`make test` runs this before its tests, so that two workers do not compile the same at the same time.
"""

from __future__ import annotations

import numpy as np  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo  # by the first DDP model of a process
import torch.distributed.run
import torch.nn.parallel
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import thinwire
import thinwire.cli
from thinwire.algorithms.registry import REGISTRY
from thinwire.plan import ParameterSpec
from thinwire.simulation import Simulation

# Of all forked processes: compiled arithmetic serves one thread.
torch.set_num_threads(1)
# At each sign of life torchrun looks in all modules for a function's name, in these here for seconds.
dynamic_rendezvous.get_method_name = lambda depth=2: "unknown"


def compile_passes() -> None:
    """Run every compiled pass: of each algorithm that there is, and at every matrix rank that they serve."""
    bucket = [ParameterSpec.of(name, torch.empty(64, 48)) for name in ("one", "two")]
    algorithms = [variant.algorithm for entry in REGISTRY for variant in entry.variants]
    for matrix_rank in (1, 2, 3, 4):
        algorithms += [
            thinwire.PowerSGD(matrix_rank=matrix_rank, min_compression_ratio=1),
            thinwire.algorithms.BatchedPowerSGD(matrix_rank=matrix_rank),
        ]
    for algorithm in algorithms:
        simulation = Simulation(algorithm, [tuple(bucket)], num_workers=1)
        for _ in range(2):
            simulation.step([[torch.randn(2 * 64 * 48)]])


compile_passes()
