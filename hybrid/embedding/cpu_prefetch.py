"""A prefetch instruction for loops that numba compiles."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_READ, _KEEP, _DATA = 0, 3, 1
_LINE_BYTES = 64


@intrinsic
def prefetch_row(typing_context: Any, matrix: Any, row: Any) -> tuple[Any, Callable[..., Any]]:
    """Fetch the cache lines of a row of a contiguous matrix.

    Hardware prefetching follows streams, not a list of rows. Nothing is read, so a row beyond the matrix does
    no harm. Call it with the matrix itself: a function around it, inlined or not, changes the reference count
    for each row, which takes longer than adding the row.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        matrix_type, row_type = signature.args
        size, byte, number = ir.IntType(64), ir.IntType(8), ir.IntType(32)
        values = context.make_array(matrix_type)(context, builder, arguments[0])
        columns = builder.extract_value(values.shape, 1)
        row_bytes = builder.mul(columns, values.itemsize)
        start = builder.mul(context.cast(builder, arguments[1], row_type, types.int64), row_bytes)
        first = builder.gep(builder.bitcast(values.data, byte.as_pointer()), [start])
        hint = builder.module.declare_intrinsic(
            "llvm.prefetch",
            [first.type],
            ir.FunctionType(ir.VoidType(), [first.type, number, number, number]),
        )
        lines = builder.udiv(builder.add(row_bytes, size(_LINE_BYTES - 1)), size(_LINE_BYTES))
        with cgutils.for_range(builder, lines) as loop:
            line = builder.gep(first, [builder.mul(loop.index, size(_LINE_BYTES))])
            builder.call(hint, [line, number(_READ), number(_KEEP), number(_DATA)])
        return context.get_dummy_value()

    return types.void(matrix, row), generate
