"""`thinwire check`: it passes where all is well, and its checks can fail, on one process as on all."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launcher import run_job
from pool import Pool
from thinwire.channel import InProcessTransport
from thinwire.cli import check
from thinwire.errors import CommunicationError, ConfigError
from thinwire.selfcheck import device as device_page
from thinwire.selfcheck.checks import CHECKS, Bench
from thinwire.selfcheck.device import ALGORITHMS, MATRIX_RANKS, measured
from thinwire.sync import Engine
from thinwire.sync.exchange import Exchange


def test_all_is_well_here() -> None:
    run, _ = run_job("thinwire", "check", "--json")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    told = json.loads(run.stdout)
    assert told["checks"] == len(CHECKS) >= 12
    assert told["failed_on_processes"] == {}
    assert told["setting"].startswith("2 processes, gloo, cpu")


def doubled(patch: pytest.MonkeyPatch) -> None:
    """Every second element of the mean is wrong, on one process."""
    average = Bench.average

    def wrong(self: Bench, engine: Engine, gradient: torch.Tensor) -> torch.Tensor:
        average(self, engine, gradient)[::2] *= 1 + (self.transport.rank == 1)
        return gradient

    patch.setattr(Bench, "average", wrong)


def forgetful(patch: pytest.MonkeyPatch) -> None:
    """What is loaded has no error."""
    load = Engine.load_state_dict

    def wrong(self: Engine, state: Any, *, strict: bool = True) -> None:
        load(self, {**state, "error": (), "checksum": None}, strict=strict)

    patch.setattr(Engine, "load_state_dict", wrong)


def poisoned(patch: pytest.MonkeyPatch) -> None:
    """A step that is not finite is committed."""
    patch.setattr(Exchange, "is_healthy", lambda self: torch.tensor(True))


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
    patch.setattr(Engine, "agree", lambda self: None)


BREAKING = [
    (doubled, "AllReduce() gives the mean"),
    (doubled, 'Cast("fp16") gives the mean'),
    (doubled, "PowerSGD(matrix_rank=2) loses nothing"),
    (doubled, "BatchedPowerSGD(matrix_rank=1) loses nothing"),
    (poisoned, "an overflow on one process is skipped by a GradScaler on all"),
    (poisoned, "the same with host_check=False"),
    (forgetful, "a saved state resumes to the bit"),
    (drifting, "a DDP model stays the same on all processes"),
    (deaf, "unlike settings are refused"),
]


@pytest.mark.parametrize(("breaking", "name"), BREAKING, ids=lambda each: getattr(each, "__name__", each))
def test_a_check_can_fail(pool2: Pool, breaking: Callable[..., None], name: str) -> None:
    before, after = zip(*pool2.run(_broken, breaking, name), strict=True)
    assert before == ([], [])
    assert bool(after[0]) == (breaking is not doubled)
    assert after[1]


def _broken(breaking: Callable[..., None], name: str) -> tuple[list[str], list[str]]:
    assert dist.get_world_size() == 2
    bench = Bench(torch.device("cpu"))
    CHECKS[name](bench)
    before = list(bench.findings)
    with pytest.MonkeyPatch.context() as patch:
        breaking(patch)
        CHECKS[name](bench)
    return before, bench.findings


def test_a_device_is_measured(pool2: Pool) -> None:
    """On a small model; on the CPU nobody counts launches, waits and memory."""
    for found, page in pool2.run(_measured):
        assert found["setting"]["processes"] == "2"
        assert found["copied_bytes_per_second"] > 0
        for kernel in found["kernels"]:
            assert 0 < max(value for name, value in kernel.items() if name != "matrix_rank") < 1e-5
        assert [each["algorithm"] for each in found["steps"]] == list(ALGORITHMS)
        assert all(each["milliseconds"] > 0 and each["launches"] is None for each in found["steps"])
        assert json.loads(json.dumps(found)) == found
        assert "| PowerSGD(matrix_rank=4) |" in page


def _measured() -> tuple[dict[str, Any], str]:
    shapes = {"embedding": (96, 48), "layer": (48, 64), "bias": (64,)}
    bench = Bench(torch.device("cpu"))
    page = measured(bench.device, bench.transport, shapes)
    return page.as_plain(), page.as_markdown()


@pytest.mark.parametrize(
    ("error", "left_out"),
    [
        (RuntimeError("no such kernel\nat line 1"), "time is used up"),
        (CommunicationError("gone"), "lost each other"),
    ],
    ids=["a part", "the processes"],
)
def test_what_fails_stands_on_the_page(
    monkeypatch: pytest.MonkeyPatch, error: Exception, left_out: str
) -> None:
    """What a part raises takes away that part alone, unless the processes have lost each other."""
    told: list[str] = []

    def step_cost(code: str, *rest: object) -> device_page.StepCost:
        if code == "AllReduce()":
            raise error
        monkeypatch.setattr(time, "monotonic", lambda: float("inf"))
        return device_page.StepCost(code, 1.0, 2.0, None, None, None)

    monkeypatch.setattr(device_page, "_step_cost", step_cost)
    page = measured(
        torch.device("cpu"), InProcessTransport.group(1)[0], {"layer": (48, 64)}, tell=told.append
    )
    first, second, *others = ALGORITHMS
    is_alone = isinstance(error, CommunicationError)
    assert [each.matrix_rank for each in page.kernels] == list(MATRIX_RANKS)
    assert [each.algorithm for each in page.steps] == ([] if is_alone else [second])
    assert list(page.failures) == [first, *([second] if is_alone else []), *others]
    assert page.failures[first] in {"RuntimeError: no such kernel", "CommunicationError: gone"}
    assert all(left_out in page.failures[name] for name in others)
    assert f"- **failed**: {first}: {page.failures[first]}" in page.as_markdown().splitlines()
    assert f"measuring {first}" in told
    assert f"{first}: {page.failures[first]}" in told


def test_another_device_than_the_jobs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int | None] = []
    monkeypatch.setattr(check, "joined_job", lambda *_, **__: nullcontext(torch.device("cpu")))
    monkeypatch.setattr(check, "run_here", started.append)
    with pytest.raises(ConfigError, match="the job's device is cpu, got --device cuda"):
        check.check(backend=None, processes=None, as_json=False, device="cuda")
    assert started == [1]  # outside of a job


def test_output_that_can_not_be_written_leaves_the_others_in_peace(pool2: Pool) -> None:
    assert pool2.run(_checked_to_a_full_disk) == ["No space left on device", None]


class FullDisk(io.StringIO):
    """A file that can't be written out."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _checked_to_a_full_disk() -> str | None:
    assert dist.get_world_size() == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "joined_job", lambda *_, **__: nullcontext(torch.device("cpu")))
        patch.setattr(check, "CHECKS", {"nothing": lambda bench: None})
        if dist.get_rank() == 0:
            patch.setattr(sys, "stdout", FullDisk())
        try:
            check.check(backend=None, processes=None, as_json=True)
        except OSError as error:
            return error.strerror
    return None
