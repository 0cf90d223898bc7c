"""Records of earlier formats, in today's words: the one place that knows them."""

from __future__ import annotations

from typing import Any

from thinwire.foreign import field_of, list_of, whole_number_of


def brought_up_to_date(record: dict[str, Any]) -> None:
    """Rename, in place, what earlier formats called otherwise.

    Format 1 called steps that were not finite skipped ones. Up to format 2, a parameter's way was
    described by the shape and the rank of a matrix, null where it was not compressed.

    Args:
        record: As read; not checked yet.

    Raises:
        ValueError: A field of an earlier format is not what it was.
    """
    if record["kind"] == "step" and "skipped_steps" in record:
        record["nonfinite_steps"] = record.pop("skipped_steps")
    if record["kind"] == "plan":
        for route in list_of("routes", field_of(record, "routes")):
            if isinstance(route, dict) and "matrix_shape" in route:
                route.update(_in_todays_words(route))


def _in_todays_words(route: dict[str, Any]) -> dict[str, Any]:
    if route["matrix_shape"] is None:
        return {"detail": "uncompressed", "is_compressed": False}
    shape = [
        whole_number_of("matrix_shape", each) for each in list_of("matrix_shape", route["matrix_shape"], 2, 2)
    ]
    matrix_rank = whole_number_of("matrix_rank", field_of(route, "matrix_rank"))
    return {"detail": f"{shape[0]}×{shape[1]}, rank {matrix_rank}", "is_compressed": True}
