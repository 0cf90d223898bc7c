"""`thinwire check`: it passes where all is well, and its checks can fail, on one process as on all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commands import run_job
from processes import Typed, in_each_process
from thinwire.plan import ParameterSpec
from thinwire.selfcheck.device import ALGORITHMS, RANKS, measure
from thinwire.selfcheck.training_checks import CHECKS, CheckContext
from thinwire.sync import Engine, GradientSync
from thinwire.sync.bucket_plans import BucketPlans
from thinwire.sync.scheduler import CollectiveScheduler


def test_all_is_well_here() -> None:
    run, _ = run_job("thinwire", "check", "--json")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    page = json.loads(run.stdout)
    assert page["checks"] == len(CHECKS) >= 12
    assert page["failed_on_processes"] == {}
    assert page["setting"].startswith("2 processes, gloo, cpu")


def doubled(patch: pytest.MonkeyPatch) -> None:
    """Every second element of the mean is wrong, on one process."""
    average = CheckContext.average

    def wrong(self: CheckContext, engine: Engine, gradient: torch.Tensor) -> torch.Tensor:
        average(self, engine, gradient)[::2] *= 1 + (self.transport.rank == 1)
        return gradient

    patch.setattr(CheckContext, "average", wrong)


def forgetful(patch: pytest.MonkeyPatch) -> None:
    """What is loaded has no error."""
    load = GradientSync.load_state_dict

    def wrong(self: GradientSync, state: Any, *, strict: bool = True) -> None:
        load(self, {**state, "error": ()}, strict=strict)

    patch.setattr(GradientSync, "load_state_dict", wrong)


def poisoned(patch: pytest.MonkeyPatch) -> None:
    """A step that is not finite is committed."""
    patch.setattr(CollectiveScheduler, "is_healthy", lambda self: torch.tensor(True))


def drifting(patch: pytest.MonkeyPatch) -> None:
    """One process's optimizer rounds the last bit otherwise."""
    step = torch.optim.SGD.step

    def wrong(self: torch.optim.SGD) -> None:
        step(self)
        if dist.get_rank() == 1:
            weight = self.param_groups[0]["params"][0].data.view(-1)
            weight[:1] = torch.nextafter(weight[:1], torch.tensor([9.0]))

    patch.setattr(torch.optim.SGD, "step", wrong)


def deaf(patch: pytest.MonkeyPatch) -> None:
    """Nobody compares anything."""
    patch.setattr(BucketPlans, "agree", lambda self, device: None)


BREAKING: list[tuple[Callable[..., None], str]] = [
    (doubled, "AllReduce() gives the mean"),
    (doubled, "PowerSGD(matrix_rank=2) loses nothing"),
    (poisoned, "an overflow on one process is skipped by a GradScaler on all"),
    (poisoned, "the same with host_check=False"),
    (forgetful, "a saved state resumes to the bit"),
    (drifting, "a DDP model stays the same on all processes"),
    (deaf, "unlike settings are refused"),
]


@in_each_process(2)
def test_a_check_can_fail() -> None:
    for breaking, name in BREAKING:
        context = CheckContext(torch.device("cpu"))
        with pytest.MonkeyPatch.context() as patch:
            breaking(patch)
            CHECKS[name](context)
        # The mean is wrong on one process only.
        assert bool(context.findings) == (breaking is not doubled or dist.get_rank() == 1), name


SMALL = [tuple(ParameterSpec.of(name, torch.empty(96, 48)) for name in ("up", "down"))]


@in_each_process(2)
def test_a_device_is_measured() -> None:
    page = measure(CheckContext(torch.device("cpu")), SMALL)
    assert [row["of"] for row in page["arithmetic"]] == [f"matrix rank {rank}" for rank in RANKS]
    for row in page["arithmetic"]:
        assert 0 < max(value for value in row.values() if isinstance(value, float)) < 1e-5
    assert [row["of"] for row in page["steps"]] == [str(algorithm) for algorithm in ALGORITHMS]
    assert all(isinstance(row["milliseconds"], float) for row in page["steps"])
    assert (page["failures"], json.loads(json.dumps(page))) == ([], page)


OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040)"


def test_where_there_is_no_gpu_it_says_why_what_serves_instead_and_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    def init() -> None:
        raise RuntimeError(f"{OLD_DRIVER}. Please update your GPU driver.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    done = typed("check", "--device=cuda")
    instead = "Thinwire then uses the CPU, which takes many times as long: measure it with --device cpu"
    expected = f"thinwire: --device cuda found no GPU: {OLD_DRIVER}; {instead}\n"
    assert (done.returncode, done.stderr) == (2, expected)
