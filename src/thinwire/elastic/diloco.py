"""`elastic.DiLoCo`: an outer Nesterov step along the mean change of whoever is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from thinwire.algorithms import Algorithm, Quantize
from thinwire.elastic.local_sgd import LocalSGD
from thinwire.fronts.local_sgd.outer import Outer
from thinwire.fronts.local_sgd.settings import Nesterov


class DiLoCo(LocalSGD):
    """Train each process on its own for many steps, then take an outer step along the mean of their changes.

    `elastic.LocalSGD`, which it is, with the outer step and the defaults of `thinwire.DiLoCo`.

    Args:
        model: As of `elastic.LocalSGD`.
        optimizer: Trains the model; or several, as of `elastic.LocalSGD`.
        every_steps: Steps from one averaging of a parameter to the next.
        algorithm: How the changes become their mean over the group.
        outer: The outer step; as of `elastic.LocalSGD`.
        settings: All others, as of `elastic.LocalSGD`.

    Raises:
        ConfigError: An argument is wrong, or the optimizer does not train this model.
        AttachError: A DDP or a sharded model, or one that is all frozen.
        GradientError: A parameter can't be averaged by the algorithm.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        every_steps: int = 30,
        algorithm: Algorithm = Quantize(bits=4),  # noqa: B008
        outer: Outer | None = Nesterov(),  # noqa: B008
        **settings: Any,
    ) -> None:
        super().__init__(
            model, optimizer, every_steps=every_steps, algorithm=algorithm, outer=outer, **settings
        )
