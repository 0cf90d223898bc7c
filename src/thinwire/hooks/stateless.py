"""torch's hooks that keep no state between steps: one message for each bucket, or none."""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

import weakref
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire.adapters.ddp import DDPAdapter, adapter_of_hook, completed_future, dense_buffer
from thinwire.adapters.setup import divide_by_contributors
from thinwire.algorithms import Algorithm, AllReduce, Cast
from thinwire.algorithms.exact import WireDtype, wire_dtype_of
from thinwire.checks import whole_number
from thinwire.comm import Layout, ProcessGroupTransport, agree
from thinwire.comm.process_group import future_of
from thinwire.errors import ConfigError
from thinwire.sync import GradientSync, Settings
from thinwire.sync.handle import attached
from thinwire.torch_private import not_compiled
from thinwire.version import __version__

MAX_CODE = 255  # of 8 bits


class HookState:
    """A hook's state that attaches itself in the first step, when the hook first sees its model."""

    process_group: dist.ProcessGroup | None
    _machines: Layout = False
    _adapter: DDPAdapter | None = None
    _used_with = ""

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        """Return a state with the same settings and no steps: a copied model has no hook."""
        # Without __init__: a process group can't be copied, so the copy shares it.
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__, _adapter=None, _used_with="")
        return copied

    @property
    def sync(self) -> GradientSync:
        """The handle, from the first step on; `sync.use(…)` switches the next step's algorithm.

        Raises:
            AttachError: There was no step yet.
        """
        missing = f"this {type(self).__name__} has not been used yet; it attaches itself in the first step"
        return attached(None if self._adapter is None else self._adapter.sync, missing)

    def _new_adapter(self, algorithm: Algorithm, settings: Settings, bucket: GradBucket) -> DDPAdapter:
        transport = ProcessGroupTransport(self.process_group, dense_buffer(bucket).device)
        return adapter_of_hook(self, bucket, algorithm, transport, settings, self._machines)

    def _average(self, adapter: DDPAdapter, used_with: str, bucket: GradBucket) -> Future[torch.Tensor]:
        """Run the adapter for a hook, which must always be the same."""
        if self._adapter is None:
            self._adapter, self._used_with = adapter, used_with
        # With two hooks, buckets of one step could be averaged in two ways.
        if self._used_with != used_with:
            raise ConfigError(
                f"this {type(self).__name__} was used with {self._used_with}, and is now used with "
                f"{used_with}; make one state for each model and hook, or switch with state.sync.use(…)"
            )
        return adapter.run(bucket)


class MachinesState(HookState):
    """Takes the place of a group in `allreduce_hook` and the 16-bit hooks if machines have several GPUs.

    Each machine then sends everything once: `ddp_model.register_comm_hook(MachinesState(),
    bf16_compress_hook)` does what `thinwire.attach(ddp_model, Cast("bf16"))` does.

    Args:
        process_group: None for the default one.
        machines: Which processes share a machine, as in `thinwire.attach`.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, machines: Layout = True) -> None:
        self.process_group, self._machines = process_group, machines

    def run(self, algorithm: AllReduce | Cast, bucket: GradBucket) -> Future[torch.Tensor]:
        """Average a bucket with a hook's algorithm, which must always be the same."""
        adapter = self._adapter or self._new_adapter(algorithm, Settings(), bucket)
        return self._average(adapter, repr(algorithm), bucket)


def allreduce_hook(
    process_group: "dist.ProcessGroup | MachinesState | None", bucket: GradBucket
) -> Future[torch.Tensor]:
    """Average uncompressed gradients, as DDP does without a hook.

    Args:
        process_group: None for the default one; or a `MachinesState`.
        bucket: DDP's bucket.

    Raises:
        GradientError: The gradients are sparse.
        AgreementError: The processes use different hooks (found when a bucket is new).
        CommunicationError: A collective failed.
    """
    return averaged(process_group, bucket, None)


def fp16_compress_hook(
    process_group: dist.ProcessGroup | MachinesState | None, bucket: GradBucket
) -> Future[torch.Tensor]:
    """Average gradients sent in fp16; otherwise as `allreduce_hook`. See `thinwire.Cast`."""
    return averaged(process_group, bucket, "fp16")


def bf16_compress_hook(
    process_group: dist.ProcessGroup | MachinesState | None, bucket: GradBucket
) -> Future[torch.Tensor]:
    """Average gradients sent in bf16, on any backend that supports it, Gloo included."""
    return averaged(process_group, bucket, "bf16")


# DDP refuses hooks with torch's name unless CUDA and NCCL are available.
bf16_compress_hook.__name__ = "thinwire_bf16_compress_hook"


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> Future[torch.Tensor]:
    """Average gradients in 8 bits, with one scale for each bucket.

    Every process receives the 8-bit gradients of all others and averages them itself. Each gradient is off by
    at most half of (largest − smallest, 0 included) / 255 of its bucket. There is no error feedback.

    Cost: one gather for each bucket: with n processes each receives n − 1 bytes per element, and 8 bytes per
    scale. An fp32 copy of the bucket.

    Raises:
        ThinwireError: See `allreduce_hook`.
    """
    return _in_8_bits(process_group, bucket, None)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> Future[torch.Tensor]:
    """Average gradients in 8 bits, with one scale, of 8 bytes, for every `bucket_size` elements."""
    return _in_8_bits(process_group, bucket, whole_number("bucket_size", bucket_size, minimum=1))


def noop_hook(_: object, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average nothing, to measure a step without communication; the models drift apart."""
    # Sparse gradients are allowed too: nothing is done to them.
    return completed_future(bucket.buffer())


State = TypeVar("State")


def checked_state(kind: type[State], state: object) -> State:
    """Return a hook's state; raise if it is not of the kind that the hook needs."""
    if not isinstance(state, kind):
        got = f"{type(state).__module__}.{type(state).__name__}"
        raise ConfigError(f"this hook needs a thinwire.hooks.{kind.__name__}, got {got}")
    return state


def cast_in(wire_dtype: WireDtype | None) -> AllReduce | Cast:
    """Return the algorithm that averages in a 16-bit dtype, or in that of the gradients."""
    return AllReduce() if wire_dtype is None else Cast(wire_dtype)


def without_p2p(transport: ProcessGroupTransport) -> ProcessGroupTransport:
    """Return the same transport, whose work has a future: what is sent to each peer has none."""
    return ProcessGroupTransport(transport.group, transport.gradient_device, p2p=False)


def sent_mean(
    flat: torch.Tensor, wire_dtype: WireDtype | None, transport: ProcessGroupTransport, purpose: str
) -> Future[torch.Tensor]:
    """Average a bucket with one message, for which DDP waits; no state is kept between steps."""
    message = flat if wire_dtype is None else flat.to(wire_dtype_of(wire_dtype))
    work = without_p2p(transport).mean(message, purpose)
    # The closure keeps the message alive: the backend reads and writes it until then.
    return future_of(work, lambda: flat if message is flat else flat.copy_(message))


@not_compiled
def averaged(
    process_group: dist.ProcessGroup | MachinesState | None, bucket: GradBucket, wire_dtype: WireDtype | None
) -> Future[torch.Tensor]:
    """Average as `allreduce_hook` does, with messages in `wire_dtype` if given."""
    algorithm = cast_in(wire_dtype)
    if isinstance(process_group, MachinesState):
        return process_group.run(algorithm, bucket)
    flat, transport = _agreed_on(repr(algorithm), process_group, bucket)
    return sent_mean(flat, wire_dtype, transport, f"a bucket of {flat.numel()} gradients")


@not_compiled
def _in_8_bits(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, scaled_elements: int | None
) -> Future[torch.Tensor]:
    """Gather once for each bucket: scales are sent with codes, so no future's callback needs a collective."""
    if isinstance(process_group, MachinesState):
        raise ConfigError(
            "torch's 8-bit hooks gather from each process, so they take no MachinesState; use "
            "thinwire.attach(ddp_model, thinwire.Quantize(bits=8)), which sends once per machine"
        )
    scaled = "a bucket" if scaled_elements is None else f"{scaled_elements} elements"
    flat, transport = _agreed_on(f"8 bits, a scale for {scaled}", process_group, bucket)
    message = _codes(flat, scaled_elements or flat.numel())

    gathered = message.new_empty(transport.size, message.numel())
    work = without_p2p(transport).all_gather(gathered, message, f"a bucket of {flat.numel()} gradients")

    def mean() -> torch.Tensor:
        # In rank order on every process, so that all get the same bits.
        total = torch.zeros_like(flat, dtype=torch.float32)
        for codes in gathered:
            total.add_(_gradients(codes, flat.numel(), scaled_elements or flat.numel()))
        return flat.copy_(total.div_(transport.size))

    return future_of(work, mean)


def _codes(flat: torch.Tensor, scaled_elements: int) -> torch.Tensor:
    """Return gradients in 8 bits after their scales and zeros: uint8, shape (8 bytes a scale + elements,).

    If a gradient is not finite, its scale is not either, nor is any gradient decoded with that scale.
    """
    # Zero padding changes no scale: every range includes 0, so that 0 has a code.
    padded = torch.nn.functional.pad(flat.float(), (0, -flat.numel() % scaled_elements))
    rows = padded.view(-1, scaled_elements)
    low, high = rows.amin(1, keepdim=True).clamp(max=0), rows.amax(1, keepdim=True).clamp(min=0)
    # Divide first: high - low can overflow fp32 even if neither does.
    scale = high / MAX_CODE - low / MAX_CODE
    # For all zeros any scale will do, except 0, by which the next line would divide.
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    # An integer, so that a gradient of 0 is decoded as 0.
    zero = (-low / scale).round()
    codes = (rows / scale).add_(zero).round_().clamp_(0, MAX_CODE).to(torch.uint8)
    return torch.cat([torch.cat([scale, zero]).view(-1).view(torch.uint8), codes.view(-1)])


def _gradients(codes: torch.Tensor, numel: int, scaled_elements: int) -> torch.Tensor:
    """Decode the result of `_codes`: fp32, shape (numel,)."""
    count = -(-numel // scaled_elements)
    # Copy: these codes may start at an address that is not aligned for fp32.
    scale, zero = codes[: 8 * count].clone().view(torch.float32).view(2, count, 1)
    rows = codes[8 * count :].view(count, scaled_elements)
    gradients: torch.Tensor = (rows.float() - zero) * scale
    return gradients.view(-1)[:numel]


# The agreed group, hook and sizes, by a bucket's first parameter. Without agreement, messages of different
# dtypes could be summed as if they had one.
_agreed = WeakTensorKeyDictionary()


def _agreed_on(
    how: str, process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> tuple[torch.Tensor, ProcessGroupTransport]:
    """Return a bucket's gradients and what carries them, once all processes average them in the same way.

    Raises:
        AgreementError: Processes use different hooks or buckets (found when a bucket is new to a hook).
    """
    flat, parameters = dense_buffer(bucket), bucket.parameters()
    transport = ProcessGroupTransport(process_group, flat.device)
    sizes = tuple(parameter.numel() for parameter in parameters)
    # A reference to the group itself: a later group may have the same name.
    agreed = (weakref.ref(transport.group), how, sizes)
    if parameters[0] not in _agreed or _agreed[parameters[0]] != agreed:
        description = {"thinwire": __version__, "algorithm": how, "parameters": f"of sizes {sizes}"}
        agree(transport, description, "a bucket's first step")
        _agreed[parameters[0]] = agreed
    # Before any cast, in the gradients' own dtype.
    divide_by_contributors(parameters, flat, transport.size)
    return flat, transport
