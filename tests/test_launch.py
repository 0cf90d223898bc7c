"""Jobs on this machine, elastic ones too: who fails first, who ends whom, who can reach it, how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from commands import run_python, stand_ins, started_python
from processes import wait_for
from thinwire import ConfigError, launch, local_job
from thinwire.cli.job import run_here
from thinwire.elastic_job import ElasticJob
from thinwire.launch import Job, LocalJob, end_signals, ending_with_this, python_module

# Every start leaves a file of its number: its process, and some of its environment; then they part.
PARTING = """
import os, pathlib, signal, sys, time
folder, number, *names = pathlib.Path(sys.argv[1]), os.environ[sys.argv[2]], *sys.argv[3:]
rank, starts = int(number), len(list(folder.glob(f"started-{number}-*")))
values = " ".join(os.environ[name] for name in names)
(folder / f"part-{number}").write_text(f"{os.getpid()} {values}")
os.replace(folder / f"part-{number}", folder / f"started-{number}-{starts}")
"""
LOCAL = ["RANK", "THINWIRE_STORE", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"]
ELASTIC = ["THINWIRE_MEMBER", "TORCHFT_LIGHTHOUSE", "THINWIRE_MIN_MEMBERS", "THINWIRE_HOSTNAME"]
SLEEP = "time.sleep(60)"
ALL_HERE = """
while len(list(folder.glob("started-*"))) < 3:
    time.sleep(0.01)
"""


def started(folder: Path) -> dict[str, list[str]]:
    """Return the process and the environment of every start, by the number of the process and its start."""
    files = folder.glob("started-*")
    return {path.name.removeprefix("started-"): path.read_text().split() for path in files}


def alive(folder: Path) -> list[str]:
    return [process for process, *_ in started(folder).values() if Path(f"/proc/{process}").exists()]


def ran(rest: str, folder: Path, first: str = "", **attributes: object) -> LocalJob:
    """A job of three that has ended, and taken its processes along."""
    code = first + PARTING + ALL_HERE + rest
    job = LocalJob([sys.executable, "-S", "-c", code, str(folder), *LOCAL], 3)
    vars(job).update(attributes)
    job.run()
    assert not alive(folder)
    return job


def ran_members(rest: str, folder: Path, members: int = 2, **options: Any) -> ElasticJob:
    """The same of elastic members."""
    command = [sys.executable, "-S", "-c", PARTING + rest, str(folder), *ELASTIC]
    options = {"min_members": 2, "end_within_seconds": 10.0, "out": sys.stdout.buffer, **options}
    job = ElasticJob(command, members, **options)
    job.run()
    assert not alive(folder)
    return job


@pytest.fixture
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks after a job before all its processes have ended."""

    def late(look: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def goes_on(job: Any) -> bool:
            while job.is_running:
                time.sleep(0.01)
            return look(job)

        return goes_on

    for kind in (Job, ElasticJob):
        monkeypatch.setattr(kind, "_continues", late(kind._continues))


def test_all_end_well_and_nobody_else_can_open_what_they_meet_by(tmp_path: Path) -> None:
    look = 'print(pathlib.Path(os.environ["THINWIRE_STORE"]).parent.stat().st_mode & 0o777, file=sys.stderr)'
    with (tmp_path / "errors").open("wb") as errors:
        job = ran(look, tmp_path, _errors=errors)
    assert (tmp_path / "errors").read_text().split() == [str(0o700)] * 3
    assert (job.failure, job.exit_code) == (None, 0)
    for _, store, size, interface in started(tmp_path).values():
        assert (size, interface) == ("3", launch.loopback_interface())
        assert not Path(store).parent.exists()


def test_the_first_that_fails_ends_the_others(tmp_path: Path) -> None:
    job = ran(f"{SLEEP} if rank != 1 else sys.exit(3)", tmp_path)
    assert (job.failure, job.exit_code) == ("process 1 ended with exit code 3", 3)


@pytest.mark.usefixtures("_late")
def test_one_that_is_killed_is_the_cause_of_the_others_errors(tmp_path: Path) -> None:
    """Even if all have failed when somebody looks."""
    job = ran("os.kill(os.getpid(), signal.SIGKILL) if rank == 2 else sys.exit(1)", tmp_path)
    assert (job.failure, job.exit_code) == ("process 2 was ended by signal 9", 137)


@pytest.mark.parametrize("is_urgent", [False, True], ids=["in time", "at a further signal"])
def test_who_does_not_listen_is_killed(tmp_path: Path, is_urgent: bool) -> None:
    deaf = "import signal; signal.signal(15, signal.SIG_IGN)\n"
    end = f"if rank: {SLEEP}\nsys.exit(1)"
    if is_urgent:

        def press() -> None:
            wait_for(lambda: len(started(tmp_path)) == 3)
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
        output.join(60)
        assert not output.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends them")
def test_who_starts_after_its_launcher_has_ended_does_not_begin() -> None:
    begin = ending_with_this([sys.executable, "-S", "-c", "print('begun')"])
    of_another = [f"{os.getpid() + 1}" if argument == f"{os.getpid()}" else argument for argument in begin]
    ends = [subprocess.run(command, capture_output=True, check=False) for command in (of_another, begin)]
    assert [(ended.returncode, ended.stdout) for ended in ends] == [(1, b""), (0, b"begun\n")]


def test_a_machine_without_loopback_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "eth0")])
    with pytest.raises(ConfigError, match=r"this machine has no loopback interface, .* it has eth0"):
        LocalJob(["true"], 2)
    monkeypatch.delattr(signal, "SIGHUP")
    with pytest.raises(ConfigError, match="Windows lacks the signals"):
        LocalJob(["true"], 2)


def test_what_is_asked_of_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", local_job.STORE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    run_here(None)
    with pytest.raises(ConfigError, match="processes must be a whole number of at least 1, got 0"):
        run_here(0)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"already belongs to one \(RANK is set\); leave it out"):
        run_here(2)
    monkeypatch.setenv(local_job.STORE_VARIABLE, "there")
    run_here(2)


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


# Elastic members

elastic = pytest.mark.skipif(find_spec("torchft") is None, reason="members meet by torchft")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@elastic
def test_who_dies_is_started_again_and_all_end_well(tmp_path: Path) -> None:
    lines: list[str] = []
    die = """
if number == "1" and not starts: os.kill(os.getpid(), signal.SIGKILL)
while number == "0" and not (folder / "started-1-1").exists():
    time.sleep(0.01)
"""
    assert ran_members(die, tmp_path, say=lines.append).exit_code == 0
    of_each = started(tmp_path)
    assert sorted(of_each) == ["0-0", "1-0", "1-1"]
    address = of_each["0-0"][1]
    assert [rest for _, *rest in of_each.values()] == [[address, "2", "127.0.0.1"]] * 3
    assert lines == [
        f"lighthouse {address}; averagings need 2 members, 2 start here",
        "member 1 was ended by signal 9; started again (1 of 3 restarts)",
    ]
    assert_free(address.rpartition(":")[2])


def assert_free(port: str) -> None:
    """Nobody listens there any more. (The kernel may keep a connection that its server has closed.)"""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)))


@elastic
@pytest.mark.parametrize(("how", "exit_code"), [("done", 1), ("SIGTERM", 143), ("SIGKILL", -9)])
def test_however_the_command_ends_no_process_and_no_port_is_left(
    tmp_path: Path, how: str, exit_code: int
) -> None:
    script = tmp_path / "member.py"
    script.write_text(f"""
import socket
listener = socket.create_server(("127.0.0.1", 0))
{PARTING}
(folder / f"port-{{number}}").symlink_to(str(listener.getsockname()[1]))
while not (folder / "done").exists():
    time.sleep(0.01)
""")
    ports = [tmp_path / f"port-{number}" for number in range(2)]
    with started_python(
        "thinwire", "run", "--min", "2", "--port", str(free_port()), str(script), str(tmp_path), *ELASTIC
    ) as command:
        wait_for(lambda: all(map(os.path.islink, ports)))
        of_each = started(tmp_path)
        assert len(of_each) == 2
        (tmp_path / "done").touch() if how == "done" else os.kill(command.pid, signal.Signals[how])
        assert command.wait() == exit_code
        # Of a command that was killed nobody asks them to end.
        wait_for(lambda: how != "SIGKILL" or not alive(tmp_path))
    assert not alive(tmp_path)
    for port in (of_each["0-0"][1].rpartition(":")[2], *map(os.readlink, ports)):
        assert_free(port)


@elastic
@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        ("print('trained')", 1, "torchrun --nproc-per-node 4"),
        ("raise SystemExit(3)", 3, ""),  # what it has failed of is said, and not this
        ("from thinwire.elastic import TorchftGroup; TorchftGroup().leave()", 0, ""),
    ],
    ids=["an ordinary script", "one that fails", "one whose members meet"],
)
def test_an_ordinary_script_is_told_what_to_do(tmp_path: Path, code: str, exit_code: int, words: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(code)
    options = ["--min=2", "--max-restarts=0", f"--processes-per-member={1 if exit_code == 0 else 2}"]
    with stand_ins() as stand_in:  # two that import torch
        command = [*(stand_in if exit_code == 0 else []), str(script), "--epochs", "1"]
        ended = run_python("thinwire", "run", *options, *command)
    assert ended.returncode == exit_code, ended.stderr
    if words:
        assert f"{words} {script} --epochs 1" in ended.stderr.strip().splitlines()[-1]
    else:
        assert "torchrun" not in ended.stderr


@elastic
def test_too_few_that_are_left_are_asked_to_leave(tmp_path: Path) -> None:
    lines: list[str] = []
    die = """
while not (folder / "started-0-0").exists():
    time.sleep(0.01)
sys.exit(3) if number == "1" else time.sleep(60)
"""
    assert ran_members(die, tmp_path, max_restarts=1, say=lines.append).exit_code == 3
    assert lines[2:] == ["member 1 ended with exit code 3; not started again"]
    assert sorted(started(tmp_path)) == ["0-0", "1-0", "1-1"]


@elastic
def test_one_that_came_too_late_is_asked_to_leave(tmp_path: Path) -> None:
    wait = 'time.sleep(60 if number == "1" else 0)'
    assert ran_members(wait, tmp_path, end_within_seconds=0.2).exit_code == 0


@pytest.mark.usefixtures("_late")
@elastic
def test_the_last_one_is_not_started_again_when_training_is_over(tmp_path: Path) -> None:
    die = """
while number == "1" and not (folder / "started-0-0").exists():
    time.sleep(0.01)
sys.exit(3 if number == "1" else 0)
"""
    job = ran_members(die, tmp_path, min_members=1)
    job.processes[1].send(signal.SIGKILL)  # nothing, since it has ended
    assert job.exit_code == 0
    assert sorted(started(tmp_path)) == ["0-0", "1-0"]


@elastic
def test_each_line_begins_with_the_member_that_printed_it(tmp_path: Path) -> None:
    words = 'print("out", number); print("error", number, end="", file=sys.stderr)'
    with (tmp_path / "out").open("wb") as out:
        ran_members(words, tmp_path, out=out)
    lines = sorted((tmp_path / "out").read_text().splitlines())
    assert lines == ["[0] error 0", "[0] out 0", "[1] error 1", "[1] out 1"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is always full")
@elastic
def test_output_that_can_not_be_written_ends_the_job(tmp_path: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as out:
        assert ran_members("print(1); time.sleep(60)", tmp_path, out=out).exit_code == 1


@elastic
def test_at_a_given_lighthouse_others_may_be_enough(tmp_path: Path) -> None:
    given = {"lighthouse": "http://10.0.0.1:29510", "host": "10.0.0.2"}
    assert ran_members("", tmp_path, members=1, **given).exit_code == 0
    assert started(tmp_path)["0-0"][1:] == ["http://10.0.0.1:29510", "2", "10.0.0.2"]


@elastic
def test_what_can_not_be_is_told_before_anything_starts() -> None:
    out = sys.stdout.buffer
    with pytest.raises(ConfigError, match="max=1 is below min=2"):
        ElasticJob(["true"], 1, min_members=2, out=out)
    with pytest.raises(ConfigError, match="lighthouse is given; leave port out"):
        ElasticJob(["true"], 1, lighthouse="http://10.0.0.1:29510", port=1, out=out)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"a lighthouse can't listen at 127.0.0.1:{port}"):
            ElasticJob(["true"], 1, port=port, out=out).run()
