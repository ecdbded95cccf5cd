"""What a step moves between a trainer and the workers: expected from the placement, not counted.

Ids are taken to be as skewed as those of the built-in click log: u uniform, id = floor(rows * u**3). In
tables of many millions of rows nearly all ids of a step are then distinct, which is the most there can be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybrid.embedding.placement import Placement, state_values_per_row
from hybrid.embedding.pooling_side import BYTES_PER_ID, bag_ids, ids_apart
from hybrid.embedding.table_spec import TableSpec

_EXACT_ROWS = 1 << 16  # the frequent ones
_BLOCK_GROWTH = 1.01  # of the blocks in which the others are taken together


@dataclass(frozen=True)
class Traffic:
    """Means of one step.

    Attributes:
        up_bytes_W: what one trainer sends to each worker: ids and gradients.
        down_bytes_W: what each worker sends to one trainer: vectors.
        rows_W: rows that each worker reads, for all trainers; it gets as many gradients of vectors.
        values_W: values of these rows.
        updated_W: values of the rows that each worker updates, with their optimizer state: of the distinct
            ones that are named, or of all where these take every step.
        ids: what one trainer looks at to find who holds what.
        values: of the vectors, or parts of vectors, that one trainer puts together.
    """

    up_bytes_W: npt.NDArray[np.float64]
    down_bytes_W: npt.NDArray[np.float64]
    rows_W: npt.NDArray[np.float64]
    values_W: npt.NDArray[np.float64]
    updated_W: npt.NDArray[np.float64]
    ids: float
    values: float


def traffic(
    tables: Sequence[TableSpec],
    placement: Placement,
    ids_per_sample: Mapping[str, float],
    samples: float,
    trainers: int,
    wire_bytes_per_value: int | None = None,
) -> Traffic:
    """What a step of ``trainers`` trainers with ``samples`` samples each moves.

    Features with one id a sample, and sequences, travel as their distinct rows, and so do multi-hot ones that
    trainers pool. Every shard of another one's table answers with a part of each vector, and gets the whole
    gradient.

    Args:
        ids_per_sample: mean number of ids of each multi-hot feature; the others have exactly one.
        wire_bytes_per_value: of vectors and gradients; None for that of the rows.
    """
    of_workers_5W = np.zeros((5, placement.num_workers))
    workers_of: dict[str, list[int]] = {table.name: [] for table in tables}
    for shard in placement.shards:
        workers_of[shard.table.name].append(shard.worker)
    pooled_here, ids, values = frozenset(placement.pooled_by_trainers), 0.0, 0.0
    for table in tables:
        holders, bytes_per_value = workers_of[table.name], wire_bytes_per_value or table.bytes_per_value
        asked = _asked(table, len(holders), table.name in pooled_here, ids_per_sample, samples)
        vector_bytes = (asked.rows + asked.vectors) * table.dim * bytes_per_value
        # Bags have offsets beside their ids.
        id_bytes = (asked.rows + asked.bag_rows + asked.vectors) * BYTES_PER_ID
        touched = distinct_rows(table.num_rows, trainers * asked.all_ids)
        updated = (table.num_rows if table.optimizer.steps_all_rows else touched) / len(holders)
        read = trainers * (asked.rows + asked.bag_rows)
        width = table.dim + state_values_per_row(table)
        of_one = (id_bytes + vector_bytes, vector_bytes, read, read * table.dim, updated * width)
        of_workers_5W[:, holders] += np.array(of_one)[:, None]
        ids += asked.ids
        values += asked.joined * table.dim
    up_W, down_W, rows_W, values_W, updated_W = of_workers_5W
    return Traffic(up_W, down_W, rows_W, values_W, updated_W, ids, values)


class _Asked(NamedTuple):
    """What a trainer asks each worker for that holds a part of a table, and what it does for all of them.

    Attributes:
        rows: distinct ones, which travel.
        bag_rows, vectors: those that are pooled, and what of them travels.
        all_ids: of its samples.
        ids: that it looks at, those of a split table once for each worker that pools them.
        joined: rows, vectors or parts of these that it puts together.
    """

    rows: float
    bag_rows: float
    vectors: float
    all_ids: float
    ids: float
    joined: float


def _asked(
    table: TableSpec, holders: int, is_pooled_here: bool, ids_per_sample: Mapping[str, float], samples: float
) -> _Asked:
    bags = bag_ids(table, ids_per_sample)
    num_bags = sum(len(means) for means in bags.values())
    of_poolings = [samples * sum(means) for means in bags.values()]
    apart, places = (samples * each for each in ids_apart(table, ids_per_sample))
    of_bags = sum(of_poolings)
    rows, all_ids = distinct_rows(table.num_rows, apart), apart + of_bags
    if is_pooled_here:
        rows += sum(distinct_rows(table.num_rows, ids) for ids in of_poolings)
        return _Asked(rows / holders, 0.0, 0.0, all_ids, all_ids, places + of_bags)
    # Each shard of a multi-hot table has a search of its own through all ids, and a part to add.
    vectors = samples * num_bags
    ids, joined = apart + of_bags * holders, places + vectors * holders
    return _Asked(rows / holders, of_bags / holders, vectors, all_ids, ids, joined)


@cache
def distinct_rows(num_rows: int, draws: float) -> float:
    """How many rows of a table ``draws`` ids are expected to name, as skewed as said above."""
    exact = min(num_rows, _EXACT_ROWS)
    count = max(0, int(np.log(num_rows / exact) / np.log(_BLOCK_GROWTH))) + 1
    blocks = np.geomspace(exact, num_rows, count + 1) if num_rows > exact else np.empty(0)
    ends = np.concatenate([np.arange(exact + 1.0), blocks[1:]])
    sizes = np.diff(ends)
    share = np.diff(np.cbrt(ends / num_rows)) / sizes  # the probability of each row of a block
    with np.errstate(divide="ignore"):
        named = -np.expm1(draws * np.log1p(-np.minimum(share, 1.0)))
    return float(sizes @ named) if draws else 0.0
