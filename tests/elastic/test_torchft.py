"""Real members with a real lighthouse: killed, stopped, told to leave, refused, and joining again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from commands import EXAMPLES, assert_compressed_and_agreed, run_python, stand_ins
from job import PATIENCE_SECONDS, Job
from thinwire.elastic import TorchftGroup
from thinwire.errors import CommunicationError, ConfigError, LeftError, MissingExtraError
from thinwire.local_sgd.groups import torchft_client, torchft_group
from thinwire.local_sgd.groups.group import NoQuorumError

pytest.importorskip("torchft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:The 'warn' method is deprecated:DeprecationWarning"
)  # its own


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    running = Job(tmp_path)
    yield running
    running.close()


@pytest.mark.timeout(300)
def test_members_are_killed_stopped_told_to_leave_and_join_again(job: Job) -> None:
    options: dict[str, Any] = {"min_members": 2, "step_seconds": 0.05}
    first, second = job.start(0, **options), job.start(1, **options)
    job.wait_for_averagings(0)
    third = job.start(2, **options)
    job.wait_for_averagings(2)
    assert job.told(event="joined", member=2)[0]["step"] > 0

    second.kill()
    job.wait(lambda: job.told(event="averaged", member=0, losses=1))
    assert job.told(event="averaged", member=0)[-1]["lost_error"] > 0

    job.start(1, **options)
    job.wait(lambda: len(job.told(event="joined", member=1)) == 2)
    job.wait_for_averagings(1)

    os.kill(third.pid, signal.SIGSTOP)
    job.wait(lambda: job.told(event="averaged", member=0, losses=2))
    job.wait_for_averagings(0)
    os.kill(third.pid, signal.SIGCONT)
    job.wait_for_averagings(2)

    os.kill(first.pid, signal.SIGTERM)
    job.wait(lambda: job.told(event="left", member=0))
    first.join(PATIENCE_SECONDS)
    assert [each.exitcode for each in first.processes] == [0]
    # At the interpreter's end they could abort the process.
    assert not [name for name in job.told(event="left")[0]["threads"] if "gloo" in name]
    job.wait(lambda: job.told(event="averaged", member=2, leaves=1))
    assert job.check_equal() > 10


def test_a_lighthouse_or_launcher_that_is_not_there_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommunicationError, match="there is no lighthouse at"):
        TorchftGroup("http://127.0.0.1:1", timeout_seconds=0.5, hostname="127.0.0.1")
    with pytest.raises(ConfigError, match="start one with torchft_lighthouse"):
        TorchftGroup("10.0.0.1:29510")
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setenv("THINWIRE_LAUNCHER_PID", str(gone.pid))
    with pytest.raises(CommunicationError, match=f"process {gone.pid}, which started this member"):
        TorchftGroup("http://127.0.0.1:1")


def test_a_torchft_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ("0.2.0", "2026.8.1", "0.1.9"):
        monkeypatch.setattr(torchft_client, "version", lambda _, found=found: found)
        if found != "0.1.9":
            assert torchft_client.checked_version() == found
    with pytest.raises(MissingExtraError, match=r"need torchft 0.2 or later, got 0.1.9"):
        TorchftGroup("http://127.0.0.1:1")


def test_torchft_is_told_the_members_count_and_asked_again_until_it_answers(job: Job) -> None:
    group = TorchftGroup(job.address, timeout_seconds=5, wait_seconds=20, hostname="127.0.0.1")
    try:
        for commits, answer in enumerate([False, TimeoutError("no answer")]):
            group.start_quorum(commits)
            with patch.object(group._manager, "should_commit", side_effect=[answer]):
                group.commit(True)
        group.start_quorum(2)
        group.commit(False)
        assert group._manager.current_step() == 2
        foreign = patch.object(torchft_group, "VERSION", "thinwire 9")
        with foreign, pytest.raises(CommunicationError, match=r"do not run thinwire 9: .*thinwire 0"):
            group.start_quorum(2)
        group.start_quorum(2)  # connects again
        asked: list[timedelta] = []

        def no_answer(timeout: timedelta, *, allow_heal: bool) -> None:
            assert not allow_heal
            asked.append(timeout)
            if len(asked) == 1:
                raise torchft_client.LighthouseGoneError
            if len(asked) < 4:
                raise TimeoutError("no answer")

        silent = patch.object(group._manager, "start_quorum", no_answer)
        with silent, patch.object(torchft_group, "PAUSE_SECONDS", 0.0):
            group.start_quorum(2)
        # Of a lighthouse that has died meanwhile none comes, and torchft does not say so.
        assert [each / asked[0] for each in asked[:3]] == [1, 1, 2]
        assert asked[0] == timedelta(seconds=7.5)
        assert asked[3] <= timedelta(seconds=20)
        group.is_leaving, group._timeout, group.wait_seconds = lambda: True, timedelta(seconds=960), 3600.0
        gone = patch.object(group._manager, "start_quorum", side_effect=RuntimeError("no answer"))
        with gone, pytest.raises(LeftError, match=r"the lighthouse .* does not answer \(no answer\)"):
            group.start_quorum(2)
        late = patch.object(group._manager, "start_quorum", side_effect=TimeoutError("status: Cancelled"))
        with late, pytest.raises(LeftError, match=r"does not answer \(no quorum in 1440 s\)"):
            group.start_quorum(2)
        group.wait_seconds = 0.0
        with late, pytest.raises(NoQuorumError, match=r"no quorum in 0.1 s\). See on the page"):
            group.start_quorum(2)
    finally:
        group.leave()
    assert group._client.has_left


def test_who_waits_for_a_lighthouse_that_ends_learns_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchft_client, "LOOK_SECONDS", 0.01)
    server = socket.create_server(("127.0.0.1", 0))
    lighthouse = f"http://127.0.0.1:{server.getsockname()[1]}"
    asked, ended = threading.Event(), threading.Event()

    def unanswered(**_: Any) -> None:
        asked.set()
        ended.wait(PATIENCE_SECONDS)

    def end() -> None:
        connection, _ = server.accept()
        asked.wait(PATIENCE_SECONDS)
        server.close()
        connection.close()

    client = torchft_client.QuorumClient(Mock(_quorum=unanswered), Mock(), Mock(), lighthouse)
    client.has_left = True  # after Ctrl-C: Python would wait for the request
    with pytest.raises(torchft_client.LighthouseGoneError):
        client._quorum(step=0)
    client.has_left = False
    asked.clear()
    threading.Thread(target=end).start()
    with pytest.raises(torchft_client.LighthouseGoneError, match="ended before it answered"):
        client._quorum(step=0)
    asked.clear()
    with pytest.raises(torchft_client.LighthouseGoneError, match="nothing listens"):
        client._quorum(step=0)
    assert not asked.is_set()  # such a question would be lost, and nobody would hear of it
    ended.set()


def test_a_quorum_of_others_under_the_same_number_is_joined_anew_and_in_another_place() -> None:
    """A lighthouse that comes back begins to count again, and stores still hold what the dead have said."""
    group = torchft_client.ConfiguredGroup(Mock())
    manager = Mock(_quorum_id=7)
    quorums = [
        Mock(quorum_id=7, replica_ids=members, max_step=4) for members in (["a", "b"], ["a", "b"], ["b", "c"])
    ]
    known: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        lighthouse = f"http://127.0.0.1:{server.getsockname()[1]}"
        inner = Mock(_quorum=Mock(side_effect=quorums))
        client = torchft_client.QuorumClient(inner, manager, group, lighthouse)
        for _ in quorums:
            known.append(client._quorum(step=4).quorum_id == manager._quorum_id)
            if not known[-1]:  # as torchft's manager does
                manager._quorum_id = 7
                group.configure("host:1/torchft/7/0", "b", 0, 2, 7)
        client.close()
    assert known == [False, True, False]
    places = [call.args[0] for call in group.inner.configure.call_args_list]
    assert len(places) == len(set(places)) == 2
    assert all(place.startswith("host:1/torchft/7/0/") for place in places)
    assert client.should_commit == client._inner.should_commit


def test_the_example_runs_as_thinwire_run_starts_it() -> None:
    with stand_ins() as stand_in:
        script = [*stand_in, str(EXAMPLES / "elastic_diloco.py")]
        ended = run_python("thinwire", "run", "--min", "2", *script)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    assert_compressed_and_agreed(output)
    assert "2 members" in output
