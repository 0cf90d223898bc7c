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
)
from thinwire.advice.priced import TABLE, InBlocks, InFactors, Priced, WholeElements

PAGE = Path(__file__).parents[1] / "docs" / "calculator.json"
GAP = ("name", "optimizer", "members", "parameters", "steps", "seeds", "percent", "is_recurrent")


def bytes_of(row: Priced) -> dict[str, Any] | None:
    """Return what an algorithm's bytes follow from; None for one whose losses are mostly not known."""
    match row.format:
        case WholeElements(element_bytes):
            return {"kind": "whole", "element_bytes": element_bytes}
        case InBlocks(block=block, block_bytes=size):
            return {"kind": "blocks", "block": block, "block_bytes": size}
        case InFactors(matrix_rank, factor_pairs=pairs):
            return {"kind": "factors", "matrix_rank": matrix_rank, "factor_pairs": pairs}
    return None


def constants() -> dict[str, Any]:
    """Return all of them."""
    ways = [
        {
            "name": row.name,
            "measured_as": row.measured_as,
            "loses_more_than": row.loses_more_than,
            "loses_less_than": row.loses_less_than,
            "keeps_16_bits": row.keeps_16_bits,
            "arithmetic_seconds": row.arithmetic_seconds,
            **sizes,
        }
        for row in TABLE
        if (sizes := bytes_of(row)) is not None
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
