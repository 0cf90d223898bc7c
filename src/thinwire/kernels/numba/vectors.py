"""Sixteen fp32 numbers as one value of compiled code, and prefetching of memory.

LLVM vectorises loops over arrays itself, but not loops that prefetch, and without prefetching a pass over
four rows of a large matrix first waits for memory and then computes. This works on any processor: one with
shorter registers uses several of them, and with 128 bits is no faster than LLVM's own loops.

It pays: a low-rank step of GPT-2 small's blocks takes 87 ms at rank 4 on one thread, and 197 ms with
PyTorch's products (docs/results.md, `codec`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from inspect import signature as signature_of
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

Vector: TypeAlias = Any
"""In compiled code: sixteen fp32 numbers. They add, subtract and multiply element by element."""
Tile: TypeAlias = Any
"""Four such vectors as one value, for example sixteen columns of four rows."""

WIDTH = 16
VECTOR_BYTES = 4 * WIDTH

FLOAT, INT32 = ir.FloatType(), ir.IntType(32)
NUMBERS, INDICES, BITS = (ir.VectorType(element, WIDTH) for element in (FLOAT, INT32, ir.IntType(1)))
ALIGNMENT = INT32(4)  # that of a single number: parameters start anywhere in a bucket


class LanesType(types.Type):
    """A vector type of LLVM."""

    def __init__(self, name: str, kind: Any) -> None:
        super().__init__(name)
        self.kind = kind


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, num_lanes: Any) -> None:
        super().__init__(manager, num_lanes, num_lanes.kind)  # type: ignore[no-untyped-call]


vector, tile = LanesType("Vector", NUMBERS), LanesType("Tile", ir.VectorType(FLOAT, 4 * WIDTH))
mask_of_lanes = LanesType("Mask", BITS)


def operation(signature: Any, of_tiles: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """Make an operation of compiled code from a function that emits it; of `of_tiles` for tiles, if given."""

    def decorated(emit: Callable[..., Any]) -> Any:
        def typed(typing_context: Any, *arguments: Any) -> Any:
            return of_tiles if of_tiles and tile in arguments else signature, emitted

        def emitted(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = emit(builder, *arguments)
            # Numba needs a value even if nothing is returned.
            return context.get_dummy_value() if signature.return_type == types.void else value

        typed.__signature__ = signature_of(emit)  # type: ignore[attr-defined] # Numba takes no *arguments
        return intrinsic(typed)

    return decorated


def at(builder: Any, address: Any, kind: Any) -> Any:
    """Emit an address as a pointer to something."""
    return builder.inttoptr(address, kind.as_pointer())


@operation(vector(types.float32))
def splat(builder: Any, number: Any) -> Any:
    """Emit a vector of one number."""
    return repeated(builder, number)


@operation(mask_of_lanes(types.int64))
def first_lanes(builder: Any, count: Any) -> Any:
    """Emit the mask of the first `count` of sixteen."""
    counts = repeated(builder, builder.trunc(count, INT32))
    return builder.icmp_unsigned("<", ir.Constant(INDICES, list(range(WIDTH))), counts)


@operation(vector(types.int64, mask_of_lanes))
def load(builder: Any, address: Any, mask: Any) -> Any:
    """Emit the load of numbers at an address; zeros outside the mask, where memory is not touched."""
    zeros = ir.Constant(NUMBERS, [0.0] * WIDTH)
    return call(
        builder, "masked.load.v16f32.p0", NUMBERS, at(builder, address, NUMBERS), ALIGNMENT, mask, zeros
    )


@operation(types.void(types.int64, vector, mask_of_lanes))
def store(builder: Any, address: Any, numbers: Any, mask: Any) -> Any:
    """Emit the store of the numbers inside a mask."""
    pointer = at(builder, address, NUMBERS)
    return call(builder, "masked.store.v16f32.p0", ir.VoidType(), numbers, pointer, ALIGNMENT, mask)


@operation(tile(types.int64))
def load_tile(builder: Any, address: Any) -> Any:
    """Emit the load of sixty-four consecutive numbers."""
    return builder.load(at(builder, address, tile.kind), align=4)


@operation(types.void(types.int64, tile))
def store_tile(builder: Any, address: Any, numbers: Any) -> None:
    """Emit the store of sixty-four consecutive numbers."""
    builder.store(numbers, at(builder, address, tile.kind), align=4)


@operation(types.void(types.int64, vector))
def stream(builder: Any, address: Any, numbers: Any) -> None:
    """Emit a non-temporal store of numbers."""
    written = builder.store(numbers, at(builder, address, NUMBERS), align=VECTOR_BYTES)
    written.set_metadata("nontemporal", builder.module.add_metadata([INT32(1)]))


@operation(types.void())
def streamed(builder: Any) -> None:
    """Emit a fence: all threads then see the non-temporal stores."""
    builder.fence("seq_cst")


@operation(types.float32(vector))
def total(builder: Any, numbers: Any) -> Any:
    """Emit the sum of a vector's numbers, in any order."""
    # Without `reassoc`, LLVM would add elements one by one. −0 changes no sum, not even −0.
    name = "vector.reduce.fadd.v16f32"
    return call(builder, name, FLOAT, FLOAT(-0.0), numbers, fastmath=("reassoc",))


@operation(types.void(types.int64))
def fetch(builder: Any, address: Any) -> Any:
    """Emit a prefetch of a line of memory into a core's L2 cache."""
    pointer = at(builder, address, ir.IntType(8))
    to_read, into_the_second, of_data = INT32(0), INT32(2), INT32(1)
    return call(builder, "prefetch.p0", ir.VoidType(), pointer, to_read, into_the_second, of_data)


@operation(tile(vector, vector, vector, vector))
def tile_of(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Emit a tile of four vectors."""
    first, second = (shuffled(builder, *pair, range(2 * WIDTH)) for pair in ((a, b), (c, d)))
    return shuffled(builder, first, second, range(4 * WIDTH))


@operation(tile(vector))
def spread(builder: Any, numbers: Any) -> Any:
    """Emit a tile of one vector, four times."""
    return shuffled(builder, numbers, numbers, [*range(WIDTH)] * 4)


@operation(types.UniTuple(vector, 4)(tile))  # type: ignore[no-untyped-call]
def rows_of(builder: Any, rows: Any) -> Any:
    """Emit the four vectors of a tile."""
    starts = range(0, 4 * WIDTH, WIDTH)
    some = [shuffled(builder, rows, rows, range(start, start + WIDTH)) for start in starts]
    pack: Any = cgutils.pack_array
    return pack(builder, some)


def shuffled(builder: Any, one: Any, other: Any, order: Sequence[int]) -> Any:
    """Emit elements of two vectors in a given order."""
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(INT32, len(order)), list(order)))


def _between(symbol: Any, emitted: str) -> None:
    """Define a Python operator for vectors and tiles."""

    @operation(vector(vector, vector), tile(tile, tile))
    def combined(builder: Any, x: Any, y: Any) -> Any:
        # A product and a sum may be fused.
        return getattr(builder, emitted)(x, y, flags=("contract",))

    @overload(symbol)
    def chosen(x, y):  # type: ignore[no-untyped-def] # Numba compares signatures, annotations included
        return (lambda x, y: combined(x, y)) if x == y and x in (vector, tile) else None  # noqa: PLW0108


_between(operator.add, "fadd")
_between(operator.sub, "fsub")
_between(operator.mul, "fmul")


def call(builder: Any, name: str, result: Any, *arguments: Any, **options: Any) -> Any:
    """Emit a call of an intrinsic of LLVM."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    get: Any = cgutils.get_or_insert_function
    function = get(builder.module, kind, f"llvm.{name}")
    return builder.call(function, arguments, **options)


def repeated(builder: Any, number: Any, num_lanes: int = WIDTH) -> Any:
    """Emit a vector of one number."""
    # LLVM recognises this form as a single operation.
    kind = ir.VectorType(number.type, num_lanes)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, INT32(0))
    return shuffled(builder, one, one, [0] * num_lanes)
