"""The modules and names of `torch.distributed.algorithms.ddp_comm_hooks`, on Thinwire's core.

Change the package's name, and leave the rest of the script as it is:

    from thinwire.ddp_comm_hooks import powerSGD_hook as powerSGD

    state = powerSGD.PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=100)
    ddp_model.register_comm_hook(state, powerSGD.powerSGD_hook)

`thinwire.hooks` has all hooks in one module. docs/powersgd.md says what behaves
differently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType

from thinwire import hooks
from thinwire.adapters.ddp_model import register
from thinwire.ddp_comm_hooks import (  # noqa: F401 (torch's package has its modules when imported)
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from thinwire.errors import ConfigError

__all__ = ["DDPCommHookType", "register_ddp_comm_hook"]


@dataclass(frozen=True)
class _Registration:
    """Registers a hook on a model: a `DDPCommHookType.….value`."""

    comm_hook: Callable[..., Any]
    matrix_approximation_rank: int | None = None

    def __call__(
        self, model: torch.nn.Module, state: object = None, start_powerSGD_iter: int | None = None
    ) -> None:
        # The state is a process group here, like torch's, and the hook's own state is made from it.
        if not (state is None or isinstance(state, dist.ProcessGroup)):
            raise ConfigError(
                f"state must be a process group or None, got {type(state).__name__}; with your own "
                "state call model.register_comm_hook(state, hook)"
            )
        if self.matrix_approximation_rank is not None:
            # A state serves one model, so each call makes one.
            state = made = hooks.PowerSGDState(state, self.matrix_approximation_rank)
            if start_powerSGD_iter is not None:
                made.start_powerSGD_iter = start_powerSGD_iter
        elif start_powerSGD_iter is not None:
            raise ConfigError("start_powerSGD_iter is for PowerSGD's hooks; leave it out")
        register(model, state, self.comm_hook)


class DDPCommHookType(Enum):
    """torch's names for hooks; each value registers its hook: `….value(model=model, state=process_group)`.

    A PowerSGD hook gets its own `PowerSGDState`, with the defaults: it compresses after 1 000 steps, unless
    the value is called with `start_powerSGD_iter` as well.
    """

    # Callable objects: an Enum would treat a function as a method, not as a member.
    ALLREDUCE = _Registration(hooks.allreduce_hook)
    FP16_COMPRESS = _Registration(hooks.fp16_compress_hook)
    BF16_COMPRESS = _Registration(hooks.bf16_compress_hook)
    QUANTIZE_PER_TENSOR = _Registration(hooks.quantization_pertensor_hook)
    QUANTIZE_PER_CHANNEL = _Registration(hooks.quantization_perchannel_hook)
    POWER_SGD = _Registration(hooks.powerSGD_hook, 1)
    POWER_SGD_RANK2 = _Registration(hooks.powerSGD_hook, 2)
    BATCHED_POWER_SGD = _Registration(hooks.batched_powerSGD_hook, 1)
    BATCHED_POWER_SGD_RANK2 = _Registration(hooks.batched_powerSGD_hook, 2)
    NOOP = _Registration(hooks.noop_hook)


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType | BuiltinCommHookType,
    model: torch.nn.Module,
    state: dist.ProcessGroup | None = None,
) -> None:
    """Register a hook by its name on a DDP model.

    Args:
        comm_hook_type: The hook. For one of torch's own `torch.distributed.BuiltinCommHookType`, Thinwire's
            hook of the same name is registered.
        model: The DDP model.
        state: Its process group, None for the default one.

    Raises:
        ConfigError: Not such a type (torch's own `DDPCommHookType` names torch's hooks), or no process group.
        AttachError: Not a DDP model, or it has a hook already.
    """
    # torch's built-in hooks are written in C++: our hooks of the same names replace them.
    if isinstance(comm_hook_type, BuiltinCommHookType):
        comm_hook_type = DDPCommHookType[comm_hook_type.name]
    if not isinstance(comm_hook_type, DDPCommHookType):
        raise ConfigError(
            "comm_hook_type must be one of thinwire.ddp_comm_hooks.DDPCommHookType or "
            f"torch.distributed.BuiltinCommHookType, got {comm_hook_type!r}"
        )
    comm_hook_type.value(model=model, state=state)
