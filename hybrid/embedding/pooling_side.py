"""Which side pools bags: the workers that hold the rows, or the trainers.

A worker that pools receives all ids, sends one vector per sample and feature, and receives as many gradients;
for a split table each worker does. A trainer that pools requests each distinct row once, and sends the sum of
its gradients. Which moves less depends on how often samples repeat rows. Equally likely ids have the most
distinct rows, so they give an upper bound of what trainers move.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from hybrid.embedding.table_spec import Pooling, TableSpec

BYTES_PER_ID = 4  # but for tables of more than 2^31 rows per worker
# Trainers pool if they move less than this fraction of the bytes. At half the bytes, both ways take the same
# processor time of all roles together.
MOST_BYTES = 0.5


class PoolingBytes(NamedTuple):
    """Bytes that one lookup of one trainer moves for the bags of a table, in both directions.

    Attributes:
        by_workers: if workers pool: ids, offsets, vectors and their gradients.
        by_trainers: if trainers pool: distinct ids, rows and their gradients.
    """

    by_workers: float
    by_trainers: float


def bag_ids(table: TableSpec, ids_per_sample: Mapping[str, float]) -> dict[Pooling, list[float]]:
    """Return the mean numbers of ids of the bags of a table, by pooling.

    A trainer that pools fetches the rows of each pooling separately.

    Args:
        ids_per_sample: mean number of ids of each multi-hot feature; other features have one.
    """
    means: dict[Pooling, list[float]] = defaultdict(list)
    for name in table.features:
        read = table.read_by(name)
        if name in ids_per_sample and not read.sequence:
            means[read.pooling].append(ids_per_sample[name])
    return means


def unpooled_ids(table: TableSpec, ids_per_sample: Mapping[str, float]) -> tuple[float, int]:
    """Return the mean number of ids, and of vectors, per sample of features that are not pooled."""
    ids, vectors = 0.0, 0
    for name in table.features:
        read = table.read_by(name)
        if name not in ids_per_sample or read.sequence:
            ids += ids_per_sample.get(name, 1.0)
            vectors += read.num_vectors
    return ids, vectors


def pooling_bytes(
    table: TableSpec,
    num_shards: int,
    ids_per_sample: Mapping[str, float],
    samples: float,
    wire_bytes_per_value: int | None = None,
) -> PoolingBytes | None:
    """Return the bytes for equally likely ids; None if the table has no bags of known sizes.

    Args:
        num_shards: number of workers that hold the table.
        ids_per_sample: as in :func:`bag_ids`.
        samples: number of samples of a trainer's lookup; 0 if unknown.
        wire_bytes_per_value: bytes of a value of vectors and gradients; None for that of the rows.
    """
    bags = bag_ids(table, ids_per_sample)
    if not bags or not samples:
        return None
    row_bytes = 2 * table.dim * (wire_bytes_per_value or table.bytes_per_value)
    means = [mean for of_pooling in bags.values() for mean in of_pooling]
    vector_bytes = num_shards * samples * len(means) * (row_bytes + BYTES_PER_ID)
    rows = 0.0
    for of_pooling in bags.values():  # expected number of distinct rows among equally likely ids
        draws = samples * sum(of_pooling)
        if table.num_rows == 1:
            rows += min(1.0, draws)
        else:
            rows += -table.num_rows * math.expm1(draws * math.log1p(-1 / table.num_rows))
    return PoolingBytes(vector_bytes + samples * sum(means) * BYTES_PER_ID, rows * (row_bytes + BYTES_PER_ID))


def trainers_pool(
    table: TableSpec,
    num_shards: int,
    ids_per_sample: Mapping[str, float],
    samples: float,
    wire_bytes_per_value: int | None = None,
) -> bool:
    """Whether trainers pool the bags of a table: if its specification says so, or if that moves clearly less.

    Args:
        num_shards, ids_per_sample, samples, wire_bytes_per_value: as in :func:`pooling_bytes`. Without known
            bags, workers pool.
    """
    if table.pooled_by != "auto":
        return table.pooled_by == "trainers"
    moved = pooling_bytes(table, num_shards, ids_per_sample, samples, wire_bytes_per_value)
    return moved is not None and moved.by_trainers < MOST_BYTES * moved.by_workers
