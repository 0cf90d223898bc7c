"""What `bench_known.py` compares."""

from __future__ import annotations

from functools import partial

from thinwire import AllReduce, Cast, DiLoCo, LocalSGD, PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm

__all__ = ["EXACT", "LOCAL", "PER_STEP"]

EXACT = "exact"
PER_STEP: dict[str, Algorithm] = {
    EXACT: AllReduce(),
    "bf16": Cast("bf16"),
    **{f"Quantize, {bits} bits": Quantize(bits=bits) for bits in (4, 3, 2, 1)},
    "PowerSGD, matrix rank 4": PowerSGD(matrix_rank=4),
}
LOCAL: dict[str, partial[LocalSGD] | partial[DiLoCo]] = {
    "LocalSGD every 5": partial(LocalSGD, every_steps=5),
    "LocalSGD every 5, TopK": partial(LocalSGD, every_steps=5, algorithm=TopK()),
    "DiLoCo every 30": partial(DiLoCo, every_steps=30),
}
