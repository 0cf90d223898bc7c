"""DDP's communication hooks as given by Lightning's options: checked together, then registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torchs_post_local
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.ddp_model import register
from thinwire.checks import whole_number
from thinwire.errors import ConfigError
from thinwire.hooks import PostLocalSGDState

SUCH_AS = "such as thinwire.hooks.powerSGD_hook"


def register_ddp_comm_hook(
    model: DistributedDataParallel,
    ddp_comm_state: object | None = None,
    ddp_comm_hook: Callable[..., Any] | None = None,
    ddp_comm_wrapper: Callable[..., Any] | None = None,
) -> None:
    """Register a communication hook on a DDP model, wrapped if a wrapper is given; nothing without a hook.

    Args:
        model: The DDP model, on any device.
        ddp_comm_state: The hook's state: a `PowerSGDState` for `powerSGD_hook` and its batched variant; a
            `PostLocalSGDState` for `post_localSGD_hook` (which leaves averaging the models to you); a
            process group, None, or (except with 8 bits) a `MachinesState` for hooks without memory.
        ddp_comm_hook: One of `thinwire.hooks`, or any other.
        ddp_comm_wrapper: `fp16_compress_wrapper` or `bf16_compress_wrapper` of `thinwire.hooks`, or another.

    Raises:
        AttachError: Not a DDP model, or it has a hook already.
        ConfigError: A state or wrapper without a hook, or a wrapper of something else. (A state of the wrong
            kind raises in the first step.)
    """
    hook = checked_hook(ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper)
    if hook is not None:
        register(model, ddp_comm_state, hook)


def checked_hook(state: object, hook: object, wrapper: object) -> Callable[..., Any] | None:
    """Return the hook with its wrapper; None without a hook."""
    if hook is None:
        if state is not None or wrapper is not None:
            raise ConfigError(f"ddp_comm_state and ddp_comm_wrapper need a ddp_comm_hook, {SUCH_AS}")
        return None
    if not callable(hook):
        raise ConfigError(f"ddp_comm_hook must be a hook, {SUCH_AS}, got {hook!r}")
    if wrapper is None:
        return hook
    # Only its result shows whether it is a wrapper.
    wrapped = wrapper(hook) if callable(wrapper) else None
    if not callable(wrapped):
        raise ConfigError(
            "ddp_comm_wrapper must be a wrapper, such as thinwire.hooks.fp16_compress_wrapper, got "
            f"{wrapper!r}"
        )
    return wrapped  # type: ignore[no-any-return]


def check_period(state: object, period: object) -> None:
    """Refuse `post_localSGD_hook` without `model_averaging_period`, and the period without the hook."""
    # Also with torch's own state: Lightning averages models with either.
    is_local = isinstance(state, PostLocalSGDState | torchs_post_local.PostLocalSGDState)
    if is_local and period is None:
        raise ConfigError(
            "with post_localSGD_hook alone the models drift apart; also pass the strategy "
            "model_averaging_period=, or use thinwire.LocalSGD"
        )
    if period is not None:
        whole_number("model_averaging_period", period, minimum=1)
        if not is_local:
            raise ConfigError(
                "model_averaging_period has an effect only with post_localSGD_hook and a PostLocalSGDState; "
                "leave it out, or use thinwire.LocalSGD"
            )
