"""A real elastic job: a machine is lost, torchrun restarts with what is left, and training goes on."""

from __future__ import annotations

import os
import re
import signal
from collections import defaultdict
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from commands import EXAMPLES, TOLD, Running, stand_ins, started_python
from processes import processes_of, wait_for

STEP = re.compile(r"step (\d+), process (\d+) of (\d+): loss (\d+\.\d+)")
SAVE_EVERY, STEPS, LOST_AT = 5, 60, 22
LIMIT_SECONDS = 180.0


def agent(
    store: Path, log: Path, launch: list[str], *, address: str, last_call_seconds: int
) -> AbstractContextManager[Running]:
    """One machine's torchrun: two processes, in a job of one or two machines, which it ranks by `address`.

    They meet by a file: what torchrun finds there, it loads as a pickle, and a store that many machines can
    reach would listen on all addresses. By default torchrun gives every restart the same store, in which Gloo
    finds addresses of dead processes. The first to come waits for the other for `last_call_seconds`. One is
    taken for lost 5 seconds after its last sign of life, so that a busy computer is not.
    """
    command = ["torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2"]
    command += ["--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=job", f"--local-addr={address}"]
    alive = "keep_alive_interval=1,keep_alive_max_attempt=5"
    command += [f"--rdzv-endpoint={store}"]
    command += [f"--rdzv-conf=store_type=file,last_call_timeout={last_call_seconds},{alive}"]
    settings = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return started_python(*command, *launch, environment=settings, stdout=log, stderr=log)


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.timeout(400)
def test_a_lost_machine_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    store, log, other_log = tmp_path / "store", tmp_path / "log", tmp_path / "other log"
    for path in (store, log, other_log):
        path.touch()
    with ExitStack() as opened:
        stand_in = opened.enter_context(stand_ins())
        script = [str(EXAMPLES / "elastic.py"), str(tmp_path / "checkpoint.pt")]
        # It stands still when it is to be lost: however late that is seen, the job has not gone on.
        still = [*stand_in, str(Path(__file__).with_name("standing_still.py")), f"step {LOST_AT},", *script]
        leaving = opened.enter_context(
            agent(store, other_log, still, address="127.0.0.2", last_call_seconds=100_000)
        )
        # Who comes first decides how long the second is waited for; who comes second completes the job.
        # An agent writes the key when it starts, and again when it has come.
        wait_for(lambda: store.read_bytes().count(b"torch.rendezvous.job") > 1)
        staying = opened.enter_context(
            agent(store, log, [*stand_in, *script], address="127.0.0.1", last_call_seconds=1)
        )
        try:
            wait_for(lambda: f"step {LOST_AT}," in log.read_text())
            lost = processes_of(leaving.pid)
            everyone = [*processes_of(staying.pid), *lost]
            assert len(lost) == 3
            for process_id in lost:
                os.kill(process_id, signal.SIGKILL)
            assert staying.wait(LIMIT_SECONDS) == 0
        finally:
            for machine in filter(is_running, (staying.pid, leaving.pid)):
                for process_id in processes_of(machine):
                    os.kill(process_id, signal.SIGKILL)
    output = log.read_text()
    assert "thinwire.errors.CommunicationError: step 2" in output
    assert not any(map(is_running, everyone))
    assert_went_on(output)


def assert_went_on(output: str) -> None:
    """Four processes up to the loss, then two, from a checkpoint; repeated steps have the same loss."""
    printed = [(int(s), int(p), int(size), float(loss)) for s, p, size, loss in STEP.findall(output)]
    of_four = {(step, process): loss for step, process, size, loss in printed if size == 4}
    of_two = {(step, process): loss for step, process, size, loss in printed if size == 2}
    assert {size for _, _, size, _ in printed} == {2, 4}
    lost_at, resumed_at = max(step for step, _ in of_four), min(step for step, _ in of_two)
    assert (lost_at, resumed_at % SAVE_EVERY) == (LOST_AT, 0)
    assert resumed_at <= lost_at < resumed_at + SAVE_EVERY + 1
    assert {step for step, _ in of_two} == set(range(resumed_at, STEPS))
    for process in (0, 1):
        if (resumed_at, process) in of_four:
            assert of_two[resumed_at, process] == of_four[resumed_at, process]
    by_step: dict[int, list[float]] = defaultdict(list)
    for (step, _), loss in [*of_four.items(), *of_two.items()]:
        by_step[step].append(loss)
    mean = {step: sum(losses) / len(losses) for step, losses in by_step.items()}
    before = [mean[step] for step in range(resumed_at - 4, resumed_at)]
    after = [mean[step] for step in range(resumed_at, resumed_at + 4)]
    last = [mean[step] for step in range(STEPS - 4, STEPS)]
    assert sum(after) < 1.1 * sum(before)  # it did not start anew, nor jump
    assert sum(last) < sum(before)
    checksums = {checksum for _, _, checksum in TOLD.findall(output)}
    ratios = [float(ratio) for _, ratio, _ in TOLD.findall(output)]
    assert (len(checksums), len(ratios)) == (1, 2)
    assert min(ratios) > 2
