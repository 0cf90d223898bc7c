"""The plan: which parameter travels how."""

from __future__ import annotations

import pytest
import torch

from catalog import low_rank_routes, spec
from thinwire import AllReduce, ConfigError, PowerSGD
from thinwire.plan import ParameterSpec, Plan


@pytest.mark.parametrize(
    ("tensor", "matrix_shape"),
    [
        (torch.zeros(()), None),
        (torch.zeros(5), None),
        (torch.zeros(0, 5), None),
        (torch.zeros(8, 5), (8, 5)),
        (torch.zeros(5, 8).t(), (5, 8)),
        (torch.zeros(8, 4, 3, 2), (8, 24)),
        (torch.zeros(8, 4, 3, 2).to(memory_format=torch.channels_last), (8, 24)),
        (torch.zeros(8, 1, 3, 3), (8, 9)),
        (torch.zeros(1, 8, 3), (8, 3)),
        (torch.zeros(1, 1), (1, 1)),
        (torch.zeros(8, 10)[:, ::2], (8, 5)),
        (torch.zeros(8, 1).expand(8, 5), (8, 5)),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "",
)
def test_matrix_shapes(tensor: torch.Tensor, matrix_shape: tuple[int, int] | None) -> None:
    assert ParameterSpec.of("p", tensor).matrix_shape == matrix_shape


@pytest.mark.parametrize(
    ("shape", "matrix_rank", "ratio", "compressed_at"),
    [
        ((64, 64), 1, 2, 1),
        ((64, 64), 16, 2, None),  # (64 + 64) · 16 · 2 = 64 · 64: not above
        ((64, 64), 15, 2, 15),
        ((64, 64), 4, 10, None),
        ((1_000, 3), 1, 2, 1),
        ((1_000, 3), 8, 0.1, 3),
        ((3, 3), 1, 2, None),
    ],
)
def test_what_is_worth_compressing(
    shape: tuple[int, int], matrix_rank: int, ratio: float, compressed_at: int | None
) -> None:
    algorithm = PowerSGD(matrix_rank=matrix_rank, min_compression_ratio=ratio)
    (route,) = low_rank_routes(algorithm.plan([spec("p", *shape)]))
    assert route.matrix_rank == compressed_at


def test_prints_as_a_table() -> None:
    specs = [spec("encoder.weight", 512, 256), spec("encoder.bias", 512), spec("logit_scale")]
    expected = """\
parameter            travels as  bytes before  bytes after
encoder.weight  512×256, rank 4       524,288       12,288
encoder.bias       uncompressed         2,048        2,048
logit_scale        uncompressed             4            4
total                                 526,340       14,340
compression ratio 36.7 (of each process), 2 rounds a step"""
    assert str(PowerSGD(matrix_rank=4).plan(specs)) == expected


def test_half_precision_factors_and_passengers_travel_as_fp32_and_a_plan_may_be_empty() -> None:
    specs = [spec("w", 64, 64, dtype=torch.bfloat16), spec("b", 64, dtype=torch.bfloat16)]
    routes = PowerSGD(matrix_rank=1).plan(specs).routes
    assert [route.gradient_bytes for route in routes] == [2 * 64 * 64, 2 * 64]
    assert [route.message_bytes for route in routes] == [4 * 128, 4 * 64]
    assert AllReduce().plan([]).compression_ratio == 1.0
    assert "total" in str(Plan(()))


@pytest.mark.parametrize("name", ["first … last", "experts @ shard 0.weight"])
def test_a_name_that_saved_states_could_not_tell_apart_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"parameter '{name}' has.*rename"):
        ParameterSpec.of(name, torch.zeros(2))
