"""Several processes on a machine: what `attach` says of it, and the table of docs/choosing.md."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from pool import Pool
from thinwire import Cast, PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm
from thinwire.fronts.machines import card_bytes
from thinwire.plan import ParameterSpec

CHOOSING = Path(__file__).parents[2] / "docs" / "choosing.md"
ROWS: list[Algorithm] = [
    Cast("bf16"), Quantize(bits=8), Quantize(bits=4), Quantize(bits=2), TopK(density=1 / 64),
]  # fmt: skip


def test_the_page_has_what_leaves_a_machine() -> None:
    table = CHOOSING.read_text().partition("with 1 process each |")[2].partition("\n\n")[0].splitlines()[2:]
    spec = ParameterSpec.of("weight", torch.empty(4096, 1024))
    for algorithm, line in zip(ROWS, table, strict=True):
        assert f"`{type(algorithm).__name__}(" in line
        expected = []
        for machines in (2, 4):
            for per_machine in (1, 2, 4, 8):
                plan = algorithm.prepare([spec], num_members=machines * per_machine)
                message = sum(route.message_bytes for route in plan.routes) / spec.numel
                sent = card_bytes(message, algorithm.travels_by, machines, per_machine)
                expected.append(f"{sent:.2f}")
        assert re.findall(r"\d\.\d\d", line) == expected


@pytest.mark.parametrize("per_machine", [1, 2, 4])
def test_an_exchange_is_counted_pair_by_pair(per_machine: int) -> None:
    """Each process sends a slice to each on other machines; then means go round a ring, and leave once."""
    machines, message = 3, 720.0
    members = machines * per_machine
    pairs = [(a, b) for a in range(members) for b in range(members) if a // per_machine != b // per_machine]
    from_first = sum(a < per_machine for a, _ in pairs) * message / members
    ring = message / members * (members - 1)
    assert card_bytes(message, "exchange", machines, per_machine) == pytest.approx(from_first + ring)
    assert card_bytes(message, "sum", machines, per_machine) == pytest.approx(2 * ring)


def test_attach_warns_once_where_processes_share_a_card(pool4: Pool) -> None:
    told = pool4.run(_told)
    assert len(told) == 4
    assert [len(messages) for messages in told] == [2, 0, 0, 0]
    of_bits, of_entries = told[0]
    assert "here 2 machines have 2 processes each" in of_bits
    assert "sends 31 % of what 16 bits would take, and 27 % with one process on each machine" in of_bits
    assert of_entries.startswith("TopK(density=0.015625")


def _told() -> list[str]:
    """What attaching says: on two machines of two, then where none is to be said."""
    one_a_machine = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    cases: list[tuple[str, Algorithm, dist.ProcessGroup | None]] = [
        ("2", Quantize(bits=4), None),
        ("2", TopK(), None),
        ("2", PowerSGD(), None),
        ("2", Quantize(bits=4), one_a_machine),
        ("4", Quantize(bits=4), None),
        ("1", Quantize(bits=4), None),
    ]
    messages = []
    for local, algorithm, group in cases:
        with patch.dict(os.environ, LOCAL_WORLD_SIZE=local), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = DistributedDataParallel(nn.Linear(256, 256), process_group=group)
            assert thinwire.attach(model, algorithm).plan.compression_ratio > 3
        messages += [str(each.message) for each in caught]
    return messages
