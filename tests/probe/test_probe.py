"""`thinwire probe`: what it finds in networks of known rates, and what it does with bad input."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

import thinwire
from advice.ways import network
from commands import run_all
from processes import Typed, in_each_process
from test_lab import real, undisturbed
from thinwire.cli.probe import describe_streams, show
from thinwire.comm import ProcessGroupTransport
from thinwire.errors import AgreementError, ConfigError
from thinwire.lab import LinkSpec, Network
from thinwire.launch import group_of_one
from thinwire.probe import PairTiming, Probe, Timing, probe
from thinwire.probe.prober import Prober, compare_streams
from training import told_by_all


def probed(network: Network, path: Path, budget_seconds: float) -> tuple[Probe, str]:
    """The probe and what it printed, in the lab."""
    with network:
        options = [f"--budget-seconds={budget_seconds}", f"--save={path}"]
        environments = [network.environment(rank) for rank in range(network.processes)]
        entering = [
            network.command_in(rank // network.processes_per_machine) for rank in range(network.processes)
        ]
        namespaces = [[flag.partition("=")[2] for flag in flags if "/ns/" in flag] for flags in entering]
        ended = run_all(("thinwire", "probe", *options), environments, namespaces=namespaces)
    assert [process.returncode for process in ended] == [0] * network.processes, ended
    return Probe.load(path), ended[0].stdout


@real
@pytest.mark.alone
@pytest.mark.parametrize(
    ("network", "bits", "nodes", "budget_seconds"),
    [
        (Network(2, LinkSpec("100mbit")), 100e6, [[0, 1]], 3),
        (Network(2, LinkSpec("1gbit")), 1e9, [[0, 1]], 4),
        (Network(2, LinkSpec("100mbit"), processes_per_machine=2), 100e6, [[0, 1], [2, 3]], 5),
    ],
    ids=["100mbit", "1gbit", "machines of two"],
)
def test_links_of_a_known_rate(
    network: Network, bits: float, nodes: list[list[int]], budget_seconds: float, tmp_path: Path
) -> None:
    expected = pytest.approx(bits / 8, rel=0.15)
    found, printed = undisturbed(
        lambda: probed(network, tmp_path / "probe.json", budget_seconds),
        lambda measured: measured[0].nodes == nodes and measured[0].bytes_per_second == expected,
    )
    assert (found.world_size, found.nodes) == (network.processes, nodes)
    assert found.bytes_per_second == expected
    assert "bandwidth" in printed
    assert ("structure  {0, 1}, {2, 3}: " in printed) == (len(nodes) > 1)
    if len(nodes) > 1:
        assert len(found.pairs) == 6
        inside, between = (found.pair_bytes_per_second(inside=inside) for inside in (True, False))
        assert inside is not None
        assert between is not None
        assert inside > 2 * between


@in_each_process(2)
def test_it_is_the_same_on_every_process_and_in_time() -> None:
    with pytest.raises(AgreementError, match="budget_seconds"):
        probe(budget_seconds=1.0 + dist.get_rank())
    found = probe(budget_seconds=1.5)
    assert told_by_all(found) == [found] * 2
    assert found.world_size == dist.get_world_size() == 2
    assert found.backend == "gloo"
    sizes = [timing.message_bytes for timing in found.timings]
    assert sizes == sorted(sizes)
    assert len(sizes) >= 2
    assert found.pairs[0].processes == (0, 1)
    assert found.latency_seconds > 0
    assert found.wire_factors.keys() == {"all_gather", "all_to_all"}
    assert min(found.wire_factors.values()) >= 1
    assert found.average_seconds(sizes[1]) == found.timings[1].median_seconds
    assert found.hosts == [gethostname()] * 2


def test_a_budget_of_nothing_and_a_single_process_are_refused() -> None:
    with group_of_one():
        for budget in (0, math.nan, math.inf):
            with pytest.raises(ConfigError, match="must be above 0 and finite"):
                probe(budget_seconds=budget)
        with pytest.raises(ConfigError, match="at least 2, got 1"):
            probe(budget_seconds=1)


@in_each_process(2)
def test_a_budget_too_small_to_tell_the_rate_is_told() -> None:
    """Here all messages take equally long."""
    with patch.object(Prober, "average_once", lambda prober, *messages: 0.001):
        found = probe(budget_seconds=1e-4)
    assert [timing.message_bytes for timing in found.timings] == [4, 1024]
    assert found.bytes_per_second is None
    assert (found.pairs[0].message_bytes, found.average_seconds(1024)) == (1024, 0.001)
    assert Probe.from_json(found.to_json()) == found
    needs_rate: list[Callable[[], object]] = [
        lambda: found.average_seconds(1025),
        lambda: thinwire.advise(torch.nn.Linear(2, 2), lambda model: None, found),
    ]
    for call in needs_rate:
        with pytest.raises(ConfigError, match="the link's rate is not known: 1,024 bytes were not"):
            call()
    assert "bandwidth  not known: a larger --budget-seconds sends larger messages" in shown(found)
    assert "inf" not in shown(found)


def test_a_late_process_that_waits_for_little_does_not_change_the_factors() -> None:
    """10 Mbit/s and a round trip of 20 ms: 64 KiB are almost there when the late one, the last, starts."""
    prober = Prober(cast(ProcessGroupTransport, SimpleNamespace(size=2, rank=0)), torch.device("cpu"))
    kinds = iter([(0.062, 0.005)] * 5 + [(0.063, 0.01)] * 5 + [(0.124, 0.124)] * 5)
    with patch.object(prober, "seconds_of", lambda *unused: list(next(kinds))):
        factors = prober.time_collectives([Timing(4, [0.01]), Timing(1 << 16, [0.06])], 2.5)
    assert factors == {"all_gather": pytest.approx(63 / 62), "all_to_all": 2}


def shown(found: Probe) -> str:
    output = StringIO()
    show(found, Console(file=output, width=200))
    return output.getvalue()


def test_the_rate_is_told_by_messages_that_differ_for_sure() -> None:
    """The second largest took as long as the largest now and then: what the machine did besides."""
    noisy = [Timing(3000, [0.004, 0.005, 0.009]), Timing(9000, [0.008, 0.008, 0.008])]
    found = replace(example(), timings=[*example().timings[:2], *noisy])
    assert found.bytes_per_second == pytest.approx(8000 / 0.005)


def test_outside_of_a_job_it_says_in_one_line_how_to_start_it(typed: Typed) -> None:
    done = typed("probe", "--json")
    assert "torchrun --nproc-per-node 2 --no-python thinwire probe" in done.stderr
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")


def example() -> Probe:
    timings = [Timing(4, [0.001]), Timing(1000, [0.002, 0.004]), Timing(3000, [0.005])]
    return Probe(2, "gloo", "cpu", timings, [PairTiming((0, 1), 1000, 0.01)], [[0, 1]])


# As 0.2.0 wrote it.
RELEASED = """{"version": 1, "world_size": 2, "backend": "gloo", "device": "cpu", "timings": [
{"message_bytes": 4, "seconds": [0.001]}, {"message_bytes": 1000, "seconds": [0.002, 0.004]},
{"message_bytes": 3000, "seconds": [0.005]}], "pairs": [{"processes": [0, 1], "message_bytes": 1000,
"seconds": 0.01}], "nodes": [[0, 1]], "wire_factors": {"all_to_all": 2.0}, "hosts": ["one", "other"]}"""


def test_a_file_of_the_last_release_is_read_and_so_is_what_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_text(RELEASED)
    read = Probe.load(path)
    assert read == replace(example(), wire_factors={"all_to_all": 2.0}, hosts=["one", "other"])
    read.save(str(path))
    assert Probe.load(str(path)) == read


def test_between_sizes_it_is_linear() -> None:
    assert example().bytes_per_second == pytest.approx(2000 / 0.002)
    seconds = [example().average_seconds(size) for size in (1, 2000, 5000)]
    assert seconds == pytest.approx([0.001, 0.004, 0.007])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": 2}, "version 2, expected 1"),
        ({"timings": []}, "timings must be two or more"),
        ({"timings": 2 * [{"message_bytes": 4, "seconds": [1.0]}]}, "timings must be .* of ascending"),
        ({"timings": [{"message_bytes": 4}]}, "a field is missing or of a wrong type: .*'seconds'"),
        ({"timings": [{"message_bytes": 4, "seconds": [math.nan]}]}, "seconds must be a number .*, got nan"),
        ({"nodes": [[0, "1"]]}, "a process must be a whole number"),
        ({"hosts": ["one", "\x1b[2J"]}, r"'.x1b\[2J' is no name"),
        ({"wire_factors": {"all_gather": 0.5}}, "wire_factors must be a number of at least 1"),
    ],
)
def test_what_is_no_probe_is_refused(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    path, whole = tmp_path / "probe.json", example().to_json()
    with pytest.raises(ConfigError, match=r"probe\.json can't be read: No such file .*; give a saved probe"):
        Probe.load(path)
    changed_text = json.dumps(json.loads(whole) | changed)
    for text, reason in (("", ""), ("[]", ""), (whole[:99], "measure again"), (changed_text, message)):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"is not what `thinwire probe --save` writes.*{reason}"):
            Probe.load(path)


@in_each_process(2)
def test_connections_are_compared_and_the_fewest_that_are_as_good_are_told() -> None:
    with patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "lo"}):
        rates = compare_streams([1, 3], network(1e6))
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert sorted(rates) == [1, 3]
    assert min(rates.values()) > 1e6
    assert describe_streams({1: 97e6, 4: 153e6, 8: 162e6}) == (
        "connections 97 Mbit/s by 1, 153 Mbit/s by 4, 162 Mbit/s by 8, eight averagings in flight: set "
        "GLOO_SOCKET_IFNAME=eth0,eth0,eth0,eth0 (your interface, 4 times) on every machine"
    )
    assert describe_streams({1: 167e6, 8: 169e6}).endswith("one is enough")
