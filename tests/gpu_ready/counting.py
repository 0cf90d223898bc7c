"""How often the host waits for an accelerator in a step, counted on tensors without values.

The real code runs on tensors of the device "meta": all that it does there it would do on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from thinwire.comm.transport import Message, Transport, Work
from thinwire.kernels import dispatch
from thinwire.kernels.dispatch import Backend
from thinwire.kernels.triton import launcher, triton_kernels
from thinwire.kernels.triton.limits import FACTOR_ROWS, GRADIENT_TYPES
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine

Shapes = dict[str, tuple[int, ...]]

# CUDA does not promise the same bits of these every time, nor of sums of floats in turn.
UNORDERED = {"index_add", "scatter_add", "scatter_reduce", "index_reduce", "kthvalue", "histc", "bincount"}


class Counting(TorchDispatchMode):
    """Counts while it is on; what is asked of a tensor without values is answered with one, or true."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: Counter[str] = Counter()  # of the host for the device
        self.unordered: list[str] = []  # operations that may not have the same bits every time
        self.in_float64: list[str] = []  # operations that make what not every accelerator has

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        base = name.removesuffix("_")
        adds_up = base in ("cumsum", "cumprod", "logcumsumexp") and args[0].is_floating_point()
        accumulates = base in ("index_put", "put") and True in (args[3:4], kwargs.get("accumulate"))
        if base in UNORDERED or adds_up or accumulates:
            self.unordered.append(name)
        given = list(tensors_in((*args, *kwargs.values())))
        if any(tensor.is_meta for tensor in given) and name in ("_local_scalar_dense", "equal", "is_nonzero"):
            self.waits[name] += 1
            return 1
        if name == "_to_copy" and given[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            self.waits[name] += 1  # `tolist`
            return torch.zeros(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
        is_in_place = name.endswith("_") and name not in ("set_", "resize_")
        if given and is_in_place and all(tensor.is_meta for tensor in given):
            out = args[0] if func._schema.returns else None  # of what has no values: nothing to do
        elif name == "threshold":  # frequent, and slow in torch where there are no values
            out = torch.empty_like(args[0])
        else:
            out = func(*args, **kwargs)
        results = list(tensors_in((out,)))
        if any(tensor.is_meta and tensor.dtype == torch.float64 for tensor in results):
            self.in_float64.append(name)
        devices = {tensor.device.type for tensor in [*given, *results]}
        is_copy = name in ("_to_copy", "copy_") and any(tensor.dim() for tensor in given)
        if is_copy and devices >= {"cpu", "meta"}:
            self.waits[f"{name} between devices"] += not kwargs.get("non_blocking")
        return out


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


class Done:
    """A collective that is done at once."""

    def wait(self) -> None:
        """Wait for nothing."""


class Alike(Transport):
    """A group of members that all do the same, of whom this is one; nothing that it does is counted.

    A mean over such a group is the tensor itself, and takes no kernel: NCCL divides.
    """

    size, rank = 2, 0
    control_device = torch.device("cpu")

    def start(self, message: Message) -> Work:
        """As `Transport.start`."""
        tensor, output = message.tensor, message.output
        with _disable_current_modes():
            if message.collective == "all_reduce" and message.operation == "sum":
                tensor.mul_(self.size)
            elif message.collective == "all_gather":
                output.copy_(tensor.expand_as(output))
            elif message.collective == "all_to_all":
                output.copy_(tensor[self.rank].expand_as(output))
        return Done()


@contextmanager
def on_meta() -> Iterator[None]:
    """Make steps on the device "meta", which autocast does not know, without launching Triton's kernels."""
    with (
        patch.object(torch, "is_autocast_enabled", lambda device_type: False),
        patch.object(launcher, "launch", lambda *_: None),
        patch.object(torch.Tensor, "data_ptr", _address),
    ):
        yield


def _address(tensor: torch.Tensor) -> int:
    """Return an address that is the storage's alone as long as it lives, and then another's."""
    number = int(tensor.untyped_storage()._cdata) // 16 % (1 << 23)
    return (number << 40) + int(tensor.storage_offset()) * tensor.element_size()


def by_triton() -> AbstractContextManager[object]:
    """Return a context in which Triton's kernels serve tensors without values."""
    triton = Backend(
        "Triton",
        lambda: triton_kernels.TABLES,
        serves=lambda _, dtype, rank: dtype in GRADIENT_TYPES and (rank or 1) <= FACTOR_ROWS,
    )
    return patch.object(dispatch, "backends", (triton, dispatch.TORCH))


def counted(engine: Engine, shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[Counting]:
    """Return what was counted in each of three steps, which average the same tensors."""
    buckets, steps = buckets_of(shapes, dtype), list[Counting]()
    numels = [sum(spec.numel for spec in bucket) for bucket in buckets]
    flats = [torch.empty(numel, dtype=dtype, device="meta") for numel in numels]
    with on_meta():
        for _ in range(3):
            with Counting() as step:
                engine.average(zip(buckets, flats, strict=True))
            steps.append(step)
    return steps


def gpt2_layer() -> Shapes:
    """The shapes of a layer of GPT-2 small."""
    matrices: Shapes = {
        "attn.c_attn": (768, 2304),
        "attn.c_proj": (768, 768),
        "mlp.c_fc": (768, 3072),
        "mlp.c_proj": (3072, 768),
    }
    shapes: Shapes = {"ln.weight": (768,), "ln.bias": (768,)}
    for name, shape in matrices.items():
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[-1:]
    return shapes


def buckets_of(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[tuple[ParameterSpec, ...]]:
    """Return the buckets that DDP would make: parameters in reverse, 1 MiB first, then 25 MiB each."""
    buckets: list[list[ParameterSpec]] = [[]]
    limit_bytes, held_bytes = 1 << 20, 0
    for name, shape in reversed(shapes.items()):
        spec = ParameterSpec.of(name, torch.empty(shape, dtype=dtype, device="meta"))
        if held_bytes >= limit_bytes:
            buckets.append([])
            limit_bytes, held_bytes = 25 << 20, 0
        buckets[-1].append(spec)
        held_bytes += spec.gradient_bytes
    return [tuple(bucket) for bucket in buckets]
