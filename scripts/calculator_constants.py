"""Write docs/calculator.json: what docs/calculator.js computes with, from the package itself."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thinwire.advice import planned_steps as planned
from thinwire.advice.losses import (
    EXACT,
    LOW_RANK,
    MAX_TIMES_LARGER,
    NOISE_PERCENT,
    known_optimizers,
    loss_gaps,
    priced,
)
from thinwire.algorithms import Algorithm, AllReduce, PowerSGD, Quantize, TopK
from thinwire.tensors.coded import block_bytes

PAGE = Path(__file__).parents[1] / "docs" / "calculator.json"
GAP = ("name", "optimizer", "members", "parameters", "steps", "seeds", "percent", "is_recurrent")


def bytes_of(algorithm: Algorithm) -> dict[str, Any]:
    """Return what an algorithm's bytes follow from."""
    if isinstance(algorithm, Quantize):
        size = block_bytes(algorithm.block, algorithm.bits)
        return {"kind": "blocks", "block": algorithm.block, "block_bytes": size}
    if isinstance(algorithm, PowerSGD):
        pairs = algorithm.factor_pairs
        return {"kind": "factors", "matrix_rank": algorithm.matrix_rank, "factor_pairs": pairs}
    return {"kind": "whole", "element_bytes": 4 if isinstance(algorithm, AllReduce) else 2}


def constants() -> dict[str, Any]:
    """Return all of them."""
    ways = [
        {
            "name": code,
            "measured_as": str(variant.algorithm),
            "loses_more_than": variant.loses_more_than,
            "loses_less_than": variant.loses_less_than,
            "keeps_16_bits": variant.keeps_16_bits,
            "arithmetic_seconds": planned.ARITHMETIC_SECONDS[code],
            **bytes_of(variant.algorithm),
        }
        for code, variant in priced().items()
        if not isinstance(variant.algorithm, TopK)  # its losses are not known in most runs
    ]
    return {
        "blocks_share": planned.BLOCKS_SHARE,
        "forward_share": planned.FORWARD_SHARE,
        "bucket_bytes": [planned.FIRST_BUCKET_BYTES, planned.BUCKET_BYTES],
        "moment": planned.MOMENT,
        "least_gain": planned.LEAST_GAIN,
        "budget_percent": 1.0,
        "noise_percent": NOISE_PERCENT,
        "low_rank": LOW_RANK,
        "max_times_larger": MAX_TIMES_LARGER,
        "exact": EXACT,
        "optimizers": known_optimizers(),
        "ways": ways,
        "gaps": [{field: asdict(gap)[field] for field in GAP} for gap in loss_gaps()],
    }


if __name__ == "__main__":
    PAGE.write_text(json.dumps(constants(), indent=1) + "\n")
