"""Expected bytes and rows of a step, given a placement.

Ids are assumed to be skewed as in the built-in click log: u uniform, id = floor(rows * u**3). In tables of
many millions of rows nearly all ids of a step are then distinct.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from hybrid.embedding.placement import Placement, state_values_per_row
from hybrid.embedding.pooling_side import BYTES_PER_ID, bag_ids, unpooled_ids
from hybrid.embedding.table_spec import TableSpec

_EXACT_ROWS = 1 << 16  # the most frequent rows
_BLOCK_GROWTH = 1.01  # growth of the blocks of the other rows


@dataclass(frozen=True)
class Traffic:
    """Expected traffic and work of one step.

    Attributes:
        up_bytes_W: bytes that one trainer sends to each worker: ids and gradients.
        down_bytes_W: bytes that each worker sends to one trainer: vectors.
        rows_W: rows that each worker reads for all trainers; it receives as many gradients.
        values_W: values of these rows.
        updated_W: values of the rows that each worker updates, with their optimizer state.
        ids: ids that one trainer distributes to workers.
        values: values of the vectors, or partial vectors, that one trainer assembles.
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
    """Return the traffic of a step of ``trainers`` trainers with ``samples`` samples each.

    Features with one id per sample, sequences, and multi-hot features that trainers pool travel as distinct
    rows. For other multi-hot features, each shard sends a part of each vector and receives the whole
    gradient.

    Args:
        ids_per_sample: mean number of ids of each multi-hot feature; other features have one.
        wire_bytes_per_value: bytes of a value of vectors and gradients; None for that of the rows.
    """
    of_workers_5W = np.zeros((5, placement.num_workers))
    workers_of: dict[str, list[int]] = {table.name: [] for table in tables}
    for shard in placement.shards:
        workers_of[shard.table.name].append(shard.worker)
    pooled_by_trainers, ids, values = frozenset(placement.pooled_by_trainers), 0.0, 0.0
    for table in tables:
        holders, bytes_per_value = workers_of[table.name], wire_bytes_per_value or table.bytes_per_value
        bags, num_shards = bag_ids(table, ids_per_sample), len(holders)
        ids_by_pooling = [samples * sum(means) for means in bags.values()]
        bag_total = sum(ids_by_pooling)
        unpooled, positions = (samples * each for each in unpooled_ids(table, ids_per_sample))
        rows = distinct_rows(table.num_rows, unpooled)
        if table.name in pooled_by_trainers:
            rows += sum(distinct_rows(table.num_rows, draws) for draws in ids_by_pooling)
            bag_rows = vectors = 0.0
            ids += unpooled + bag_total
            values += (positions + bag_total) * table.dim
        else:
            # Each shard of a multi-hot table needs a pass over all ids, and sends partial vectors.
            bag_rows, vectors = bag_total / num_shards, samples * sum(map(len, bags.values()))
            ids += unpooled + bag_total * num_shards
            values += (positions + vectors * num_shards) * table.dim
        rows /= num_shards
        vector_bytes = (rows + vectors) * table.dim * bytes_per_value
        # Bags have offsets beside their ids.
        id_bytes = (rows + bag_rows + vectors) * BYTES_PER_ID
        touched = distinct_rows(table.num_rows, trainers * (unpooled + bag_total))
        updated = (table.num_rows if table.optimizer.steps_all_rows else touched) / num_shards
        read = trainers * (rows + bag_rows)
        width = table.dim + state_values_per_row(table)
        of_one = (id_bytes + vector_bytes, vector_bytes, read, read * table.dim, updated * width)
        of_workers_5W[:, holders] += np.array(of_one)[:, None]
    up_W, down_W, rows_W, values_W, updated_W = of_workers_5W
    return Traffic(up_W, down_W, rows_W, values_W, updated_W, ids, values)


@cache
def distinct_rows(num_rows: int, draws: float) -> float:
    """Return the expected number of distinct rows among ``draws`` ids, skewed as described above."""
    exact = min(num_rows, _EXACT_ROWS)
    count = max(0, int(np.log(num_rows / exact) / np.log(_BLOCK_GROWTH))) + 1
    blocks = np.geomspace(exact, num_rows, count + 1) if num_rows > exact else np.empty(0)
    ends = np.concatenate([np.arange(exact + 1.0), blocks[1:]])
    sizes = np.diff(ends)
    probability = np.diff(np.cbrt(ends / num_rows)) / sizes  # of each row of a block
    with np.errstate(divide="ignore"):
        distinct = -np.expm1(draws * np.log1p(-np.minimum(probability, 1.0)))
    return float(sizes @ distinct) if draws else 0.0
