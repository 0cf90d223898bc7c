"""Start the training job, watch its records, and end it whole."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from thinwire.demo.options import DemoOptions
from thinwire.demo.records import RecordFile, TrainedStep
from thinwire.end_signals import EndSignals
from thinwire.errors import ThinwireError
from thinwire.interpreter import python_module
from thinwire.local_job import LOOK_EVERY_SECONDS, LocalJob


class JobError(ThinwireError, RuntimeError):
    """The training job failed; the message says where its log is."""


class JobInterruptedError(ThinwireError):
    """The job was asked to end, by Ctrl-C or another signal, and has ended.

    Attributes:
        signal_number: The signal.
    """

    def __init__(self, signal_number: int) -> None:
        name = signal.Signals(signal_number).name
        super().__init__(
            f"stopped by {name}; every process has ended. Its steps are on disk; a demo can't be resumed, "
            "the same command begins anew"
        )
        self.signal_number = signal_number


def run_job(options: DemoOptions, on_record: Callable[[TrainedStep], None]) -> None:
    """Train with every algorithm of `options`, and hand over each step's record soon after the step.

    Args:
        options: The settings of the run. What an earlier run of the same has left is removed.
        on_record: Takes the records.

    Raises:
        JobError: A training process failed.
        JobInterruptedError: A signal ended the job.
    """
    options.output.mkdir(parents=True, exist_ok=True)
    paths = [options.record_path(name) for name in options.algorithms]
    for path in paths:
        # A watch goes on in a file that is there, as after a resume.
        path.unlink(missing_ok=True)
    log_path = options.output / "processes.log"
    files = [RecordFile(path) for path in paths]
    command = [*python_module("thinwire.demo.train"), options.to_json()]
    with (
        # Before the job: a signal while its processes start must end them, too.
        EndSignals() as end_signals,
        log_path.open("wb") as log,
        LocalJob(command, options.processes, out=log) as job,
    ):
        while job.is_running() and end_signals.received is None:
            time.sleep(LOOK_EVERY_SECONDS)
            _hand_over(files, on_record)
    if end_signals.received is not None:
        raise JobInterruptedError(end_signals.received)
    if job.failure is not None:
        raise JobError(f"the training job failed: {job.failure}; see {log_path}")
    # Once more: the last lines came after the last look.
    _hand_over(files, on_record)


def _hand_over(files: list[RecordFile], on_record: Callable[[TrainedStep], None]) -> None:
    for file in files:
        for record in file.new_records():
            on_record(record)
