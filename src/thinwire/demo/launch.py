"""Start the training job with torchrun, watch its records, and end it whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from thinwire.demo.lifeline import LAUNCHER_VARIABLE
from thinwire.demo.options import DemoOptions
from thinwire.demo.records import RecordFile, StepRecord
from thinwire.end_signals import EndSignals
from thinwire.errors import ThinwireError

LOOK_EVERY_SECONDS = 0.1
# torchrun gives its processes 30 seconds to end before it kills them.
END_WITHIN_SECONDS = 40.0


class JobError(ThinwireError, RuntimeError):
    """The training job failed; the message says where its log is."""


class JobInterruptedError(ThinwireError):
    """The job was told to end, by Ctrl-C or another signal, and has ended.

    Attributes:
        signal_number: the signal.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; every process has ended")
        self.signal_number = signal_number


def run_job(options: DemoOptions, on_record: Callable[[StepRecord], None]) -> None:
    """Train with every algorithm of `options`, and hand over each step's record soon after the step.

    Raises:
        JobError: a training process failed.
        JobInterruptedError: a signal ended the job.
    """
    prepare_output(options)
    files = [RecordFile(options.record_path(name)) for name in options.algorithms]
    with (
        EndSignals() as end_signals,
        log_path(options).open("wb") as log,
        TemporaryDirectory(prefix="thinwire-demo-") as scratch,
    ):
        process = subprocess.Popen(
            torchrun_command(options, scratch),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=job_environment(options),
            # Ctrl-C on a terminal reaches every process of its session at once; here, this process alone
            # hears it, and passes it on in order.
            start_new_session=True,
        )
        try:
            while process.poll() is None and end_signals.received is None:
                time.sleep(LOOK_EVERY_SECONDS)
                _hand_over(files, on_record)
        finally:
            _end(process)
    if end_signals.received is not None:
        raise JobInterruptedError(end_signals.received)
    if process.returncode != 0:
        raise JobError(f"the training job failed: {_cause(options, process)}; see {log_path(options)}")
    _hand_over(files, on_record)


def torchrun_command(options: DemoOptions, scratch: str) -> list[str]:
    """The command line of the training job, whose processes leave their errors in the folder `scratch`."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    workers = ["--log-dir", scratch, "--nproc-per-node", str(options.processes)]
    return [*torchrun, *workers, "-m", "thinwire.demo.train", options.to_json()]


def job_environment(options: DemoOptions) -> dict[str, str]:
    """This process's environment, and what the job needs to know of it."""
    return {
        **os.environ,
        LAUNCHER_VARIABLE: str(os.getpid()),
        "TORCHELASTIC_ERROR_FILE": str(error_path(options)),
    }


def log_path(options: DemoOptions) -> Path:
    """Where the processes' own output goes."""
    return options.output / "torchrun.log"


def error_path(options: DemoOptions) -> Path:
    """Where torchrun says why the job failed."""
    return options.output / "error.json"


def prepare_output(options: DemoOptions) -> None:
    """Make the output folder, and clear it of what an earlier run of the same options would leave."""
    options.output.mkdir(parents=True, exist_ok=True)
    for path in (error_path(options), *map(options.record_path, options.algorithms)):
        path.unlink(missing_ok=True)


def _hand_over(files: list[RecordFile], on_record: Callable[[StepRecord], None]) -> None:
    for file in files:
        for record in file.new_records():
            on_record(record)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its training processes, if it has not ended already."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(END_WITHIN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _cause(options: DemoOptions, process: subprocess.Popen[bytes]) -> str:
    """The first failing process's error, in one line."""
    try:
        cause = json.loads(error_path(options).read_text())["message"]
    except (OSError, ValueError, KeyError):
        return f"exit code {process.returncode}"
    message = str(cause["message"] if isinstance(cause, dict) else cause)
    return message.strip().partition("\n")[0]
