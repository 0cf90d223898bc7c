"""What an accelerator's steps cost it and the host, counted on tensors without values.

The real code runs on tensors of the device "meta": all that it does there it would do on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from thinwire.comm.transport import Message, Transport, Work
from thinwire.kernels import dispatch
from thinwire.kernels.dispatch import Backend
from thinwire.kernels.triton import launcher, triton_kernels
from thinwire.kernels.triton.limits import FACTOR_ROWS, GRADIENT_TYPES
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine

# Views, allocations and questions to the host's own part of a tensor launch nothing.
FREE = {
    "alias", "as_strided", "detach", "diagonal", "expand", "lift_fresh", "permute", "reshape", "select",
    "set_", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
    "_reshape_alias", "_unsafe_view", "is_same_size", "record_stream", "resize_", "empty", "empty_like",
    "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip

Shapes = dict[str, tuple[int, ...]]

# CUDA does not promise the same bits of these every time, nor of sums of floats in turn.
UNORDERED = {"index_add", "scatter_add", "scatter_reduce", "index_reduce", "kthvalue", "histc", "bincount"}


class Counting(TorchDispatchMode):
    """Counts while it is on; what is asked of a tensor without values is answered with one, or true."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()  # of kernels, by torch or Triton
        self.waits: Counter[str] = Counter()  # of the host for the device
        self.unordered: list[str] = []  # operations that may not have the same bits every time

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        base = name if name in FREE else name.removesuffix("_")
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
        if given and name.endswith("_") and name not in FREE and all(tensor.is_meta for tensor in given):
            out = args[0] if func._schema.returns else None  # in place, of what has no values: nothing to do
        elif name == "threshold":  # frequent, and slow in torch where there are no values
            out = torch.empty_like(args[0])
        else:
            out = func(*args, **kwargs)
        results = list(tensors_in((out,)))
        devices = {tensor.device.type for tensor in [*given, *results]}
        if "meta" not in devices:
            return out
        if "cpu" in devices and name in ("_to_copy", "copy_") and any(tensor.dim() for tensor in given):
            self.waits[f"{name} between devices"] += not kwargs.get("non_blocking")
        if base not in FREE and any(tensor.numel() > 0 for tensor in [*given, *results]):
            self.launches[name] += 1
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
    """Make steps on the device "meta", which autocast does not know; Triton's kernels are counted only."""
    with (
        patch.object(torch, "is_autocast_enabled", lambda device_type: False),
        patch.object(launcher, "launch", _count_launch),
        patch.object(torch.Tensor, "data_ptr", _address),
    ):
        yield


def _address(tensor: torch.Tensor) -> int:
    """Return an address that is the storage's alone as long as it lives, and then another's."""
    number = int(tensor.untyped_storage()._cdata) // 16 % (1 << 23)
    return (number << 40) + int(tensor.storage_offset()) * tensor.element_size()


def _count_launch(kernel: str, programs: int, arguments: object, constants: object) -> None:
    counting = _get_current_dispatch_mode()
    if isinstance(counting, Counting) and programs:
        counting.launches[kernel] += 1


def by_triton() -> AbstractContextManager[object]:
    """Return a context in which Triton's kernels serve tensors without values."""
    triton = Backend(
        "Triton",
        lambda: triton_kernels.TABLES,
        serves=lambda _, dtype, rank: dtype in GRADIENT_TYPES and (rank or 1) <= FACTOR_ROWS,
    )
    return patch.object(dispatch, "backends", (triton, dispatch.TORCH))


def counted(engine: Engine, shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[Counting]:
    """Return what each of three steps costs, which average the same tensors."""
    buckets, steps = buckets_of(shapes, dtype), list[Counting]()
    numels = [sum(spec.numel for spec in bucket) for bucket in buckets]
    flats = [torch.empty(numel, dtype=dtype, device="meta") for numel in numels]
    with on_meta():
        for _ in range(3):
            with Counting() as step:
                engine.average(zip(buckets, flats, strict=True))
            steps.append(step)
    return steps


# Models, as DDP's buckets: parameters in reverse, 1 MiB first, then 25 MiB each.


def gpt2_small() -> Shapes:
    """The shapes of GPT-2 small, 124 million parameters."""
    shapes: Shapes = {"wte.weight": (50257, 768), "wpe.weight": (1024, 768)}
    for layer in range(12):
        block = f"h.{layer}."
        for name, shape in {
            "ln_1": (768,), "attn.c_attn": (768, 2304), "attn.c_proj": (768, 768),
            "ln_2": (768,), "mlp.c_fc": (768, 3072), "mlp.c_proj": (3072, 768),
        }.items():  # fmt: skip
            shapes[f"{block}{name}.weight"] = shape
            shapes[f"{block}{name}.bias"] = shape[-1:]
    return {**shapes, "ln_f.weight": (768,), "ln_f.bias": (768,)}


def buckets_of(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[tuple[ParameterSpec, ...]]:
    """Return the buckets that DDP would make of parameters of some shapes."""
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
