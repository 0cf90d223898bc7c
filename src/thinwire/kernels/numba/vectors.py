"""Sixteen fp32 numbers as one value of compiled code, and memory asked for before it is needed.

LLVM makes such code from loops over arrays by itself, but not from loops that prefetch, and without that a
pass over four rows of a large matrix first waits for memory and then computes. Any processor is served: one
whose registers are shorter takes several of them, and is no faster than such loops where they have 128 bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from inspect import signature as signature_of
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

Vector: TypeAlias = Any
"""In compiled code: sixteen fp32 numbers. They add, subtract and multiply lane by lane."""

LANES = 16
VECTOR_BYTES = 4 * LANES

FLOAT, INT32 = ir.FloatType(), ir.IntType(32)
NUMBERS, INDICES, BITS = (ir.VectorType(element, LANES) for element in (FLOAT, INT32, ir.IntType(1)))
ALIGNMENT = INT32(4)  # of a single number: parameters begin anywhere in a bucket


class VectorType(types.Type):
    """Sixteen fp32 numbers."""


class MaskType(types.Type):
    """Which of sixteen."""


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, NUMBERS)  # type: ignore[no-untyped-call]


@register_model(MaskType)
class _MaskModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, BITS)  # type: ignore[no-untyped-call]


vector, mask_of_lanes = VectorType("Vector"), MaskType("Mask")


def operation(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an operation of compiled code of a function that emits it."""

    def decorated(emit: Callable[..., Any]) -> Any:
        def typed(typing_context: Any, *arguments: Any) -> Any:
            return signature, emitted

        def emitted(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = emit(builder, *arguments)
            # Numba takes a value even of what returns nothing.
            return context.get_dummy_value() if signature.return_type == types.void else value

        typed.__signature__ = signature_of(emit)  # type: ignore[attr-defined] # Numba takes no *arguments
        return intrinsic(typed)

    return decorated


@operation(types.CPointer(types.float32)(types.int64))  # type: ignore[no-untyped-call]
def pointer(builder: Any, address: Any) -> Any:
    """Emit a pointer to fp32 numbers at an address."""
    return builder.inttoptr(address, FLOAT.as_pointer())


@operation(vector(types.float32))
def splat(builder: Any, number: Any) -> Any:
    """Emit a vector of one number."""
    return repeated(builder, number)


@operation(mask_of_lanes(types.int64))
def first_lanes(builder: Any, count: Any) -> Any:
    """Emit the mask of the first `count` of sixteen."""
    counts = repeated(builder, builder.trunc(count, INT32))
    return builder.icmp_unsigned("<", ir.Constant(INDICES, list(range(LANES))), counts)


@operation(vector(types.int64, mask_of_lanes))
def load(builder: Any, address: Any, mask: Any) -> Any:
    """Emit the load of numbers at an address; zeros outside the mask, where memory is not touched."""
    pointer = builder.inttoptr(address, NUMBERS.as_pointer())
    zeros = ir.Constant(NUMBERS, [0.0] * LANES)
    return call(builder, "masked.load.v16f32.p0", NUMBERS, pointer, ALIGNMENT, mask, zeros)


@operation(types.void(types.int64, vector, mask_of_lanes))
def store(builder: Any, address: Any, numbers: Any, mask: Any) -> Any:
    """Emit the store of the numbers inside a mask."""
    pointer = builder.inttoptr(address, NUMBERS.as_pointer())
    return call(builder, "masked.store.v16f32.p0", ir.VoidType(), numbers, pointer, ALIGNMENT, mask)


@operation(types.void(types.int64, vector))
def stream(builder: Any, address: Any, numbers: Any) -> None:
    """Emit the store of numbers past the caches."""
    written = builder.store(numbers, builder.inttoptr(address, NUMBERS.as_pointer()), align=VECTOR_BYTES)
    written.set_metadata("nontemporal", builder.module.add_metadata([INT32(1)]))


@operation(types.void())
def streamed(builder: Any) -> None:
    """Emit a fence: all threads see what was written past the caches."""
    builder.fence("seq_cst")


@operation(types.float32(vector))
def total(builder: Any, numbers: Any) -> Any:
    """Emit the sum of a vector's numbers, in any order."""
    # Without `reassoc` LLVM would add one lane after the other. And −0 is what changes no sum, not even −0.
    name = "vector.reduce.fadd.v16f32"
    return call(builder, name, FLOAT, FLOAT(-0.0), numbers, fastmath=("reassoc",))


@operation(types.void(types.int64))
def fetch(builder: Any, address: Any) -> Any:
    """Emit a request for a line of memory, into a core's second cache."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    to_read, into_the_second, of_data = INT32(0), INT32(2), INT32(1)
    return call(builder, "prefetch.p0", ir.VoidType(), pointer, to_read, into_the_second, of_data)


# A product and a sum may become one operation.
@operation(vector(vector, vector))
def _sum(builder: Any, x: Any, y: Any) -> Any:
    return builder.fadd(x, y, flags=("contract",))


@operation(vector(vector, vector))
def _difference(builder: Any, x: Any, y: Any) -> Any:
    return builder.fsub(x, y, flags=("contract",))


@operation(vector(vector, vector))
def _product(builder: Any, x: Any, y: Any) -> Any:
    return builder.fmul(x, y, flags=("contract",))


def _between_vectors(symbol: Any, operation: Any) -> None:
    """Give an operator of Python its meaning for vectors."""

    @overload(symbol)
    def chosen(x, y):  # type: ignore[no-untyped-def] # Numba compares signatures, annotations included
        return (lambda x, y: operation(x, y)) if x is vector and y is vector else None  # noqa: PLW0108


_between_vectors(operator.add, _sum)
_between_vectors(operator.sub, _difference)
_between_vectors(operator.mul, _product)


def call(builder: Any, name: str, result: Any, *arguments: Any, **options: Any) -> Any:
    """Emit a call of an intrinsic of LLVM."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    get: Any = cgutils.get_or_insert_function
    function = get(builder.module, kind, f"llvm.{name}")
    return builder.call(function, arguments, **options)


def repeated(builder: Any, number: Any, lanes: int = LANES) -> Any:
    """Emit a vector of one number."""
    # As LLVM writes it itself: it takes this for one operation, and not for many.
    kind = ir.VectorType(number.type, lanes)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, INT32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes))
