"""Kernels over ids and rows that torch does not have, compiled by numba, which run without Python's lock.

They copy values and add them, perhaps weighted; all other arithmetic of optimizers is torch's. Additions have
a fixed order, so the same input gives the same bits. Bounds are not checked. Machine code is cached beside
the source, or in ``NUMBA_CACHE_DIR``, so that only the first import compiles.

``order_L`` sorts the ids of a lookup stably: ``ids_L[order_L]`` ascends. ``starts_V``, (U + 1), bounds the
runs of equal ids in it, for U distinct ids.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from hybrid.embedding.cpu_prefetch import prefetch_row

Function = TypeVar("Function", bound=Callable[..., Any])
Ints = npt.NDArray[np.signedinteger[Any]]
Floats = npt.NDArray[np.floating[Any]]

_DIGIT_BITS = 11  # the counters of a digit fit the first-level cache
_DIGITS = 1 << _DIGIT_BITS
_ROWS_AHEAD = 8  # distance of the prefetch: longer than a memory access, shorter than cache eviction


def _compiled(*signatures: str) -> Callable[[Function], Function]:
    """Compile for these types when the module is imported, before roles are forked.

    Multiply-add may be fused, as in torch's gradients of weighted bags.
    """
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}}

    def compiled(function: Function) -> Function:
        try:
            return cast(Function, numba.njit(list(signatures), cache=True, **options)(function))
        except RuntimeError:  # no writable cache folder: compile at each start
            return cast(Function, numba.njit(list(signatures), **options)(function))

    return compiled


@_compiled("int64(int64[::1], int64[::1], int64[::1])")
def first_outside(ids_L: Ints, ends_K: Ints, num_rows_K: Ints) -> int:
    """Return the position of the first id that is not a row of its feature's table; -1 if there is none.

    Args:
        ends_K: where the ids of each feature end.
    """
    start = 0
    for k in range(len(ends_K)):
        for i in range(start, ends_K[k]):
            if ids_L[i] < 0 or ids_L[i] >= num_rows_K[k]:
                return i
        start = ends_K[k]
    return -1


@_compiled(
    "void(int64[:,::1], int64[:,::1], int64[::1], int32[:,::1])",
    "void(int64[:,::1], int64[:,::1], int64[::1], int64[:,::1])",
)
def addresses(ids_KB: Ints, bases_KS: Ints, counts_K: Ints, out_BK: Ints) -> None:
    """Write the address of each id: of row ``id // count`` of shard ``id % count``."""
    for k in range(len(ids_KB)):
        count = counts_K[k]
        for b in range(ids_KB.shape[1]):
            row = ids_KB[k, b]
            if count == 1:
                out_BK[b, k] = bases_KS[k, 0] + row
            else:
                out_BK[b, k] = bases_KS[k, row % count] + row // count


_BAG_ADDRESSES = (
    "void(int64[::1], int64[::1], int64, int64[::1], int64[:,::1], int64[::1], "
    "{0}[::1], int32[::1], int64[::1])"
)


@_compiled(_BAG_ADDRESSES.format("int32"), _BAG_ADDRESSES.format("int64"))
def bag_addresses(
    ids_L: Ints,
    offsets: Ints,
    batch_size: int,
    features_F: Ints,
    bases_FS: Ints,
    counts_F: Ints,
    out_L: Ints,
    out_offsets: Ints,
    out_positions: Ints,
) -> None:
    """Like :func:`addresses`, for bags: sample by sample, and within a sample feature by feature.

    Args:
        offsets: where each bag starts, feature by feature (features * B + 1).
        out_L: one per id of these features.
        out_offsets: (B * F + 1).
        out_positions: position of each id in ``ids_L``; not written if empty.
    """
    size = 0
    bag = 0
    out_offsets[0] = 0
    for b in range(batch_size):
        for f in range(len(features_F)):
            here, count = features_F[f] * batch_size + b, counts_F[f]
            for i in range(offsets[here], offsets[here + 1]):
                row = ids_L[i]
                if count == 1:
                    out_L[size] = bases_FS[f, 0] + row
                else:
                    out_L[size] = bases_FS[f, row % count] + row // count
                if len(out_positions):
                    out_positions[size] = i
                size += 1
            bag += 1
            out_offsets[bag] = size


_GATHER = "int64(int64[::1], int64[::1], int64, int64[:,::1], {0}[::1], {0}[::1], int64[::1])"


@_compiled(_GATHER.format("int32"), _GATHER.format("int64"))
def gather_bags(
    ids_L: Ints,
    offsets: Ints,
    batch_size: int,
    shards_F4: Ints,
    out_ids: Ints,
    out_offsets: Ints,
    out_positions: Ints,
) -> int:
    """Write the rows of ids that given shards hold, sample by sample and within a sample feature by feature.

    Args:
        offsets: where each bag starts, feature by feature (features * B + 1).
        shards_F4: feature, shard index, number of shards, and first row of the shard in its group.
        out_ids: as long as all ids of these features.
        out_offsets: (B * F + 1).
        out_positions: position of each id in ``ids_L``; not written if empty.

    Returns:
        The number of ids written.
    """
    size = 0
    bag = 0
    out_offsets[0] = 0
    for b in range(batch_size):
        for f in range(len(shards_F4)):
            feature, index, count, start = shards_F4[f]
            here = feature * batch_size + b
            for i in range(offsets[here], offsets[here + 1]):
                row = ids_L[i]
                if count > 1:
                    if row % count != index:
                        continue
                    row = row // count
                out_ids[size] = start + row
                if len(out_positions):
                    out_positions[size] = i
                size += 1
            bag += 1
            out_offsets[bag] = size
    return size


@_compiled(
    "Tuple((int32[::1], int32[::1], int32[::1]))(int32[::1], int64)",
    "Tuple((int64[::1], int32[::1], int32[::1]))(int64[::1], int64)",
)
def group_ids(ids_L: Ints, num_rows: int) -> tuple[Ints, Ints, Ints]:
    """Return the distinct ids, ascending, and their positions: ``rows_U, starts_V, order_L``.

    A stable radix sort, linear in the number of ids.

    Args:
        num_rows: upper bound of the ids.
    """
    size = len(ids_L)
    keys, other_keys = ids_L, np.empty_like(ids_L)
    spare_keys = np.empty_like(ids_L)
    order, other_order = np.empty(size, np.int32), np.empty(size, np.int32)
    for i in range(size):
        order[i] = i
    counts = np.empty(_DIGITS, np.int64)
    shift = 0
    while (num_rows - 1) >> shift > 0:
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


@_compiled("int32[::1](int32[::1], int32[::1])")
def ranks(starts_V: Ints, order_L: Ints) -> Ints:
    """Return for each id its index among the distinct ids."""
    ranks_L = np.empty_like(order_L)
    for u in range(len(starts_V) - 1):
        for i in range(starts_V[u], starts_V[u + 1]):
            ranks_L[order_L[i]] = u
    return ranks_L


@_compiled("int32[::1](int32[::1], int32[::1])", "int32[::1](int64[::1], int32[::1])")
def bags_in_order(offsets: Ints, order_L: Ints) -> Ints:
    """Return the bag of each id, in the order of the sorted ids."""
    bag_L = np.empty_like(order_L)
    for bag in range(len(offsets) - 1):
        for i in range(offsets[bag], offsets[bag + 1]):
            bag_L[i] = bag
    return bag_L[order_L]


@_compiled(
    "float64(int32[::1], int32[::1], float32[:,::1], float32[:,::1])",
    "float64(int32[::1], int32[::1], float64[:,::1], float64[:,::1])",
)
def sum_rows(starts_V: Ints, sources_L: Ints, grad_BD: Floats, out_UD: Floats) -> float:
    """Sum the gradients of the bags of each run of equal ids, in order.

    Args:
        starts_V: bounds of the runs in ``sources_L``; may begin within it.
        sources_L: the bag of each id, ids sorted.

    Returns:
        The sum of all written values: finite if they are, unless it overflows.
    """
    dim = grad_BD.shape[1]
    total_D = np.zeros(dim, grad_BD.dtype)
    for u in range(len(out_UD)):
        for i in range(starts_V[u], starts_V[u + 1]):
            if i + _ROWS_AHEAD < len(sources_L):
                prefetch_row(grad_BD, sources_L[i + _ROWS_AHEAD])  # type: ignore[call-arg]  # numba adds the first
            source = sources_L[i]
            if i == starts_V[u]:
                for d in range(dim):
                    out_UD[u, d] = grad_BD[source, d]
            else:
                for d in range(dim):
                    out_UD[u, d] += grad_BD[source, d]
        for d in range(dim):
            total_D[d] += out_UD[u, d]
    return total_D.sum()  # type: ignore[no-any-return]


@_compiled(
    "float64(int32[::1], int32[::1], float32[::1], float32[:,::1], float32[:,::1])",
    "float64(int32[::1], int32[::1], float64[::1], float64[:,::1], float64[:,::1])",
)
def sum_weighted_rows(
    starts_V: Ints, sources_L: Ints, weights_L: Floats, grad_BD: Floats, out_UD: Floats
) -> float:
    """Like :func:`sum_rows`, with each gradient times the weight of its id, sorted like the ids."""
    dim = grad_BD.shape[1]
    total_D = np.zeros(dim, grad_BD.dtype)
    for u in range(len(out_UD)):
        for d in range(dim):
            out_UD[u, d] = 0
        for i in range(starts_V[u], starts_V[u + 1]):
            if i + _ROWS_AHEAD < len(sources_L):
                prefetch_row(grad_BD, sources_L[i + _ROWS_AHEAD])  # type: ignore[call-arg]  # numba adds the first
            source, weight = sources_L[i], weights_L[i]
            for d in range(dim):
                out_UD[u, d] += weight * grad_BD[source, d]
        for d in range(dim):
            total_D[d] += out_UD[u, d]
    return total_D.sum()  # type: ignore[no-any-return]


_LARGEST = "float64(int32[::1], int32[::1], {0}[::1], {0}[:,::1], {1}[:,::1], {1}[:,::1])"


@_compiled(*(_LARGEST.format(i, f) for i in ("int32", "int64") for f in ("float32", "float64")))
def sum_largest_rows(
    starts_V: Ints, sources_L: Ints, rows_U: Ints, winners_BD: Ints, grad_BD: Floats, out_UD: Floats
) -> float:
    """Like :func:`sum_rows`, but a row gets only the columns of a gradient that it won."""
    dim = grad_BD.shape[1]
    total_D = np.zeros(dim, grad_BD.dtype)
    for u in range(len(out_UD)):
        for d in range(dim):
            out_UD[u, d] = 0
        for i in range(starts_V[u], starts_V[u + 1]):
            if i + _ROWS_AHEAD < len(sources_L):
                prefetch_row(grad_BD, sources_L[i + _ROWS_AHEAD])  # type: ignore[call-arg]  # numba adds the first
            source = sources_L[i]
            if i > starts_V[u] and source == sources_L[i - 1]:
                continue  # a row that occurs twice in a bag gets its gradient once
            for d in range(dim):
                if winners_BD[source, d] == rows_U[u]:
                    out_UD[u, d] += grad_BD[source, d]
        for d in range(dim):
            total_D[d] += out_UD[u, d]
    return total_D.sum()  # type: ignore[no-any-return]


_MOVE = "void({0}[:,::1], {1}[::1], {0}[:,::1])"
_MOVES = [_MOVE.format(f, i) for i in ("int32", "int64") for f in ("float32", "float64")]


@_compiled(*_MOVES)
def take_rows(table_RD: Floats, rows_U: Ints, out_UD: Floats) -> None:
    """``out_UD = table_RD[rows_U]``."""
    for u in range(len(rows_U)):
        row = rows_U[u]
        for d in range(out_UD.shape[1]):
            out_UD[u, d] = table_RD[row, d]


@_compiled(*_MOVES)
def put_rows(table_RD: Floats, rows_U: Ints, part_UD: Floats) -> None:
    """``table_RD[rows_U] = part_UD``."""
    for u in range(len(rows_U)):
        row = rows_U[u]
        for d in range(part_UD.shape[1]):
            table_RD[row, d] = part_UD[u, d]


_ADD = "void({0}[:,::1], {1}[::1], {0}[:,::1], {0})"


@_compiled(*(_ADD.format(f, i) for i in ("int32", "int64") for f in ("float32", "float64")))
def add_rows(table_RD: Floats, rows_U: Ints, part_UD: Floats, scale: float) -> None:
    """``table_RD[rows_U] += scale * part_UD``."""
    for u in range(len(rows_U)):
        row = rows_U[u]
        for d in range(part_UD.shape[1]):
            table_RD[row, d] += scale * part_UD[u, d]


_PLACE = "void({0}[:,:,::1], int64[::1], {0}[:,::1])"
_PLACES = [_PLACE.format(f) for f in ("float32", "float64")]


@_compiled(*_PLACES)
def scatter_columns(vectors_BFD: Floats, columns_F: Ints, out_BE: Floats) -> None:
    """Write the vectors of each feature to the columns from its first one on."""
    for b in range(len(vectors_BFD)):
        for f in range(len(columns_F)):
            for d in range(vectors_BFD.shape[2]):
                out_BE[b, columns_F[f] + d] = vectors_BFD[b, f, d]


@_compiled(*_PLACES)
def gather_columns(out_BFD: Floats, columns_F: Ints, whole_BE: Floats) -> None:
    """The inverse of :func:`scatter_columns`."""
    for b in range(len(out_BFD)):
        for f in range(len(columns_F)):
            for d in range(out_BFD.shape[2]):
                out_BFD[b, f, d] = whole_BE[b, columns_F[f] + d]
