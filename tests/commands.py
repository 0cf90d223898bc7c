"""Commands as a user runs them, in forked processes that have imported already: see processes.py."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from processes import Process, context, end, enter, finish, print_stacks, process, redirect

EXAMPLES = Path(__file__).parents[1] / "examples"
TOLD = re.compile(r"process (\d+): compression ratio ([\d.]+), checksum (-?\d+\.\d{9})")


def run_python(
    *command: str,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 100,
) -> subprocess.CompletedProcess[str]:
    """Run `python script …`, or `python -m package …`: what it printed, and how it ended."""
    return run_all(command, [environment or {}], cwd=cwd, timeout_seconds=timeout_seconds)[0]


def run_job(
    *command: str,
    processes: int = 2,
    timeout_seconds: float = 100,
    environment: Mapping[str, str] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """Run the same as the ranks of a job, which are told what torchrun tells its own."""
    from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415 - as in conftest.py

    # One that no other machine reaches; the processes' own would listen on all addresses.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    # The store closes the listener when it is gone.
    uses_libuv = {**os.environ, **(environment or {})}.get("USE_LIBUV") != "0"  # torch 2.6 needs 0
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "use_libuv": uses_libuv}
    store = TCPStore("127.0.0.1", port, master_listen_fd=listener.detach(), **options)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "none"}
    job |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    job |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), **(environment or {})}
    ranks = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return run_all(command, ranks, timeout_seconds=timeout_seconds)


def run_processes(script: Path, *arguments: str, processes: int = 2, **options: Any) -> str:
    """Run the ranks of a script; return what they printed, errors included. Raises if one failed."""
    ended = run_job(str(script), *arguments, processes=processes, **options)
    output = "".join(rank.stdout + rank.stderr for rank in ended)
    assert [rank.returncode for rank in ended] == [0] * processes, output
    return output


def assert_compressed_and_agreed(output: str, *, processes: int = 2, least_ratio: float = 2.0) -> None:
    """Check that each process of an example printed its ratio, and that all ended with the same model."""
    printed = TOLD.findall(output)
    assert sorted(int(rank) for rank, _, _ in printed) == list(range(processes)), output
    assert all(float(ratio) > least_ratio for _, ratio, _ in printed), output
    assert len({checksum for _, _, checksum in printed}) == 1, output


def run_all(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    *,
    cwd: Path | None = None,
    timeout_seconds: float = 100,
    namespaces: Sequence[Sequence[str]] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """Run the same with each environment, in its namespaces; those that have not ended in time are killed."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(Path(folder, f"out-{n}"), Path(folder, f"err-{n}")) for n in range(len(environments))]
        running = [
            process(_main, list(command), dict(own), *output, cwd or Path.cwd(), namespaces=entered)
            for own, output, entered in zip(
                environments, outputs, namespaces or [()] * len(outputs), strict=True
            )
        ]
        finish(running, timeout_seconds)
        return [
            subprocess.CompletedProcess(command, forked.exitcode, out.read_text(), err.read_text())
            for forked, (out, err) in zip(running, outputs, strict=True)
        ]


def listening_on(process_id: int) -> set[str]:
    """Return the addresses that a process listens on, as Linux writes them: 127.0.0.1 is 0100007F."""
    links = Path(f"/proc/{process_id}/fd").iterdir()
    own = {os.readlink(link) for link in links if link.is_symlink()}
    found = set[str]()
    for name in ("tcp", "tcp6"):
        table = Path(f"/proc/{process_id}/net/{name}")
        for line in table.read_text().splitlines()[1:] if table.exists() else []:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                found.add(local.partition(":")[0])
    return found


class Running:
    """A process that was started as `run_python` does it, and has perhaps not ended."""

    def __init__(self, forked: Process, stdout: IO[str], stderr: IO[str]) -> None:
        self.pid, self.stdout, self.stderr = forked.pid, stdout, stderr
        self._process = forked

    def kill(self) -> None:
        """End it outright."""
        self._process.kill()

    def wait(self, timeout_seconds: float = 60) -> int:
        """Return how it ended, as subprocess.Popen tells it."""
        self._process.join(timeout_seconds)
        assert self._process.exitcode is not None, "it has not ended"
        return int(self._process.exitcode)


@contextmanager
def started_python(
    *command: str,
    environment: Mapping[str, str] | None = None,
    stdout: str | Path | None = None,
    stderr: str | Path | None = None,
) -> Iterator[Running]:
    """Start what `run_python` runs, in its own session as on a terminal; it ends with the block.

    `stdout` and `stderr` are files to print to, instead of pipes. A test that fails shows what is in the
    latter, with the stacks of all that still runs.
    """
    (out, its_out), (err, its_err) = (context().Pipe(duplex=False) for _ in range(2))
    with out, err, open(os.dup(out.fileno())) as read_out, open(os.dup(err.fileno())) as read_err:
        out.close()
        with its_out, its_err:
            outputs = (stdout or its_out, stderr or its_err)
            running = process(_in_own_session, list(command), dict(environment or {}), *outputs, Path.cwd())
            running.start()
        try:
            yield Running(running, read_out, read_err)
        except BaseException:
            print_stacks([running])
            sys.stderr.write("" if stderr is None else Path(stderr).read_text())
            raise
        finally:
            end([running])


def _in_own_session(*arguments: Any) -> None:
    os.setsid()
    _main(*arguments)


def _main(*arguments: Any) -> None:
    # Without teardown: now and then it ends a process by SIGABRT in a native thread, after all is done. Seen
    # in one of eight launches of plain DDP under stock Accelerate, without Thinwire.
    os._exit(become(*arguments))


def become(
    command: list[str],
    environment: dict[str, str],
    out: str | Path | Connection,
    err: str | Path | Connection,
    cwd: Path,
) -> int:
    """Be `python script …`, `python -m package …` or `python -u -c code`; return the exit status."""
    os.environ.update(environment)
    os.chdir(cwd)
    redirect(1, out)
    redirect(2, err)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    name, sys.argv, code = command[0], command, 0
    try:
        if name == "-u":
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            sys.argv = ["-c", *command[3:]]
            exec(command[2], main.__dict__)
        elif os.path.isabs(name):
            sys.path[0] = os.path.dirname(name)
            runpy.run_path(name, run_name="__main__")
        else:
            sys.path[0] = str(cwd)
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


@contextmanager
def stand_ins() -> Iterator[list[str]]:
    """Yield what a launcher is to start, before the script and its arguments: see stand_in.py."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/socket")
            listener.listen()
            server = process(_fork_when_asked, listener)
            server.daemon = False  # or what it forks would be refused processes of its own
            server.start()
        try:
            yield [str(Path(__file__).with_name("stand_in.py")), f"{folder}/socket"]
        finally:
            end([server])


def _fork_when_asked(listener: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    server, only_here = os.pipe()  # so it is closed when this process has ended
    while True:
        stand_in, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.close(only_here)
            _stand_for(stand_in, server)
        stand_in.close()


def _stand_for(stand_in: socket.socket, server: int) -> None:
    """Run what stand_in.py asks for at the other end, as long as both live, and tell it how that ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, (its_in, its_out, its_err), _, _ = socket.recv_fds(stand_in, 4, 3)
    request = stand_in.recv(int.from_bytes(length, "little"), socket.MSG_WAITALL)
    command, environment, cwd = json.loads(request)
    # Its number here: it may be in a PID namespace.
    pid, *_ = struct.unpack("3i", stand_in.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    for kind in ("user", "net"):
        own, its = f"/proc/self/ns/{kind}", f"/proc/{pid}/ns/{kind}"
        if os.path.exists(its) and os.readlink(its) != os.readlink(own):
            enter(its)
    threading.Thread(target=_listen_to, args=(stand_in, server), daemon=True).start()
    os.environ.clear()
    os.dup2(its_in, 0)
    os.close(its_in)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    code = become(command, environment, Connection(its_out), Connection(its_err), Path(cwd))
    stand_in.sendall(bytes([code]))
    os._exit(code)


def _listen_to(stand_in: socket.socket, server: int) -> None:
    """Print all stacks if this process's counterpart is asked for them; end with it, or with the server."""
    while server not in connection.wait([stand_in, server]) and stand_in.recv(1):
        os.kill(os.getpid(), signal.SIGUSR1)
    os._exit(1)
