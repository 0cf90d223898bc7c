"""The time of the host for an accelerator's step, in milliseconds and in units of a loop that stays the same.

The code for accelerators runs on the CPU, on tiny tensors, and Triton's kernels are not launched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from gpu_ready.counting import Alike, Done, buckets_of, by_triton, gpt2_small
from thinwire import AllReduce, PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm
from thinwire.comm.transport import Message, Work
from thinwire.kernels.triton import launcher
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine, Settings
from thinwire.tensors import accelerators

# The shortest of so many steps: what else the machine does only adds to it.
STEPS, UNTIMED_STEPS = 20, 6
LONGEST = 48  # of a matrix's sides: what is computed takes no time


class Idle(Alike):
    """A group whose messages take no time; nothing arrives."""

    def start(self, message: Message) -> Work:
        """As `Transport.start`."""
        return Done()


@dataclass(frozen=True)
class HostTime:
    """Milliseconds of thread time of a step: the hooks of all buckets, its end, and `a_unit` beside it."""

    hooks: float
    finish: float
    unit: float  # half a millisecond on a server's CPU

    @property
    def units(self) -> float:
        """The whole step, in units: so it is a bound on a busy machine, and on a different one."""
        return (self.hooks + self.finish) / self.unit

    def __str__(self) -> str:
        step = f"{self.hooks + self.finish:.2f} ms (hooks {self.hooks:.2f}, finish {self.finish:.2f})"
        return f"{step}, {self.units:.1f} units of {self.unit:.2f} ms"


def tiny_buckets() -> list[tuple[ParameterSpec, ...]]:
    """Return GPT-2 small's 13 buckets, with all their parameters and hardly an element."""
    return [
        tuple(
            ParameterSpec.of(spec.name, torch.empty([min(size, LONGEST) for size in spec.shape]))
            for spec in bucket
        )
        for bucket in buckets_of(gpt2_small())
    ]


def a_unit() -> None:
    """Do what a step does: small operations of torch's, in about as much Python."""
    tensor, kept = torch.zeros(8, 8), {}
    for number in range(300):
        kept[number, tensor.data_ptr()] = tensor.view(64)[:32]
    torch.cat(list(kept.values()))


def milliseconds_of(run: Callable[[], object]) -> float:
    before = time.thread_time()
    run()
    return 1e3 * (time.thread_time() - before)


def host_time(algorithm: Algorithm, **settings: Any) -> HostTime:
    """Return what the hooks of a step's buckets take, and its end.

    Args:
        algorithm: Averages GPT-2 small, shrunk.
        settings: Of `Settings`.
    """
    buckets = tiny_buckets()
    flats = [torch.randn(sum(spec.numel for spec in bucket)) for bucket in buckets]
    engine = Engine(algorithm, Idle(), settings=Settings(host_check=False, **settings))
    engine.buckets.has_agreed = True  # there is no one to compare with
    units, steps = list[float](), list[tuple[float, float]]()
    with (
        by_triton(),
        patch.object(accelerators, "is_accelerator", lambda device: True),
        patch.object(launcher, "launch", lambda *_, **__: None),
    ):
        lanes = [engine.open(specs, flats[0].device) for specs in buckets]
        for _ in range(UNTIMED_STEPS + STEPS):
            # Kernels would have written it; without that, what is checked might not be finite.
            for flat in flats:
                flat.normal_()
            units.append(milliseconds_of(a_unit))
            step = engine.begin()
            hooks = [
                milliseconds_of(partial(step.start, lane, flat))
                for lane, flat in zip(lanes, flats, strict=True)
            ]
            steps.append((sum(hooks), milliseconds_of(step.finish)))
    hooks_took, finish_took = min(steps[UNTIMED_STEPS:], key=sum)
    return HostTime(hooks_took, finish_took, min(units))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for averaged in (AllReduce(), Quantize(bits=4), PowerSGD(matrix_rank=4), TopK()):
        print(averaged, min((host_time(averaged) for _ in range(3)), key=lambda found: found.units))
