"""`DiLoCo`: local SGD with an outer Nesterov step and few bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from thinwire.algorithms import Algorithm, Quantize
from thinwire.channel import Transport
from thinwire.localsgd.local_sgd import LocalSGD
from thinwire.localsgd.outer import Outer
from thinwire.localsgd.schedule import WHOLE
from thinwire.localsgd.settings import Nesterov, Streaming, Warmup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DiLoCo(LocalSGD):
    """Train each process on its own for many steps, then take an outer step along the mean of their changes.

    A context manager around the training loop: `LocalSGD` with other defaults. See there what is averaged,
    when, and what is refused, and all other settings. The outer optimizer is SGD with Nesterov's momentum on
    the last averaged parameters; changes travel in four bits a number. With `streaming` it is Streaming
    DiLoCo: the model is averaged in parts, one at a time, while training goes on.

    Sources: Douillard et al., "DiLoCo" (arXiv 2311.08105, algorithm 1) and "Streaming DiLoCo" (arXiv
    2501.18512, algorithm 2); Thérien et al., "MuLoCo" (arXiv 2505.23725), for Muon inside.

    Args:
        model: As of `LocalSGD`.
        optimizer: Trains the model (AdamW, Muon); of several, the one that steps last.
        every_steps: Steps from one averaging of a parameter to the next.
        algorithm: How the changes become their mean over the group.
        outer: The outer step; as of `LocalSGD`.
        streaming: As of `LocalSGD`, and all that follow.
        warmup: As of `LocalSGD`.
        replicas: As of `LocalSGD`.
        subgroup: As of `LocalSGD`. A subgroup counts as one member.
        grad_scaler: As of `LocalSGD`.

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
        algorithm: Algorithm = Quantize(bits=4),  # noqa: B008
        outer: Outer | None = Nesterov(),  # noqa: B008
        streaming: Streaming = WHOLE,
        warmup: Warmup | None = None,
        replicas: dist.ProcessGroup | Transport | DeviceMesh | None = None,
        subgroup: dist.ProcessGroup | Transport | None = None,
        grad_scaler: GradScaler | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            every_steps=every_steps,
            algorithm=algorithm,
            outer=outer,
            streaming=streaming,
            warmup=warmup,
            replicas=replicas,
            subgroup=subgroup,
            grad_scaler=grad_scaler,
        )
