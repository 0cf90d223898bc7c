"""torch's wrappers, which make the messages of a hook small."""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from thinwire.algorithms import BatchedPowerSGD, PowerSGD
from thinwire.algorithms.exact import WireDtype
from thinwire.errors import ConfigError
from thinwire.hooks.post_local_sgd import PostLocalSGDState, averaged, post_localSGD_hook
from thinwire.hooks.powersgd import PowerSGDState, batched_powerSGD_hook, checked_state_of, powerSGD_hook
from thinwire.hooks.stateless import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    noop_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

Hook: TypeAlias = Callable[[Any, GradBucket], Future[torch.Tensor]]


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook with its messages in fp16: the factors of PowerSGD, not its memory, which stays fp32.

    Hooks whose messages have 16 or 8 bits already (those wrapped before, too), or that send none, are given
    back as they are.

    Raises:
        ConfigError: Not one of this module's hooks: the messages of another can't be reached.
    """
    return _wrapped(hook, "fp16")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook with its messages in bf16; see `fp16_compress_wrapper`.

    Raises:
        ConfigError: Not one of this module's hooks.
    """
    return _wrapped(hook, "bf16")


SMALL_ALREADY: tuple[Hook, ...] = (
    fp16_compress_hook,
    bf16_compress_hook,
    quantization_pertensor_hook,
    quantization_perchannel_hook,
    noop_hook,
)
# What was made here, so that wrapping it again can be seen.
_made_small = WeakSet[Hook]()


def _wrapped(hook: Hook, wire_dtype: WireDtype) -> Hook:
    if hook is powerSGD_hook or hook is batched_powerSGD_hook:
        # torch's wrapper casts the gradients that the hook is given. Here factors are cast, and the residual
        # keeps what that rounds off.
        kind = PowerSGD if hook is powerSGD_hook else BatchedPowerSGD

        def low_rank_in_16_bits(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
            return checked_state_of(state).run(kind, wire_dtype, bucket)

        _made_small.add(low_rank_in_16_bits)
        return low_rank_in_16_bits
    if hook is post_localSGD_hook:

        def post_local_in_16_bits(state: PostLocalSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
            return averaged(state, bucket, wire_dtype)

        _made_small.add(post_local_in_16_bits)
        return post_local_in_16_bits
    # The hook and its wrapper are one cast: no closure is needed around it.
    if hook is allreduce_hook:
        return fp16_compress_hook if wire_dtype == "fp16" else bf16_compress_hook
    # By identity: a hook of the user's own may compare as it likes.
    if any(hook is each for each in (*SMALL_ALREADY, *_made_small)):
        return hook
    raise ConfigError(
        f"expected one of thinwire.hooks, got {hook!r}; the messages of another hook can't be reached from "
        "outside: use torch's own wrapper for it"
    )
