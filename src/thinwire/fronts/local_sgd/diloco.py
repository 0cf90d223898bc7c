"""`DiLoCo`: local SGD with an outer Nesterov step and few bits, by defaults that fit the group."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from thinwire.algorithms import Algorithm, Quantize
from thinwire.channel import Transport
from thinwire.checks import number
from thinwire.errors import ConfigError
from thinwire.fronts.local_sgd.local_sgd import LocalSGD
from thinwire.sync.nonfinite import OnNonfinite

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FOUR_BITS = Quantize(bits=4)

# Each by whether the algorithm sends few entries.

# By members, from so many on. Charles et al., "Communication-Efficient Language Model Training Scales
# Reliably and Robustly: Scaling Laws for DiLoCo" (arXiv 2503.09799): 0.4, 0.4 to 0.6, 0.6 and 0.8, whatever
# the size of the model, with momentum 0.9 and 30 steps from one averaging to the next.
# Of few entries, one that a single member has sent moves by that member's whole change, so with more members
# more of them add up. Measured: `docs/adamw.md`.
LR_FROM_MEMBERS = {False: ((1, 0.4), (2, 0.5), (4, 0.6), (8, 0.8)), True: ((1, 1.0), (8, 0.5))}

# By steps from one averaging to the next, from so many on. 0.9 as there; at shorter distances it hurts (arXiv
# 2509.10439), and 0.5 is a choice of ours. Of few entries error feedback takes the place of momentum
# (SparseLoCo, arXiv 2508.15706).
MOMENTUM_FROM_STEPS = {False: ((1, 0.5), (30, 0.9)), True: ((1, 0.0),)}


def _last_reached(table: Sequence[tuple[int, float]], value: int) -> float:
    return [chosen for least, chosen in table if value >= least][-1]


@dataclass(frozen=True)
class Nesterov:
    """The outer step of DiLoCo: by what is given, or chosen by what takes part.

    Args:
        lr: Learning rate; None to choose it by the number of members.
        momentum: From 0 to below 1; None to choose it by the steps from one averaging to the next.

    Raises:
        ConfigError: One is no number, or out of range.
    """

    lr: float | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        if self.lr is not None:
            object.__setattr__(self, "lr", float(number("outer_lr", self.lr, minimum=0)))
            if math.isinf(self.lr):
                raise ConfigError(f"outer_lr must be finite, got {self.lr!r}")
        if self.momentum is not None:
            object.__setattr__(self, "momentum", number("outer_momentum", self.momentum, minimum=0))
            if self.momentum >= 1:
                raise ConfigError(f"outer_momentum must be from 0 to below 1, got {self.momentum!r}")

    def lr_for(self, num_members: int, algorithm: Algorithm) -> float:
        """Return the learning rate.

        Args:
            num_members: That train on their own.
            algorithm: How their changes are averaged.

        Examples:
            >>> [Nesterov().lr_for(num_members, FOUR_BITS) for num_members in (1, 2, 3, 4, 16)]
            [0.4, 0.5, 0.5, 0.6, 0.8]
        """
        if self.lr is not None:
            return self.lr
        return _last_reached(LR_FROM_MEMBERS[algorithm.sends_few_entries], num_members)

    def optimizer(
        self, parameters: list[torch.Tensor], lr: float, every_steps: int, algorithm: Algorithm
    ) -> torch.optim.Optimizer:
        """Return the outer optimizer.

        Args:
            parameters: The last averages.
            lr: To begin with.
            every_steps: From one averaging to the next.
            algorithm: How changes are averaged.

        Examples:
            >>> last = [torch.zeros(3)]
            >>> outers = [Nesterov().optimizer(last, 0.5, every_steps, FOUR_BITS) for every_steps in (29, 30)]
            >>> [outer.defaults["momentum"] for outer in outers]
            [0.5, 0.9]
        """
        momentum = self.momentum
        if momentum is None:
            momentum = _last_reached(MOMENTUM_FROM_STEPS[algorithm.sends_few_entries], every_steps)
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=momentum > 0)


class DiLoCo(LocalSGD):
    """Train each process on its own for many steps, then take an outer step along the mean of their changes.

    A context manager around the training loop, as `LocalSGD`, which it is: see there what is averaged, when,
    and what is refused. The outer optimizer is SGD with Nesterov's momentum on the last averaged parameters;
    changes travel in four bits a number. With `fragments` and `delay_steps` it is Streaming DiLoCo: the model
    is averaged in parts, one at a time, while training goes on.

    Sources: Douillard et al., "DiLoCo" (arXiv 2311.08105, algorithm 1) and "Streaming DiLoCo" (arXiv
    2501.18512, algorithm 2); Thérien et al., "MuLoCo" (arXiv 2505.23725), for Muon inside.

    Args:
        model: As of `LocalSGD`.
        optimizer: Trains the model (AdamW, Muon); of several, the one that steps last.
        every_steps: Steps from one averaging of a parameter to the next.
        algorithm: How the changes become their mean over the group.
        outer_lr: Learning rate of the outer optimizer; None to choose by the number of members (0.4 with
            one, 0.5 from two on, 0.6 from four, 0.8 from eight); with an algorithm that sends few entries
            (`TopK`: that is SparseLoCo) 1.0, and 0.5 from eight members on.
        outer_momentum: Its momentum, from 0 to below 1; None to choose by `every_steps` (0.9 from 30 on, 0.5
            below), or 0.0 with an algorithm that sends few entries.
        outer_device: Where the last averages and the momentum are kept: "cpu" to spare an accelerator's
            memory.
        fragments: As of `LocalSGD`: in how many parts the model is averaged.
        delay_steps: As of `LocalSGD`: steps from sending a change to applying what became of it.
        mix: As of `LocalSGD`: the share of its own that a model keeps then.
        warmup_steps: Steps at the start that are plain data-parallel training.
        warmup_algorithm: As of `LocalSGD`: how a DDP model's gradients become their mean in them.
        subgroup: This process's fast subgroup. A subgroup counts as one member.
        average_buffers: Whether to average floating buffers that the model saves, without outer optimizer.
        process_group: As of `LocalSGD`.
        grad_scaler: The `GradScaler`, if there is one.
        on_nonfinite: As of `LocalSGD`.
        mesh: As of `LocalSGD`: the dimension of an FSDP2 model's replicas.

    Cost: as of `LocalSGD`; the outer optimizer's momentum is one more copy of the parameters.

    Raises:
        ConfigError: An argument is wrong, or the optimizer does not train this model.
        AttachError: No process group, or one this process is not in, or a DDP model that can't be driven, or
            a model whose parameters have no values yet, or are all frozen.
        GradientError: A parameter can't be averaged by the algorithm.

    Examples:
        >>> import thinwire
        >>> model = nn.Linear(64, 32)  # in a process group
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with thinwire.DiLoCo(model, optimizer, every_steps=30) as local:
        ...     for _ in range(60):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1, 64)).sum().backward()
        ...         optimizer.step()
        >>> print(local)
        DiLoCo(every_steps=30), Quantize(bits=4)
        >>> local.stats().compression_ratio > 200
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every_steps: int = 30,
        algorithm: Algorithm = FOUR_BITS,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        outer_device: torch.device | str | None = None,
        fragments: int = 1,
        delay_steps: int = 0,
        mix: float | None = None,
        warmup_steps: int = 0,
        warmup_algorithm: Algorithm | None = None,
        subgroup: dist.ProcessGroup | Transport | None = None,
        average_buffers: bool = True,
        process_group: dist.ProcessGroup | Transport | None = None,
        grad_scaler: GradScaler | None = None,
        on_nonfinite: OnNonfinite = "nan",
        mesh: DeviceMesh | None = None,
    ) -> None:
        self._outer_step = Nesterov(outer_lr, outer_momentum)
        super().__init__(
            model,
            optimizer,
            every_steps=every_steps,
            warmup_steps=warmup_steps,
            warmup_algorithm=warmup_algorithm,
            subgroup=subgroup,
            average_buffers=average_buffers,
            algorithm=algorithm,
            # Weak: in a circle, last averages would stay in memory until the garbage collector comes.
            outer=partial(DiLoCo._new_outer, weakref.proxy(self)),
            process_group=process_group,
            grad_scaler=grad_scaler,
            on_nonfinite=on_nonfinite,
            fragments=fragments,
            delay_steps=delay_steps,
            mix=mix,
            outer_device=outer_device,
            mesh=mesh,
        )

    def _new_outer(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        # On entry, and not with the constructor: the group and the algorithm are known by then.
        algorithm = self.sync.algorithm
        lr = self._outer_step.lr_for(self.num_replicas, algorithm)
        return self._outer_step.optimizer(parameters, lr, self._schedule.every_steps, algorithm)

    @property
    def num_replicas(self) -> int:
        """Members that train on their own: processes of the group, or its subgroups."""
        subgroup = self._exact.get("subgroup")
        return self._engine.transport.size // (1 if subgroup is None else subgroup.transport.size)
