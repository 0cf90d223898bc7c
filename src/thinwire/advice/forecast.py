"""`thinwire.advise`: time steps on this process, take the link from a probe, and losses from a table."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from thinwire.adapters.ddp_model import ddp_inside, is_fsdp2, is_sharded
from thinwire.advice.advice_page import Advice
from thinwire.advice.notes import notes_on_link, notes_on_losses
from thinwire.advice.prediction import checked_budget, checked_gain, checked_steps
from thinwire.advice.priced_steps import PricedSteps
from thinwire.advice.step_benchmark import DDPSubject, OneStep, StepBenchmark, mean_over_processes
from thinwire.advice.trained import notes_on_optimizer, optimizer_name, training_of
from thinwire.checks import positive
from thinwire.comm import ProcessGroupTransport
from thinwire.errors import AttachError, ConfigError
from thinwire.launch import group_of_one
from thinwire.probe import Probe
from thinwire.probe import probe as measure_network
from thinwire.probe.measured_link import MeasuredLink
from thinwire.torch_private import uncompiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SHARDED = "thinwire.advice.sharded_subject"  # imports DTensor, which takes seconds


def advise(
    model: nn.Module,
    one_step: OneStep,
    probe: Probe | None = None,
    *,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    budget_seconds: float = 30.0,
    least_gain: float = 0.05,
    budget_loss: float = 0.01,
    optimizer: torch.optim.Optimizer | str | None = None,
    total_steps: int | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Advice:
    """Predict each algorithm's step time for a model on the probed network, and its loss gap.

    Steps of a copy of the model (without a DDP model's options) are timed on this process, without any
    network. The probe tells how long their messages would take. The slowest of as many steps as there are
    processes sets the pace. With a `fully_shard` model, the processes of a replica time steps together, share
    the link of the one process that was probed, and are compared with native HSDP in bf16.

    Call it on every process of the default process group (for a sharded model: of one replica), or with a
    probe in a single process, which needs no group. The result is the same on all. A module that communicates
    itself (SyncBatchNorm) must do so in every process. Memory: a copy of the model (or of this process's
    shards), its gradients, and the state of one algorithm at a time.

    Args:
        model: A module, plain or DDP. Or an FSDP2 model, which is itself trained, and then restored.
        one_step: Called with a DDP model of the copy, or with the FSDP2 model; it makes a batch and runs
            forward and backward. Whatever else it does (an optimizer's step) counts in every prediction.
        probe: The network's probe; None to probe the default process group now, which is collective. For a
            sharded model: of one process per machine, or of all, if each machine holds a replica.
        replicas: For a sharded model without a probe: as in `attach`; the links are probed now.
        budget_seconds: About how long it may take. Ten steps with each algorithm are made in any case.
        least_gain: How much faster than both exact and 16-bit averaging an approximation must be to be
            advised, as a share of the step.
        budget_loss: The largest expected gap to exact averaging's loss that is advised, as a share of it:
            0.01 is 1 %; at most 0.2. `math.inf` for any, known or not.
        optimizer: The optimizer that trains the model, or its name, such as "AdamW": loss gaps depend on it.
            With None, or one without measurements, the largest gap of all counts.
        total_steps: Steps of the run. Few bits lose more in short runs, so only runs that were not longer
            count; with None, the shortest.
        progress: Called with a description of each measurement.

    Raises:
        ConfigError: `one_step` does not run a backward pass, the model is sharded by FSDP1 or on several
            devices, the probe does not know the link's rate, or an argument is out of range.
        AttachError: The model is all frozen; or `attach` does not take the sharded model.
        GradientError: Gradients are sparse.
    """
    name = optimizer_name(optimizer)
    budget_loss, least_gain = checked_budget(budget_loss), checked_gain(least_gain)
    total_steps = checked_steps(total_steps)
    budget_seconds = positive("budget_seconds", budget_seconds)
    if not isinstance(probe, Probe | None):
        raise ConfigError(f"probe must be what thinwire.probe or Probe.load returned, or None, got {probe!r}")
    module, device = _trainable(model)
    with ExitStack() as entered:
        if not dist.is_initialized():
            entered.enter_context(group_of_one())
        link, transport = _link_between_replicas(module, probe, replicas), ProcessGroupTransport()
        training = training_of(module, name, link.members, total_steps)
        benchmark = StepBenchmark(link.members, device)
        kind = import_module(SHARDED).ShardedSubject if is_fsdp2(module) else DDPSubject
        subject = kind(module, benchmark.transport, entered)
        gradient_bytes = sum(p.nbytes for p in subject.model.parameters() if p.requires_grad)
        means = partial(mean_over_processes, transport=transport)
        steps = PricedSteps(training, gradient_bytes, means, subject.shards)
        benchmark.run(subject, one_step, steps, budget_seconds, progress)
        notes = (
            *notes_on_losses(name, total_steps),
            *notes_on_optimizer(optimizer),
            *notes_on_link(link, transport.size, device.type),
        )
        return steps.advice(link, least_gain, budget_loss, notes)


def _trainable(model: nn.Module) -> tuple[nn.Module, torch.device]:
    """Return the module to time, and its device: a copy, or a sharded model itself."""
    # A compiled module can't be copied, and a DDP model's copy would average: take the module inside.
    ddp = ddp_inside(model)
    module = uncompiled(model) if ddp is None else ddp.module
    if not isinstance(module, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module, got {model!r:.200}")
    if is_sharded(module) and not is_fsdp2(module):
        raise ConfigError(
            "the model is sharded by FullyShardedDataParallel (FSDP1), whose flat shards span several "
            "parameters; shard it with fully_shard, or pass the plain module if it fits on each device"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise AttachError("no parameter of the model is trained, so there is nothing to average")
    device, *others = {parameter.device for parameter in module.parameters()}
    if others:
        devices = " and ".join(sorted(map(str, (device, *others))))
        raise ConfigError(
            f"advise times the work of one device, got a model on {devices}; move the model to one device"
        )
    # A copy, to leave no gradients or hooks behind.
    return module if is_fsdp2(module) else copy.deepcopy(module), device


def _link_between_replicas(
    module: nn.Module, probe: Probe | None, replicas: dist.ProcessGroup | DeviceMesh | None
) -> MeasuredLink:
    """Return the link between the replicas. Without a probe it is probed now, which is collective."""
    if is_fsdp2(module):
        sharded = import_module(SHARDED)
        probe = probe or sharded.probed_between_replicas(module, replicas)
        return MeasuredLink.of(probe, sharded.view_of(module).shards().size)
    if replicas is not None:
        raise ConfigError("replicas is for models of fully_shard; leave it out")
    return MeasuredLink.of(probe or measure_network())
