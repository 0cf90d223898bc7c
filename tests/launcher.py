"""Run a script or a command as a user does: in fresh processes, with a real rendezvous."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch._C._distributed_c10d import TCPStore

import forked
from stand_ins import become, stand_ins
from thinwire.lab import Network

EXAMPLES = Path(__file__).parents[1] / "examples"
WITHOUT_PACKAGE = str(Path(__file__).with_name("without_package.py"))
TOLD = re.compile(r"process (\d+): compression ratio ([\d.]+), checksum (-?\d+\.\d{9})")


def torchrun(script: Path, *arguments: str, processes: int = 2, timeout_seconds: float = 100) -> str:
    """What the script printed, errors included; raises if it failed.

    Its agent and the processes that it starts are forked. The rendezvous is a file: what torchrun finds
    there, it loads as a pickle.
    """
    with tempfile.TemporaryDirectory() as folder, stand_ins() as stand_in:
        launch = ["torch.distributed.run", "--local-addr=127.0.0.1", "--rdzv-backend=c10d"]
        launch += [f"--rdzv-endpoint={folder}/store", "--rdzv-conf=store_type=file"]
        launch += [f"--nproc-per-node={processes}", *stand_in, str(script), *arguments]
        told = {"OMP_NUM_THREADS": "1"}
        ended = run_python(*launch, environment=told, timeout_seconds=timeout_seconds)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def run_processes(script: Path, *arguments: str, processes: int = 2, **options: Any) -> str:
    """The same without torchrun's agent."""
    ended = run_job(str(script), *arguments, processes=processes, **options)
    output = "".join(each.stdout + each.stderr for each in ended)
    assert [each.returncode for each in ended] == [0] * processes, output
    return output


def run_job(
    *command: str,
    processes: int = 2,
    timeout_seconds: float = 100,
    environment: Mapping[str, str] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """How processes ended that were told what torchrun tells its own; for the command see `run_python`."""
    # One that no other machine reaches; the processes' own would listen on all addresses.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    # The store closes the listener when it is gone.
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "none"}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    told |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), **(environment or {})}
    of_each = [told | {"RANK": str(number), "LOCAL_RANK": str(number)} for number in range(processes)]
    return _run_all(command, of_each, Path.cwd(), timeout_seconds)


def run_in_network(
    network: Network, *command: str, timeout_seconds: float = 100
) -> list[subprocess.CompletedProcess[str]]:
    """How processes ended on the machines of a lab's network; for the command see `run_python`."""
    ranks = range(network.processes)
    told = [network.environment(rank) for rank in ranks]
    entering = [network.command_in(rank // network.processes_per_machine) for rank in ranks]
    files = [[flag.partition("=")[2] for flag in flags if "/ns/" in flag] for flags in entering]
    return _run_all(command, told, Path.cwd(), timeout_seconds, files)


def run_python(
    *command: str,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 100,
) -> subprocess.CompletedProcess[str]:
    """What `python script arguments…`, or `python -m package arguments…`, printed, and how it ended.

    It runs in a forked process: what is to be tested before torch is imported needs a process of its own.
    """
    return _run_all(command, [environment or {}], cwd or Path.cwd(), timeout_seconds)[0]


class Running:
    """A process that was started as `run_python` does it, and has perhaps not ended."""

    def __init__(self, process: forked.Process, stdout: IO[str], stderr: IO[str]) -> None:
        self.pid, self.stdout, self.stderr = process.pid, stdout, stderr
        self._process = process

    def kill(self) -> None:
        """End it outright."""
        self._process.kill()

    def wait(self, timeout_seconds: float = 60) -> int:
        """How it ended, as subprocess.Popen tells it."""
        self._process.join(timeout_seconds)
        assert self._process.exitcode is not None, "it has not ended"
        return int(self._process.exitcode)


@contextmanager
def started_python(
    *command: str,
    environment: Mapping[str, str] | None = None,
    stdout: str | None = None,
    stderr: str | None = None,
) -> Iterator[Running]:
    """What `run_python` starts, in its own session as on a terminal; it ends with the block.

    `stdout` and `stderr` are files to print to, instead of pipes.
    """
    (out, its_out), (err, its_err) = (forked.context().Pipe(duplex=False) for _ in range(2))
    with out, err, open(os.dup(out.fileno())) as read_out, open(os.dup(err.fileno())) as read_err:
        out.close()
        with its_out, its_err:
            outputs = (stdout or its_out, stderr or its_err)
            process = forked.process(
                _in_own_session, list(command), dict(environment or {}), *outputs, str(Path.cwd())
            )
            process.start()
        try:
            yield Running(process, read_out, read_err)
        finally:
            process.kill()
            process.join()


def _in_own_session(*arguments: Any) -> None:
    os.setsid()
    _main(*arguments)


def _run_all(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    cwd: Path,
    timeout_seconds: float,
    namespaces: Sequence[Sequence[str]] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """A process for each environment; those that have not ended in time are killed."""
    deadline = time.monotonic() + timeout_seconds
    with tempfile.TemporaryDirectory() as folder:
        paths = [(Path(folder, f"out-{n}"), Path(folder, f"err-{n}")) for n in range(len(environments))]
        running = [
            forked.process(_main, list(command), dict(each), str(out), str(err), str(cwd), namespaces=enter)
            for each, (out, err), enter in zip(
                environments, paths, namespaces or [()] * len(paths), strict=True
            )
        ]
        try:
            for process in running:
                process.start()
            for process in running:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in running:
                process.kill()
                process.join()
        return [
            subprocess.CompletedProcess(command, process.exitcode, out.read_text(), err.read_text())
            for process, (out, err) in zip(running, paths, strict=True)
        ]


def _main(*arguments: Any) -> None:
    # Without teardown: now and then it ends a process by SIGABRT in a native thread, after all is done. Seen
    # in one of eight launches of plain DDP under stock Accelerate, without Thinwire.
    os._exit(become(*arguments))


def assert_compressed_and_agreed(output: str, *, processes: int = 2, least_ratio: float = 2.0) -> None:
    """Every process of an example told its compression ratio, and all ended with the same model."""
    told = TOLD.findall(output)
    assert sorted(int(process_rank) for process_rank, _, _ in told) == list(range(processes)), output
    assert all(float(ratio) > least_ratio for _, ratio, _ in told), output
    assert len({checksum for _, _, checksum in told}) == 1, output
