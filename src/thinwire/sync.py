"""GradientSync: the handle that a user keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.algorithms import Algorithm
from thinwire.engine import Engine
from thinwire.plan import Plan
from thinwire.stats import Stats

__all__ = ["GradientSync", "engine_of"]


class GradientSync:
    """What averages a model's gradients, as its user sees it: to look at, to switch, to save and to load.

    `thinwire.attach` makes one, and the other fronts have one as `sync`. Printing it gives some lines to
    read. It is what `torch.distributed.checkpoint` calls stateful.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __str__(self) -> str:
        """Some lines to read: the algorithm, the plan's compression ratio, and what was done. Cost: none."""
        return str(self._engine)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in use."""
        return self._engine.algorithm

    @property
    def plan(self) -> Plan:
        """Which parameter travels how once past the warm-up, in the order of the model.

        An algorithm that works on whole buckets is planned for the buckets of the last step; before
        the first step, as if the model were one bucket.
        """
        return self._engine.plan

    @property
    def steps(self) -> int:
        """Steps so far, those that were not finite included."""
        return self._engine.steps

    def stats(self) -> Stats:
        """What has been done so far. Cost: one norm a compressed parameter and one host synchronisation."""
        return self._engine.stats()

    def use(self, algorithm: Algorithm) -> None:
        """Switch to another algorithm from the next step on; to be called on every process alike.

        What the old one still owes is carried over: a low-rank algorithm goes on with it, any other
        pays it back in its first step.

        Raises:
            ConfigError: It is not an algorithm.
            GradientError: A parameter's gradient can't be averaged by it.
            StepError: A step is under way.
        """
        self._engine.use(algorithm)

    def state_dict(self) -> dict[str, Any]:
        """What the algorithm remembers, the same on every process. Collective: call it on all processes.

        The error of the processes is replaced by its mean, here and in the result: every later step
        depends on the mean alone, so a run that goes on and one that resumes are the same, on any number
        of processes.

        Returns:
            Plain values, and tensors on the CPU: "error" and "factor" are tuples of pairs of a name and a
            tensor, "parameters" one of names and shapes. `torch.load(weights_only=True)` and
            `torch.distributed.checkpoint` take it; `thinwire.checkpoint` writes it as safetensors, too.

        Cost: a gather of 32 bytes a process, one exact average of all error memory (none if there was no step
        since the last time), a copy of it to the CPU and its checksum. If other processes do not call it as
        well, it says so after 10 s, and fails after the group's timeout.

        Raises:
            StepError: A step is under way.
            AgreementError: The processes have made different steps, or have other algorithms.
            CommunicationError: A collective failed, or some process did not call it; memory is as it was.
        """
        return self._engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue from a state saved by `state_dict`; to be called on every process with the same state.

        The number of processes may be another one, and the buckets. The algorithm in use is kept: a state
        saved at another matrix rank (its factors are cut or extended, with a warning), or by another
        algorithm, is taken over, its error included. All is checked before anything is changed; where
        the parameters are not known yet (the hooks), at the first step.

        Args:
            state: What `state_dict` returned, on any process.
            strict: Whether to refuse a state that lacks parameters of this model, or has others. If not,
                what is owed on those others is dropped. Where parameters are known by position only, all
                must be the same anyway.

        Raises:
            StateError: It is not such a state, damaged, of a later version, or of another model.
            StepError: A step is under way.
        """
        self._engine.load_state_dict(state, strict=strict)

    def abandon(self) -> None:
        """Forget a step that an exception in the backward pass has ended. Memory is as it was before it."""
        self._engine.abandon()


def engine_of(sync: GradientSync) -> Engine:
    """What a handle stands for; for what drives or watches it."""
    return sync._engine
