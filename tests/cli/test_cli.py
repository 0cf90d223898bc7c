"""The command line as a whole: its surface, its help, its errors, its pipes."""

from __future__ import annotations

import os
import signal
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
import typer

from processes import Typed
from thinwire import Cast, checks, local_job
from thinwire.cli import build_app
from thinwire.cli.job import check_output, make_folder
from thinwire.errors import ConfigError
from thinwire.version import __version__
from watch.test_report import watched

# What people type. Adding is free; what is here stays.
SURFACE = {
    "": "--debug --version --install-completion --show-completion",
    "check": "--backend --processes --json --device",
    "probe": "--budget-seconds --backend --save --processes --streams --json",
    "advise": "--parameters --compute --rate --latency --machines --gpus --probe --optimizer --steps "
    "--budget-loss --json",
    "lab": "COMMAND --machines --rate --processes-per-machine --latency --jitter --loss --slow-machine "
    "--grace-seconds --report",
    "demo": "--processes --steps --algorithm --matrix-rank --model-size --seed --output",
    "report": "RUNS --output",
    "run": "SCRIPT ARGUMENTS --min --max --processes-per-member --lighthouse --host --port --max-restarts "
    "--grace-seconds",
    "attach": "COMMAND --bits --algorithm --auto --watch --checkpoint --strict",
}


def commands() -> dict[str, Any]:
    """By name; "" is what they all have in common."""
    group: Any = typer.main.get_command(build_app())
    return {"": group, **group.commands}


def name_of(parameter: Any) -> str:
    return str(parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper())


def test_the_surface() -> None:
    assert {name: " ".join(map(name_of, command.params)) for name, command in commands().items()} == SURFACE


def test_help_and_version_in_a_pipe(monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = typed("--help")
    assert (shown.returncode, "\x1b" in shown.stdout) == (0, False)
    assert all(name in shown.stdout for name in SURFACE)
    assert typed("--version").stdout == f"thinwire {__version__}\n"


def test_a_terminal_may_lack_our_signs_or_be_closed(monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    # In the locale C, Python opens stdout with the second kind of errors.
    for stdout in (*(TextIOWrapper(BytesIO(), "ascii", it) for it in ("strict", "surrogateescape")), None):
        monkeypatch.setattr(sys, "stdout", stdout)
        assert (typed("lab", "--help").returncode, sys.stdout is None) == (0, False)  # a lab writes to it


def test_an_error_is_one_line_and_a_traceback_if_asked_for(tmp_path: Path, typed: Typed) -> None:
    missing = tmp_path / "nothing.jsonl"
    done = typed("report", missing)
    assert done.returncode == 2
    assert done.stderr == f"thinwire: {missing} can't be read: No such file or directory\n"
    with pytest.raises(ConfigError, match="can't be read"):
        typed("--debug", "report", missing)


def test_an_error_of_all_processes_of_a_local_job_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    monkeypatch.setenv(local_job.STORE_VARIABLE, str(tmp_path / "store"))
    printed = [typed("report", name).stderr for name in ("one", "one", "two")]
    error = "thinwire: {} can't be read: No such file or directory\n"
    assert printed == [error.format("one"), "", error.format("two")]


@pytest.mark.parametrize(
    ("typed_line", "error"),
    [
        ("attach --bit 4 -- true", "--bits"),
        ("atach -- true", "'atach'"),
        ("demo --processes two", "'--processes'"),
        ("probe --save", "'--save'"),
        ("report", "missing argument"),
        ("lab --report -- true", "--report got --"),
        (f"advise --parameters=1M --compute=1s --rate=1gbit --machines=1{400 * '0'}", "'--machines'"),
    ],
)
def test_a_line_that_can_not_be_parsed_is_refused_in_one(typed_line: str, error: str, typed: Typed) -> None:
    done = typed(*typed_line.split())
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line[:10]) == (2, "thinwire: ")
    assert error in line


FILES = [
    "report run.jsonl --output {}",
    "probe --save {}",
    "lab --report {} -- true",
    "attach --watch {} -- true",
]
FOLDERS = ["demo --output {}", "attach --checkpoint {} -- true"]


@pytest.mark.parametrize(
    ("commands", "path", "reason"),
    [
        (FILES, "folder", "Is a directory; give another path"),
        (FILES, "n" * 300, "File name too long; give another path"),
        (FILES, "/proc/file", "No such file or directory; give another path"),  # whatever root may do
        (FILES[:3], "missing/file", "No such file or directory; give another path"),
        (FILES[3:], "file/below", "File exists; give another path"),
        (FOLDERS, "file", "File exists; give another path"),
        (FOLDERS, "file/below", "Not a directory; give another path"),
        (FOLDERS, "/proc", "No such file or directory; give another path"),
    ],
)
def test_a_path_that_can_not_be_written_is_refused_before_the_work(
    commands: list[str], path: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for command in commands:
        done = typed(*command.format(path).split())
        (line,) = done.stderr.splitlines()
        assert (done.returncode, line[:12]) == (2, "thinwire: --"), command
        assert line.endswith(f": {reason}"), command
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_trying_a_path_changes_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, pipe = tmp_path / "old", tmp_path / "new", tmp_path / "pipe"
    old.write_text("kept")
    os.mkfifo(pipe)
    for path in (old, new, pipe):
        check_output("--save", path)
    make_folder("--output", tmp_path)
    assert (old.read_text(), sorted(os.listdir(tmp_path))) == ("kept", ["old", "pipe"])
    monkeypatch.setattr(Path, "open", lambda *_: BytesIO())  # another machine of the job has removed it
    check_output("--save", new)


@pytest.mark.parametrize(
    "command",
    [
        "demo --processes=17",
        "check --processes=17",
        "probe --processes=17",
        "lab --machines=17 -- true",
        f"run --max=17 {__file__}",
        f"run --min=17 {__file__}",
    ],
)
def test_no_more_processes_are_started_than_this_machine_can_bear(
    command: str, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    monkeypatch.setattr(checks, "cores", lambda: 2)
    done, name = typed(*command.split()), command.partition("=")[0].partition("--")[2]
    expected = f"thinwire: {name} must be at most 16 here, 8 for each core, got 17; start fewer\n"
    assert (done.returncode, done.stderr) == (2, expected)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is always full")
@pytest.mark.parametrize("typed_line", ["--help", "report {run} --output={page}", "report {run} -o/dev/full"])
def test_output_that_can_not_be_written_is_one_line(
    typed_line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    run = watched(tmp_path / "run.jsonl", Cast("fp16"), steps=1)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        done = typed(*typed_line.format(run=run, page=tmp_path / "page.html").split())
    what = "[Errno 28] {}: '/dev/full'" if "/dev/full" in typed_line else "the output can't be written: {}"
    assert (done.returncode, done.stderr) == (1, f"thinwire: {what.format('No space left on device')}\n")


def test_output_that_nobody_reads_is_nothing_to_talk_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    run = watched(tmp_path / "run.jsonl", Cast("fp16"), steps=1)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        done = typed("report", run, f"--output={tmp_path / 'page.html'}")
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
