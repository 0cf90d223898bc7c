"""PyTorch's DDP communication hooks, with torch's names, signatures and defaults, on Thinwire's core.

Change `torch.distributed.algorithms.ddp_comm_hooks` to `thinwire.hooks` and register them as before:

    state = PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=100)
    ddp_model.register_comm_hook(state, powerSGD_hook)

docs/powersgd.md says what behaves differently.
"""

from thinwire.hooks.post_local_sgd import PostLocalSGDState, post_localSGD_hook
from thinwire.hooks.powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from thinwire.hooks.stateless import (
    MachinesState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    noop_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from thinwire.hooks.wrappers import Hook, bf16_compress_wrapper, fp16_compress_wrapper

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
