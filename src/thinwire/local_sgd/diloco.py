"""`DiLoCo`: `LocalSGD` with an outer step and the defaults that go with it."""

from __future__ import annotations

from typing import Any

from torch import nn

from thinwire.algorithms import Algorithm, Quantize
from thinwire.local_sgd.averaged_model import Optimizers
from thinwire.local_sgd.local_sgd import LocalSGD
from thinwire.local_sgd.outer import Outer
from thinwire.local_sgd.settings import Nesterov


class DiLoCo(LocalSGD):
    """Train each process on its own for many steps, then take an outer step along the mean of their changes.

    `LocalSGD` with other defaults: see there what is averaged, when, and what is refused. The outer optimizer
    is SGD with Nesterov's momentum on the last averaged parameters; changes travel in four bits a number.
    With `streaming` it is Streaming DiLoCo: the model is averaged in parts, while training goes on. With Muon
    inside, and AdamW for what is no matrix, it is MuLoCo: `DiLoCo(model, [muon, adamw])`. Arguments, cost and
    errors are those of `LocalSGD`; a subgroup counts as one member.

    Sources: Douillard et al., "DiLoCo" (arXiv 2311.08105, algorithm 1) and "Streaming DiLoCo" (arXiv
    2501.18512, algorithm 2); Thérien et al., "MuLoCo" (arXiv 2505.23725).

    Examples:
        >>> import thinwire, torch
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
        optimizer: Optimizers,
        *,
        every_steps: int = 30,
        algorithm: Algorithm = Quantize(bits=4),  # noqa: B008
        outer: Outer | None = Nesterov(),  # noqa: B008
        **settings: Any,
    ) -> None:
        settings |= {"every_steps": every_steps, "algorithm": algorithm, "outer": outer}
        super().__init__(model, optimizer, **settings)
