"""Every example runs in real processes, compresses, and leaves the same model on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from commands import EXAMPLES, assert_compressed_and_agreed, run_processes, run_python, stand_ins

NEEDS_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
OTHERS = ["optimizer_step", "uneven_inputs", "local_sgd", pytest.param("diloco_muon", marks=NEEDS_MUON)]


def test_the_plain_one_runs_under_torchrun(tmp_path: Path) -> None:
    # The rendezvous is a file: what torchrun finds there, it loads as a pickle.
    rendezvous = [f"--rdzv-endpoint={tmp_path}/store", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]
    with stand_ins() as stand_in:
        launch = ["torch.distributed.run", "--local-addr=127.0.0.1", *rendezvous, "--nproc-per-node=2"]
        ended = run_python(
            *launch, *stand_in, str(EXAMPLES / "plain_ddp.py"), environment={"OMP_NUM_THREADS": "1"}
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert_compressed_and_agreed(ended.stdout + ended.stderr)


@pytest.mark.parametrize("name", OTHERS)
def test_the_others_run(name: str) -> None:
    assert_compressed_and_agreed(run_processes(EXAMPLES / f"{name}.py"))


def test_the_sharded_one_runs_with_two_replicas_of_two_shards() -> None:
    output = run_processes(EXAMPLES / "fsdp2.py", processes=4)
    assert_compressed_and_agreed(output, processes=4)
