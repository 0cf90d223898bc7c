"""PyTorch's DDP communication hooks, with torch's names, signatures and defaults, on Thinwire's core.

Change `torch.distributed.algorithms.ddp_comm_hooks` to `thinwire.hooks` and register them as before:

    state = PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=100)
    ddp_model.register_comm_hook(state, powerSGD_hook)

docs/powersgd.md says what behaves differently.
"""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from thinwire.algorithms import BatchedPowerSGD, PowerSGD
from thinwire.algorithms.exact import WireDtype
from thinwire.errors import ConfigError
from thinwire.hooks.post_local_sgd import PostLocalSGDState, averaged, post_localSGD_hook
from thinwire.hooks.powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from thinwire.hooks.stateless import (
    MachinesState,
    allreduce_hook,
    bf16_compress_hook,
    checked_state,
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
    """Return a hook with its messages in fp16: the factors of PowerSGD, not its memory, which stays fp32.

    Hooks whose messages have 16 or 8 bits already (those wrapped before, too), or that send none, are given
    back as they are.

    Raises:
        ConfigError: It is a foreign hook, whose messages can't be reached.
    """
    return _wrapped(hook, "fp16")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """As `fp16_compress_wrapper`, in bf16."""
    return _wrapped(hook, "bf16")


def _each_in_16_bits(wire_dtype: WireDtype, cast: Hook) -> list[tuple[Hook, Hook]]:
    """Return the hooks with large messages, each with the one that sends them in 16 bits."""

    def low_rank_hook(kind: type[PowerSGD] | type[BatchedPowerSGD]) -> Hook:
        # torch's wrapper casts the gradients that the hook is given. Here factors are cast, and the residual
        # keeps what that rounds off.
        def low_rank_in_16_bits(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
            return checked_state(PowerSGDState, state).run(kind, wire_dtype, bucket)

        return low_rank_in_16_bits

    def post_local_in_16_bits(state: PostLocalSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
        return averaged(state, bucket, wire_dtype)

    return [
        (allreduce_hook, cast),
        (powerSGD_hook, low_rank_hook(PowerSGD)),
        (batched_powerSGD_hook, low_rank_hook(BatchedPowerSGD)),
        (post_localSGD_hook, post_local_in_16_bits),
    ]


IN_16_BITS: dict[WireDtype, list[tuple[Hook, Hook]]] = {
    "fp16": _each_in_16_bits("fp16", fp16_compress_hook),
    "bf16": _each_in_16_bits("bf16", bf16_compress_hook),
}
SMALL = [small for pairs in IN_16_BITS.values() for _, small in pairs]
SMALL += [quantization_pertensor_hook, quantization_perchannel_hook, noop_hook]


def _wrapped(hook: Hook, wire_dtype: WireDtype) -> Hook:
    # Compare identities: a user's hook may define its own equality.
    for whole, small in IN_16_BITS[wire_dtype]:
        if hook is whole:
            return small
    if any(hook is small_hook for small_hook in SMALL):
        return hook
    raise ConfigError(
        f"expected one of thinwire.hooks, got {hook!r}; the messages of a foreign hook can't be reached from "
        "outside: use torch's own wrapper for it"
    )
