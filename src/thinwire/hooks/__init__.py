"""PyTorch's DDP communication hooks, with torch's names, signatures and defaults, on Thinwire's core.

Change `torch.distributed.algorithms.ddp_comm_hooks` to `thinwire.hooks` and register them as before:

    state = PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=100)
    ddp_model.register_comm_hook(state, powerSGD_hook)

docs/powersgd.md says what behaves differently.
"""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from thinwire.algorithms import BatchedPowerSGD, PowerSGD
from thinwire.algorithms.exact import WireDtype
from thinwire.errors import ConfigError
from thinwire.hooks import post_local_sgd, powersgd_hook, stateless
from thinwire.hooks.post_local_sgd import PostLocalSGDState, post_localSGD_hook
from thinwire.hooks.powersgd_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from thinwire.hooks.stateless import (
    MachinesState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    noop_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

__all__ = [
    "Hook",
    "MachinesState",
    "PostLocalSGDState",
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]

Hook: TypeAlias = Callable[[Any, GradBucket], Future[torch.Tensor]]


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook with its messages in fp16: PowerSGD's factors, not its memory, which stays in fp32.

    Hooks whose messages have 16 or 8 bits already (including wrapped ones), or that send none, are returned
    as they are.

    Raises:
        ConfigError: It is not one of Thinwire's hooks, so its messages can't be reached.
    """
    return _wrapped(hook, "fp16")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook with its messages in bf16; see `fp16_compress_wrapper`."""
    return _wrapped(hook, "bf16")


# The hooks with large messages, each with its function that also takes a dtype for them.
LARGE: list[tuple[Hook, Callable[..., Future[torch.Tensor]]]] = [
    (allreduce_hook, stateless.averaged),
    (powerSGD_hook, partial(powersgd_hook.low_rank, PowerSGD)),
    (batched_powerSGD_hook, partial(powersgd_hook.low_rank, BatchedPowerSGD)),
    (post_localSGD_hook, post_local_sgd.averaged),
]


def _wrapped(hook: Hook, wire_dtype: WireDtype) -> Hook:
    # Compare identities: a user's hook may define its own equality.
    run = next((run for large, run in LARGE if hook is large), None)
    if run is not None:

        def in_16_bits(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
            return run(state, bucket, wire_dtype)

        return in_16_bits
    if str(getattr(hook, "__module__", "")).startswith("thinwire.hooks"):
        return hook
    raise ConfigError(
        f"expected one of thinwire.hooks, got {hook!r}; for any other hook use torch's own wrapper, since "
        "Thinwire can't change the messages of a foreign hook"
    )
