"""Numba kernels over ids and rows, for operations that torch lacks. They release the GIL.

Kernels copy and round values, and add weighted values; torch does all other arithmetic of optimizers. Sums
have a fixed order, so results for the same input are bit-identical. Bounds are not checked. Machine code is
cached beside the source, or in ``NUMBA_CACHE_DIR``, so that only the first import compiles.

The permutation ``order_L`` sorts the ids of a lookup stably: ``ids_L[order_L]`` ascends. For U distinct ids,
``starts_V`` (U + 1) has the bounds of the runs of equal ids in the sorted ids. An address is the number of a
row among the rows of several tables and workers.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])
Ints = npt.NDArray[np.signedinteger[Any]]
Floats = npt.NDArray[np.floating[Any]]
Words = npt.NDArray[np.unsignedinteger[Any]]

KEYS_END = 2**63 - 1  # ``num_rows`` for ids of any 64 bits; such ids are sorted as unsigned numbers
_DIGIT_BITS = 11  # the counters of a digit fit the first-level cache
_DIGITS = 1 << _DIGIT_BITS
_CACHE_LINE_BYTES = 64
_INFINITY = 0x7F800000  # bits of float32
_ROWS_AHEAD = 8  # prefetch distance: rows arrive in time, and are not evicted before use


def compiled(*signatures: str) -> Callable[[Function], Function]:
    """Return a decorator that compiles a function for ``signatures`` at import, before roles are forked.

    Multiplications and additions may be fused, as in torch's gradients of weighted bags.
    """
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}}

    def compile_function(function: Function) -> Function:
        try:
            return cast(Function, numba.njit(list(signatures), cache=True, **options)(function))
        except RuntimeError:  # no writable cache folder: compile at each start
            return cast(Function, numba.njit(list(signatures), **options)(function))

    return compile_function


@intrinsic
def prefetch_row(typing_context: Any, matrix: Any, row: Any) -> tuple[Any, Callable[..., Any]]:
    """Prefetch the cache lines of a row in a contiguous matrix.

    A row beyond the matrix does no harm, since the processor ignores invalid addresses. Kernels must call
    this intrinsic directly: a wrapper, even if inlined, would make numba count references for each row.
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
        lines = builder.udiv(builder.add(row_bytes, size(_CACHE_LINE_BYTES - 1)), size(_CACHE_LINE_BYTES))
        with cgutils.for_range(builder, lines) as loop:
            line = builder.gep(first, [builder.mul(loop.index, size(_CACHE_LINE_BYTES))])
            # Arguments: for reading, keep in all cache levels, data cache.
            builder.call(hint, [line, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(matrix, row), generate


@compiled("int64(int64[::1], int64[::1], int64[::1])")
def find_invalid_id(ids_L: Ints, ends_K: Ints, num_rows_K: Ints) -> int:
    """Return the index of the first id without a row in the table of its feature; -1 if all are valid.

    Args:
        ends_K: where the ids of each feature end.
        num_rows_K: rows of each feature's table; 0 for a growing table, in which any id is valid.
    """
    start = 0
    for k in range(len(ends_K)):
        for i in range(start, ends_K[k]):
            if num_rows_K[k] > 0 and (ids_L[i] < 0 or ids_L[i] >= num_rows_K[k]):
                return i
        start = ends_K[k]
    return -1


@compiled(
    "void(int64[:,::1], int64[:,::1], int64[::1], int32[:,::1])",
    "void(int64[:,::1], int64[:,::1], int64[::1], int64[:,::1])",
)
def write_addresses(ids_KB: Ints, bases_KS: Ints, counts_K: Ints, out_BK: Ints) -> None:
    """Write, for each id of feature k, the address ``bases_KS[k, id % n] + id // n``.

    The feature's table has ``n = counts_K[k]`` shards, and its shard s starts at ``bases_KS[k, s]``.
    """
    for k in range(len(ids_KB)):
        count = counts_K[k]
        for b in range(ids_KB.shape[1]):
            row = ids_KB[k, b]
            if count == 1:
                out_BK[b, k] = bases_KS[k, 0] + row
            else:
                out_BK[b, k] = bases_KS[k, row % count] + row // count


_BAG_ADDRESSES = (
    "int64(int64[::1], int64[::1], int64, int64[::1], int64[:,::1], int64[::1], "
    "{0}[::1], {1}[::1], int64[::1])"
)
_ID_OFFSET_TYPES = (("int32", "int32"), ("int64", "int64"), ("int64", "int32"))


@compiled(*(_BAG_ADDRESSES.format(*types) for types in _ID_OFFSET_TYPES))
def write_bag_addresses(
    ids_L: Ints,
    offsets: Ints,
    batch_size: int,
    features_F: Ints,
    bases_FS: Ints,
    counts_F: Ints,
    out_L: Ints,
    out_offsets: Ints,
    out_positions: Ints,
) -> int:
    """Write the addresses of the ids of bags, ordered by sample, and within a sample by feature.

    Args:
        offsets: where each bag of ``ids_L`` starts, feature by feature, for all K features (K * B + 1).
        features_F: indices of the features to write.
        bases_FS, counts_F: first address of each shard, and number of shards, of each feature's table. If the
            first address of a shard is negative, the ids of the shard are left out.
        out_L: receives the addresses; must be large enough for all ids of these features.
        out_offsets: receives where each bag of ``out_L`` starts (B * F + 1).
        out_positions: receives the position of each id in ``ids_L``; not written if empty.

    Returns:
        The number of ids written.
    """
    size = 0
    bag = 0
    out_offsets[0] = 0
    for b in range(batch_size):
        for f in range(len(features_F)):
            source_bag, count = features_F[f] * batch_size + b, counts_F[f]
            for i in range(offsets[source_bag], offsets[source_bag + 1]):
                row = ids_L[i]
                base = bases_FS[f, row % count if count > 1 else 0]
                if base < 0:
                    continue
                out_L[size] = base + (row // count if count > 1 else row)
                if len(out_positions):
                    out_positions[size] = i
                size += 1
            bag += 1
            out_offsets[bag] = size
    return size


@compiled(
    "Tuple((int32[::1], int32[::1], int32[::1]))(int32[::1], int64)",
    "Tuple((int64[::1], int32[::1], int32[::1]))(int64[::1], int64)",
)
def group_ids(ids_L: Ints, num_rows: int) -> tuple[Ints, Ints, Ints]:
    """Sort ids. Return the distinct ids, ascending, then ``starts_V`` and ``order_L`` (see the module).

    Args:
        num_rows: a number above all ids; ``KEYS_END`` for 64-bit keys, which are sorted as unsigned numbers.
    """
    size = len(ids_L)
    keys, other_keys = ids_L, np.empty_like(ids_L)
    spare_keys = np.empty_like(ids_L)
    order, other_order = np.empty(size, np.int32), np.empty(size, np.int32)
    for i in range(size):
        order[i] = i
    counts = np.empty(_DIGITS, np.int64)
    shift = 0
    while shift < 64 and (num_rows - 1) >> shift > 0:
        counts[:] = 0
        for i in range(size):
            counts[(keys[i] >> shift) & (_DIGITS - 1)] += 1
        before = 0
        for digit in range(_DIGITS):
            count = counts[digit]
            counts[digit] = before
            before += count
        for i in range(size):
            digit = (keys[i] >> shift) & (_DIGITS - 1)
            target = counts[digit]
            counts[digit] = target + 1
            other_keys[target] = keys[i]
            other_order[target] = order[i]
        keys, other_keys = other_keys, spare_keys if shift == 0 else keys
        order, other_order = other_order, order
        shift += _DIGIT_BITS
    num_distinct = 0
    for i in range(size):
        num_distinct += i == 0 or keys[i] != keys[i - 1]
    rows_U, starts_V = np.empty(num_distinct, ids_L.dtype), np.empty(num_distinct + 1, np.int32)
    u = 0
    for i in range(size):
        if i == 0 or keys[i] != keys[i - 1]:
            rows_U[u] = keys[i]
            starts_V[u] = i
            u += 1
    starts_V[u] = size
    return rows_U, starts_V, order


@compiled("int32[::1](int32[::1], int32[::1])")
def rank_ids(starts_V: Ints, order_L: Ints) -> Ints:
    """Return, for each id of a lookup, its index among the distinct ids, given results of ``group_ids``."""
    ranks_L = np.empty_like(order_L)
    for u in range(len(starts_V) - 1):
        for i in range(starts_V[u], starts_V[u + 1]):
            ranks_L[order_L[i]] = u
    return ranks_L


@compiled("int32[::1](int32[::1], int32[::1])", "int32[::1](int64[::1], int32[::1])")
def sort_bags(offsets: Ints, order_L: Ints) -> Ints:
    """Return the number of the bag of each id, in the order of the sorted ids."""
    bag_L = np.empty_like(order_L)
    for bag in range(len(offsets) - 1):
        for i in range(offsets[bag], offsets[bag + 1]):
            bag_L[i] = bag
    return bag_L[order_L]


# The distinct ids are needed only for a table and for max pooling.
_SUM = "float64(int32[::1], int32[::1], {0}[:,::1], {0}[:,::1], "
_SUMS = [
    _SUM + f"{weights}, {rows}, {winners}, {table}, {{0}}, {{0}})"
    for i in ("int32", "int64")
    for table in ("none", "{0}[:,::1]")
    for weights, rows, winners in (
        ("none", "none" if table == "none" else f"{i}[::1]", "none"),
        ("{0}[::1]", "none" if table == "none" else f"{i}[::1]", "none"),
        ("none", f"{i}[::1]", f"{i}[:,::1]"),
    )
]


@compiled(*sorted({each.format(f) for each in _SUMS for f in ("float32", "float64")}))
def sum_rows(
    starts_V: Ints,
    sources_L: Ints,
    grad_BD: Floats,
    out_UD: Floats,
    weights_L: Floats | None,
    rows_U: Ints | None,
    winners_BD: Ints | None,
    table_RD: Floats | None,
    scale: float,
    rate: float,
) -> float:
    """Sum the gradients of each distinct id over its bags. Write the sums, or add them to a table.

    Args:
        starts_V: where the bags of each distinct id start in ``sources_L``; pass a slice for some ids only.
        sources_L: the bag of each id, in the order of the sorted ids.
        out_UD: receives the sums; not used if ``table_RD`` is given.
        weights_L: factor of the gradient of each id, in the order of the sorted ids; None for ones.
        rows_U: the distinct ids; needed only with ``table_RD`` or ``winners_BD``.
        winners_BD: for max pooling, the row of each maximum. A row gets only those columns of a gradient in
            which the row has the maximum. None for other pooling.
        table_RD: if given, ``table_RD[rows_U] += rate * (scale * sums)`` is computed in the same pass.

    Returns:
        The total of all sums, unscaled. It is finite if all gradients are finite, unless it overflows.
    """
    dim = grad_BD.shape[1]
    sum_D, total_D = np.empty(dim, grad_BD.dtype), np.zeros(dim, grad_BD.dtype)
    for u in range(len(starts_V) - 1):
        first = starts_V[u]
        if table_RD is not None and rows_U is not None and u + _ROWS_AHEAD < len(rows_U):
            prefetch_row(table_RD, rows_U[u + _ROWS_AHEAD])  # type: ignore[call-arg]  # numba adds the first
        if weights_L is not None or winners_BD is not None:
            for d in range(dim):
                sum_D[d] = 0
        for i in range(first, starts_V[u + 1]):
            if i + _ROWS_AHEAD < len(sources_L):
                prefetch_row(grad_BD, sources_L[i + _ROWS_AHEAD])  # type: ignore[call-arg]
            source = sources_L[i]
            if winners_BD is not None and rows_U is not None:
                if i > first and source == sources_L[i - 1]:
                    continue  # a row that occurs twice in a bag gets the gradient once
                for d in range(dim):
                    if winners_BD[source, d] == rows_U[u]:
                        sum_D[d] += grad_BD[source, d]
            elif weights_L is not None:
                weight = weights_L[i]
                for d in range(dim):
                    sum_D[d] += weight * grad_BD[source, d]
            elif i == first:
                for d in range(dim):
                    sum_D[d] = grad_BD[source, d]
            else:
                for d in range(dim):
                    sum_D[d] += grad_BD[source, d]
        for d in range(dim):
            total_D[d] += sum_D[d]
        if table_RD is None:
            for d in range(dim):
                out_UD[u, d] = sum_D[d]
        elif rows_U is not None:
            row = rows_U[u]
            for d in range(dim):
                table_RD[row, d] += rate * (scale * sum_D[d])
    return total_D.sum()  # type: ignore[no-any-return]


_PUT = "void({0}[:,::1], {1}[::1], {0}[:,::1])"


@compiled(*(_PUT.format(f, i) for i in ("int32", "int64") for f in ("float32", "float64")))
def put_rows(table_RD: Floats, rows_U: Ints, part_UD: Floats) -> None:
    """Compute ``table_RD[rows_U] = part_UD``."""
    for u in range(len(rows_U)):
        row = rows_U[u]
        for d in range(part_UD.shape[1]):
            table_RD[row, d] = part_UD[u, d]


_ROUND = "void(uint16[:,::1], {1}[::1], {0}[:,::1], uint64[::1])"


@compiled(*(_ROUND.format(f, i) for i in ("int32", "int64") for f in ("float32", "float64")))
def put_rounded_rows(table_RD: Words, rows_U: Ints, part_UD: Floats, seeds_U: Words) -> None:
    """Compute ``table_RD[rows_U] = part_UD`` in bfloat16, with stochastic rounding.

    Each value is rounded up or down at random, so that the expected result is the value. Values that bfloat16
    can represent do not change, nor do infinity and NaN. A finite value stays finite, unless it is a float64
    beyond the range of float32, which becomes infinity.

    Args:
        seeds_U: for each row, the state of a SplitMix64 generator of random numbers.
    """
    dim = part_UD.shape[1]
    words = np.empty((dim + 3) // 4, np.uint64)
    random_D, values_D = words.view(np.uint16), np.empty(dim, np.float32)
    bits_D = values_D.view(np.int32)
    for u in range(len(rows_U)):
        row = rows_U[u]
        for i in range(len(words)):
            word = np.uint64(seeds_U[u]) + np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15)
            word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            words[i] = word ^ (word >> np.uint64(31))
        for d in range(dim):
            values_D[d] = part_UD[u, d]
        for d in range(dim):  # in 32 bits and without a branch, so that LLVM makes vectors of them
            magnitude = np.int32(bits_D[d] & 0x7FFFFFFF)
            rounded = min(np.int32(magnitude + random_D[d]), np.int32(_INFINITY - 1))
            if magnitude >= _INFINITY:  # the upper half of a NaN from arithmetic is a NaN, too
                rounded = magnitude
            table_RD[row, d] = (bits_D[d] >> 31 << 15) | (rounded >> 16)
