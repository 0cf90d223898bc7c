"""`thinwire check`: it passes where all is well, and its checks can fail, on one process as on all."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

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
from thinwire.selfcheck.device import (
    ALGORITHMS,
    COPY,
    MATRIX_RANKS,
    NOT_BEGUN,
    DevicePage,
    Row,
    measure,
    new_page,
    printed_once,
)
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


def test_machines_of_several_processes_are_checked_as_attach_uses_them(pool4: Pool) -> None:
    for machines, findings in pool4.run(_on_machines):
        assert machines == (2, 2)
        assert findings == []


def _on_machines() -> tuple[tuple[int, int], list[str]]:
    launched = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    with patch.dict(os.environ, launched, GROUP_RANK=str(dist.get_rank() // 2)):
        bench = Bench(torch.device("cpu"))
        assert bench.machines is not None
        for check in CHECKS.values():
            check(bench)
    return (bench.machines.between.size, bench.machines.inside.size), bench.findings


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
    bench, page = Bench(torch.device("cpu")), new_page("cpu")
    measure(page, bench.device, bench.transport, SHAPES)
    assert page.is_whole
    return asdict(page), page.as_markdown()


SHAPES = {"embedding": (96, 48), "layer": (48, 64), "bias": (64,)}
PARTS = [*(f"arithmetic at matrix rank {each}" for each in MATRIX_RANKS), COPY, *ALGORITHMS]


def measured_alone(told: list[str]) -> DevicePage:
    page = new_page("cpu")
    measure(page, torch.device("cpu"), InProcessTransport.group(1)[0], SHAPES, tell=told.append)
    return page


@pytest.mark.parametrize("is_alone", [False, True], ids=["a part", "the processes"])
def test_what_fails_stands_on_the_page(monkeypatch: pytest.MonkeyPatch, is_alone: bool) -> None:
    """What a part raises takes away that part alone, unless the processes have lost each other."""
    told: list[str] = []

    def step_cost(code: str, *rest: object) -> Row:
        if code == "AllReduce()":
            raise CommunicationError("gone") if is_alone else RuntimeError("no such kernel\nat line 1")
        monkeypatch.setattr(time, "monotonic", lambda: float("inf"))
        return {"algorithm": code}

    monkeypatch.setattr(device_page, "_step_cost", step_cost)
    page = measured_alone(told)
    first, second, *others = ALGORITHMS
    why = (
        "left out, as the processes have lost each other" if is_alone else "left out, as the time is used up"
    )
    assert [each["matrix_rank"] for each in page.kernels] == list(MATRIX_RANKS)
    assert [each["algorithm"] for each in page.steps] == ([] if is_alone else [second])
    assert page.failures == {
        first: "CommunicationError: gone" if is_alone else "RuntimeError: no such kernel"
    }
    assert page.not_run == dict.fromkeys([*([second] if is_alone else []), *others], why)
    lines = page.as_markdown().splitlines()
    assert f"- **failed**: {first}: {page.failures[first]}" in lines
    assert f"- **not run**: {others[0]}: {why}" in lines
    assert {f"measuring {first}", f"{first}: {page.failures[first]}"} <= set(told)


def test_without_gradients_no_step_is_made_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(*_: object) -> None:
        raise MemoryError("too large")

    monkeypatch.setattr(device_page, "_Copied", copied)
    page = measured_alone([])
    assert page.failures == {COPY: "MemoryError: too large"}
    assert list(page.not_run) == list(ALGORITHMS)


@pytest.mark.parametrize(
    ("seconds_of_a_step", "timed_steps"), [(0.3, [5] * len(ALGORITHMS)), (15.0, [5, 1]), (100.0, [])]
)
def test_a_part_ends_between_two_of_its_steps_when_time_is_up(
    monkeypatch: pytest.MonkeyPatch, seconds_of_a_step: float, timed_steps: list[int]
) -> None:
    now = 0.0

    class Slow(device_page._Copied):
        def copy(self) -> None:
            nonlocal now
            super().copy()
            if hasattr(self, "seconds"):
                now += seconds_of_a_step  # behind its own measurement, so of steps alone

    monkeypatch.setattr(device_page, "_Copied", Slow)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    page = measured_alone([])  # within 240 s
    assert [each["timed_steps"] for each in page.steps] == timed_steps
    assert page.is_whole == (len(timed_steps) == len(ALGORITHMS))
    if not timed_steps:
        assert "ended after 3 steps" in page.failures["AllReduce()"]
        assert list(page.not_run) == list(ALGORITHMS)[1:]


@pytest.mark.parametrize(
    ("ends", "why"), [("hangs", "its time, 0 s, was over"), ("raises", "no GPU"), ("well", None)]
)
def test_a_page_is_printed_once_if_what_fills_it_hangs_or_raises(
    ends: str, why: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    page, is_printed = DevicePage({"torch": "2"}), threading.Event()

    def rendered() -> str:
        is_printed.set()
        return json.dumps(asdict(page))

    printed = printed_once(page, rendered, within_seconds=0.01 if ends == "hangs" else 600.0)
    with pytest.raises(ConfigError) if ends == "raises" else nullcontext(), printed as print_page:
        if ends == "raises":
            raise ConfigError("no GPU")
        assert ends == "well" or is_printed.wait(60)
        print_page()
    found = json.loads(capsys.readouterr().out)
    assert found["setting"] == {"torch": "2"} | ({"ended by": why} if why else {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("as_json", [True, False])
def test_where_there_is_no_gpu_the_page_says_so(as_json: bool) -> None:
    (run,) = run_job("thinwire", "check", "--device", "cuda", *(["--json"] if as_json else []), processes=1)
    assert run.returncode == 2
    assert "the job's device is cpu, got --device cuda; torch" in run.stderr
    text = run.stdout if as_json else run.stdout.partition("```json\n")[2].removesuffix("```\n")
    told = json.loads(text)
    page = told["device"] if as_json else told
    assert page["not_run"] == dict.fromkeys(PARTS, NOT_BEGUN)
    assert page["setting"]["device"] == "cuda"
    assert page["setting"]["ended by"].startswith("the job's device is cpu, got --device cuda; torch")
    if not as_json:
        assert run.stdout.startswith("\n- thinwire: ")
        assert f"- **not run**: AllReduce(): {NOT_BEGUN}" in run.stdout


def test_a_device_needs_no_job_but_must_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = {"backend": None, "processes": None, "as_json": False}
    with pytest.raises(ConfigError, match="must be cpu or cuda, got 'xpu'"):
        check.check(**options, device="xpu")
    started: list[int | None] = []

    def run_here(processes: int | None) -> None:
        started.append(processes)
        raise SystemExit

    monkeypatch.setattr(check, "run_here", run_here)
    with pytest.raises(SystemExit):
        check.check(**options, device="cuda")
    assert started == [1]


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
            check.check(backend=None, processes=None, as_json=True, device=None)
        except OSError as error:
            return error.strerror
    return None
