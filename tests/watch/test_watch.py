"""`thinwire.Watch`: what is recorded, where it goes, what is read again, and when it warns."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import thinwire
from catalog import buckets, random_gradients, spec
from processes import in_each_process
from thinwire import ConfigError, PowerSGD, Watch
from thinwire.algorithms import AllReduce
from thinwire.algorithms.error_feedback import ERROR
from thinwire.simulation import Simulation
from thinwire.sync import engine_of
from thinwire.watch import MetricsWriter, read_run

STEPS = 6


@pytest.fixture
def simulated() -> Simulation:
    return simulation()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


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
        return [values for recorded, _, values in self.records if recorded == kind]


def simulation() -> Simulation:
    return Simulation(PowerSGD(matrix_rank=2), buckets(), num_workers=2)


def train(simulated: Simulation, steps: range, bad_steps: tuple[int, ...] = ()) -> None:
    for step in steps:
        gradients = random_gradients(simulated.buckets, num_workers=len(simulated.syncs), seed=step)
        if step in bad_steps:
            gradients[0][0][0] = torch.nan
        simulated.step(gradients)


def test_the_records_add_up_to_the_stats(simulated: Simulation) -> None:
    kept = Kept()
    with Watch(simulated.syncs[0], kept, norms_every_steps=2):
        train(simulated, range(STEPS), bad_steps=(2,))
    assert kept.closed
    steps, stats = kept.of("step"), simulated.syncs[0].stats()
    assert len(steps) == STEPS
    for name in ("messages", "message_bytes", "gradient_bytes", "waiting_seconds"):
        assert sum(record[name] for record in steps) == pytest.approx(getattr(stats, name))
    assert stats.compression_ratio > 5
    assert [record["nonfinite_steps"] for record in steps] == [0, 0, 1, 0, 0, 0]
    assert sum(record["exposed_seconds"] for record in steps) == pytest.approx(stats.exposed_seconds)
    assert 0 < stats.exposed_seconds < steps[-1]["seconds"]
    assert 0 < stats.arithmetic_seconds < steps[-1]["seconds"]
    norms = kept.of("norms")
    assert [step for kind, step, _ in kept.records if kind == "norms"] == [2, 4, 6]
    assert norms[-1]["relative_error"] == stats.relative_error
    assert norms[-1]["error_norm"] == stats.error_norm
    for name, error in simulated.engines[0].state.memory[ERROR].items():
        assert stats.error_norm[name] == pytest.approx(error.norm().item())
    (plan,) = kept.of("plan")
    assert plan["algorithm"] == "PowerSGD(matrix_rank=2)"
    labels = {route.label for route in simulated.syncs[0].plan.routes}
    assert {route["label"] for route in plan["routes"]} == labels


def test_a_record_of_several_steps_and_another_plan(simulated: Simulation) -> None:
    kept = Kept()
    with Watch(simulated.syncs[0], kept, every_steps=3):
        train(simulated, range(STEPS))
        for sync in simulated.syncs:
            sync.use(AllReduce())
        train(simulated, range(STEPS))
    assert [record["steps"] for record in kept.of("step")] == [3, 3, 3, 3]
    assert [plan["algorithm"] for plan in kept.of("plan")] == ["PowerSGD(matrix_rank=2)", "AllReduce()"]
    before = len(kept.records)
    train(simulated, range(1))
    assert len(kept.records) == before


def test_watching_changes_nothing() -> None:
    plain, watched = simulation(), simulation()
    with Watch(watched.syncs[0], Kept(), norms_every_steps=1):
        for step in range(STEPS):
            gradients, others = (random_gradients(buckets(), num_workers=2, seed=step) for _ in range(2))
            plain.step(gradients)
            watched.step(others)
            assert all(torch.equal(a, b) for a, b in zip(gradients[0], others[0], strict=True))


def test_a_file_is_read_again(simulated: Simulation, path: Path) -> None:
    with Watch(simulated.syncs[0], path, name="mine", norms_every_steps=2) as watch:
        for step in range(STEPS):
            train(simulated, range(step, step + 1))
            watch.log(loss=1 / (1 + step))
        watch.log(heldout_loss=float("nan"))
    run = read_run(path)
    assert (run.name, run.processes, run.resumed, run.damage) == ("mine", 2, 0, None)
    assert [record["step"] for record in run.steps] == [1, 2, 3, 4, 5, 6]
    losses = [(point.step, point.value) for point in run.points("loss")]
    assert losses == [(step + 1, 1 / (1 + step)) for step in range(STEPS)]
    assert (run.logged, run.points("heldout_loss")) == (["loss", "heldout_loss"], [])
    assert (len(run.norms), len(run.plans)) == (3, 1)
    assert "NaN" not in path.read_text()


# As 0.2.0 wrote them.
RELEASED = """\
{"kind": "run", "step": 0, "format": 4, "name": null, "thinwire": "0.2.0", "unix_seconds": 1795829780.5, \
"processes": 4, "machines": 2, "process_rank": 0}
{"kind": "plan", "step": 1, "algorithm": "PowerSGD(matrix_rank=2)", "routes": [{"label": "weight", \
"names": ["weight"], "detail": "64\\u00d732, rank 2", "is_compressed": true, "gradient_bytes": 8192, \
"message_bytes": 768}]}
{"kind": "step", "step": 1, "seconds": 0.5, "step_seconds": 0.5, "steps": 1, "nonfinite_steps": null, \
"messages": 3, "message_bytes": 768, "inside_bytes": 0, "gradient_bytes": 8192, "arithmetic_seconds": 0.01, \
"waiting_seconds": 0.4, "exposed_seconds": 0.45, "compression_ratio": 10.67}
{"kind": "norms", "step": 1, "relative_error": {"weight": 0.97}, "error_norm": {"weight": null}}
{"kind": "log", "step": 1, "seconds": 0.6, "loss": 3.0, "heldout_loss": null}
"""


def test_a_file_of_the_last_release_is_read(path: Path) -> None:
    path.write_text(RELEASED)
    run = read_run(path)
    assert (run.damage, run.processes, run.machines) == (None, 4, 2)
    assert [route["detail"] for route in run.plans[0]["routes"]] == ["64×32, rank 2"]
    assert [len(records) for records in (run.steps, run.norms, run.logs)] == [1, 1, 1]
    assert run.points("loss") == [(1, 0.6, 3.0)]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_run_that_goes_back_is_one(simulated: Simulation, is_new: bool, path: Path) -> None:
    """From 5 steps to a state of the third: in a new process, its last line cut off, or in the same loop."""
    with ExitStack() as entered:
        watch = entered.enter_context(Watch(simulated.syncs[0], path))
        train(simulated, range(3))
        states = simulated.state_dicts()
        train(simulated, range(3, 5))
        watch.log(loss=7.0)
        if is_new:
            entered.close()
            path.write_text(path.read_text() + '{"kind": "st')
            simulated = simulation()
        for sync, state in zip(simulated.syncs, states, strict=True):
            sync.load_state_dict(state)
        if is_new:
            watch = entered.enter_context(Watch(simulated.syncs[0], path))
        train(simulated, range(3, STEPS))
        watch.log(loss=8.0, routes=3, process_rank=7)  # any names
    run = read_run(path)
    assert (run.damage, run.resumed, len(run.plans)) == (None, is_new, 1)
    assert [(record["step"], record["steps"]) for record in run.steps] == [(n + 1, 1) for n in range(STEPS)]
    assert [point.value for point in run.points("loss")] == [8.0]
    seconds = [record["seconds"] for record in run.steps]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("old", "new", "lines", "message"),
    [
        (r"(?s).{5}\Z", "", 7, "it is cut off"),
        (r"\Z", "\x00\x00\n", 8, "Expecting value"),
        (r"\Z", 9999 * "[" + "\n", 8, "its brackets are too deep"),
        (r"\Z", '{"kind": "step", "step": 9}\n', 8, "its steps is None"),
        (r"\Z", "[]\n", 8, "expected an object whose kind is one of run, plan, step, norms, log"),
        (r"\Z", '{"kind": "run", "process_rank": 1}\n', 8, "it is of process 1, the first of process 0"),
        (r'(?s), "nonfinite_steps": 0(?!.*nonfinite)', "", 7, "its nonfinite_steps is None"),
    ],
)
def test_a_damaged_file_is_read_up_to_the_damage(
    old: str, new: str, lines: int, message: str, simulated: Simulation, path: Path
) -> None:
    with Watch(simulated.syncs[0], path):
        train(simulated, range(STEPS))
    text = path.read_text()
    assert text.count("\n") == 8
    path.write_text(re.sub(old, new, text))
    run = read_run(path)
    assert str(run.damage).startswith(f"reading stopped at line {lines + 1}: {message}")
    assert 1 + len(run.plans) + len(run.steps) == lines


NO_RUN = r"was not written by thinwire.Watch \(its first line: .*\); pass a different path"
OTHER = b'{"kind": "run", "step": 0, "format": 3, "process_rank": 0}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "it is empty"),
        (b"loss,step\n1,2\n", NO_RUN),
        (b"\xff\xfe\x00", NO_RUN),
        (b'{"kind": "log", "step": 0, "seconds": 1.0}\n', NO_RUN),
        (OTHER, "has format 3, but this Thinwire release has format 4; pass"),
        (OTHER.replace(b"3", b"5"), "has format 5, but this Thinwire release has format 4; pass"),
    ],
)
def test_what_is_no_record_is_refused_and_not_continued(
    content: bytes | None, message: str, path: Path
) -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_run(path)
    if content:
        with pytest.raises(ConfigError, match=message):
            Watch(simulation().syncs[0], path)
        assert path.read_bytes() == content


def test_what_can_not_be_watched(tmp_path: Path) -> None:
    sync, path = simulation().syncs[0], tmp_path / "run.jsonl"
    kept: Any = Watch(sync, Kept())
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: Watch(torch.nn.Linear(2, 2), path), r"needs what attach\(\) returned"),  # type: ignore[arg-type]
        (lambda: Watch(sync, path, every_steps=0), "every_steps must be"),
        (lambda: Watch(sync, print), r"in a thinwire.watch.MetricsWriter"),  # type: ignore[arg-type]
        (lambda: Watch(sync, tmp_path / "no" / "run.jsonl"), "there is no folder .*no; make it first"),
        (lambda: MetricsWriter(3), "log must be a function"),  # type: ignore[arg-type]
        (lambda: kept.log(loss=torch.ones(1)), r"pass value.item\(\)"),
        (lambda: kept.log(loss=1.0, step=3), "log can't take step="),
    ]
    for call, message in calls:
        with pytest.raises(ConfigError, match=message):
            call()
    kept.close()
    assert not path.exists()
    assert not engine_of(sync).reporter.observers


def test_a_full_disk_ends_the_watching_and_not_the_training(caplog: pytest.LogCaptureFixture) -> None:
    failure = OSError(28, "No space left on device")

    class Full(Kept):
        def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
            if step == 2:
                raise failure
            super().write(kind, step, values)

        def close(self) -> None:
            raise failure

    simulated, full = simulation(), Full()
    with Watch(simulated.syncs[0], full) as watch, caplog.at_level(logging.WARNING, "thinwire"):
        train(simulated, range(4))
        watch.log(loss=1.0)
        with Watch(simulated.syncs[0], Full()) as last:
            pass
    last.close()
    for step in (2, 4):
        assert f"step {step}: watching ends, training continues: {failure!r}" in caplog.text
    assert [kind for kind, _, _ in full.records] == ["run", "plan", "step"]
    assert simulated.syncs[0].steps == 4


def test_loggers_take_numbers_by_name(simulated: Simulation) -> None:
    logged: list[tuple[dict[str, float], int]] = []
    writer = MetricsWriter(lambda metrics, step: logged.append((metrics, step)))
    with Watch(simulated.syncs[0], writer, norms_every_steps=2) as watch:
        train(simulated, range(2))
        watch.log({"loss": np.float32(1.0)}, epoch=np.int64(3))
    assert [step for _, step in logged] == [1, 2, 2, 2]
    stats = simulated.syncs[0].stats()
    assert [metrics["thinwire/message_bytes"] for metrics, _ in logged[:2]] == 2 * [stats.message_bytes / 2]
    assert logged[1][0]["thinwire/compression_ratio"] == stats.compression_ratio > 5
    assert logged[3][0] == {"loss": 1.0, "epoch": 3.0}
    assert 0 < logged[2][0]["thinwire/relative_error/body.weight"] < 1
    assert all(isinstance(value, float) for metrics, _ in logged for value in metrics.values())


def test_tensorboard_reads_what_is_written(simulated: Simulation, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="NO TENSORBOARD HERE")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    with Watch(simulated.syncs[0], thinwire.watch.TensorBoardWriter(tmp_path), norms_every_steps=1) as watch:
        train(simulated, range(3))
        watch.log(loss=0.5)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("thinwire/messages")] == [1, 2, 3]
    assert "thinwire/error_norm/body.weight" in events.Tags()["scalars"]
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("loss")] == [(3, 0.5)]
    assert events.Scalars("thinwire/compression_ratio")[-1].value > 5


def test_skips_that_the_host_does_not_see_are_not_known(path: Path) -> None:
    simulated = Simulation(PowerSGD(matrix_rank=2), buckets(), num_workers=2, host_check=False)
    with Watch(simulated.syncs[0], path):
        train(simulated, range(STEPS), bad_steps=(2,))
    assert [record["nonfinite_steps"] for record in read_run(path).steps] == [None] * STEPS


def train_one_matrix(*matrix_ranks: int) -> None:
    simulated = Simulation(PowerSGD(matrix_rank=1), [(spec("weight", 64, 32),)], num_workers=1)
    with Watch(simulated.syncs[0], Kept(), norms_every_steps=2):
        for matrix_rank in matrix_ranks:
            simulated.syncs[0].use(PowerSGD(matrix_rank=matrix_rank))
            train(simulated, range(75))
    assert simulated.syncs[0].stats().compression_ratio > 5


def test_error_that_grows_without_bound_is_told_and_error_that_is_paid_is_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "thinwire")
    monkeypatch.setattr("thinwire.watch.watch.MIN_STEPS", 100)
    train_one_matrix(1, 2)
    assert not caplog.records
    sizes = count()
    monkeypatch.setattr("thinwire.watch.watch._residual_in_steps", lambda stats: float(next(sizes)))
    train_one_matrix(1, 1)
    (record,) = caplog.records
    assert record.getMessage().startswith("step 128:")
    assert "it keeps growing" in record.getMessage()


@in_each_process(2)
def test_local_steps_are_counted_as_steps() -> None:
    model, kept = torch.nn.Linear(96, 64), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    warmup, algorithm = thinwire.Warmup(2), PowerSGD(matrix_rank=2)
    with (
        thinwire.LocalSGD(model, optimizer, every_steps=3, warmup=warmup, algorithm=algorithm) as local,
        Watch(local, kept),
    ):
        for _ in range(8):
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.ones(8, 96)).square().sum())
            optimizer.step()
    steps, (plan, *_) = kept.of("step"), kept.of("plan")
    assert [number for number, step in enumerate(steps) if step["messages"]] == [0, 1, 4, 7]
    whole, sent = (sum(step[f"{name}_bytes"] for step in steps) for name in ("gradient", "message"))
    assert whole == 8 * 4 * (96 * 64 + 64)
    assert sent < whole
    assert plan["algorithm"] == "LocalSGD(every_steps=3), PowerSGD(matrix_rank=2)"


def test_the_profiler_shows_the_rounds() -> None:
    simulated = Simulation(PowerSGD(matrix_rank=2), buckets(), num_workers=1)  # on this thread
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        simulated.step(random_gradients(buckets(), num_workers=1, seed=0))
    names = {event.key.partition(" of ")[0] for event in profiler.key_averages()}
    shown = ("round 1", "wait for round 1", "round 2", "wait for round 2", "commit")
    assert {f"thinwire: {phase}" for phase in shown} <= names
