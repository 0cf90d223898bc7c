"""Training commands that know nothing of Thinwire, with and without `thinwire attach` before them."""

from __future__ import annotations

import gc
import os
import re
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim import SGD

from commands import run_job, run_processes, run_python, stand_ins
from processes import Setting, Spawn, Typed, in_each_process, run_fresh
from thinwire import AttachError, ConfigError, Quantize
from thinwire.algorithms.registry import REGISTRY, parsed
from thinwire.preload import built_model
from thinwire.preload.options import VARIABLE, Options
from thinwire.preload.strict import AVERAGED, note_averaged
from thinwire.sync import engine_of

SCRIPT, FORKED = (Path(__file__).with_name(name) for name in ("script.py", "forked.py"))
ALGORITHM = "Quantize(bits=4, error_feedback=True)"


def run(*arguments: str, options: Options | None = None) -> str:
    """What the script's ranks print; they are attached if there are options."""
    if options is None:
        return run_processes(SCRIPT, *arguments)
    return run_processes(FORKED, str(SCRIPT), *arguments, environment=options.environment())


def weights(printed: str) -> str:
    return str(re.findall(r"weights (\S+)", printed)[0])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", ["forked", pytest.param("as it is", marks=pytest.mark.nightly)])
def test_an_unchanged_script_trains_as_if_it_attached_by_itself(first: str, tmp_path: Path) -> None:
    """The line that users type; every night rank 0 is a Python as it is, which imports torch by itself."""
    folder, watch = tmp_path / "c", tmp_path / "w"
    options = ["--algorithm", ALGORITHM, "--watch", str(watch), "--checkpoint", str(folder), "--strict"]
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    with stand_ins() as stand_in:
        forked = [sys.executable, "-S", *stand_in, str(FORKED), str(SCRIPT)]
        rank_0 = [sys.executable, str(SCRIPT)] if first == "as it is" else forked
        ranks = f'test "$RANK" = 0 && exec {shlex.join(rank_0)}; exec {shlex.join(forked)}'
        command = [sys.executable, "-S", *stand_in, *torchrun, "--no-python", "sh", "-c", ranks]
        ended = run_python("thinwire", "attach", *options, "--", *command, timeout_seconds=240)
    assert ended.returncode == 0, ended.stderr
    assert weights(ended.stdout) == weights(run("attach"))
    sent, in_bf16 = map(float, re.findall(r"5 steps sent (\S+) MB.* sent (\S+);", ended.stderr)[0])
    assert "over 2 processes" in ended.stderr
    assert 3 < in_bf16 / sent < 4
    assert len(watch.read_text().splitlines()) >= 5
    assert {file.name for file in folder.iterdir()} == {"thinwire_0.pt", "thinwire_1.pt"}
    # It goes on with the residual that it has saved; through torch's other store, which wakes fewer waits.
    old_store = Options(ALGORITHM, checkpoint=str(folder)).environment() | {"USE_LIBUV": "0"}
    again = run_processes(FORKED, str(SCRIPT), environment=old_store)
    assert weights(again) != weights(ended.stdout)
    # A process that was killed has saved nothing: none loads.
    (folder / "thinwire_1.pt").unlink()
    without = run(options=Options(ALGORITHM, checkpoint=str(folder)))
    assert "no process loads its saved state" in without
    assert weights(without) == weights(ended.stdout)


# Has torch's place: to import that takes seconds.
STUB = """
class DistributedDataParallel:
    def __init__(self) -> None:
        print("built")
"""
BUILDING = """
import sys, types
print(sorted(name for name in sys.modules if name.startswith("thinwire")))
sys.modules["thinwire.preload.built_model"] = types.SimpleNamespace(note_built=lambda model: print("noted"))
from torch.nn.parallel.distributed import DistributedDataParallel
DistributedDataParallel()
"""


def test_every_python_waits_for_ddp_and_has_next_to_nothing_of_thinwire_before(tmp_path: Path) -> None:
    """A Python as it is, for the file that Python runs when it starts."""
    package = tmp_path / "torch" / "nn" / "parallel"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    (package / "distributed.py").write_text(STUB)
    environment = os.environ | Options(ALGORITHM).environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", BUILDING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    modules = ["thinwire", "thinwire.preload", "thinwire.preload.startup", "thinwire.version"]
    assert done.stdout.splitlines() == [str(modules), "built", "noted"]


def test_a_run_ends_with_the_thread_that_trains(tmp_path: Path) -> None:
    """Ray Train kills the process after that."""
    told = run("thread", "bf16", options=Options(ALGORITHM, checkpoint=str(tmp_path / "c")))
    assert re.search("5 steps sent .* bf16 would have sent 0.0961;", told)  # 9610 parameters
    assert {file.name for file in (tmp_path / "c").iterdir()} == {"thinwire_0.pt", "thinwire_1.pt"}


def train_in_forked_process(setting: Setting, options: Options) -> tuple[float | None, int]:
    """Return the loss scale that the attached model knows, and how SIGTERM ends a process that this forks."""
    os.environ.update(options.environment())
    setting.join_group()
    model = DistributedDataParallel(nn.Linear(64, 64))
    built_model.note_built(model)
    assert "_pre_forward" not in model.__getstate__()  # type: ignore[no-untyped-call]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with Join([model]):
        for batch in torch.ones(1 - setting.process_rank, 1, 64):  # none on rank 1
            scaler.scale(model(batch).sum()).backward()
    gc.disable()
    model.itself = model  # as in some scripts: it is not freed when the function returns
    (run,) = built_model._runs
    scale = engine_of(run.sync).settings.loss_scale
    if (forked := os.fork()) == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
    return None if scale is None else float(scale(torch.device("cpu"))), exit_code


def test_a_run_ends_with_a_process_that_multiprocessing_forked(tmp_path: Path) -> None:
    """Such as mp.start_processes(start_method="fork"); atexit's functions do not run there."""
    options = Options(ALGORITHM, checkpoint=str(tmp_path / "c"))
    ended = run_fresh(train_in_forked_process, options, processes=2)
    assert [(process.told, process.exit_code) for process in ended] == [((8.0, -signal.SIGTERM), 0)] * 2
    assert {file.name for file in (tmp_path / "c").iterdir()} == {"thinwire_0.pt", "thinwire_1.pt"}


@pytest.mark.parametrize("arguments", ["hook", "replicate hook", "late hook", "late attach"])
def test_a_hook_of_the_scripts_own_averages(arguments: str) -> None:
    attached = run(*arguments.split(), options=Options(ALGORITHM))
    name = "thinwire_hook" if arguments == "late attach" else "fp16_compress_hook"
    why = "from now on the script's own" if "late" in arguments else "it already has the"
    assert f"{why} communication hook {name}" in attached
    assert weights(attached) == weights(run(*arguments.split()))


@in_each_process(2)
def test_an_option_of_ddp_is_named_and_not_the_hook_that_it_registers() -> None:
    # A PyTorch for CUDA makes none without a driver.
    with patch.object(torch, "Stream"), patch.object(torch.cuda, "Stream"):
        model = DistributedDataParallel(nn.Linear(4, 4), mixed_precision=_MixedPrecision())
    environment = patch.dict(os.environ, Options(strict=True).environment())
    with environment, patch.object(built_model, "_log_to_stderr"):
        built_model.note_built(model)
    with pytest.raises(AttachError, match="build it without mixed_precision"):
        model(torch.ones(1, 4))


def test_strict_ends_the_training_instead() -> None:
    environment = Options(ALGORITHM, strict=True).environment()
    ranks = run_job(str(FORKED), str(SCRIPT), "hook", environment=environment)
    assert [rank.returncode for rank in ranks] == [1, 1]
    why = "AttachError: it already has the communication hook fp16_compress_hook"
    assert all(why in rank.stderr for rank in ranks)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("exit 0", 1),
        ('touch "$THINWIRE_ATTACH_AVERAGED"', 0),
        ("exit 3", 3),
        ("kill -9 $$", 128 + signal.SIGKILL),
        # Signals are passed on; the parent has been one Python since before the shell.
        ("trap 'exit 7' TERM; kill -TERM $PPID; sleep 60 & wait", 7),
    ],
)
def test_strict_runs_a_command_and_fails_if_nothing_was_attached(code: str, exit_code: int) -> None:
    ended = run_python("thinwire", "attach", "--strict", "--", "sh", "-c", code)
    assert ended.returncode == exit_code
    assert ("none of its processes" in ended.stderr) == (exit_code == 1)


def test_a_process_on_another_machine_has_nobody_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AVERAGED, "/folder/of/another/machine")
    note_averaged()


@pytest.mark.parametrize("argument", ["eval", "no_sync", "replicate", "validated", "forward", "own forward"])
def test_only_a_model_whose_steps_are_averaged_is_attached(argument: str, tmp_path: Path) -> None:
    environment = Options(ALGORITHM).environment() | {AVERAGED: str(tmp_path / "attached")}
    told = run_processes(FORKED, str(SCRIPT), argument, environment=environment)
    whys = {"eval": "it made no forward pass in training mode", "no_sync": "0 steps were averaged"}
    assert whys.get(argument, "5 steps sent") in told
    assert (tmp_path / "attached").exists() == (argument not in whys)
    assert argument in whys or weights(told) == weights(run("attach"))


@pytest.mark.parametrize(
    ("has_trained", "environment", "is_told"),
    [
        (True, {}, True),
        (False, {}, False),  # a launcher
        (False, {"RANK": "0", "WORLD_SIZE": "2"}, True),
        (False, {"RANK": "0", "WORLD_SIZE": "2", "THINWIRE_ATTACH_BUILT": "1"}, False),  # a data worker of it
    ],
)
@pytest.mark.parametrize("script", ["builds nothing", "attaches by itself", "fails"])
def test_a_process_that_built_no_model_says_so(
    has_trained: bool,
    environment: dict[str, str],
    is_told: bool,
    script: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A script that attaches by itself, to FSDP2 for example, has attached; one that fails has said why."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    from thinwire.preload import startup  # noqa: PLC0415 - it waits for DDP

    for name in ("thinwire.preload.built_model", *["thinwire.sync"] * (script != "attaches by itself")):
        monkeypatch.delitem(sys.modules, name)
    layer = nn.Linear(2, 2)
    SGD(layer.parameters())
    with ThreadPoolExecutor() as fresh:  # its thread has computed nothing, as one that only spawns the ranks
        assert not fresh.submit(startup.has_trained).result()
    layer(torch.ones(2))
    assert startup.has_trained()
    monkeypatch.setattr(startup, "has_trained", lambda: has_trained)
    for name, value in ({"WORLD_SIZE": "1", AVERAGED: str(tmp_path / "attached")} | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "last_value", OSError() if script == "fails" else None, raising=False)
    startup.end_process()
    monkeypatch.setattr(built_model, "_waiting", {"a model that the script built"})
    built_model._end_runs()
    told = capsys.readouterr().err
    assert ("nothing was attached" in told) == (is_told and script == "builds nothing")
    assert ("no forward pass" in told) == (script != "fails")
    assert (tmp_path / "attached").exists() == (script == "attaches by itself")


def started_otherwise() -> list[str]:
    """Why a model is not attached: nobody differs, another algorithm, too late on process 1."""
    votes, rank = built_model._Votes(DistributedDataParallel(nn.Linear(4, 4))), dist.get_rank()
    reasons = [votes.cast("1", ALGORITHM, 30), votes.cast("2", f"Quantize(bits={2**rank})", 30)]
    for turn in range(2):
        reasons += [votes.cast("built", ALGORITHM, 1) for _ in range(rank == turn)]
        dist.barrier()
    return reasons


def test_a_process_that_was_started_otherwise_is_named(spawn: Spawn) -> None:
    (alike, other, missing), (*_, late) = spawn(2, started_otherwise)
    assert (alike, "process 1" in other) == ("", True)
    assert "processes 1 have not" in missing == late  # the one that was late does not attach alone


def test_algorithms_are_parsed_as_they_are_written() -> None:
    for variant in (variant for entry in REGISTRY for variant in entry.variants):
        assert parsed(variant.code) == variant.algorithm
    assert (parsed("thinwire.Quantize"), parsed("8 bits")) == (Quantize(), Quantize(bits=8))
    assert parsed("auto(budget_loss=0.005)") == {"budget_loss": 0.005}


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("Quantise(bits=4)", "did you mean Quantize?"),
        ("powersgd(matrix_rank=4)", "did you mean PowerSGD?"),
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
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        Options(text)


def test_options_travel_in_the_environment() -> None:
    options = Options("PowerSGD(matrix_rank=2)", "w", "c", strict=True)
    assert Options.of(options.environment()) == options
    assert Options.of({VARIABLE: "Cast('bf16')"}) == Options("Cast('bf16')")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--bits", "5000", "--", sys.executable],
        ["--bits", "5 000", "--", sys.executable],
        ["--bits", "--", sys.executable],
        ["--bits", "4", "--auto", "--", sys.executable],
        ["--", "a-command-that-is-not-there"],
        [sys.executable, "script.py"],  # no --
        ["--bits", "4"],  # no command
        ["--bit", "4", "--", sys.executable],
        ["--checkpoint", "--", sys.executable],
        ["--watch", "--", sys.executable],
        ["--algorithm", "", "--", sys.executable],
        ["--algorithm", "auto(budget=1)", "--", sys.executable],
        ["--checkpoint", "/dev/null/folder", "--", sys.executable],
        ["--watch", "/dev/null/folder/run.jsonl", "--", sys.executable],
        ["--watch", "/", "--", sys.executable],
        ["--auto", "--checkpoint", "x", "--", sys.executable],
    ],
)
def test_a_wrong_line_starts_nothing(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("something was started"))
    done = typed("attach", *arguments)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_a_shell_script_with_python_in_its_name_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    script, started = tmp_path / "train_python.sh", []
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/has_run")
    script.chmod(0o755)
    monkeypatch.setattr(os, "execve", lambda program, *_: started.append(program))
    typed("attach", "--", script)
    assert started == [str(script)]
    assert not (tmp_path / "has_run").exists()
