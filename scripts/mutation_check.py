"""Plant small faults in a copy of the source, one at a time, and print those that no test notices.

    python scripts/mutation_check.py [WORD …] [--all-tests] [--again]

With words, only faults whose name has one of them. For each fault the tests of its line run, up to the first
that fails; with `--all-tests`, all others after them if none has. Results are kept in build/mutations.jsonl: a
fault that was caught is not planted again (without `--again`), however often this is interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy  # noqa: F401 - what tests import, but for what is tested
import pytest
import torch.nn.parallel  # noqa: F401

ROOT = Path(__file__).parents[1]
COPY, RESULTS = ROOT / "build" / "mutations", ROOT / "build" / "mutations.jsonl"
FIRST_SECONDS, ALL_SECONDS, TEST_SECONDS = 800, 3600, 300
CALM = "not within_seconds"  # what fails on a busy machine catches nothing


class Fault(NamedTuple):
    """A fault: a text that stands once in the source, wherever, and what takes its place."""

    name: str
    old: str
    new: str
    tests: str  # that are likely to notice, within `tests`
    within: str = ""  # a part of the file's path
    first: str = ""  # which of those tests run first, as pytest's -k takes it

    def place(self) -> Path | None:
        """Return the file that has the text once; None if none or several do."""
        paths = sorted((COPY / "src" / "thinwire").rglob("*.py"))
        found = [path for path in paths if self.within in str(path) and self.old in path.read_text()]
        once = len(found) == 1 and found[0].read_text().count(self.old) == 1
        return found[0] if once else None


LOW_RANK = "algorithms/test_conformance.py test_powersgd.py"
CONFORMANCE = "algorithms/test_conformance.py"
ENGINE = "sync/test_engine.py sync/test_scheduler.py sync/test_nonfinite.py algorithms/test_conformance.py"
STATE = "sync/test_state.py sync/test_local_state.py algorithms/test_conformance.py sync/test_partition.py"
MACHINES = "sync/test_partition.py sync/test_state.py adapters/test_machines.py"
LOCAL = "local_sgd/test_averaging.py local_sgd/test_diloco.py local_sgd/test_streaming.py local_sgd"
FAULTS = [
    Fault("core: finite only if one bucket is", "for answer in answers]).all()\n\n    def commit_early", "for answer in answers]).any()\n\n    def commit_early", ENGINE, "/sync/"),
    Fault("core: an unhealthy step is committed", "committed = bool(is_healthy)", "committed = True", ENGINE),
    Fault("core: a step is not counted", "state.memory.step += 1", "state.memory.step += 0", ENGINE),
    Fault("core: a dropped step is not counted", "state.nonfinite_steps += 1", "state.nonfinite_steps += 0", ENGINE),
    Fault("core: gradients of a dropped step stay", "            part.flat.fill_(fill)", "            pass", ENGINE),
    Fault("core: zero and NaN swapped", '0.0 if settings.on_nonfinite == "zero"', '0.0 if settings.on_nonfinite != "zero"', ENGINE),
    Fault("core: unused parameters move", "in self.unused:\n                    mean.zero_()", "in self.unused:\n                    pass", "adapters/test_ddp_used.py sync"),
    Fault("core: residuals of unused parameters move", "residuals_restored(self._memory, self.unused) if self.unused else", "", "adapters/test_ddp_used.py sync"),
    Fault("scheduler: requests not sorted by kind", "for kind in sorted(kinds):", "for kind in kinds:", "sync/test_scheduler.py sync"),
    Fault("scheduler: a swallowed failure", "                for work in sent.works:\n                    work.wait()\n        for", "                for work in sent.works:\n                    with suppress(CommunicationError):\n                        work.wait()\n        for", "sync/test_engine.py test_lost_peers.py sync"),
    Fault("scheduler: a message behind the commit", "if self.is_committed and not isinstance", "if False and not isinstance", "sync/test_scheduler.py sync algorithms"),
    Fault("error feedback: excess lost", "if torch.stack([part.any() for part in excess]).any():", "if False:", "sync/test_owed.py sync/test_nonfinite.py algorithms/test_conformance.py"),
    Fault("error feedback: residual not dropped", "    for name in names:\n        errors.pop(name, None)\n    if means[0]", "    if means[0]", "algorithms/test_conformance.py sync/test_owed.py sync"),
    Fault("error feedback: residual unscaled", "wide + (error if scale is None else error * scale)", "wide + error", "algorithms/test_conformance.py sync/test_owed.py hooks"),
    Fault("exact: residual not added", "wide + (error if scale is None else error * scale)", "wide", "algorithms/test_conformance.py sync/test_owed.py sync"),
    Fault("low rank: residual added each iteration", "add_error=iteration == 1)", "add_error=True)", LOW_RANK, first="PowerSGD and true_means"),
    Fault("low rank: starts from its own factors", "Factors((p, q), (p, mean))", "Factors((p, q), (p, q))", LOW_RANK, first="PowerSGD and true_means"),
    Fault("low rank: the wrong turn", "if (turn + iteration) % 2 == 0:", "if (turn + iteration) % 2 == 1:", LOW_RANK, first="PowerSGD and true_means"),
    Fault("low rank: fp16 not clamped", "return torch.where(factor.isinf(), factor, factor.clamp(-limit, limit))", "return factor", "sync/test_owed.py " + LOW_RANK, first="PowerSGD and true_means"),
    Fault("low rank: seed without the step", "seed + SEED_STRIDE * step", "seed", "sync/test_engine.py " + LOW_RANK, first="seed"),
    Fault("low rank: batched residual not kept", "errors.update(zip(self._names, self._parts, strict=True))", "pass", LOW_RANK, first="PowerSGD and true_means"),
    Fault("low rank: rank before the warm start", "rows = min(len(factor), len(like))", "rows = 1", "sync/test_engine.py " + LOW_RANK, first="matrix_rank"),
    Fault("quantize: another member's share", "self.blocks, self.blocks.shares[rank]", "self.blocks, self.blocks.shares[0]", CONFORMANCE, first="Quantize and true_means"),
    Fault("quantize: residual added scaled twice", "added if scale is None else torch._foreach_mul(added, scale)", "added", CONFORMANCE + " algorithms", first="Quantize and true_means"),
    Fault("quantize: the residual is not written", "memory[ERROR].update(zip(self.names, bucket.split(residual), strict=True))", "pass", CONFORMANCE, first="Quantize and true_means"),
    Fault("quantize: shares of two members swapped", "rows if rank == 0 else rows[::-1]", "rows", "algorithms/low_bit/test_quantize.py algorithms", first="near"),
    Fault("TopK: not divided by the members", "scaled = scaled / scaled.new_full((), len(indices))", "scaled = scaled / 1", CONFORMANCE + " algorithms/test_topk.py", first="TopK"),
    Fault("TopK: another member's entries", "own = indices[query.rank]", "own = indices[0]", CONFORMANCE + " algorithms/test_topk.py", first="TopK"),
    Fault("TopK: residual does not decay", "wanted.add_(query.error, alpha=query.decay)", "wanted.add_(query.error)", CONFORMANCE + " algorithms/test_topk.py", first="TopK"),
    Fault("state: residuals saved without averaging", "self.unsynced_names.clear()\n        return", "self.unsynced_names.clear()\n        self.memory.step += 1\n        return", STATE),
    Fault("state: local memory is not averaged", "memory[slot][spec.name].copy_(mean)", "pass", STATE),
    Fault("state: pending means not divided", "slot: {name: tensor / self.inter_node.size for", "slot: {name: tensor / 1 for", STATE + " sync adapters/test_machines.py"),
    Fault("state: skipped steps forgotten", "= loaded.skipped_steps", "= 0", STATE),
    Fault("state: of a different model", "check_model(loaded, specs, strict=strict)", "pass", STATE + " sync"),
    Fault("machines: a taken residual is not multiplied", "error * self.partition.intra_node.size", "error", "test_powersgd.py " + MACHINES, first="fed_back"),
    Fault("machines: another rank's part", "by_rank.split_with_sizes(self.lengths)[self.local_rank]", "by_rank.split_with_sizes(self.lengths)[0]", MACHINES),
    Fault("machines: moved memory is lost", "whole[self.held(name)] = tensors.pop(name)", "tensors.pop(name)", MACHINES + " sync adapters"),
    Fault("weights: not divided by the total", "number > 0, (number or 1.0) * self._size / total", "number > 0, (number or 1.0) * self._size + 0 * total", "adapters/test_weights.py"),
    Fault("weights: samples of an empty process count", "            if not has_samples:\n                bucket.flat.zero_()\n", "", "adapters/test_weights.py adapters"),
    Fault("local SGD: averaged a step late", "return steps_since >= self._turn_ends(turn + 1)", "return steps_since > self._turn_ends(turn + 1)", LOCAL),
    Fault("local SGD: another fragment's turn", "[self.model.fragments[turn % len(self.model.fragments)]]", "[self.model.fragments[0]]", LOCAL + " elastic"),
    Fault("local SGD: an uneven scale is dropped", "flat.mul_(scale)\n        for fragment in changes", "pass\n        for fragment in changes", LOCAL),
    Fault("local SGD: overflow is averaged", "if not committed or not are_finite(self.changes, self._engine.settings.health_group):", "if not committed:", LOCAL),
    Fault("local SGD: the outer step is skipped", "outer = None if self.schedule.is_warm_up(step) else self.model.outer", "outer = None", LOCAL),
    Fault("local SGD: work is counted twice", "fragment.work -= fragment.sent_work", "pass", LOCAL + " elastic", first="work"),
    Fault("local SGD: the local share is dropped", "local_weight = self.schedule.local_weight(self.engine.algorithm) if self.age else 0.0", "local_weight = 0.0", LOCAL),
    Fault("hooks: warm-up of local SGD ends late", "is_local = state.iter >= state.start_localSGD_iter", "is_local = state.iter > state.start_localSGD_iter", "hooks"),
    Fault("hooks: averaged over all in the local phase", "state.subgroup if is_local else state.process_group, flat", "state.process_group, flat", "hooks"),
    Fault("join: contributors are not counted", "self.scale.copy_(scale)", "pass", "adapters/test_join.py adapters"),
    Fault("checkpoint: a part is left behind", "part.unlink(missing_ok=True)", "pass", "test_checkpoint.py"),
    Fault("checkpoint: a damaged file is read", "if has_crcs and (damaged := archive.testzip()) is not None:", "if (damaged := None) is not None:", "test_checkpoint.py"),
    Fault("checkpoint: another process's file", "own = folder / LOCAL_NAME.format(sync.position.rank)", "own = folder / LOCAL_NAME.format(0)", "test_checkpoint.py sync/test_local_state.py"),
]  # fmt: skip


def run_tests(names: list[str], seconds: int) -> tuple[str, bool]:
    """Run some tests of the copy up to the first that fails; return its name, and whether all could run."""
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--ignore", "tests/triton_ready"]
    options += ["-o", f"timeout={TEST_SECONDS}", "-m", "not nightly and not alone"]
    output = ROOT / "build" / "mutation-output.txt"
    if (pid := os.fork()) == 0:
        # In a fork, since to import torch takes longer than most tests.
        os.setsid()
        os.chdir(COPY)
        sys.path[:0] = [str(COPY / "src"), str(COPY / "tests")]
        for number in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os._exit(pytest.main([*options, *names]))
    deadline, ended, status = time.monotonic() + seconds, 0, 0
    try:
        while not ended and time.monotonic() < deadline:
            time.sleep(0.1)
            ended, status = os.waitpid(pid, os.WNOHANG)
    finally:
        if not ended:
            os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
    status = os.waitstatus_to_exitcode(status)
    printed = output.read_text()
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if status == -signal.SIGKILL:
        return f"hung for {seconds} s", False  # with the fault, or on a busy machine
    ran = status in (0, 5)  # 5: no test has such a name
    return (failed[0][:150], True) if failed else ("" if ran else printed[-300:], ran)


def test_files(name: str) -> list[str]:
    """Return a file of tests, or those of a folder."""
    path = COPY / "tests" / name
    files = [path] if path.suffix else sorted(path.rglob("test_*.py"))
    return [str(file.relative_to(COPY)) for file in files if file.exists()]


def planted(fault: Fault, path: Path, *, all_tests: bool) -> tuple[str, bool]:
    """Plant a fault, and run tests; return the one that has failed, and whether all could run."""
    tests = list(dict.fromkeys(chain(*map(test_files, fault.tests.split()))))  # in this order
    rounds = [(["-k", f"({fault.first}) and {CALM}", *tests], FIRST_SECONDS)] if fault.first else []
    rounds.append((["-k", CALM, *tests], FIRST_SECONDS))
    rounds += [(["-k", CALM, "tests"], ALL_SECONDS)] if all_tests else []
    text = path.read_text()
    path.write_text(text.replace(fault.old, fault.new))
    try:
        for arguments, seconds in rounds:
            by, could_run = run_tests(arguments, seconds)
            if by:
                break
    finally:
        path.write_text(text)
    return by, could_run


def copy_checkout() -> None:
    """Bring the copy to the state of the working tree."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for path in [*COPY.glob("tests/**/*.py"), *COPY.glob("src/**/*.py")]:
        if not (ROOT / path.relative_to(COPY)).exists():
            path.unlink()
    for name in listed.stdout.split("\n"):
        source, target = ROOT / name, COPY / name
        if source.is_file() and not (target.exists() and target.read_bytes() == source.read_bytes()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def main() -> int:
    """Plant the faults; return 1 if one survives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--all-tests", action="store_true")
    parser.add_argument("--again", action="store_true", help="plant those again that were caught before")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and with it what it has started
    copy_checkout()
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() and not options.again else []
    caught = {result["name"] for result in map(json.loads, lines) if result["by"]}
    survivors = []
    for fault in FAULTS:
        if fault.name in caught or not any(word in fault.name for word in options.words or [""]):
            continue
        began, path = time.monotonic(), fault.place()
        by, could_run = "its text does not stand once in the source", False
        if path is not None:
            by, could_run = planted(fault, path, all_tests=options.all_tests)
        what = "COULD NOT RUN" if not could_run else "caught" if by else "SURVIVED"
        print(f"{what:9} {fault.name} ({time.monotonic() - began:.0f} s) {by}", flush=True)
        if not could_run or not by:
            survivors.append(fault.name)
        else:
            with RESULTS.open("a") as file:
                file.write(json.dumps({"name": fault.name, "by": by}) + "\n")
    print(*("every fault was caught",) if not survivors else ("not caught:", *survivors), sep="\n  ")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
