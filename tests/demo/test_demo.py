"""The demo: its text, its model, its arithmetic, and a real run of it."""

from __future__ import annotations

import os
import re
import signal
import sysconfig
from pathlib import Path

import pytest
from rich.console import Console

from commands import listening_on, run_python, started_python
from demo import forking
from processes import Setting, run_fresh, wait_for
from thinwire import launch
from thinwire.cli.demo import JobError, run_algorithms
from thinwire.demo.gpt import load_text
from thinwire.demo.train import DemoOptions
from thinwire.errors import ConfigError
from thinwire.watch import read_run


def test_heldout_files_are_never_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(25):
        (tmp_path / f"file{number:02}.py").write_text(f"# {number:02}\n")
    for folder in ("site-packages", "test", "encodings"):  # which are skipped
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file.py").write_text("# skipped\n")
    text = load_text(tmp_path)
    assert bytes(text.heldout.tolist()) == b"# 09\n# 19\n"
    others = "".join(f"# {number:02}\n" for number in range(25) if number not in (9, 19))
    assert bytes(text.train.tolist()) == others.encode()
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    cut = load_text(max_train_bytes=12, max_heldout_bytes=7)
    assert (cut.train.numel(), cut.heldout.numel()) == (12, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"processes": 1}, "processes must be a whole number of at least 2, got 1"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"model_size": "huge"}, "model_size must be one of tiny, small, medium, got 'huge'"),
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


def test_a_failing_process_is_told_in_one_line(tmp_path: Path) -> None:
    (ended,) = run_fresh(_failed, tmp_path, processes=1)
    assert re.fullmatch(r"the training job failed: process [01] ended with exit code 1; see .*", ended.told)
    assert "no-such-network" in (tmp_path / "processes.log").read_text()


def _failed(setting: Setting, folder: Path) -> str:
    forking.install()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "loopback_interface", lambda: "no-such-network")
        with pytest.raises(JobError) as error_info:
            run_algorithms(DemoOptions(steps=1, model_size="tiny", output=folder), Console(quiet=True))
    return str(error_info.value)


def test_demo_end_to_end(tmp_path: Path) -> None:
    options = ["--model-size=tiny", f"--output={tmp_path}", "--steps=6", "--processes=2"]
    done = run_python(str(forking.__file__), "demo", *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "heldout loss" in done.stdout
    assert "compression ratio" in done.stdout
    assert "powersgd  step 6/6" in done.stdout
    runs = [read_run(tmp_path / f"{name}.jsonl") for name in ("fp16", "quantize", "powersgd")]
    for run in runs:
        assert ([step["step"] for step in run.steps], run.processes) == ([1, 2, 3, 4, 5, 6], 2)
        assert run.points("heldout_loss")[-1].value < 5
    first, *_, last = (run.points("loss")[0].value for run in runs)
    assert first == last
    fp16, quantize, powersgd = (sum(step["message_bytes"] for step in run.steps) for run in runs)
    assert fp16 == 6 * 2 * 136_960
    assert quantize < fp16 / 3.5
    assert powersgd < fp16 / 4


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux tells who listens where")
def test_it_listens_on_loopback_only_and_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    options = ["--model-size=tiny", f"--output={tmp_path}", "--steps=100000"]
    with started_python(str(forking.__file__), "demo", *options) as running:
        record = tmp_path / "fp16.jsonl"
        wait_for(lambda: record.exists() and '"loss"' in record.read_text())
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        processes = [running.pid, *map(int, children)]
        assert len(processes) == 3
        addresses = {address for process_id in processes for address in listening_on(process_id)}
        assert addresses == {"0100007F"}
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait() == 130
        stopped = (
            "thinwire: stopped by SIGINT; every process has ended; run the same command to start again\n"
        )
        assert running.stderr.read() == stopped
        assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert read_run(record).points("loss")
