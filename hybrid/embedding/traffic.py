"""What a step moves between a trainer and the workers: expected from the placement, not counted.

Ids are taken to be as skewed as those of the built-in click log: u uniform, id = floor(rows * u**3). In
tables of many millions of rows nearly all ids of a step are then distinct, which is the most there can be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from hybrid.embedding.placement import BYTES_PER_ID, Placement, state_values_per_row
from hybrid.embedding.spec import TableSpec

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
        updated_W: values of the distinct rows that each worker updates, with their optimizer state.
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

    A feature with one id a sample travels as its distinct rows. Every shard of a multi-hot feature's table
    answers with a part of each vector, and gets the whole gradient.

    Args:
        ids_per_sample: mean number of ids of each multi-hot feature; the others have exactly one.
        wire_bytes_per_value: of vectors and gradients; None for that of the rows.
    """
    of_workers_5W = np.zeros((5, placement.num_workers))
    workers_of: dict[str, list[int]] = {table.name: [] for table in tables}
    for shard in placement.shards:
        workers_of[shard.table.name].append(shard.worker)
    ids = values = 0.0
    for table in tables:
        holders, bytes_per_value = workers_of[table.name], wire_bytes_per_value or table.bytes_per_value
        one_id, bags = _features(table, ids_per_sample)
        rows = distinct_rows(table.num_rows, samples * one_id) / len(holders)
        bag_rows, bag_vectors = samples * sum(bags) / len(holders), samples * len(bags)
        vector_bytes = (rows + bag_vectors) * table.dim * bytes_per_value
        id_bytes = (rows + bag_rows + bag_vectors) * BYTES_PER_ID  # bags have offsets beside their ids
        touched = distinct_rows(table.num_rows, trainers * samples * (one_id + sum(bags))) / len(holders)
        read = trainers * (rows + bag_rows)
        width = table.dim + state_values_per_row(table)
        of_one = (id_bytes + vector_bytes, vector_bytes, read, read * table.dim, touched * width)
        of_workers_5W[:, holders] += np.array(of_one)[:, None]
        # Each shard of a multi-hot table has a search of its own through all ids, and a part to add.
        ids += samples * (one_id + sum(bags) * len(holders))
        values += samples * (one_id + len(bags) * len(holders)) * table.dim
    up_W, down_W, rows_W, values_W, updated_W = of_workers_5W
    return Traffic(up_W, down_W, rows_W, values_W, updated_W, ids, values)


def _features(table: TableSpec, ids_per_sample: Mapping[str, float]) -> tuple[int, list[float]]:
    """How many features of a table have one id a sample, and the mean number of ids of each other."""
    bags = [ids_per_sample[name] for name in table.features if name in ids_per_sample]
    return len(table.features) - len(bags), bags


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
