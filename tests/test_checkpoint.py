"""Checkpoints: every format, any number of processes, and damage."""

from __future__ import annotations

import math
import os
import resource
import sys
import tempfile
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel

import thinwire
from algorithms.test_conformance import assert_same_state, first_steps
from catalog import ENTRIES, Entry, Sums, averaged, buckets, random_gradients, resumed, spec
from processes import in_each_process
from thinwire import (
    AllReduce,
    CheckpointError,
    ConfigError,
    GradientSync,
    MissingExtraError,
    PowerSGD,
    StateError,
)
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.checkpoint import load, load_local, merge, save, save_local
from thinwire.comm import InProcessTransport
from thinwire.local_sgd.averager import DistributedState
from thinwire.local_sgd.groups.state_transfer import deserialize, serialize
from thinwire.simulation import Simulation
from training import flat, new_model, train

POWER = PowerSGD(matrix_rank=2)
WITH_FEEDBACK = [entry for entry in ENTRIES if entry.feedback]
FORMATS = ["sync.pt", "sync.safetensors"]


def assert_nothing_is_lost(first: Simulation, algorithm: Algorithm, num_workers: int, most: float) -> None:
    """Check that sum of results + final mean residual = sum of true means, across a restart."""
    sums = Sums()
    for seed in range(4):
        averaged(first, seed, sums)
    state = first.state_dicts()[0]
    assert state["error"]
    second = resumed(Simulation(algorithm, buckets(), num_workers=num_workers), state)
    for seed in range(4, 6):
        averaged(second, seed, sums)
    final = second.state_dicts()[0]
    assert final["step"] == 6
    assert isinstance(algorithm, AllReduce) == (final["error"] == ())
    assert sums.lost(second).norm() < most


@pytest.mark.parametrize(("entry", "num_workers"), [*zip(WITH_FEEDBACK, cycle([1, 3]))], ids=str)
def test_saved_by_two_and_resumed_by_others_nothing_is_lost(entry: Entry, num_workers: int) -> None:
    most = 1e-6 if entry.tolerance <= 1e-5 else entry.tolerance
    first = Simulation(entry.algorithm, buckets(), num_workers=2)
    assert_nothing_is_lost(first, entry.algorithm, num_workers, most)


@pytest.mark.parametrize(
    ("algorithm", "warning"),
    [
        (PowerSGD(matrix_rank=1), "2, here 1"),
        (PowerSGD(matrix_rank=5), "2, here 5"),
        (PowerSGD(matrix_rank=2, alternating=True), ""),
        (BatchedPowerSGD(), ""),
        (AllReduce(), ""),
    ],
)
@pytest.mark.filterwarnings("default")
def test_another_matrix_rank_or_algorithm_takes_the_residual_over(
    algorithm: Algorithm, warning: str, recwarn: pytest.WarningsRecorder
) -> None:
    assert_nothing_is_lost(Simulation(POWER, buckets(), num_workers=4), algorithm, 3, 1e-6)
    warned = {str(shown.message) for shown in recwarn.list}
    assert len(warned) == (1 if warning else 0)
    assert all(warning in message and "No residual is lost" in message for message in warned)


def test_parameters_added_or_removed() -> None:
    state = trained_state()
    whole = resumed(Simulation(POWER, buckets(), num_workers=2), state)
    part = Simulation(POWER, buckets()[:1], num_workers=2)
    with pytest.raises(StateError, match=r"this model does not train conv\.weight, empty, tiny\.weight;"):
        part.syncs[0].load_state_dict(state)
    for sync in part.syncs:
        sync.load_state_dict(state, strict=False)
    kept = part.state_dicts()[0]
    assert [name for name, _ in kept["error"]] == ["body.weight", "head.weight"]
    assert part.step(random_gradients(buckets()[:1], num_workers=2, seed=5))
    with pytest.raises(StateError, match=r"model: the state has no conv\.weight, empty, tiny"):
        whole.syncs[0].load_state_dict(kept)
    for sync in whole.syncs:
        sync.load_state_dict(kept, strict=False)
    assert [name for name, _ in whole.state_dicts()[0]["error"]] == ["body.weight", "head.weight"]
    other = Simulation(POWER, [(spec("scalar"),)], num_workers=1)
    with pytest.raises(StateError, match=r"load the state of the same model$"):
        other.syncs[0].load_state_dict(state)  # strict=False would load none
    reshaped = [(buckets()[0][0]._replace(shape=(32, 64)), *buckets()[0][1:])]
    with pytest.raises(StateError, match=r"head.weight has shape \(64, 32\) in the state and \(32, 64\)"):
        Simulation(POWER, reshaped, num_workers=1).syncs[0].load_state_dict(state, strict=False)


@cache
def trained_state() -> dict[str, Any]:
    simulation = Simulation(POWER, buckets(), num_workers=2)
    for seed in range(3):
        averaged(simulation, seed)
    return simulation.state_dicts()[0]


@pytest.fixture(params=FORMATS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where a state is saved, of either format, in a folder of its own."""
    folder = tmp_path / "saved"
    folder.mkdir()
    return folder / str(request.param)


@pytest.fixture
def state(path: Path) -> dict[str, Any]:
    """What is saved there."""
    trained, before = trained_state(), os.umask(0o027)
    save(trained, path)
    os.umask(before)
    return trained


def test_written_and_read_it_is_the_same(path: Path, state: dict[str, Any]) -> None:
    assert os.listdir(path.parent) == [path.name]
    assert path.stat().st_mode & 0o777 == 0o640  # as the umask has it
    assert_same_state(load(str(path)), state)
    resumed(Simulation(POWER, buckets(), num_workers=3), load(path))


def test_torchs_own_settings_change_nothing(tmp_path: Path) -> None:
    config = pytest.importorskip("torch.utils.serialization.config", reason="torch 2.6 has none")
    averager = Mock(has_state=True, state_dict=lambda: {"step": 3})
    with config.patch({"save.compute_crc32": False, "load.mmap": True}):
        save(trained_state(), tmp_path / "sync.pt")
        assert_same_state(load(tmp_path / "sync.pt"), trained_state())
        DistributedState(averager).load_state_dict(DistributedState(averager).state_dict())
        assert deserialize(serialize({"step": 3})) == averager.load_state_dict.call_args.args[0]


def test_what_is_no_state_is_not_written_and_leaves_the_old_file(path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(StateError, match="made by state_dict"):
        save({"model": 1}, path)
    with pytest.raises(ConfigError, match=r"path must be that of a file, got '\.'"):
        save(state, "")
    assert_same_state(load(path), state)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nowhere.pt")
    for name in FORMATS:
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(StateError, match=f"{name} can't be read: it is empty; load an earlier file"):
            load(tmp_path / name)
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(StateError, match="expected a state made by state_dict"):
        load(tmp_path / "model.pt")


def test_a_save_within_another_to_the_same_path(
    path: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What two processes may do to each other, at its worst moment."""
    second = resumed(Simulation(POWER, buckets(), num_workers=1), state).state_dicts()[0]
    flush_to_disk, loaded = os.fsync, []

    def meanwhile(number: int) -> None:
        monkeypatch.setattr(os, "fsync", flush_to_disk)
        save(second, path)
        loaded.append(load(path))
        flush_to_disk(number)

    monkeypatch.setattr(os, "fsync", meanwhile)
    save(state, path)
    assert_same_state(loaded[0], second)
    assert_same_state(load(path), state)
    assert os.listdir(path.parent) == [path.name]


def test_a_file_that_is_replaced_while_it_is_loaded_is_read_to_its_end(
    path: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced, other = [], path.with_name(f"other {path.name}")
    save(resumed(Simulation(AllReduce(), buckets(), num_workers=1), state).state_dicts()[0], other)
    open_file = Path.open

    def then_replaced(self: Path, *options: Any) -> Any:
        file = open_file(self, *options)
        replaced.append(other.replace(path))
        return file

    monkeypatch.setattr(Path, "open", then_replaced)
    assert_same_state(load(path), state)
    assert replaced == [path]


def test_a_disk_that_is_full_is_told_and_leaves_the_old_file(path: Path, state: dict[str, Any]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(
            CheckpointError, match=f"{path.name} can't be written: File too large; .* free space"
        ):
            save(state, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(CheckpointError, match=r"nowhere/.* can't be written: No such file or directory"):
        save(state, path.parent / "nowhere" / path.name)
    assert_same_state(load(path), state)
    assert os.listdir(path.parent) == [path.name]


def test_safetensors_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = trained_state()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(MissingExtraError, match=r"pip install '.\[safetensors\]' in a clone"):
        save(state, tmp_path / "sync.safetensors")


@cache
def written(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        save(trained_state(), Path(folder, name))
        return Path(folder, name).read_bytes()


@pytest.mark.parametrize("damage", ["truncated", "a flipped bit", "a torn page"])
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), junk=st.binary(min_size=1, max_size=4096))
def test_a_damaged_file_is_refused_or_is_the_same(name: str, damage: str, place: float, junk: bytes) -> None:
    """Whole or not at all; but safetensors' format does not tell one number from a different one."""
    data = bytearray(written(name))
    start = math.floor(place * len(data))
    if damage == "truncated":
        del data[start:]
    elif damage == "a flipped bit":
        data[start] ^= 1 << junk[0] % 8
    else:
        data[start : start + len(junk)] = junk[: len(data) - start]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(data)
        try:
            loaded = load(path)
        except StateError:
            return
        assert damage != "truncated"
        if name == "sync.pt":
            assert_same_state(loaded, trained_state())


def attached(algorithm: Algorithm = POWER) -> tuple[DistributedDataParallel, GradientSync]:
    model = DistributedDataParallel(new_model(), bucket_cap_mb=0.005)
    return model, thinwire.attach(model, algorithm)


def trained(model: nn.Module, steps: range) -> Tensor:
    """The parameters after some steps."""
    train(model, torch.optim.SGD(model.parameters(), lr=0.05), steps)
    return flat(model)


@pytest.mark.parametrize("asynchronous", [False, True])
@in_each_process(2)
def test_distributed_checkpoint_resumes_to_the_bit(asynchronous: bool, tmp_path: Path) -> None:
    model, sync = attached()
    trained(model, range(4))
    # Copies: of what is on the CPU torch 2.6 makes none before training goes on.
    parameters = {name: each.clone() for name, each in model.module.state_dict().items()}
    saving = {"model": parameters, "sync": sync}
    if asynchronous:
        group = dist.new_group()  # its own: it is used by another thread while training goes on
        future: Any = dcp_async_save(saving, checkpoint_id=tmp_path / "dcp", process_group=group)
        straight = trained(model, range(4, 8))
        future.result()
    else:
        dcp_save(saving, checkpoint_id=tmp_path / "dcp")
        straight = trained(model, range(4, 8))
    assert sync.stats().compression_ratio > 4
    for is_forgetful in (False, True):
        other, its = attached()
        loading = {"model": other.module} if is_forgetful else {"model": other.module, "sync": its}
        dcp_load(loading, checkpoint_id=tmp_path / "dcp")
        assert torch.equal(trained(other, range(4, 8)), straight) == (not is_forgetful)


@in_each_process(2)
def test_bases_of_a_distributed_checkpoint_start_again(tmp_path: Path) -> None:
    """It loads only what a fresh run lists, and lists what it has not loaded."""
    (model, sync), (_, other) = (attached(thinwire.Quantize(bits=4, eigenbasis="*")) for _ in range(2))
    trained(model, range(2))
    dcp_save({"sync": sync}, checkpoint_id=tmp_path / "dcp")
    dcp_load({"sync": other}, checkpoint_id=tmp_path / "dcp")
    assert (other.steps, bool(other.state_dict().get("covariance"))) == (2, False)


@pytest.mark.parametrize(("entry", "per_machine"), [*zip(WITH_FEEDBACK, cycle([2, 1]))], ids=str)
def test_what_each_process_saves_for_itself_goes_on_to_the_bit(
    entry: Entry, per_machine: int, tmp_path: Path
) -> None:
    simulation, resuming = (
        Simulation(entry.algorithm, buckets(), num_workers=2 * per_machine, workers_per_machine=per_machine)
        for _ in range(2)
    )
    for seed in first_steps(entry):
        averaged(simulation, seed)
    with patch.object(InProcessTransport, "start", side_effect=AssertionError("a message")):
        for sync in simulation.syncs:
            save_local(sync, tmp_path)
    for sync in resuming.syncs:
        load_local(sync, tmp_path)
    for seed in (8, 9):
        assert all(map(torch.equal, averaged(resuming, seed), averaged(simulation, seed)))
    for state, again in zip(simulation.state_dicts(), resuming.state_dicts(), strict=True):
        assert_same_state(state, again)


def test_local_states_of_other_layouts_runs_and_steps_are_refused(tmp_path: Path) -> None:
    simulation = Simulation(POWER, buckets(), num_workers=2)
    averaged(simulation, 0)
    states = [sync.local_state_dict() for sync in simulation.syncs]
    with pytest.raises(StateError, match="saved by process 1 of 2, 1 a machine, but this is process 0 of 2"):
        simulation.syncs[0].load_state_dict(states[1])
    with pytest.raises(StateError, match=r"the states of all processes, got those of ranks 0 of 2;"):
        merge(states[:1])
    averaged(simulation, 1)
    with pytest.raises(StateError, match="from different steps or runs"):
        merge([states[0], simulation.syncs[1].local_state_dict()])
    with pytest.raises(StateError, match="process 3 of 2"):
        simulation.syncs[0].load_state_dict(states[0] | {"layout": states[0]["layout"] | {"rank": 3}})
    with pytest.raises(StateError, match="contains no file from save_local"):
        load_local(simulation.syncs[0], tmp_path)
    for sync in Simulation(POWER, buckets(), num_workers=3).syncs[1:]:
        save_local(sync, tmp_path)
    with patch("torch.save", side_effect=OSError), pytest.raises(CheckpointError):
        save_local(simulation.syncs[0], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"thinwire_1.pt", "thinwire_2.pt"}
    torch.save(states[0] | {"layout": {}}, tmp_path / "thinwire_0.pt")
    with pytest.raises(StateError, match="can't be read, KeyError: 'rank'"):
        load_local(simulation.syncs[0], tmp_path)
    save_local(simulation.syncs[0], tmp_path)
    assert len(list(tmp_path.iterdir())) == 2  # the third of three is removed
    (tmp_path / "thinwire_1.pt").unlink()
    with pytest.raises(StateError, match=r"the states of all processes, got those of ranks 0 of 2;"):
        load_local(simulation.syncs[1], tmp_path)
