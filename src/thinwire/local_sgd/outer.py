"""The outer optimizer, which steps the last averages: made, described and checked."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from thinwire.algorithms import Algorithm
from thinwire.checks import number, shown
from thinwire.errors import ConfigError
from thinwire.local_sgd.inner_optimizers import parameters_of
from thinwire.local_sgd.schedule import written
from thinwire.sync.state import digest_of


@dataclass(frozen=True)
class Nesterov:
    """The outer step of DiLoCo: SGD with Nesterov's momentum on the last averaged parameters.

    Without momentum and with a learning rate of 1 the result is the mean itself.

    Args:
        lr: Learning rate; None to choose by the number of members (0.4 with one, 0.5 from two on, 0.6 from
            four, 0.8 from eight). With an algorithm that sends few entries (`TopK`: that is SparseLoCo) it is
            1.0, and 0.5 from eight members on.
        momentum: From 0 to below 1; None to choose by `every_steps` (0.9 from 30 on, 0.5 below), or 0.0 with
            an algorithm that sends few entries.
        device: The device of the last averages and the momentum: "cpu" saves an accelerator's memory. None
            for the model's device.

    Cost: the momentum is one more copy of the parameters.

    Raises:
        ConfigError: A setting is not a number, or out of range, or `device` is not a device.
    """

    lr: float | None = None
    momentum: float | None = None
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        if self.lr is not None:
            object.__setattr__(self, "lr", float(number("lr", self.lr, minimum=0)))
            if math.isinf(self.lr):
                raise ConfigError(f"lr must be finite, got {self.lr!r}")
        if self.momentum is not None:
            object.__setattr__(self, "momentum", number("momentum", self.momentum, minimum=0))
            if self.momentum >= 1:
                raise ConfigError(f"momentum must be from 0 to below 1, got {self.momentum!r}")
        try:
            _ = self.device is None or torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f'device must be a device such as "cpu", or None, got {self.device!r}'
            ) from error

    __repr__ = written


Outer: TypeAlias = Nesterov | Callable[[list[torch.Tensor]], torch.optim.Optimizer]
"""The outer step, or a function that makes an optimizer of the last averaged parameters."""

PLAIN = bool | int | float
OUTER_EXAMPLE = "such as outer=thinwire.Nesterov(lr=0.7, momentum=0.9)"

# Tables by whether the algorithm sends few entries.

# For at least this many members. Charles et al., "Communication-Efficient Language Model Training Scales
# Reliably and Robustly: Scaling Laws for DiLoCo" (arXiv 2503.09799): 0.4, 0.4 to 0.6, 0.6 and 0.8, whatever
# the size of the model, with momentum 0.9 and 30 steps from one averaging to the next.
# With few entries, an entry that only one member has sent moves by its whole change, so with more members
# more such changes add up. Measured: `docs/optimizers.md`.
LR_FROM_MEMBERS = {False: ((1, 0.4), (2, 0.5), (4, 0.6), (8, 0.8)), True: ((1, 1.0), (8, 0.5))}

# For at least this many steps between averagings. 0.9 as in that paper; with fewer steps it hurts (arXiv
# 2509.10439), and 0.5 is our choice. With few entries, error feedback replaces momentum (SparseLoCo, arXiv
# 2508.15706).
MOMENTUM_FROM_STEPS = {False: ((1, 0.5), (30, 0.9)), True: ((1, 0.0),)}


def _last_reached(table: Sequence[tuple[int, float]], value: int) -> float:
    return [chosen for least, chosen in table if value >= least][-1]


def nesterov_lr(outer: Nesterov, num_members: int, algorithm: Algorithm) -> float:
    """Return the outer learning rate for a number of members.

    Examples:
        >>> from thinwire import AllReduce
        >>> [nesterov_lr(Nesterov(), num_members, AllReduce()) for num_members in (1, 2, 3, 4, 16)]
        [0.4, 0.5, 0.5, 0.6, 0.8]
    """
    table = LR_FROM_MEMBERS[algorithm.sends_few_entries]
    return _last_reached(table, num_members) if outer.lr is None else outer.lr


def check_outer(outer: object) -> None:
    """Raise if `outer` does not make an outer optimizer."""
    if outer is not None and not isinstance(outer, Nesterov) and not callable(outer):
        raise ConfigError(
            "outer must be a thinwire.Nesterov or a function that returns an optimizer, got "
            f"{shown(outer)}; {OUTER_EXAMPLE}"
        )


def new_outer(
    make: Outer, parameters: list[torch.Tensor], num_members: int, every_steps: int, algorithm: Algorithm
) -> torch.optim.Optimizer:
    """Return the outer optimizer of `parameters`."""
    if isinstance(make, Nesterov):
        lr, momentum = nesterov_lr(make, num_members, algorithm), make.momentum
        if momentum is None:
            momentum = _last_reached(MOMENTUM_FROM_STEPS[algorithm.sends_few_entries], every_steps)
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=momentum > 0)
    outer: object = make(parameters)
    if not isinstance(outer, torch.optim.Optimizer):
        raise ConfigError(f"outer must return a torch.optim.Optimizer, got {shown(outer)}; {OUTER_EXAMPLE}")
    # A missing parameter would never change, nor would the model's: all steps on it would be lost.
    if set(map(id, parameters_of(outer))) != set(map(id, parameters)):
        raise ConfigError(
            "outer must return an optimizer of all the tensors that it is given and no others; "
            f"{OUTER_EXAMPLE}"
        )
    return outer


def warn_of_momentum(outer: torch.optim.Optimizer | None, algorithm: Algorithm, *, stacklevel: int) -> None:
    """Warn of a momentum that does not suit the algorithm."""
    if outer is None or not algorithm.sends_few_entries:
        return
    if any(group.get("momentum", 0) or group.get("betas", (0,))[0] for group in outer.param_groups):
        warnings.warn(
            f"the outer optimizer has momentum, but {algorithm} sends an entry only now and then, and "
            "momentum would move it in all other steps; leave momentum out: "
            "outer=thinwire.Nesterov(lr=1, momentum=0)",
            stacklevel=stacklevel + 1,
        )


def described_outer(outer: torch.optim.Optimizer | None) -> str:
    """Return an outer optimizer's kind and plain settings as text, for processes to compare."""
    if outer is None:
        return "none"
    # Functions and tensors may print differently on every process.
    plain = {name: value for name, value in outer.defaults.items() if isinstance(value, PLAIN)}
    return f"{type(outer).__name__}({', '.join(f'{name}={value}' for name, value in plain.items())})"


def settings_digest(outer: torch.optim.Optimizer | None) -> int:
    """Return a CRC-32 of an outer optimizer's settings as they are now; 0 for none."""
    if outer is None:
        return 0
    now = [
        [(name, group[name]) for name in sorted(outer.defaults) if isinstance(group[name], PLAIN | tuple)]
        for group in outer.param_groups
    ]
    # 32 bits: members compare it in a float64 message, which holds such integers exactly.
    return digest_of(now)
