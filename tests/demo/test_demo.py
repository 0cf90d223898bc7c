"""The demo: its text, its model, its arithmetic, and a real run of it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
from rich.console import Console

import crash
import forking
from launcher import WITHOUT_PACKAGE, run_python, started_python
from stand_ins import stand_ins
from thinwire import cli, launch
from thinwire.cli.demo import FOOTNOTE, shown_progress, summary_table
from thinwire.demo.model import (
    GPT,
    SIZES,
    batch_generator,
    fixed_batches,
    heldout_loss,
    load_text,
    next_byte_loss,
    sample_batch,
    source_files,
    split_files,
)
from thinwire.demo.train import (
    DemoOptions,
    JobError,
    RecordFile,
    TrainedStep,
    read_records,
    run_job,
    summarize,
)
from thinwire.errors import ConfigError
from thinwire.watch import JSONLWriter, read_run


def make_record(**changes: object) -> TrainedStep:
    fields: dict[str, object] = {
        "algorithm": "fp16",
        "processes": 2,
        "step": 1,
        "loss": 5.5,
        "step_seconds": 0.2,
        "waiting_seconds": 0.05,
        "message_bytes": 1_000_000,
        "gradient_bytes": 2_000_000,
    }
    return TrainedStep(**{**fields, **changes})  # type: ignore[arg-type]


def write_files(folder: Path, count: int) -> None:
    for number in range(count):
        (folder / f"file{number:02}.py").write_text(f"# {number:02}\n")


# Text


def test_text_is_the_same_every_time_and_large_enough_to_train_on() -> None:
    first, second = load_text(), load_text()
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.heldout, second.heldout)
    assert first.train.dtype == torch.uint8
    assert first.train.numel() > 3_000_000
    assert first.heldout.numel() > 300_000


def test_heldout_files_are_never_trained_on(tmp_path: Path) -> None:
    write_files(tmp_path, 25)
    for folder in ("site-packages", "test", "encodings"):  # which are skipped
        (tmp_path / folder).mkdir()
        write_files(tmp_path / folder, 1)
    train, heldout = split_files(source_files(tmp_path))
    assert [path.name for path in heldout] == ["file09.py", "file19.py"]
    assert len(train) == 23
    assert not set(train) & set(heldout)
    text = load_text(tmp_path)
    assert bytes(text.heldout.tolist()) == b"# 09\n# 19\n"
    assert b"# 09" not in bytes(text.train.tolist())
    cut = load_text(tmp_path, max_train_bytes=12, max_heldout_bytes=7)
    assert (cut.train.numel(), cut.heldout.numel()) == (12, 7)


def test_a_python_without_source_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="found 0 Python files"):
        load_text(tmp_path)


def test_batches_depend_on_seed_step_and_process_only() -> None:
    data = torch.arange(256, dtype=torch.uint8)

    def batch(seed: int, step: int, process_rank: int) -> torch.Tensor:
        generator = batch_generator(seed=seed, step=step, process_rank=process_rank)
        inputs, targets = sample_batch(data, batch_size=4, context_length=8, generator=generator)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        return inputs

    assert torch.equal(batch(0, 3, 1), batch(0, 3, 1))
    different = [batch(0, 3, 1), batch(0, 3, 0), batch(0, 4, 1), batch(1, 3, 1)]
    assert len({tuple(inputs.flatten().tolist()) for inputs in different}) == 4


def test_every_byte_can_be_drawn_and_none_beyond_the_end() -> None:
    data = torch.arange(5, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = sample_batch(data, batch_size=100, context_length=3, generator=generator)
    assert set(inputs[:, 0].tolist()) == {0, 1}
    assert targets.max() == 4
    fixed = list(fixed_batches(data, batches=2, batch_size=1, context_length=3))
    assert [inputs.tolist() for inputs, _ in fixed] == [[[0, 1, 2]], [[1, 2, 3]]]


# Model


@pytest.mark.parametrize(
    ("size", "parameters"), [("tiny", 136_960), ("small", 1_902_720), ("medium", 10_893_312)]
)
def test_sizes(size: str, parameters: int) -> None:
    assert sum(parameter.numel() for parameter in GPT(SIZES[size]).parameters()) == parameters


def test_the_model_does_not_see_the_future() -> None:
    torch.manual_seed(0)
    model = GPT(SIZES["tiny"])
    inputs = torch.randint(256, (1, 16))
    changed = inputs.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(inputs), model(changed)
    assert before.shape == (1, 16, 256)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_a_few_steps_of_training_lower_the_loss() -> None:
    torch.manual_seed(0)
    model = GPT(SIZES["tiny"])
    text = load_text(max_train_bytes=100_000, max_heldout_bytes=10_000)
    before = heldout_loss(model, text.heldout, batches=2)
    assert before == pytest.approx(5.55, abs=0.1)
    assert heldout_loss(model, text.heldout, batches=2) == before
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(20):
        generator = batch_generator(seed=0, step=step, process_rank=0)
        inputs, targets = sample_batch(text.train, batch_size=8, context_length=64, generator=generator)
        optimizer.zero_grad()
        torch.autograd.backward(next_byte_loss(model, inputs, targets))
        optimizer.step()
    assert heldout_loss(model, text.heldout, batches=2) < 4
    assert model.training


# Records and report


def test_a_growing_file_is_read_line_by_complete_line(tmp_path: Path) -> None:
    counted = {
        "messages": 2,
        "message_bytes": 1_000_000,
        "inside_bytes": 0,
        "gradient_bytes": 2_000_000,
        "waiting_seconds": 0.05,
        "compression_ratio": 2.0,
    }
    times = {"seconds": 1.0, "step_seconds": 0.2, "arithmetic_seconds": 0.0, "exposed_seconds": 0.1}
    whole, growing = tmp_path / "whole.jsonl", tmp_path / "growing.jsonl"
    writer = JSONLWriter(whole)
    run = {
        "format": 1,
        "name": "fp16",
        "thinwire": "0",
        "unix_seconds": 0.0,
        "processes": 2,
        "machines": 2,
        "process_rank": 0,
    }
    writer.write("run", 0, run)
    for step in (1, 2):
        writer.write("step", step, {**counted, **times, "steps": 1, "nonfinite_steps": 0})
        writer.write("log", step, {"seconds": 1.0, "loss": 5.5})
    writer.close()
    text = whole.read_text()
    file = RecordFile(growing)
    assert file.new_records() == []
    growing.write_text(text[:-10])
    assert file.new_records() == [make_record()]
    assert file.new_records() == []
    with growing.open("a") as more:
        more.write(text[-10:])
    assert file.new_records() == [make_record(step=2)]
    assert len(read_records(growing)) == 2


def test_summary_of_hand_made_records() -> None:
    summary = summarize(
        [
            make_record(step=1, step_seconds=9.0, waiting_seconds=8.0, message_bytes=1_000_000),
            make_record(step=2, step_seconds=0.3, waiting_seconds=0.1, message_bytes=500_000),
            make_record(step=3, step_seconds=0.4, waiting_seconds=0.15, message_bytes=0, heldout_loss=2.5),
        ]
    )
    assert summary.heldout_loss == 2.5
    assert summary.step_seconds == 0.4
    assert summary.waiting_seconds == 0.15
    assert summary.working_seconds == pytest.approx(0.25)
    assert summary.message_bytes == 500_000
    assert summary.compression_ratio == 4.0


@pytest.mark.parametrize(("processes", "milliseconds"), [(1, 150), (2, 230), (4, 270)])
def test_implied_step_time(processes: int, milliseconds: float) -> None:
    # 1 MB at 100 Mbit/s takes 80 ms; a ring of N sends 2(N-1)/N of it.
    summary = summarize([make_record(processes=processes)])
    assert 1000 * summary.implied_step_seconds(1e8) == pytest.approx(milliseconds)


def test_table_has_a_column_an_algorithm() -> None:
    summaries = [summarize([make_record()]), summarize([make_record(algorithm="powersgd", heldout_loss=2.5)])]
    console = Console(width=100)
    with console.capture() as capture:
        console.print(summary_table(summaries))
    table = capture.get()
    assert "fp16" in table
    assert "powersgd" in table
    assert "not measured" in table
    assert "ms at 100 Mbit/s *" in table
    assert "Computed, not measured" in FOOTNOTE


# Options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"processes": 1}, "processes must be a whole number of at least 2, got 1"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"model_size": "huge"}, "model_size must be one of tiny, small, medium, got 'huge'"),
        ({"algorithms": ()}, "got no algorithms"),
        ({"algorithms": ("int8",)}, "algorithm must be one of exact, .*, got 'int8'"),
        ({"algorithms": ("fp16", "fp16")}, "twice"),
        ({"matrix_rank": 0}, "matrix_rank must be"),
        ({"seed": 10**22}, r"seed must be below 2\*\*64, which torch's generators take, got 10000"),
    ],
)
def test_impossible_options_are_refused_at_once(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DemoOptions(**changes)  # type: ignore[arg-type]


# The command


def run_main(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str]:
    monkeypatch.setattr(sys, "argv", ["thinwire", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    return exit_info.value.code, capsys.readouterr().err


def test_a_users_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, stderr = run_main(["demo", "--algorithm", "int8"], monkeypatch, capsys)
    assert code == 2
    assert stderr.startswith("thinwire: algorithm must be one of exact")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_missing_packages_are_named(package: str) -> None:
    command = run_python(WITHOUT_PACKAGE, package, "thinwire")
    assert command.returncode == 2
    remedy = "pip install '.[cli]' in a clone of Thinwire"
    assert command.stderr == f"thinwire: the command line needs {package}: {remedy}\n"


def test_a_failing_process_is_told_in_one_line(tmp_path: Path) -> None:
    (ended,) = crash.run(_failed, tmp_path, processes=1)
    assert re.match(r"the training job failed: process [01]: ", ended.told)
    assert "no-such-network" in ended.told
    assert "\n" not in ended.told


def _failed(setting: crash.Setting, folder: Path) -> str:
    forking.install()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "loopback_interface", lambda: "no-such-network")
        with pytest.raises(JobError) as error_info:
            run_job(DemoOptions(steps=1, model_size="tiny", output=folder), lambda record: None)
    return str(error_info.value)


def test_demo_end_to_end(tmp_path: Path) -> None:
    options = ["--model-size=tiny", f"--output={tmp_path}", "--steps=6", "--processes=2"]
    demo = run_python(str(forking.__file__), "demo", *options)
    assert demo.returncode == 0, demo.stderr
    assert demo.stderr == ""
    assert "held-out loss" in demo.stdout
    assert "powersgd  step 6/6" in demo.stdout
    records = {name: read_records(tmp_path / f"{name}.jsonl") for name in ("fp16", "quantize", "powersgd")}
    for steps in records.values():
        assert [record.step for record in steps] == [1, 2, 3, 4, 5, 6]
        assert {record.processes for record in steps} == {2}
        assert steps[-1].heldout_loss is not None
        assert steps[-1].heldout_loss < 5
    assert records["fp16"][0].loss == records["powersgd"][0].loss
    fp16, quantize, powersgd = (sum(record.message_bytes for record in steps) for steps in records.values())
    assert fp16 == 6 * 2 * 136_960
    assert quantize < fp16 / 3.5
    assert powersgd < fp16 / 4


@pytest.mark.parametrize(
    ("is_terminal", "shown", "expected"),
    [
        (False, [("exact", 10), ("exact", 100), ("fp16", 10), ("fp16", 100)], ["95", "50", "45"]),
        (True, [("exact", 10)], ["95"]),
        (True, [("exact", 100), ("fp16", 60)], ["20"]),
    ],
)
def test_it_tells_the_time_left_of_all_algorithms(
    is_terminal: bool, shown: list[tuple[str, int]], expected: list[str]
) -> None:
    out = io.StringIO()
    options = DemoOptions(algorithms=("exact", "fp16"), steps=100)
    with shown_progress(Console(file=out, force_terminal=is_terminal, width=150), options) as show:
        for algorithm, step in shown:
            show(make_record(algorithm=algorithm, step=step, step_seconds=0.5))
    # A terminal's picture is drawn again and again: the last one counts.
    told = re.findall(r"(\d+) s left in all", out.getvalue())
    assert (told[-1:] if is_terminal else told) == expected


def children_of(process_id: int) -> list[int]:
    """The processes that a process has started and not waited for."""
    path = Path(f"/proc/{process_id}/task/{process_id}/children")
    if path.exists():
        return [int(each) for each in path.read_text().split()]
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    pairs = [line.split() for line in listing.stdout.splitlines()]
    return [int(child) for child, parent in pairs if int(parent) == process_id]


def is_there(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_listens_on_loopback_only_and_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    options = ["--model-size=tiny", f"--output={tmp_path}", "--steps=100000"]
    with started_python(str(forking.__file__), "demo", *options) as demo:
        deadline = time.monotonic() + 60
        while not read_records(tmp_path / "fp16.jsonl") and time.monotonic() < deadline:
            time.sleep(0.05)
        running = [demo.pid, *children_of(demo.pid)]
        assert len(running) == 3
        if Path("/proc/net/tcp").exists():
            addresses = {each for process_id in running for each in crash.listening_on(process_id)}
            assert addresses
            assert all(address.is_loopback for address in addresses)
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait() == 130
        said = demo.stderr.read()
        assert said.startswith("thinwire: stopped by SIGINT; every process has ended.")
        assert said.endswith("can't be resumed, the same command begins again\n")
        assert not any(map(is_there, running))
    for line in (tmp_path / "fp16.jsonl").read_text().splitlines()[:-1]:
        assert json.loads(line)["kind"] in ("run", "plan", "step", "norms", "log")


@pytest.mark.timeout(300)
def test_the_elastic_demo_kills_and_adds_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchft")
    elastic = import_module("thinwire.demo.elastic")
    said: list[str] = []
    with stand_ins() as stand_in:
        # Not as a module: that ends without a word, and its stand-in would take it for dead.
        code = "import sys; from thinwire.demo.elastic import main; del sys.argv[1:3]; main()"
        forked = [sys.executable, *stand_in, "-u", "-c", code]
        monkeypatch.setattr(elastic, "python_module", lambda name: forked)
        paths = elastic.run_elastic(
            DemoOptions(processes=2, steps=60, model_size="tiny", output=tmp_path), said.append
        )
    told = "\n".join(said)
    assert "member 1 is killed (SIGKILL)" in told
    assert "without it" in told
    assert "member 2, which was waiting, joins" in told
    assert "it has taken the others' model" in told
    assert said[-1].startswith("in the end 2 members")
    assert "hold one model, the same to the bit" in said[-1]
    assert tmp_path / "member-0.jsonl" in paths
    run = read_run(tmp_path / "member-0.jsonl")
    assert run.points("losses")[-1].value == 1
    assert run.points("loss")[-1].step == 60


def test_the_elastic_demo_without_torchft_announces_nothing(tmp_path: Path) -> None:
    demo = run_python(
        WITHOUT_PACKAGE, "torchft", "thinwire", "demo", "--elastic", f"--output={tmp_path / 'new'}"
    )
    assert (demo.returncode, demo.stdout) == (1, "")
    assert demo.stderr.startswith("thinwire: elastic members need torchft")
    assert not (tmp_path / "new").exists()


def test_the_elastic_demo_takes_no_algorithm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, stderr = run_main(["demo", "--elastic", "--algorithm", "exact"], monkeypatch, capsys)
    assert code == 2
    assert "leave --algorithm out" in stderr
