"""`thinwire check`: it passes where all is well, and its checks can fail, on one process as on all."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from commands import run_job
from processes import Spawn
from thinwire.algorithms import Algorithm, AllReduce
from thinwire.cli import check
from thinwire.errors import CommunicationError
from thinwire.launch import group_of_one
from thinwire.plan import ParameterSpec
from thinwire.selfcheck import device as device_page
from thinwire.selfcheck.checks import CHECKS, CheckContext
from thinwire.selfcheck.device import ALGORITHMS, RANKS, Row, measure
from thinwire.sync import Engine, GradientSync
from thinwire.sync.scheduler import CollectiveScheduler


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
    patch.setattr(Engine, "agree", lambda self, device: None)


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
def test_a_check_can_fail(spawn: Spawn, breaking: Callable[..., None], name: str) -> None:
    before, after = zip(*spawn(2, _broken, breaking, name), strict=True)
    assert before == ([], [])
    assert bool(after[0]) == (breaking is not doubled)
    assert after[1]


def _broken(breaking: Callable[..., None], name: str) -> tuple[list[str], list[str]]:
    assert dist.get_world_size() == 2
    context = CheckContext(torch.device("cpu"))
    CHECKS[name](context)
    before = list(context.findings)
    with pytest.MonkeyPatch.context() as patch:
        breaking(patch)
        CHECKS[name](context)
    return before, context.findings


def test_machines_of_several_processes_are_checked_as_attach_uses_them(spawn: Spawn) -> None:
    for machines, findings in spawn(4, _on_machines):
        assert machines == (2, 2)
        assert findings == []


def _on_machines() -> tuple[tuple[int, int], list[str]]:
    launched = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    with patch.dict(os.environ, launched, GROUP_RANK=str(dist.get_rank() // 2)):
        context = CheckContext(torch.device("cpu"))
        assert context.machines is not None
        for check in CHECKS.values():
            check(context)
    return (context.machines.inter_node.size, context.machines.intra_node.size), context.findings


def test_a_device_is_measured(spawn: Spawn) -> None:
    for page in spawn(2, _measured):
        assert [row["of"] for row in page["arithmetic"]] == [f"matrix rank {rank}" for rank in RANKS]
        for row in page["arithmetic"]:
            assert 0 < max(value for value in row.values() if isinstance(value, float)) < 1e-5
        assert [row["of"] for row in page["steps"]] == [str(algorithm) for algorithm in ALGORITHMS]
        assert all(isinstance(row["milliseconds"], float) for row in page["steps"])
        assert page["failures"] == []
        assert json.loads(json.dumps(page)) == page


SMALL = [tuple(ParameterSpec.of(name, torch.empty(96, 48)) for name in ("up", "down"))]


def _measured() -> dict[str, list[Row]]:
    assert dist.get_world_size() == 2
    return measure(CheckContext(torch.device("cpu")), SMALL)


def measured_alone() -> dict[str, list[Row]]:
    with group_of_one():
        return measure(CheckContext(torch.device("cpu")), SMALL)


@pytest.mark.parametrize("is_alone", [False, True], ids=["a part", "the processes"])
def test_what_fails_stands_on_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_alone: bool
) -> None:
    """What a part raises takes away that part alone, unless the processes have lost each other."""

    def step(context: CheckContext, buckets: object, algorithm: Algorithm) -> Row:
        if algorithm == AllReduce():
            raise CommunicationError("gone") if is_alone else RuntimeError("no such kernel\nat line 1")
        return {"milliseconds": 0.0012}

    monkeypatch.setattr(device_page, "_step", step)
    page = measured_alone()
    why = "CommunicationError: gone" if is_alone else "RuntimeError: no such kernel"
    others = [] if is_alone else [str(algorithm) for algorithm in ALGORITHMS[1:]]
    assert len(page["arithmetic"]) == len(RANKS)
    assert [row["of"] for row in page["steps"]] == others
    assert page["failures"] == [{"of": "steps, AllReduce()", "why": why}]
    assert f"steps of AllReduce() failed: {why}" in capsys.readouterr().err
    lines = check._tables(page).splitlines()
    assert f"| steps, AllReduce() | {why} |" in lines
    assert is_alone or "| PowerSGD(matrix_rank=4) | 1.2e-03 |" in lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_where_there_is_no_gpu_it_says_why_and_what_serves_instead() -> None:
    (run,) = run_job("thinwire", "check", "--device", "cuda", processes=1)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("thinwire: --device cuda finds no GPU: ")
    assert run.stderr.endswith("; the CPU serves, --device cpu measures it\n")


def test_output_that_can_not_be_written_leaves_the_others_in_peace(spawn: Spawn) -> None:
    assert spawn(2, _checked_to_a_full_disk) == ["No space left on device", None]


class FullDisk(io.StringIO):
    """A file that can't be written out."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _checked_to_a_full_disk() -> str | None:
    assert dist.get_world_size() == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "joined_job", lambda *_, **__: nullcontext(torch.device("cpu")))
        patch.setattr(check, "CHECKS", {"nothing": lambda context: None})
        if dist.get_rank() == 0:
            patch.setattr(sys, "stdout", FullDisk())
        try:
            check.check(backend=None, processes=None, as_json=True, device=None)
        except OSError as error:
            return error.strerror
    return None
