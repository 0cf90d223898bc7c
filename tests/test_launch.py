"""A job on this machine: who fails first, who ends whom, and who can reach it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from ipaddress import ip_address
from pathlib import Path
from threading import Thread

import pytest

from crash import listening_on
from launcher import started_python
from thinwire import ConfigError, exit_with_launcher, launch
from thinwire.cli.common import run_here
from thinwire.launch import LocalJob, end_signals, python_module

WITHIN_SECONDS = 60.0

# Every process leaves its number and its folder's mode; then they part.
PARTING = """
import os, pathlib, signal, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
mode = pathlib.Path(os.environ["THINWIRE_STORE"]).parent.stat().st_mode & 0o777
told = f"{os.getpid()} {mode:o} {os.environ['WORLD_SIZE']} {os.environ['GLOO_SOCKET_IFNAME']}"
(folder / f"part-{rank}").write_text(told)
os.replace(folder / f"part-{rank}", folder / f"told-{rank}")
while len(list(folder.glob("told-*"))) < 3:
    time.sleep(0.01)
"""
SLEEP = "time.sleep(60)"


def ran(rest: str, folder: Path, first: str = "", **attributes: object) -> LocalJob:
    """A job of three that has ended, and taken its processes along."""
    job = LocalJob([sys.executable, "-S", "-c", first + PARTING + rest, str(folder)], 3)
    vars(job).update(attributes)
    job.run()
    assert not any(Path(f"/proc/{process_id}").exists() for process_id, *_ in told(folder))
    return job


def told(folder: Path) -> list[list[str]]:
    return [(folder / f"told-{process_rank}").read_text().split() for process_rank in range(3)]


def test_all_that_end_well(tmp_path: Path) -> None:
    job = ran("", tmp_path)
    assert (job.failure, job.exit_code) == (None, 0)
    assert [rest for _, *rest in told(tmp_path)] == [["700", "3", launch.loopback_interface()]] * 3


FAIL = """
path = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"])
path.write_text('{"message": {"message": "RuntimeError: lost a peer\\\\nat length"}}')
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("rest", "failure", "exit_code"),
    [
        (f"{SLEEP} if rank != 1 else sys.exit(3)", "process 1 ended with exit code 3", 3),
        # Even if all have failed when somebody looks: who was killed is the cause of the others' errors.
        (
            f"if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n{FAIL}",
            "process 2 was ended by signal 9",
            137,
        ),
        (f"if rank: {SLEEP}\n{FAIL}", "process 0: RuntimeError: lost a peer", 1),
    ],
    ids=["by its exit code", "killed", "in its own words"],
)
def test_the_first_that_fails_ends_the_others(
    rest: str, failure: str, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if SLEEP not in rest:
        monkeypatch.setattr(launch, "LOOK_EVERY_SECONDS", 1.0)
    job = ran(rest, tmp_path)
    assert (job.failure, job.exit_code) == (failure, exit_code)


@pytest.mark.parametrize("is_urgent", [False, True], ids=["in time", "at a further signal"])
def test_who_does_not_listen_is_killed(tmp_path: Path, is_urgent: bool) -> None:
    deaf = "import signal; signal.signal(15, signal.SIG_IGN)\n"
    end = f"if rank: {SLEEP}\nsys.exit(1)"
    if is_urgent:

        def press() -> None:
            while len(list(tmp_path.glob("told-*"))) < 3:
                time.sleep(0.01)
            for _ in range(2):
                time.sleep(0.3)
                signal.raise_signal(signal.SIGTERM)

        Thread(target=press).start()
        end = SLEEP
    job = ran(end, tmp_path, deaf, _end_within_seconds=1000 if is_urgent else 0.2)
    assert job.exit_code == (143 if is_urgent else 1)


def test_signals_that_are_ignored_stay_ignored() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with end_signals() as received:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends them")
def test_a_launcher_that_is_killed_outright_takes_its_processes_along() -> None:
    """Even those that have come no further than their imports, and do nothing for that themselves."""
    command = [sys.executable, "-S", "-c", "import os, time; os.write(1, b'here\\n'); time.sleep(60)"]
    code = f"from thinwire.launch import LocalJob; LocalJob({command}, 3).run()"
    with started_python("-u", "-c", code) as launcher:
        assert [launcher.stdout.readline() for _ in range(3)] == ["here\n"] * 3
        launcher.kill()
        # Ends when nobody has it open, its processes neither.
        output = Thread(target=launcher.stdout.read, daemon=True)
        output.start()
        output.join(WITHIN_SECONDS)
        assert not output.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends them")
def test_who_starts_after_its_launcher_has_ended_does_not_begin() -> None:
    gone = {exit_with_launcher.LAUNCHER_VARIABLE: str(os.getpid() + 1)}
    command = exit_with_launcher.exiting_with_this([sys.executable, "-S", "-c", "print('begun')"])
    here = {exit_with_launcher.LAUNCHER_VARIABLE: str(os.getpid())}
    ends = [
        subprocess.run(command, env=os.environ | each, capture_output=True, text=True, check=False)
        for each in (gone, here)
    ]
    assert [(each.returncode, each.stdout) for each in ends] == [(1, ""), (0, "begun\n")]


def test_a_machine_without_loopback_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "eth0")])
    with pytest.raises(ConfigError, match="its loopback interface, lo or lo0; this one has eth0"):
        LocalJob(["true"], 2)


def test_what_is_asked_of_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", launch.STORE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    run_here(None)
    with pytest.raises(ConfigError, match="sharded must be a whole number of at least 1, got 0"):
        run_here(0, "--sharded")
    with pytest.raises(ConfigError, match="processes must be a whole number of at least 1, got 0"):
        run_here(0)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"this is a process of one \(RANK is set\): leave it out"):
        run_here(2)
    monkeypatch.setenv(launch.STORE_VARIABLE, "there")
    run_here(2)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux tells who listens where")
def test_the_eye_that_looks_for_listeners_sees_them() -> None:
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0)):
        assert {ip_address("127.0.0.1"), ip_address("0.0.0.0")} <= listening_on(os.getpid())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python can't be told to leave the folder out")
def test_what_lies_in_the_current_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "this.py").write_text("raise SystemExit('a stranger ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    assert "a stranger ran" not in printed_by(python_module("this"))
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as it is where the user wants it so
    assert "a stranger ran" in printed_by(python_module("this"))


def printed_by(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr
