"""Messages for the start of an adapter: what is on, and what would go wrong without a word."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from thinwire.algorithms import BatchedPowerSGD, PowerSGD
from thinwire.sync import Engine
from thinwire.torch_private import scales_now

logger = logging.getLogger(__name__)

ALONE = (
    "nothing is averaged: this is one process, in a group of its own. If others train with it, start all as "
    "one job, on each machine: torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "
    "HOST:29500 train.py; accelerate launch takes --num_machines, --num_processes, --machine_rank and "
    "--main_process_ip"
)


def tell_start(engine: Engine, parameters: Iterable[torch.Tensor], averages: str = "") -> None:
    """Log on the first process what an engine does in a step, and after its first step what does not fit it.

    Args:
        engine: It knows the model.
        parameters: The model's.
        averages: What averages models, and how often; "" if gradients are averaged in every step.
    """
    together = engine.settings.health_group
    if engine.transport.rank or (together is not None and together.rank):
        return
    if engine.transport.size == 1:
        logger.warning(ALONE)
        return
    where, sender = f"{engine.transport.size} processes", "process"
    if engine.partition is not None:
        where = f"{engine.inter_node.size} machines of {engine.partition.intra_node.size} processes"
        sender = "machine"
    elif together is not None:
        where = f"{engine.transport.size} replicas of {together.size} processes"
    sent, in_bf16 = engine.plan.message_bytes / 1e6, 2 * sum(spec.numel for spec in engine.specs) / 1e6
    if averages:
        what = f"{averages}, averages models"
        sends = (
            f": a {sender} sends {sent:.3g} MB an averaging, where gradients in bf16 are {in_bf16:.3g} a step"
        )
    else:
        what = f"{engine.algorithm} averages gradients"
        sends = f": a {sender} sends {sent:.3g} MB a step, where bf16 sends {in_bf16:.3g}"
    logger.info("%s over %s%s", what, where, sends if in_bf16 else "")
    if not averages and engine.algorithm.remembers:
        # Take identities: a message that comes once must keep no model alive.
        _look_after_first_step(engine, {id(parameter) for parameter in parameters})


def _look_after_first_step(engine: Engine, owned: set[int]) -> None:
    def look(committed: bool) -> None:
        engine.reporter.observers.remove(look)
        for words in misfits(engine, owned):
            logger.warning("%s", words)

    # Then the loss has been scaled, and there is an optimizer. Neither is known to a hook, so all objects are
    # looked through, in some 0.1 s: once.
    engine.reporter.observers.append(look)


def misfits(engine: Engine, owned: set[int]) -> list[str]:
    """Return warnings about objects in this process that do not go with an algorithm that remembers."""
    # Types are compared, since `isinstance` asks objects, and some do something then.
    kinds = (GradScaler, torch.optim.Optimizer)
    objects: list[Any] = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), kinds)]
    warnings, algorithm = [], engine.algorithm
    if engine.settings.loss_scale is None and any(map(_scales_now, objects)):
        warnings.append(
            f"a GradScaler scales a loss, and {algorithm} was not given it: what it remembers is wrong after "
            "each change of the scale; pass grad_scaler=scaler, unless it is a different model's"
        )
    adam = next((type(candidate).__name__ for candidate in objects if _is_adam_of(candidate, owned)), "")
    if adam and isinstance(algorithm, PowerSGD | BatchedPowerSGD):
        warnings.append(
            f"{type(algorithm).__name__} with {adam} costs loss (3.6 % after 300 steps of a small GPT); "
            "Quantize(bits=4) costs none that we could measure, see docs/optimizers.md"
        )
    return warnings


def _scales_now(candidate: Any) -> bool:
    """Return whether it is a scaler of a loss, and no gradients have been unscaled yet."""
    return isinstance(candidate, GradScaler) and scales_now(candidate)


def _is_adam_of(candidate: Any, owned: set[int]) -> bool:
    """Return whether it is Adam, or an optimizer like it, and trains one of some parameters."""
    if not any("Adam" in kind.__name__ for kind in type(candidate).__mro__):
        return False
    groups = getattr(candidate, "param_groups", ())
    return any(id(parameter) in owned for group in groups for parameter in group["params"])
