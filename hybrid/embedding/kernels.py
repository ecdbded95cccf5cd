"""The arithmetic of lookups: rows to pooled vectors, pooled gradients to row gradients, initial rows."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.embedding.spec import Pooling

_MODES = {Pooling.SUM: 0, Pooling.MEAN: 1, Pooling.MAX: 2}
_INIT_BLOCK_VALUES = 1 << 20


class Bags(NamedTuple):
    """Ids to look up in one weight matrix.

    Attributes:
        ids_L: rows of the matrix.
        offsets: int64 of shape (bags + 1), where each bag starts; None where each id is its own bag.
        weights_L: weight of each id within its bag, or None for ones. Only for sum pooling.
        pooling: how the rows of a bag become one vector.
        winners_BD: for max pooling, the row that each pooled value came from, as ``pool_recorded`` found.
    """

    ids_L: Tensor
    offsets: Tensor | None = None
    weights_L: Tensor | None = None
    pooling: Pooling = Pooling.SUM
    winners_BD: Tensor | None = None


def pool(weight_RD: Tensor, bags: Bags) -> Tensor:
    """One pooled vector a bag, (bags, D); zeros for an empty bag."""
    return pool_recorded(weight_RD, bags)[0]


def pool_recorded(weight_RD: Tensor, bags: Bags) -> tuple[Tensor, Bags]:
    """As :func:`pool`, and the bags with what their gradients will need, though the rows change meanwhile."""
    if bags.offsets is None:
        return weight_RD.index_select(0, bags.ids_L), bags
    pooled_BD, _, _, winners_BD = _embedding_bag(weight_RD, _with_weights_as(weight_RD.dtype, bags))
    if bags.pooling is Pooling.MAX:
        bags = bags._replace(winners_BD=winners_BD)
    return pooled_BD, bags


def row_gradients(bags: Bags, grad_BD: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows that ``bags`` touch, ascending, and their gradients, duplicates summed in order.

    Args:
        grad_BD: gradient of each bag's pooled vector.

    Returns:
        rows_U (int64) and grad_UD.
    """
    bags = _with_weights_as(grad_BD.dtype, bags)
    rows_U, inverse_L = torch.unique(bags.ids_L, return_inverse=True)
    if bags.offsets is None:
        return rows_U, torch.ops.aten.embedding_dense_backward(grad_BD, inverse_L, len(rows_U), -1, False)
    bag_size = bags.offsets.diff()
    offset2bag_L = torch.repeat_interleave(torch.arange(len(bag_size)), bag_size)
    largest = bag_size.new_empty(0)
    if bags.pooling is Pooling.MAX:
        assert bags.winners_BD is not None, "max pooling for training records its winners"
        largest = torch.searchsorted(rows_U, bags.winners_BD)
    grad_UD = torch.ops.aten._embedding_bag_dense_backward(
        grad_BD, inverse_L, offset2bag_L, bag_size, largest, len(rows_U), False, _MODES[bags.pooling],
        bags.weights_L, -1,
    )  # fmt: skip
    return rows_U, grad_UD


def _with_weights_as(dtype: torch.dtype, bags: Bags) -> Bags:
    return bags if bags.weights_L is None else bags._replace(weights_L=bags.weights_L.to(dtype))


def _embedding_bag(weight_RD: Tensor, bags: Bags) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.aten._embedding_bag(
        weight_RD, bags.ids_L, bags.offsets, False, _MODES[bags.pooling], False, bags.weights_L, True, -1
    )
    return result


def concatenate(parts: list[Bags]) -> Bags:
    """All bags of ``parts``, in order, as one; they share a pooling."""
    if len(parts) == 1:
        return parts[0]
    ids_L = torch.cat([p.ids_L for p in parts])
    if all(p.offsets is None for p in parts):
        return Bags(ids_L, None, None, parts[0].pooling)
    starts, base = [], 0
    for part in parts:
        offsets = part.offsets if part.offsets is not None else torch.arange(len(part.ids_L) + 1)
        starts.append(offsets[:-1] + base)
        base += len(part.ids_L)
    starts.append(torch.tensor([base]))
    weights_L = None
    if any(p.weights_L is not None for p in parts):
        weights_L = torch.cat(
            [torch.ones(len(p.ids_L)) if p.weights_L is None else p.weights_L for p in parts]
        )
    winners = [p.winners_BD for p in parts if p.winners_BD is not None]
    return Bags(
        ids_L, torch.cat(starts), weights_L, parts[0].pooling, torch.cat(winners) if winners else None
    )


def initialise_rows(
    out_RD: Tensor, seed: int, table: str, scale: float, index: int = 0, count: int = 1
) -> None:
    """Fill the rows ``index``, ``index + count``, ... of a table with their initial values.

    Each value is uniform in [-scale, scale] and a pure function of seed, table name, row and column
    (SplitMix64 used as a counter; Steele et al. 2014), so that every placement starts from the same
    table and each worker computes only its own rows.
    """
    num_rows, dim = out_RD.shape
    key = np.uint64((seed * 0x9E3779B97F4A7C15 + zlib.crc32(table.encode()) * 0xD1B54A32D192ED03) % 2**64)
    block = max(1, _INIT_BLOCK_VALUES // dim)
    columns_D = np.arange(dim, dtype=np.uint64)
    for start in range(0, num_rows, block):
        stop = min(start + block, num_rows)
        rows = np.arange(start, stop, dtype=np.uint64) * np.uint64(count) + np.uint64(index)
        counter_RD = rows[:, None] * np.uint64(dim) + columns_D
        uniform_RD = (_splitmix64(counter_RD + key) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
        out_RD[start:stop] = torch.from_numpy((uniform_RD * 2 - 1) * np.float32(scale))


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
