"""The requests of a lookup, which consist of bags of ids, and the pooling of each bag into one vector."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybrid.embedding.table_spec import Pooling

_MODES = {Pooling.SUM: 0, Pooling.MEAN: 1, Pooling.MAX: 2}


class Bags(NamedTuple):
    """Bags of ids to look up in one weight matrix. Without ``offsets``, each id is a bag."""

    ids_L: Tensor  # rows of the matrix, int32 or int64; for a growing table, keys
    # Where each bag starts, of shape (bags + 1) and the type of the ids; None for one id per bag.
    offsets: Tensor | None = None
    # Weight of each id within its bag, or None for ones; for sum pooling only.
    weights_L: Tensor | None = None
    pooling: Pooling = Pooling.SUM  # how the rows of a bag become one vector
    winners_BD: Tensor | None = None  # for max pooling, the row of each maximum; set by pool_and_record

    @property
    def num_bags(self) -> int:
        return len(self.ids_L) if self.offsets is None else len(self.offsets) - 1


# A call of a table in a custom module: the name of the table, and the ids; ids and offsets are int64.
TableRequest: TypeAlias = tuple[str, Bags]

# A request to one group of a worker's tables: index of the group, and rows within the group.
Item: TypeAlias = tuple[int, Bags]

# The last request of a custom module's training lookup, whose loss may not use all vectors. The gradient
# of its response has a mark for each bag of the other requests, then for each table: 0 if the loss does not
# use the bag or table, which is then not updated, else 1. Example: requests of 3 and 2 bags, 2 tables; the
# loss does not use the second request and the last table: 1 1 1, 0 0, 1 0. No marks mean all ones.
MARKS: Item = (-1, Bags(torch.empty(0, dtype=torch.int32)))


def has_marks(items: Sequence[Item]) -> bool:
    """Return whether the last request is :data:`MARKS`.

    The gradients of such a lookup can end with a mark for each bag and table: 0 if the update leaves it out.
    """
    return bool(items) and items[-1][0] == MARKS[0]


# An item without tensors: group, pooling, whether it has offsets, and whether it has weights.
PackedItem: TypeAlias = tuple[int, str, bool, bool]


def pack_items(items: Sequence[Item]) -> tuple[list[PackedItem], list[Tensor]]:
    """Split the requests of a lookup into plain values and tensors for a message."""
    packed: list[PackedItem] = []
    tensors: list[Tensor] = []
    for group, (ids_L, offsets, weights_L, pooling, _) in items:
        packed.append((group, pooling.value, offsets is not None, weights_L is not None))
        tensors += [each for each in (ids_L, offsets, weights_L) if each is not None]
    return packed, tensors


def unpack_items(packed: Sequence[PackedItem], tensors: Iterable[Tensor]) -> list[Item]:
    """Return the requests that :func:`pack_items` has split."""
    rest = iter(tensors)
    items = []
    for group, pooling, has_offsets, has_weights in packed:
        ids_L = next(rest)
        offsets = next(rest) if has_offsets else None
        weights_L = next(rest) if has_weights else None
        items.append((group, Bags(ids_L, offsets, weights_L, Pooling(pooling))))
    return items


def ids_dtype(num_rows: int) -> torch.dtype:
    """Return the dtype for ids of a table: int32 if it can represent ``num_rows``, else int64."""
    return torch.int32 if num_rows <= torch.iinfo(torch.int32).max else torch.int64


def pool_and_record(weight_RD: Tensor, bags: Bags) -> tuple[Tensor, Bags]:
    """Return the pooled vector of each bag, (bags, D), and ``bags`` for the backward pass.

    The vector of an empty bag is zeros. For max pooling, the returned bags have ``winners_BD``,
    the row of each maximum.
    """
    if bags.offsets is None:
        return weight_RD.index_select(0, bags.ids_L), bags
    weights_L = None if bags.weights_L is None else bags.weights_L.to(weight_RD.dtype)
    pooled_BD, _, _, winners_BD = torch.ops.aten._embedding_bag(
        weight_RD, bags.ids_L, bags.offsets, False, _MODES[bags.pooling], False, weights_L, True, -1
    )
    if bags.pooling is Pooling.MAX:
        bags = bags._replace(winners_BD=winners_BD.to(bags.ids_L.dtype))
    return pooled_BD, bags


def pool_vectors(vectors_LD: Tensor, bags: Bags) -> tuple[Tensor, Bags]:
    """Pool like :func:`pool_and_record`, given the vector of each id instead of a weight matrix."""
    order_L = torch.arange(len(vectors_LD), dtype=bags.ids_L.dtype)
    pooled_BD, of_order = pool_and_record(vectors_LD, bags._replace(ids_L=order_L))
    if of_order.winners_BD is None:
        return pooled_BD, bags
    rows_V = torch.cat([bags.ids_L, bags.ids_L.new_zeros(1)])  # an empty bag has the winner -1
    return pooled_BD, bags._replace(winners_BD=rows_V[of_order.winners_BD.long()])


def concatenate(parts: list[Bags]) -> Bags:
    """Concatenate bags. All must have the same pooling and id type, and either all or none have offsets."""
    if len(parts) == 1:
        return parts[0]
    ids_L = torch.cat([p.ids_L for p in parts])
    lengths = [part.offsets.diff() for part in parts if part.offsets is not None]
    if not lengths:
        return Bags(ids_L, pooling=parts[0].pooling)
    offsets = torch.cat([ids_L.new_zeros(1), *lengths]).cumsum(0, dtype=ids_L.dtype)
    weights_L = None
    if any(p.weights_L is not None for p in parts):
        weights_L = torch.cat(
            [torch.ones(len(p.ids_L)) if p.weights_L is None else p.weights_L for p in parts]
        )
    winners = [p.winners_BD for p in parts if p.winners_BD is not None]
    return Bags(ids_L, offsets, weights_L, parts[0].pooling, torch.cat(winners) if winners else None)
