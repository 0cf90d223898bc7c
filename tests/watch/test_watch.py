"""`thinwire.Watch`: what is recorded, where it goes, what is read again, and when it warns."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import thinwire
from catalog import buckets, random_gradients, spec
from pool import Pool
from thinwire import ConfigError, MissingExtraError, PowerSGD, Watch, powersgd
from thinwire.algorithms import Algorithm, AllReduce, BucketPlan, Commit, Diagnosis, Mean
from thinwire.algorithms.error_feedback import ERROR
from thinwire.channel import Collective, InProcessTransport, Work
from thinwire.channel.metered import Wrapped
from thinwire.plan import Route
from thinwire.simulation import Simulation
from thinwire.sync import Engine, GradientSync, engine_of
from thinwire.watch import JSONLWriter, MetricsWriter, read_run, records
from thinwire.watch.watch import GrowthAlarm

STEPS = 6


class Kept:
    """A writer that keeps."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int, Mapping[str, Any]]] = []
        self.closed = False

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self.records.append((kind, step, values))

    def close(self) -> None:
        self.closed = True

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [values for each, _, values in self.records if each == kind]


def simulation(algorithm: Algorithm | None = None) -> Simulation:
    return Simulation(algorithm or PowerSGD(matrix_rank=2), buckets(), num_workers=2)


def train(simulated: Simulation, steps: range, bad_steps: tuple[int, ...] = ()) -> None:
    for step in steps:
        gradients = random_gradients(simulated.buckets, num_workers=len(simulated.syncs), seed=step)
        if step in bad_steps:
            gradients[0][0][0] = torch.nan
        simulated.step(gradients)


def test_the_records_add_up_to_the_stats() -> None:
    simulated, kept = simulation(), Kept()
    with Watch(simulated.syncs[0], kept, norms_every_steps=2):
        train(simulated, range(STEPS), bad_steps=(2,))
    assert kept.closed
    steps, stats = kept.of("step"), simulated.syncs[0].stats()
    assert len(steps) == STEPS
    for name in ("messages", "message_bytes", "gradient_bytes", "waiting_seconds"):
        assert sum(each[name] for each in steps) == pytest.approx(getattr(stats, name))
    assert stats.compression_ratio > 5
    assert [each["nonfinite_steps"] for each in steps] == [0, 0, 1, 0, 0, 0]
    assert sum(each["exposed_seconds"] for each in steps) == pytest.approx(stats.exposed_seconds)
    assert 0 < stats.exposed_seconds < steps[-1]["seconds"]
    assert 0 < stats.arithmetic_seconds < steps[-1]["seconds"]
    norms = kept.of("norms")
    assert [step for kind, step, _ in kept.records if kind == "norms"] == [2, 4, 6]
    assert norms[-1]["relative_error"] == stats.relative_error
    assert norms[-1]["error_norm"] == stats.error_norm
    for name, error in simulated.engines[0].memory[ERROR].items():
        assert stats.error_norm[name] == pytest.approx(error.norm().item())
    (plan,) = kept.of("plan")
    assert plan["algorithm"] == "PowerSGD(matrix_rank=2)"
    assert {route["label"] for route in plan["routes"]} == {
        route.label for route in simulated.syncs[0].plan.routes
    }


def test_a_record_of_several_steps_and_another_plan() -> None:
    simulated, kept = simulation(), Kept()
    with Watch(simulated.syncs[0], kept, every_steps=3):
        train(simulated, range(STEPS))
        for sync in simulated.syncs:
            sync.use(AllReduce())
        train(simulated, range(STEPS))
    assert [each["steps"] for each in kept.of("step")] == [3, 3, 3, 3]
    assert [each["algorithm"] for each in kept.of("plan")] == ["PowerSGD(matrix_rank=2)", "AllReduce()"]
    before = len(kept.records)
    train(simulated, range(1))
    assert len(kept.records) == before


def test_a_step_that_leaves_parameters_out_is_no_new_plan() -> None:
    kept, specs = Kept(), [spec(name, 64, 32) for name in "abc"]
    engine = Engine(PowerSGD(matrix_rank=2), InProcessTransport.group(1)[0], specs)
    used: list[str] = ["ab", "a", "b", "abc", "c", "ac", "a"]
    with Watch(GradientSync(engine), kept):
        for names in used:
            bucket = tuple(each for each in specs if each.name in names)
            engine.average([(bucket, torch.randn(64 * 32 * len(bucket)))], is_agreed=True)
        engine.use(PowerSGD(matrix_rank=1))
        engine.average([(tuple(specs), torch.randn(64 * 32 * 3))], is_agreed=True)
        engine.use(PowerSGD(matrix_rank=2))
        engine.average([(tuple(specs), torch.randn(64 * 32 * 3))], is_agreed=True)
    assert [[route["label"] for route in plan["routes"]] for plan in kept.of("plan")] == [
        ["a", "b"],
        *[["a", "b", "c"]] * 3,
    ]
    assert len(kept.of("step")) == len(used) + 2
    assert engine.counts().compression_ratio > 5


def test_watching_changes_nothing() -> None:
    plain, watched = simulation(), simulation()
    with Watch(watched.syncs[0], Kept(), norms_every_steps=1):
        for step in range(STEPS):
            gradients, others = (random_gradients(buckets(), num_workers=2, seed=step) for _ in range(2))
            plain.step(gradients)
            watched.step(others)
            assert all(torch.equal(a, b) for a, b in zip(gradients[0], others[0], strict=True))


def test_a_file_is_read_again(tmp_path: Path) -> None:
    simulated, path = simulation(), tmp_path / "run.jsonl"
    with Watch(simulated.syncs[0], path, name="mine", norms_every_steps=2) as watch:
        for step in range(STEPS):
            train(simulated, range(step, step + 1))
            watch.log(loss=1 / (1 + step))
        watch.log(heldout_loss=float("nan"))
    run = read_run(path)
    assert (run.name, run.processes, run.resumed, run.damage) == ("mine", 2, 0, None)
    assert [each["step"] for each in run.steps] == [1, 2, 3, 4, 5, 6]
    assert [(point.step, point.value) for point in run.points("loss")] == [
        (step + 1, 1 / (1 + step)) for step in range(STEPS)
    ]
    assert run.logged == ["loss", "heldout_loss"]
    assert run.points("heldout_loss") == []
    assert len(run.norms) == 3
    assert len(run.plans) == 1
    assert (tmp_path / "run.jsonl").read_text().count("NaN") == 0


def test_a_plan_is_told_again_when_something_travels_otherwise(tmp_path: Path) -> None:
    """And not when DDP's rebuilt buckets round to a few bytes more, and come in another order."""
    simulated, path = simulation(), tmp_path / "run.jsonl"
    with Watch(simulated.syncs[0], path):
        train(simulated, range(1))
    (first,) = read_run(path).plans
    rebuilt = [{**route, "message_bytes": route["message_bytes"] + 2} for route in reversed(first["routes"])]
    other = [{**route, "detail": "uncompressed"} for route in rebuilt]
    with path.open("a") as file:
        file.writelines(
            json.dumps({**first, "step": 2, "routes": routes}) + "\n" for routes in (rebuilt, other)
        )
    told = read_run(path).plans
    assert [(plan["step"], plan["routes"]) for plan in told] == [(1, rebuilt), (2, other)]


def test_a_resumed_run_is_one(tmp_path: Path) -> None:
    """Stopped after 5 steps, resumed from a checkpoint of the third; the last line was cut off."""
    first, path = simulation(), tmp_path / "run.jsonl"
    with Watch(first.syncs[0], path) as watch:
        train(first, range(3))
        states = first.state_dicts()
        train(first, range(3, 5))
        watch.log(loss=7.0)
    with path.open("a") as file:
        file.write('{"kind": "st')
    second = simulation()
    for sync, state in zip(second.syncs, states, strict=True):
        sync.load_state_dict(state)
    with Watch(second.syncs[0], path) as watch:
        train(second, range(3, STEPS))
        watch.log(loss=8.0)
    run = read_run(path)
    assert run.damage is None
    assert run.resumed == 1
    assert [each["step"] for each in run.steps] == [1, 2, 3, 4, 5, 6]
    assert [each["steps"] for each in run.steps] == [1] * 6
    assert [point.value for point in run.points("loss")] == [8.0]
    seconds = [each["seconds"] for each in run.steps]
    assert seconds == sorted(seconds)
    assert len(run.plans) == 1


# What is replaced in the file by what, how many lines are read, and what is told.
DAMAGE = {
    "cut off": (r"(?s).{5}\Z", "", 12, "it is cut off"),
    "text for a number": ('"step": 4,', '"step": "four",', 8, "step must be a whole number"),
    "zeros": (r"\Z", "\x00\x00\n", 13, "Expecting value"),
    "no object": (r"\Z", "[]\n", 13, "kind must be one of run, plan, step, norms, log"),
    "nested": (r"\Z", 200_000 * "[" + "\n", 13, "it is nested too deeply"),
    "no steps": ('"steps": 1', '"steps": 0', 2, "steps must be a whole number from 1"),
    "null": ('"messages": .', '"messages": null', 2, "messages must be a number"),
    "text": ('"loss": 1.0', '"loss": "low"', 3, "'loss' must be a number"),
    "route": (r'"routes": \[', '"routes": [5, ', 1, "there is no label"),
    "detail": (
        '"detail": "',
        '"detail": 7, "more": "',
        1,
        "detail must be text of at most 10000 characters, got 7",
    ),
    "flag": ('"is_compressed": true', '"is_compressed": 1', 1, "is_compressed must be true or false, got 1"),
    "negative": ('"waiting_seconds": ', '"waiting_seconds": -', 2, "waiting_seconds must be a number from 0"),
    "nan": ('"step_seconds": [^,]*', '"step_seconds": NaN', 2, "it has NaN, expected finite numbers"),
    "infinite": (
        '"step_seconds": [^,]*',
        '"step_seconds": 1e999',
        2,
        "must be a number from 0 to 1e+10, got inf",
    ),
    "large": ('"loss": 1.0', '"loss": 1.7e308', 3, "must be a number from -1e+100 to 1e+100, got 1.7e+308"),
    "larger": ('"loss": 1.0', f'"loss": {10**400}', 3, "must be a number from -1e+100 to 1e+100, got 1000"),
    "digits": ('"messages": ', f'"messages": {5000 * "1"}', 2, "Exceeds the limit"),
    "name": ('"loss"', f'"{20_000 * "x"}"', 3, "a name in log must be text of at most 10000 characters"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_read_up_to_the_damage(damage: str, tmp_path: Path) -> None:
    simulated, path = simulation(), tmp_path / "run.jsonl"
    with Watch(simulated.syncs[0], path) as watch:
        for step in range(STEPS):
            train(simulated, range(step, step + 1))
            if step < 5:
                watch.log(loss=1.0)
    text = path.read_text()
    assert text.count("\n") == 13
    old, new, lines, told = DAMAGE[damage]
    path.write_text(re.sub(old, new, text))
    run = read_run(path)
    assert run.damage is not None
    assert run.damage.startswith(f"line {lines + 1} ends the reading: ")
    assert told in run.damage
    assert 1 + len(run.plans) + len(run.steps) + len(run.logs) == lines


NO_RUN = "line 1 ends the reading: .*; give one that a Watch has written"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file"),
        (b"", "it is empty; give one that a Watch has written"),
        (b"loss,step\n1,2\n", NO_RUN),
        (b"\xff\xfe\x00", NO_RUN),
        (b'{"kind": "log", "step": 0, "seconds": 1.0}\n', NO_RUN),
    ],
)
def test_what_is_no_record_is_refused(content: bytes | None, told: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        read_run(path)


@pytest.mark.parametrize("processes", ["0", "-1", "1000000000", "true", "2.0", "1e400"])
def test_a_run_of_so_many_processes_is_refused(processes: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Watch(simulation().syncs[0], path).close()
    path.write_text(path.read_text().replace('"processes": 2', f'"processes": {processes}'))
    with pytest.raises(ConfigError, match="processes must be a whole number from 1 to 1048576, got"):
        read_run(path)


def test_a_long_line_and_a_long_file_are_not_read_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated, path = simulation(), tmp_path / "run.jsonl"
    with Watch(simulated.syncs[0], path):
        train(simulated, range(STEPS))
    text = path.read_text()
    monkeypatch.setattr(records, "MAX_BYTES", len(text) - 1)
    run = read_run(path)
    assert run.damage is not None
    assert run.damage.endswith("bytes: give Watch a larger every_steps")
    assert len(run.steps) == STEPS - 1
    monkeypatch.undo()
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 20_000)
    path.write_text(text.replace('"kind": "step"', f'"kind": "step", "more": "{20_000 * "x"}"'))
    assert read_run(path).damage == "line 3 ends the reading: it is longer than 20,000 bytes"


def test_what_no_report_takes_is_written_as_null(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Watch(simulation().syncs[0], path) as watch:
        for loss in (1e99, 1.7e308, 10**200, float("nan"), float("-inf")):
            watch.log(loss=loss)
    run = read_run(path)
    assert run.damage is None
    assert [each["loss"] for each in run.logs] == [1e99, None, None, None, None]


def test_what_was_recorded_of_steps_that_were_undone_is_forgotten() -> None:
    """As if every return had gone through all records; the plan of a step stands just before it."""
    draw = random.Random(0)
    for _ in range(100):
        written, expected, step = [dict[str, Any](kind="run")], [dict[str, Any](kind="run")], 0
        for _ in range(30):
            if draw.random() < 0.2:
                step = draw.randrange(step + 1)
                expected = [each for each in expected if each.get("step", 0) <= step]
            step += 1
            kinds = ["step", *draw.choices(["log", "norms"], k=draw.randrange(3))]
            kinds = ["plan"] * (draw.random() < 0.2) + kinds
            added = [{"kind": kind, "step": step, "steps": 1} for kind in kinds]
            written, expected = written + added, expected + added
        assert records.without_undone(written) == expected


def test_what_can_not_be_watched(tmp_path: Path) -> None:
    sync = simulation().syncs[0]
    with pytest.raises(ConfigError, match=r"needs what attach\(\) returned"):
        Watch(torch.nn.Linear(2, 2), tmp_path / "run.jsonl")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="every_steps must be"):
        Watch(sync, tmp_path / "run.jsonl", every_steps=0)
    with pytest.raises(ConfigError, match="log must be a function"):
        MetricsWriter(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"can't be written: there is no folder .*nowhere; make it first"):
        Watch(sync, tmp_path / "nowhere" / "run.jsonl")
    with Watch(sync, Kept()) as watch, pytest.raises(ConfigError, match=r"give value.item\(\)"):
        watch.log(loss=torch.ones(1))  # type: ignore[arg-type]
    with Watch(sync, Kept()) as watch, pytest.raises(ConfigError, match="log can't take step="):
        watch.log(loss=1.0, step=3)
    with Watch(sync, Kept()) as watch, pytest.raises(ConfigError, match="loss must be a number that a float"):
        watch.log(loss=10**400)
    with pytest.raises(ConfigError, match=r"make a thinwire.watch.MetricsWriter"):
        Watch(sync, print)  # type: ignore[arg-type]
    (tmp_path / "mine.txt").write_text("important\n")
    with pytest.raises(ConfigError, match=r"is no file of a thinwire\.Watch; give another path"):
        Watch(sync, tmp_path / "mine.txt")
    assert (tmp_path / "mine.txt").read_text() == "important\n"
    assert not engine_of(sync).observers


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), RuntimeError("no network")])
def test_a_full_disk_ends_the_watching_and_not_the_training(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(Kept):
        def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
            if step == 2:
                raise failure
            super().write(kind, step, values)

    simulated, full = simulation(), Full()
    with Watch(simulated.syncs[0], full), caplog.at_level(logging.WARNING, "thinwire"):
        train(simulated, range(4))
    assert f"step 2: watching ends, training goes on: {failure!r}" in caplog.text
    assert len(full.of("step")) == 1
    assert simulated.syncs[0].steps == 4


def test_loggers_take_numbers_by_name() -> None:
    logged: list[tuple[dict[str, float], int]] = []
    simulated = simulation()
    writer = MetricsWriter(lambda metrics, step: logged.append((metrics, step)))
    with Watch(simulated.syncs[0], writer, norms_every_steps=2) as watch:
        train(simulated, range(2))
        watch.log(loss=1.0, epoch=3)
    assert [step for _, step in logged] == [1, 2, 2, 2]
    stats = simulated.syncs[0].stats()
    assert [metrics["thinwire/message_bytes"] for metrics, _ in logged[:2]] == 2 * [stats.message_bytes / 2]
    assert logged[1][0]["thinwire/compression_ratio"] == stats.compression_ratio > 5
    assert logged[3][0] == {"loss": 1.0, "epoch": 3.0}
    assert 0 < logged[2][0]["thinwire/relative_error/body.weight"] < 1
    assert all(isinstance(value, float) for metrics, _ in logged for value in metrics.values())


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="NO TENSORBOARD HERE")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    simulated = simulation()
    with Watch(simulated.syncs[0], thinwire.watch.TensorBoardWriter(tmp_path), norms_every_steps=1) as watch:
        train(simulated, range(3))
        watch.log(loss=0.5)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [each.step for each in events.Scalars("thinwire/messages")] == [1, 2, 3]
    assert "thinwire/error_norm/body.weight" in events.Tags()["scalars"]
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(3, 0.5)]
    assert events.Scalars("thinwire/compression_ratio")[-1].value > 5


def test_without_tensorboard_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.startswith(("torch.utils.tensorboard", "tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install '.\[tensorboard\]' in a clone"):
        thinwire.watch.TensorBoardWriter(tmp_path)


def test_going_back_within_a_run(tmp_path: Path) -> None:
    simulated, path = simulation(), tmp_path / "run.jsonl"
    with Watch(simulated.syncs[0], path) as watch:
        train(simulated, range(3))
        states = simulated.state_dicts()
        train(simulated, range(3, 5))
        watch.log(loss=7.0)
        for sync, state in zip(simulated.syncs, states, strict=True):
            sync.load_state_dict(state)
        train(simulated, range(3, STEPS))
    run = read_run(path)
    assert [each["step"] for each in run.steps] == [1, 2, 3, 4, 5, 6]
    assert run.points("loss") == []


def test_two_processes_in_one_file_are_told(tmp_path: Path) -> None:
    simulated, path = simulation(), tmp_path / "run.jsonl"
    with Watch(simulated.syncs[0], path), Watch(simulated.syncs[1], path):
        train(simulated, range(2))
    run = read_run(path)
    assert run.damage is not None
    assert "line 2 ends the reading: it is of process 1, the first of process 0" in run.damage


def test_skips_that_the_host_does_not_see_are_not_known(tmp_path: Path) -> None:
    simulated = Simulation(PowerSGD(matrix_rank=2), buckets(), num_workers=2, host_check=False)
    with Watch(simulated.syncs[0], tmp_path / "run.jsonl"):
        train(simulated, range(STEPS), bad_steps=(2,))
    assert [each["nonfinite_steps"] for each in read_run(tmp_path / "run.jsonl").steps] == [None] * STEPS


@pytest.mark.parametrize("version", [3, 5])
def test_a_file_of_a_different_format_is_refused_and_not_continued(version: int, tmp_path: Path) -> None:
    simulated, path = simulation(), tmp_path / "run.jsonl"
    with Watch(simulated.syncs[0], path):
        train(simulated, range(2))
    path.write_text(text := path.read_text().replace('"format": 4', f'"format": {version}'))
    with pytest.raises(ConfigError, match=f"has format {version}, this Thinwire reads format 4; read"):
        read_run(path)
    with pytest.raises(ConfigError, match=f"has format {version}, this Thinwire writes format 4; give"):
        Watch(simulated.syncs[0], path)
    assert path.read_text() == text


# Growth


class HoardPlan(BucketPlan):
    """Keeps everything, sends nothing."""

    def exchange(self, bucket: Any, memory: Any) -> Any:
        own = list(bucket.gradients)
        yield Mean(torch.ones(1))
        yield Commit(lambda: torch.tensor(True))
        for each, gradient in zip(self.specs, own, strict=True):
            memory[ERROR][each.name] = memory[ERROR].get(each.name, 0.0) + gradient.abs()

    def diagnose(self, memory: Any) -> Any:
        norms = torch.stack([memory[ERROR][spec.name].double().norm() for spec in self.specs])
        relative = torch.where(norms > 0, norms / torch.hypot(norms, torch.tensor(1.0)), 0.0)
        return Diagnosis([spec.name for spec in self.specs], relative, norms)


class Hoard(Algorithm):
    """An algorithm whose residual goes on growing."""

    slots = (ERROR,)

    def prepare(self, specs: Any, *, num_members: int = 1) -> Any:
        return HoardPlan(tuple(specs), tuple(Route((spec.name,), spec.gradient_bytes, 4) for spec in specs))


def of_one_matrix(algorithm: Algorithm) -> Simulation:
    """One worker and one matrix: a thousand steps take a second."""
    return Simulation(algorithm, [(spec("weight", 64, 32),)], num_workers=1)


def test_error_that_grows_without_bound_is_told(caplog: pytest.LogCaptureFixture) -> None:
    simulated = of_one_matrix(Hoard())
    with (
        Watch(simulated.syncs[0], Kept(), norms_every_steps=16),
        caplog.at_level(logging.WARNING, "thinwire"),
    ):
        train(simulated, range(1100))
    assert "the error memory goes on growing" in caplog.text
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith("step 1024:")


def test_error_that_is_paid_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    simulated = of_one_matrix(PowerSGD(matrix_rank=1))
    caplog.set_level(logging.WARNING, "thinwire")
    with Watch(simulated.syncs[0], Kept(), norms_every_steps=8):
        train(simulated, range(600))
        for sync in simulated.syncs:
            sync.use(PowerSGD(matrix_rank=2))
        train(simulated, range(600))
    assert simulated.syncs[0].stats().compression_ratio > 5
    assert not caplog.records


@pytest.mark.parametrize(
    ("series", "alarms"),
    [
        (lambda step: step, True),
        (lambda step: step**0.5, True),
        (lambda step: 10 * step / (20 + step), False),
        (lambda step: 3.0, False),
        (lambda step: 0.0, False),
        (lambda step: 100 / step, False),
    ],
    ids=["linear", "root", "saturates", "constant", "nothing", "falls"],
)
def test_growth(series: Any, alarms: bool) -> None:
    alarm = GrowthAlarm()
    told = [alarm.growth_after(float(series(step)), 5 * step) for step in range(1, 600)]
    assert any(each is not None for each in told) == alarms


# Real processes


def test_in_ddp_it_tells_what_a_process_sends(pool2: Pool, tmp_path: Path) -> None:
    assert pool2.run(_trained, str(tmp_path)) == [2, 2]
    runs = [read_run(tmp_path / f"{process_rank}.jsonl") for process_rank in range(2)]
    for run in runs:
        assert run.processes == 2
        assert [each["message_bytes"] for each in run.steps] == [runs[0].steps[0]["message_bytes"]] * STEPS
        assert run.steps[0]["gradient_bytes"] / run.steps[0]["message_bytes"] > 4
        assert all(0 < each["waiting_seconds"] < each["step_seconds"] for each in run.steps)
        assert all(0 < each["arithmetic_seconds"] < each["step_seconds"] for each in run.steps)
        assert all(0 < each["exposed_seconds"] < each["step_seconds"] for each in run.steps)
    assert runs[0].norms[-1]["error_norm"] != runs[1].norms[-1]["error_norm"]


def _trained(folder: str) -> int:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(96, 64))
    sync = thinwire.attach(model, PowerSGD(matrix_rank=2))
    path = os.path.join(folder, f"{dist.get_rank()}.jsonl")
    with Watch(sync, path, norms_every_steps=3):
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            torch.autograd.backward(model(torch.randn(8, 96, generator=generator)).square().sum())
    return dist.get_world_size()


SLOW_SECONDS = 0.4
KINDS_OF_TIME = ("arithmetic", "waiting", "step")


class Announcing(Wrapped):
    """Sets `key` in the store that the processes share when it is about to wait."""

    key = ""

    def send(
        self, collective: Collective, tensor: torch.Tensor, purpose: str, start: Callable[[], Work]
    ) -> Work:
        return AnnouncedWork(start(), self)


@dataclass
class AnnouncedWork:
    work: Work
    transport: Announcing

    def wait(self) -> None:
        dist.distributed_c10d._get_default_store().set(self.transport.key, "")
        self.work.wait()


def test_waiting_for_a_slow_process_is_waiting_on_every_front(pool2: Pool) -> None:
    """And what is exposed has all of it, and the messages that a front sends before."""
    for told in pool2.run(_slow_peer)[:1]:
        for name, steps in told.items():
            assert len(steps) == 4
            seconds = {kind: sum(each[f"{kind}_seconds"] for each in steps) for kind in KINDS_OF_TIME}
            assert seconds["arithmetic"] + seconds["waiting"] < seconds["step"], name
            for each in steps[2:]:
                assert each["waiting_seconds"] > 0.1 * SLOW_SECONDS, name
                assert each["arithmetic_seconds"] > 0, name
                assert each["exposed_seconds"] > 0.1 * SLOW_SECONDS, name
                assert each["gradient_bytes"] > 5 * each["message_bytes"], name


def _slow_peer() -> dict[str, list[Mapping[str, Any]]]:
    """The second process sleeps once the first one waits for it, however late that is."""
    assert dist.get_world_size() == 2
    is_slow = dist.get_rank() == 1
    told = {}
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(96, 64))
    own = torch.nn.Linear(96, 64)
    front = powersgd.PowerSGD(
        list(own.parameters()), powersgd.Config(rank=2, start_compressing_after_num_steps=0)
    )
    for name, sync in (("ddp", thinwire.attach(model, PowerSGD(matrix_rank=2))), ("step", front.sync)):
        kept, metered = Kept(), engine_of(sync).metered
        metered.transport = announcing = Announcing(metered.transport)
        with Watch(sync, kept):
            for step in range(4):
                loss = (model if name == "ddp" else own)(torch.ones(8, 96)).square().sum()
                announcing.key = f"process {dist.get_rank()}, {name} {step}"
                if step > 1 and is_slow:  # before, buckets are new, so the processes are compared
                    dist.distributed_c10d._get_default_store().wait([f"process 0, {name} {step}"])
                    time.sleep(SLOW_SECONDS)
                torch.autograd.backward(loss)
                if name == "step":
                    front.aggregate([p.grad for p in own.parameters() if p.grad is not None])
        told[name] = kept.of("step")
    return told


def test_local_steps_are_counted_as_steps(pool2: Pool) -> None:
    for steps, plan in pool2.run(_local):
        assert [each["messages"] > 0 for each in steps] == [
            True,
            True,
            False,
            False,
            True,
            False,
            False,
            True,
        ]
        assert all(each["arithmetic_seconds"] >= 0 for each in steps)
        whole, sent = (sum(each[f"{name}_bytes"] for each in steps) for name in ("gradient", "message"))
        assert whole == 8 * 4 * (96 * 64 + 64)
        assert sent < whole
        assert plan["algorithm"] == "LocalSGD(every_steps=3), PowerSGD(matrix_rank=2)"


def _local() -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
    assert dist.get_world_size() == 2
    model, kept = torch.nn.Linear(96, 64), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        thinwire.LocalSGD(
            model, optimizer, every_steps=3, warmup=thinwire.Warmup(2), algorithm=PowerSGD(matrix_rank=2)
        ) as local,
        Watch(local, kept),
    ):
        for _ in range(8):
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.ones(8, 96)).square().sum())
            optimizer.step()
    return kept.of("step"), kept.of("plan")[0]


def test_the_profiler_shows_the_rounds() -> None:
    simulated = Simulation(PowerSGD(matrix_rank=2), buckets(), num_workers=1)  # on this thread
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        simulated.step(random_gradients(buckets(), num_workers=1, seed=0))
    names = {event.key for event in profiler.key_averages()}
    assert {
        "thinwire: round 1",
        "thinwire: wait for round 1",
        "thinwire: round 2",
        "thinwire: wait for round 2",
        "thinwire: commit",
    } <= names


def test_lines_are_there_at_once(tmp_path: Path) -> None:
    writer = JSONLWriter(tmp_path / "run.jsonl")
    writer.write("log", 3, {"seconds": 1.5, "nested": {"a": [1.0, float("inf")]}})
    line = (tmp_path / "run.jsonl").read_text()
    assert json.loads(line) == {"kind": "log", "step": 3, "seconds": 1.5, "nested": {"a": [1.0, None]}}
    writer.close()
