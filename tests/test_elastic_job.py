"""Elastic members on this machine: who is started again, who ends whom, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launcher import started_python
from thinwire import ConfigError, launch
from thinwire.launch import ElasticJob

pytest.importorskip("torchft")

WITHIN_SECONDS = 60.0

# Every start leaves a file of its member's number; then they part.
PARTING = """
import os, pathlib, signal, sys, time
number, folder = os.environ["THINWIRE_MEMBER"], pathlib.Path(sys.argv[1])
starts = len(list(folder.glob(f"told-{number}-*")))
names = "TORCHFT_LIGHTHOUSE", "THINWIRE_MIN_MEMBERS", "THINWIRE_HOSTNAME"
told = " ".join(os.environ[name] for name in names)
(folder / f"part-{number}").write_text(f"{os.getpid()} {told}")
os.replace(folder / f"part-{number}", folder / f"told-{number}-{starts}")
"""


def ran(rest: str, folder: Path, members: int = 2, **options: Any) -> ElasticJob:
    """A job that has ended, and taken its members along."""
    command = [sys.executable, "-S", "-c", PARTING + rest, str(folder)]
    options = {"min_members": 2, "end_within_seconds": 10.0, "out": sys.stdout.buffer, **options}
    job = ElasticJob(command, members, **options)
    job.run()
    assert_all_have_ended(folder)
    return job


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def told(folder: Path) -> dict[str, list[str]]:
    return {path.name.removeprefix("told-"): path.read_text().split() for path in folder.glob("told-*")}


def assert_all_have_ended(folder: Path) -> None:
    assert not any(Path(f"/proc/{process_id}").exists() for process_id, *_ in told(folder).values())


def test_who_dies_is_started_again_and_all_end_well(tmp_path: Path) -> None:
    said: list[str] = []
    die = """
if number == "1" and not starts: os.kill(os.getpid(), signal.SIGKILL)
while number == "0" and not (folder / "told-1-1").exists():
    time.sleep(0.01)
"""
    assert ran(die, tmp_path, say=said.append).exit_code == 0
    of_each = told(tmp_path)
    assert sorted(of_each) == ["0-0", "1-0", "1-1"]
    address = of_each["0-0"][1]
    assert [rest for _, *rest in of_each.values()] == [[address, "2", "127.0.0.1"]] * 3
    assert said == [
        f"lighthouse {address}; averagings need 2 members, 2 start here",
        "member 1 was ended by signal 9; started again (1 of 3 restarts)",
    ]
    assert_free(address.rpartition(":")[2])


def assert_free(port: str) -> None:
    """Nobody listens there any more."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", int(port)))


@pytest.mark.parametrize(("how", "exit_code"), [("done", 0), ("SIGTERM", 143), ("SIGKILL", -9)])
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
        "thinwire", "run", "--min", "2", "--port", str(free_port()), str(script), str(tmp_path)
    ) as command:
        deadline = time.monotonic() + WITHIN_SECONDS
        while not all(map(os.path.islink, ports)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        of_each = told(tmp_path)
        assert len(of_each) == 2
        if how == "done":
            (tmp_path / "done").touch()
        else:
            os.kill(command.pid, signal.Signals[how])
        assert command.wait(WITHIN_SECONDS) == exit_code
        if how == "SIGKILL":  # nobody asks them to end, or can
            while any(Path(f"/proc/{process_id}").exists() for process_id, *_ in of_each.values()):
                assert time.monotonic() < deadline
                time.sleep(0.01)
    assert_all_have_ended(tmp_path)
    for port in (of_each["0-0"][1].rpartition(":")[2], *map(os.readlink, ports)):
        assert_free(port)


def test_too_few_that_are_left_are_asked_to_leave(tmp_path: Path) -> None:
    said: list[str] = []
    die = """
while not (folder / "told-0-0").exists():
    time.sleep(0.01)
sys.exit(3) if number == "1" else time.sleep(60)
"""
    assert ran(die, tmp_path, max_restarts=1, say=said.append).exit_code == 3
    assert said[2:] == ["member 1 ended with exit code 3; not started again"]
    assert sorted(told(tmp_path)) == ["0-0", "1-0", "1-1"]


def test_one_that_came_too_late_is_asked_to_leave(tmp_path: Path) -> None:
    wait = 'time.sleep(60 if number == "1" else 0)'
    assert ran(wait, tmp_path, end_within_seconds=0.2).exit_code == 0


def test_the_last_one_is_not_started_again_when_training_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die = """
while number == "1" and not (folder / "told-0-0").exists():
    time.sleep(0.01)
sys.exit(3 if number == "1" else 0)
"""
    monkeypatch.setattr(launch, "LOOK_EVERY_SECONDS", 1.0)  # both have ended when somebody looks
    job = ran(die, tmp_path, min_members=1)
    job.processes[1].send(signal.SIGKILL)  # nothing, since it has ended
    assert job.exit_code == 0
    assert sorted(told(tmp_path)) == ["0-0", "1-0"]


def test_each_line_begins_with_the_member_that_printed_it(tmp_path: Path) -> None:
    words = 'print("out", number); print("error", number, end="", file=sys.stderr)'
    with (tmp_path / "out").open("wb") as out:
        ran(words, tmp_path, out=out)
    lines = sorted((tmp_path / "out").read_text().splitlines())
    assert lines == ["[0] error 0", "[0] out 0", "[1] error 1", "[1] out 1"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is always full")
def test_output_that_can_not_be_written_ends_the_job(tmp_path: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as out:
        assert ran("print(1); time.sleep(60)", tmp_path, out=out).exit_code == 1


def test_at_a_given_lighthouse_others_may_be_enough(tmp_path: Path) -> None:
    given = {"lighthouse": "http://10.0.0.1:29510", "host": "10.0.0.2"}
    assert ran("", tmp_path, members=1, **given).exit_code == 0
    assert told(tmp_path)["0-0"][1:] == ["http://10.0.0.1:29510", "2", "10.0.0.2"]


def test_what_can_not_be_is_told_before_anything_starts() -> None:
    out = sys.stdout.buffer
    with pytest.raises(ConfigError, match="max=1 members are fewer than min=2"):
        ElasticJob(["true"], 1, min_members=2, out=out)
    with pytest.raises(ConfigError, match="leave it out with lighthouse"):
        ElasticJob(["true"], 1, lighthouse="http://10.0.0.1:29510", port=1, out=out)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"no lighthouse can listen at 127.0.0.1:{port}"):
            ElasticJob(["true"], 1, port=port, out=out).run()
