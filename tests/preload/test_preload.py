"""Training commands that know nothing of Thinwire, with and without `thinwire attach` before them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from processes import Spawn
from thinwire import ConfigError, Quantize
from thinwire.algorithms.registry import REGISTRY, parsed
from thinwire.cli import main
from thinwire.preload import model as preload_model
from thinwire.preload.settings import VARIABLE, Options

SCRIPT = Path(__file__).parent / "script.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TOLD = "Quantize(bits=4, error_feedback=True)"


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def attached(*arguments: object, options: tuple[object, ...] = ("--algorithm", TOLD)) -> tuple[str, str]:
    """What a script prints under `thinwire attach`."""
    ended = run(sys.executable, "-m", "thinwire", "attach", *options, "--", *TORCHRUN, *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr


def weights(printed: str) -> str:
    return str(re.findall(r"weights (\S+)", printed)[0])


def test_an_unchanged_script_trains_as_if_it_attached_by_itself(tmp_path: Path) -> None:
    by_itself = run(*TORCHRUN, SCRIPT, "attach")
    folder = ("--checkpoint", tmp_path)
    out, told = attached(SCRIPT, options=("--algorithm", TOLD, "--watch", tmp_path / "w", *folder))
    assert weights(out) == weights(by_itself.stdout)
    sent, in_bf16 = map(float, re.findall(r"5 steps sent (\S+) MB.* sent (\S+);", told)[0])
    assert "over 2 processes" in told
    assert 3 < in_bf16 / sent < 4
    assert len((tmp_path / "w").read_text().splitlines()) >= 5
    assert {file.name for file in tmp_path.glob("*.pt")} == {"thinwire_0.pt", "thinwire_1.pt"}
    # It goes on with the residual that it has saved.
    again, _ = attached(SCRIPT, options=("--algorithm", TOLD, *folder))
    assert weights(again) != weights(out)


def test_a_model_with_a_hook_stays_as_it_is() -> None:
    plain = run(*TORCHRUN, SCRIPT, "hook")
    out, told = attached(SCRIPT, "hook")
    assert weights(out) == weights(plain.stdout)
    assert "fp16_compress_hook" in told


def test_strict_ends_the_training_instead() -> None:
    ended = run(sys.executable, "-m", "thinwire", "attach", "--strict", "--", *TORCHRUN, SCRIPT, "hook")
    assert ended.returncode
    assert "fp16_compress_hook" in ended.stderr


def test_a_process_without_a_ddp_model_imports_next_to_nothing() -> None:
    look = "import sys, torch; print(sorted(name for name in sys.modules if name.startswith('thinwire')))"
    ended = run(sys.executable, "-c", look, **{VARIABLE: TOLD})
    imported = ["thinwire", "thinwire.preload", "thinwire.preload.startup", "thinwire.version"]
    assert ended.stdout.strip() == str(imported)


def started_otherwise() -> list[str]:
    """Why a model is not attached: nobody differs, another algorithm, nothing on process 1."""
    votes, rank = preload_model._Votes(DistributedDataParallel(nn.Linear(4, 4))), dist.get_rank()
    reasons = [votes.cast("1", TOLD, 30), votes.cast("2", f"Quantize(bits={2**rank})", 30)]
    if rank == 0:
        reasons.append(votes.cast("3", TOLD, 1))
    dist.barrier()
    return reasons


def test_a_process_that_was_started_otherwise_is_named(spawn: Spawn) -> None:
    alike, other, missing = spawn(2, started_otherwise)[0]
    assert not alike
    assert "process 1" in other
    assert "processes 1 were not" in missing


def test_algorithms_are_parsed_as_they_are_written() -> None:
    for variant in (variant for entry in REGISTRY for variant in entry.variants):
        assert parsed(variant.code) == variant.algorithm
    assert parsed("thinwire.Quantize") == Quantize()
    assert parsed("8 bits") == Quantize(bits=8)
    assert parsed("auto(budget_loss=0.005)") == {"budget_loss": 0.005}


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("Quantise(bits=4)", "Quantize"),
        ("PowerSGD(rank=4)", "matrix_rank"),
        ("PowerSGD(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)", "matrix_rank"),
        ("__import__('os').system('true')", "Quantize(bits=4)"),
        ("Quantize(bits=open('x'))", "Quantize(bits=4)"),
        ("Quantize(bits=", "Quantize(bits=4)"),
        ("Quantize(bits=5000)", "bits"),
        ("5000 bits", "bits"),
        ("four bits", "Quantize(bits=4)"),
        ("", "Quantize(bits=4)"),
    ],
)
def test_what_is_no_algorithm_is_refused_with_what_was_meant(text: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Options(text)
    assert remedy in str(refused.value)


def test_options_travel_in_the_environment() -> None:
    options = Options("PowerSGD(matrix_rank=2)", "w", "c", strict=True)
    assert Options.of(options.environment()) == options
    assert Options.of({VARIABLE: "Cast('bf16')"}) == Options("Cast('bf16')")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--bits", "5000", "--", sys.executable],
        ["--bits", "4", "--auto", "--", sys.executable],
        ["--", "a-command-that-is-not-there"],
        [sys.executable, "script.py"],  # no --
        ["--bits", "4"],  # no command
        ["--algorithm", "", "--", sys.executable],
        ["--algorithm", "auto(budget=1)", "--", sys.executable],
        ["--checkpoint", "/dev/null/folder", "--", sys.executable],
        ["--watch", "/dev/null/folder/run.jsonl", "--", sys.executable],
        ["--auto", "--checkpoint", "x", "--", sys.executable],
    ],
)
def test_a_wrong_line_starts_nothing(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("something was started"))
    monkeypatch.setattr(sys, "argv", ["thinwire", "attach", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
