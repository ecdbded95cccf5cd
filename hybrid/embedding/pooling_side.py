"""Where bags of ids become vectors: at the workers that hold their rows, or at the trainers that ask.

A worker that pools is told all ids, answers with a vector a sample and feature, and gets as many gradients;
of a split table each worker does. A trainer that pools asks for each distinct row once, and sends the sum
of its gradients. So it depends on how often the samples of a trainer name the same rows. No ids name more
distinct ones than those that are all equally likely: by these, trainers are expected to move at most so much.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from hybrid.embedding.table_spec import Pooling, TableSpec

BYTES_PER_ID = 4  # tables of more than 2^31 rows a worker aside
# Of the bytes that move where workers pool. With half of them, all roles together take as much processor time
# either way; with more, trainers take more than workers spare (docs/performance.md).
MOST_BYTES = 0.5


class PoolingBytes(NamedTuple):
    """What one lookup of one trainer moves of the bags of a table, there and back, whoever pools them.

    Attributes:
        by_workers: ids, and where bags start; vectors, and their gradients.
        by_trainers: distinct ids; their rows, and the gradients of these.
    """

    by_workers: float
    by_trainers: float


def bag_ids(table: TableSpec, ids_per_sample: Mapping[str, float]) -> dict[Pooling, list[float]]:
    """The mean numbers of ids of the bags of a table, by how these are pooled.

    A trainer that pools fetches the rows of each pooling by itself.

    Args:
        ids_per_sample: mean number of ids of each multi-hot feature; the others have exactly one.
    """
    found: dict[Pooling, list[float]] = defaultdict(list)
    for name in table.features:
        read = table.read_by(name)
        if name in ids_per_sample and not read.sequence:
            found[read.pooling].append(ids_per_sample[name])
    return found


def ids_apart(table: TableSpec, ids_per_sample: Mapping[str, float]) -> tuple[float, int]:
    """Of the features that nobody pools, of one id or sequences: the mean number of ids of a sample, and how
    many vectors they make, with the zeros of sequences."""
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
    """The bytes of both ways, for ids that are all equally likely; None where no bags are known of the table.

    Args:
        num_shards: over how many workers the table is split.
        ids_per_sample: as in :func:`bag_ids`.
        samples: of a trainer's lookup; 0 where nobody knows.
        wire_bytes_per_value: of vectors and gradients; None for that of the rows.
    """
    bags = bag_ids(table, ids_per_sample)
    if not bags or not samples:
        return None
    row_bytes = 2 * table.dim * (wire_bytes_per_value or table.bytes_per_value)
    means = [mean for of_pooling in bags.values() for mean in of_pooling]
    of_shards = num_shards * samples * len(means) * (row_bytes + BYTES_PER_ID)
    rows = sum(_most_distinct(table.num_rows, samples * sum(of_pooling)) for of_pooling in bags.values())
    return PoolingBytes(of_shards + samples * sum(means) * BYTES_PER_ID, rows * (row_bytes + BYTES_PER_ID))


def trainers_pool(
    table: TableSpec,
    num_shards: int,
    ids_per_sample: Mapping[str, float],
    samples: float,
    wire_bytes_per_value: int | None = None,
) -> bool:
    """Whether the bags of a table are pooled by trainers: where it says so, or where that moves clearly less.

    Args:
        num_shards, ids_per_sample, samples, wire_bytes_per_value: as in :func:`pooling_bytes`. Where they
            tell of no bags, workers pool.
    """
    if table.pooled_by != "auto":
        return table.pooled_by == "trainers"
    moved = pooling_bytes(table, num_shards, ids_per_sample, samples, wire_bytes_per_value)
    return moved is not None and moved.by_trainers < MOST_BYTES * moved.by_workers


def _most_distinct(num_rows: int, draws: float) -> float:
    """How many rows so many ids are expected to name that may each be any row, equally likely."""
    if num_rows == 1:
        return min(1.0, draws)
    return -num_rows * math.expm1(draws * math.log1p(-1 / num_rows))
