"""Run a script as a user does: in fresh processes, with a real rendezvous."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from crash import free_port

EXAMPLES = Path(__file__).parents[1] / "examples"
WITHOUT_TEARDOWN = str(Path(__file__).with_name("without_teardown.py"))
TOLD = re.compile(r"process (\d+): compression ratio ([\d.]+), checksum (-?\d+\.\d{9})")


def torchrun(script: Path, *arguments: str, processes: int = 2, timeout_seconds: float = 100) -> str:
    """What the script printed, errors included; raises if it failed."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = [sys.executable, *launch, f"--nproc-per-node={processes}"]
    return run([*command, WITHOUT_TEARDOWN, str(script), *arguments], timeout_seconds=timeout_seconds)


def run_processes(script: Path, *arguments: str, processes: int = 2, timeout_seconds: float = 100) -> str:
    """The same without torchrun's agent, which takes seconds to start: processes with what it tells them."""
    command = [sys.executable, WITHOUT_TEARDOWN, str(script), *arguments]
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "none"}
    told |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    deadline = time.monotonic() + timeout_seconds
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as out:
        try:
            for number in range(processes):
                environment = os.environ | told | {"RANK": str(number), "LOCAL_RANK": str(number)}
                running.append(
                    subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
                )
            codes = [each.wait(deadline - time.monotonic()) for each in running]
        finally:
            for each in running:
                each.kill()
                each.wait()
        out.seek(0)
        output = out.read().decode()
    assert codes == [0] * processes, output
    return output


def run(command: list[str], *, timeout_seconds: float = 100) -> str:
    """What a command printed, errors included; raises if it failed or hung."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def assert_compressed_and_agreed(output: str, *, processes: int = 2, least_ratio: float = 2.0) -> None:
    """Every process of an example told its compression ratio, and all ended with the same model."""
    told = TOLD.findall(output)
    assert sorted(int(process_rank) for process_rank, _, _ in told) == list(range(processes)), output
    assert all(float(ratio) > least_ratio for _, ratio, _ in told), output
    assert len({checksum for _, _, checksum in told}) == 1, output
