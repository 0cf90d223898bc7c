"""`thinwire.attach`: one call for both kinds of models, DDP and FSDP2."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from thinwire.adapters.ddp import attach_ddp
from thinwire.adapters.ddp_model import ddp_inside, is_fsdp2
from thinwire.algorithms import Algorithm
from thinwire.comm import Layout
from thinwire.errors import ConfigError
from thinwire.sync import GradientSync, Settings
from thinwire.sync.settings import HostCheck, OnNonfinite
from thinwire.sync.weights import Weight
from thinwire.torch_private import uncompiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)


def attach(
    model: torch.nn.Module,
    algorithm: Algorithm,
    *,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    machines: Layout = True,
    grad_scaler: GradScaler | Callable[[], float] | None = None,
    host_check: HostCheck = "auto",
    on_nonfinite: OnNonfinite = "nan",
    weight: Weight | None = None,
) -> GradientSync:
    """Average the gradients of a DDP or FSDP2 model with `algorithm` from its next backward pass on.

    The training loop stays as it is. Call it on every process that trains the model, with the same algorithm.

    Args:
        model: A `DistributedDataParallel` model, or a module that holds one (the result of `torch.compile`
            or of Fabric's `setup`, a wrapper of your own), on any backend and process group, with any of
            DDP's options but `mixed_precision`, `skip_all_reduce_unused_params` and
            `delay_all_reduce_named_params`. A `copy.deepcopy` of it has no hook: training the copy raises an
            error until you attach it. Or an FSDP2 model: one made by `replicate`, or by `fully_shard` over a
            mesh of one replica's shards, or of replicas and shards (native HSDP); see docs/sharded.md. Its
            replicas are made equal, in parameters and buffers.
        algorithm: For example `thinwire.PowerSGD(matrix_rank=4)`. `TopK` is meant for averaged models and
            logs a warning here.
        replicas: For an FSDP2 model: the processes that hold the same shard of different replicas, as a mesh
            or a process group: `mesh["replicate"]` of the mesh whose `mesh["shard"]` was given to
            `fully_shard`, or that mesh as a whole. `replicate` and native HSDP already have this group: leave
            `replicas` out. Not allowed with DDP.
        machines: For a DDP model: which processes share a machine. If every machine has the same number of
            processes, more than one, each machine averages exactly inside first and sends everything once;
            see docs/machines.md. True reads the layout from the variables of torchrun, srun or mpirun. Or
            give the ranks on each machine, `[[0, 1], [2, 3]]`, or a mesh of (machines, processes of each).
            With False each process sends by itself.
        grad_scaler: The scaler that scales the loss. If something else scales it, a function that returns the
            factor by which the current step's loss was multiplied. The residual is then kept in unscaled
            units, so that a change of scale changes no result.
        host_check: Whether the host waits for the device in each step to see whether all means are finite
            (`on_nonfinite` says when this is checked at all). With False it mostly does not wait, and steps
            that are not finite count in `steps`. "auto" is False for low-rank algorithms on accelerators,
            unless with `find_unused_parameters` or "raise", else True; see docs/ddp.md#without-a-host-check.
        on_nonfinite: What happens on all processes in a step in which a mean is not finite. The residual
            always stays as it was. "nan": all gradients become NaN, so that a `GradScaler` skips the step;
            without a scaler the model is lost, and this is logged once. "zero": all become zero; an optimizer
            with momentum or weight decay still moves the parameters. "raise": `backward()` raises
            `NonfiniteError` at its end; take no optimizer step, and training can continue. With "nan", only
            algorithms that keep state check the means and count such steps (`stats().nonfinite_steps`). With
            "zero" and "raise", `AllReduce`, `Cast` and `Quantize` without error feedback check as well: this
            costs a host synchronisation per step, and for the first two a pass over the gradients.
        weight: How much this process counts in the means, if not all count the same: for example the number
            of samples or tokens behind its gradients, if the loss is their mean; 0 for none. A number is
            fixed. A function is called once a step, in the backward pass, and costs an 8-byte message that
            must arrive before the first bucket is sent. For an FSDP2 model it is the weight of the replica,
            the same on all its shards: PyTorch itself averages between them.

    Returns:
        The handle: it has the plan, statistics and state, and can switch the algorithm.

    Cost per step: one host synchronisation with algorithms that keep state, if `host_check`; with
    `find_unused_parameters` one more, and 4 bytes for each parameter in the messages.

    Raises:
        AttachError: The model is neither a DDP nor an FSDP2 model, is not trained, or can't be averaged: its
            hook is taken, gradients are sparse, DDP skips some, or `replicas` hold different shards.
        AgreementError: Replicas are sharded differently, or processes disagree on who shares a machine.
        ConfigError: `machines` does not divide the processes; `algorithm` or `grad_scaler` is not one; or
            `on_nonfinite` conflicts with other arguments. Or `weight` is below 0 or NaN. If a function
            returns it, `backward()` raises this, and `StepError` on the other processes, or on all if no
            weight is above 0; on accelerators the step's means become NaN instead.
        NonfiniteError: (From `backward()`.) See `on_nonfinite`.
        GradientError: A parameter's gradient can't be averaged by the algorithm.

    Examples:
        >>> import thinwire
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> ddp_model = DistributedDataParallel(torch.nn.Linear(64, 32))  # in a process group
        >>> sync = thinwire.attach(ddp_model, thinwire.PowerSGD(matrix_rank=2))
        >>> ddp_model(torch.ones(1, 64)).sum().backward()
        >>> sync.stats().steps, round(sync.stats().compression_ratio, 1)
        (1, 9.3)
    """
    if isinstance(algorithm, torch.nn.Module):
        raise ConfigError(
            f"got {type(model).__name__} for the model and {type(algorithm).__name__} for the algorithm; "
            "write attach(model, algorithm)"
        )
    settings = Settings.of(
        grad_scaler=grad_scaler, host_check=host_check, on_nonfinite=on_nonfinite, weight=weight
    )
    if getattr(algorithm, "sends_few_entries", False):
        logger.warning(
            "%s is for models that are averaged every few steps: pass it to LocalSGD or DiLoCo. For "
            "gradients that are averaged in every step, Quantize(bits=4) loses less",
            algorithm,
        )
    plain = uncompiled(model)
    if is_fsdp2(plain):
        if not isinstance(machines, bool):
            raise ConfigError(
                "machines is for DDP models, and this model is sharded; leave it out: the mesh defines the "
                "replicas"
            )
        # DTensor takes seconds to import; a sharded model has imported it already.
        from thinwire.adapters.sharded.fsdp import attach_sharded  # noqa: PLC0415

        return attach_sharded(plain, algorithm, replicas, settings)
    if replicas is not None and ddp_inside(model) is not None:
        raise ConfigError(
            "replicas is for sharded models, and this is a DDP model; leave it out: DDP's process_group "
            "defines the replicas"
        )
    # `attach_ddp` rejects every other type and names the accepted ones.
    return attach_ddp(model, algorithm, settings, machines)
