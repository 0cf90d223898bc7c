"""PowerSGD of whole matrices, of which each member has the rows of a shard: members in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from catalog import spec
from thinwire import PowerSGD
from thinwire.algorithms import Commit, Requests, ShardSum
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.lowrank.slots import FACTOR
from thinwire.channel import InProcessTransport, run_members
from thinwire.errors import ConfigError
from thinwire.plan import Cut, ParameterSpec
from thinwire.simulation import Simulation
from thinwire.sync import Engine, Settings
from thinwire.sync.exchange import Exchange

REPLICAS, SHARDS, STEPS = 2, 3, 4

# Rows of the shards: 9, 9 and 8; 2, 2 and none, of which the rank of a shard's own rows would be 2 at most.
SHAPES = {"uneven": (26, 24), "empty": (4, 40), "row": (1, 3), "vector": (5,)}
LONG = 4  # bytes of an fp32 number


def wholes(dtype: torch.dtype) -> list[ParameterSpec]:
    return [spec(name, *shape)._replace(dtype=dtype) for name, shape in SHAPES.items()]


def rows_of(cut: Cut) -> slice:
    return slice(min(cut.shard * cut.height, cut.shape[0]), min((cut.shard + 1) * cut.height, cut.shape[0]))


def shards_of(dtype: torch.dtype, shard: int) -> tuple[ParameterSpec, ...]:
    specs = []
    for whole in wholes(dtype):
        cut = Cut(whole.shape, shard, SHARDS)
        part = torch.empty(whole.shape, dtype=dtype)[rows_of(cut)]
        specs.append(ParameterSpec.of(whole.name, part)._replace(cut=cut))
    return tuple(specs)


def gradient(replica: int, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
    }


def of_whole_matrices(algorithm: PowerSGD, dtype: torch.dtype) -> tuple[list[dict[str, Tensor]], Engine]:
    simulation = Simulation(algorithm, [tuple(wholes(dtype))], num_workers=REPLICAS)
    means = []
    for step in range(STEPS):
        flats = [
            torch.cat([each.flatten() for each in gradient(replica, step, dtype).values()])
            for replica in range(REPLICAS)
        ]
        simulation.step([[flat] for flat in flats])
        sizes = [whole.numel for whole in wholes(dtype)]
        parts = flats[0].split_with_sizes(sizes)
        means.append({w.name: part.view(w.shape) for w, part in zip(wholes(dtype), parts, strict=True)})
    return means, simulation.engines[0]


def of_shards(algorithm: PowerSGD, dtype: torch.dtype, host_check: bool = True) -> list[Any]:
    """Return of each member (replica by replica) its means by step, as it has them, and its engine."""
    between = [InProcessTransport.group(REPLICAS) for _ in range(SHARDS)]
    inside = [InProcessTransport.group(SHARDS) for _ in range(REPLICAS)]

    def body(rank: int) -> tuple[list[dict[str, Tensor]], Engine]:
        replica, shard = divmod(rank, SHARDS)
        specs = shards_of(dtype, shard)
        settings = Settings(together=inside[replica][shard], host_check=host_check)
        engine = Engine(algorithm, between[shard][replica], specs, settings)
        means = []
        for step in range(STEPS):
            whole = gradient(replica, step, dtype)
            own = [whole[each.name][rows_of(each.cut)] for each in specs if each.cut is not None]
            flat = torch.cat([each.flatten() for each in own])
            engine.average([(specs, flat)])
            parts = flat.split_with_sizes([each.numel for each in specs])
            means.append({each.name: p.view(each.shape) for each, p in zip(specs, parts, strict=True)})
        return means, engine

    return run_members(REPLICAS * SHARDS, body)


def glued(members: list[Any], replica: int, step: int, name: str) -> Tensor:
    return torch.cat([members[replica * SHARDS + shard][0][step][name] for shard in range(SHARDS)])


@pytest.mark.parametrize(
    ("settings", "dtype", "tolerance"),
    [
        ({}, torch.float32, 1e-5),
        ({}, torch.float64, 1e-12),
        ({"power_iterations": 2, "warmup_steps": 1}, torch.float64, 1e-12),
        ({"wire_dtype": "bf16"}, torch.float32, 5e-2),
    ],
    ids=["fp32", "fp64", "two iterations", "bf16"],
)
def test_the_result_is_that_of_whole_matrices(
    settings: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    algorithm = PowerSGD(matrix_rank=3, min_compression_ratio=0, **settings)
    expected, whole = of_whole_matrices(algorithm, dtype)
    members = of_shards(algorithm, dtype)
    for step in range(STEPS):
        for name, mean in expected[step].items():
            found = glued(members, 0, step, name)
            assert torch.equal(found, glued(members, 1, step, name))
            assert (found - mean).norm() <= tolerance * mean.norm(), (step, name)
    errors = [
        torch.cat([engine.memory[ERROR]["uneven"] for _, engine in members[r * SHARDS : (r + 1) * SHARDS]])
        for r in range(REPLICAS)
    ]
    assert (errors[0] - whole.memory[ERROR]["uneven"]).norm() <= tolerance * errors[0].norm()
    factors = [engine.memory[FACTOR]["uneven"] for _, engine in members]
    assert all(torch.equal(factor, factors[0]) for factor in factors)
    assert (factors[0] - whole.memory[FACTOR]["uneven"]).norm() <= tolerance * factors[0].norm()


def test_a_replica_sends_two_factors_whatever_the_number_of_shards() -> None:
    algorithm = PowerSGD(matrix_rank=2, min_compression_ratio=0)
    members = of_shards(algorithm, torch.float32)
    sent = sum(engine.counts().message_bytes for _, engine in members[:SHARDS]) / STEPS
    factors = 2 * sum(SHAPES["uneven"] + SHAPES["empty"])
    others = sum(math.prod(SHAPES[name]) for name in ("row", "vector"))
    assert 0 <= sent - LONG * (factors + others) < LONG * SHARDS  # padded to equal parts
    planned = sum(engine.plan.message_bytes for _, engine in members[:SHARDS])
    assert abs(planned - sent) < LONG * SHARDS * len(SHAPES)
    assert sum(e.plan.gradient_bytes for _, e in members[:SHARDS]) == LONG * sum(
        map(math.prod, SHAPES.values())
    )


def test_a_shard_says_how_much_was_left_out_of_its_rows() -> None:
    members = of_shards(PowerSGD(matrix_rank=3, min_compression_ratio=0), torch.float64)
    for _, engine in members[:SHARDS]:
        assert 0.3 < engine.stats().relative_error["uneven"] < 1


def test_settings_that_need_a_matrix_on_one_process_are_refused() -> None:
    specs = shards_of(torch.float32, 0)
    for settings in ({"alternating": True}, {"bytes_per_step": 10_000}, {"max_relative_error": 0.5}):
        with pytest.raises(ConfigError, match="do not go with whole_matrices=True"):
            PowerSGD(**settings).check_model(specs)


def test_between_shards_only_where_there_are_some() -> None:
    def exchange() -> Requests:
        yield ShardSum(torch.zeros(2))
        yield Commit(lambda: torch.tensor(True))

    with pytest.raises(ConfigError, match="where no parameter is cut into shards"):
        Exchange(InProcessTransport.group(1)[0], "step 0").start(exchange(), "a")
