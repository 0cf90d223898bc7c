"""The loggers of Lightning and Accelerate take what a Watch writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning.pytorch.loggers import CSVLogger
from torch.nn.parallel import DistributedDataParallel

import thinwire
from accelerated import several_processes
from pool import Pool
from thinwire import PowerSGD, Watch
from thinwire.watch import MetricsWriter

STEPS = 6


def test_the_loggers_of_lightning_and_accelerate_take_it(pool2: Pool, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="NO TENSORBOARD HERE")
    assert pool2.run(_logged, str(tmp_path)) == [2, 2]
    (csv,) = tmp_path.glob("lightning/**/version_0/metrics.csv")
    header, *rows = csv.read_text().splitlines()
    assert "thinwire/message_bytes" in header
    assert "thinwire/relative_error/weight" in header
    assert len(rows) == STEPS + STEPS // 2  # steps, and norms
    assert list(tmp_path.glob("accelerate/**/events.out.tfevents.*"))


def _logged(folder: str) -> int:
    with several_processes():  # what it keeps of this process is no other test's
        accelerator = Accelerator(
            cpu=True, log_with="tensorboard", project_dir=os.path.join(folder, "accelerate")
        )
        accelerator.init_trackers("run")
        logger = CSVLogger(os.path.join(folder, "lightning"), version=dist.get_rank())
        model = DistributedDataParallel(torch.nn.Linear(96, 64))
        sync = thinwire.attach(model, PowerSGD(matrix_rank=2))
        with (
            Watch(sync, MetricsWriter(accelerator.log)),
            Watch(sync, MetricsWriter(logger.log_metrics), norms_every_steps=2),
        ):
            for _ in range(STEPS):
                torch.autograd.backward(model(torch.ones(8, 96)).square().sum())
        logger.save()
        for tracker in accelerator.trackers:
            tracker.finish()
    return dist.get_world_size()
