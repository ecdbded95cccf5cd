"""Who pools bags: bytes as the routes of a batch ask for them, and what follows from them."""

import dataclasses

import numpy as np
import pytest
import torch

from hybrid.batch import SparseFeatures
from hybrid.embedding.bags import Bags, Item
from hybrid.embedding.placement import place
from hybrid.embedding.pooling_side import PoolingBytes, pooling_bytes, trainers_pool
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.embeddings import make_routes

SAMPLES, IDS, WORKERS = 300, 6, 3
SGD = OptimizerSpec("sgd", 0.1)


def table(num_rows: int, placement: str = "table", **more: object) -> TableSpec:
    fields: dict[str, object] = {"placement": placement, **more}
    of = TableSpec("a", num_rows, 8, Pooling.SUM, ("a",), SGD, 1.0)
    return dataclasses.replace(of, **fields)  # type: ignore[arg-type]


def moved(of: TableSpec, skew: int) -> float:
    """Bytes there and back by what the routes of a batch ask for; ids floor(rows * u**skew)."""
    num_features = len(of.features)
    draw = np.random.default_rng(0)
    ids = (of.num_rows * draw.random(num_features * SAMPLES * IDS) ** skew).astype(np.int64)
    offsets = torch.arange(num_features * SAMPLES + 1) * IDS
    batch = BatchIds(SparseFeatures(torch.from_numpy(ids), offsets, None, num_features))
    tables = [of.read_by(name) for name in of.features]
    items: dict[int, list[Item]] = {worker: [] for worker in range(WORKERS)}
    for route in make_routes([], range(num_features), tables, place([of], WORKERS)):
        route.start(batch, items)
    return sum(_bytes(bags) for of_worker in items.values() for _, bags in of_worker)


def _bytes(bags: Bags) -> int:
    offsets = 0 if bags.offsets is None else bags.offsets.nbytes
    return bags.ids_L.nbytes + offsets + 2 * bags.num_bags * 8 * 4


BOTH = ("a", "b")
TABLES = [
    table(50),
    table(5000),
    table(5000, "row"),
    table(400, "row", features=BOTH),
    table(400, features=BOTH, poolings=(Pooling.MAX, Pooling.SUM)),
]


@pytest.mark.parametrize("of", TABLES, ids=lambda t: f"{t.num_rows} {t.placement} {len(t.features)}")
def test_pooling_bytes_equal_those_of_a_batch(of: TableSpec) -> None:
    shards = WORKERS if of.placement == "row" else 1
    known = dict.fromkeys(of.features, float(IDS))
    found = pooling_bytes(of, shards, known, SAMPLES)
    assert found is not None
    by_workers, by_trainers = (dataclasses.replace(of, pooled_by=who) for who in ("workers", "trainers"))
    assert found.by_workers == pytest.approx(moved(by_workers, 1), rel=0.01)
    assert found.by_trainers == pytest.approx(moved(by_trainers, 1), rel=0.03)
    assert moved(by_trainers, 3) < 1.001 * found.by_trainers
    half = pooling_bytes(of, shards, known, SAMPLES, 2)
    assert half is not None
    assert found.by_trainers / half.by_trainers == pytest.approx(68 / 36)


def test_pooling_bytes_need_known_sizes() -> None:
    assert pooling_bytes(table(50), 1, {}, SAMPLES) is None
    assert pooling_bytes(table(50), 1, {"a": 3.0}, 0) is None
    assert pooling_bytes(table(1), 1, {"a": 0.001}, 100) == PoolingBytes(100 * 68 + 0.4, 0.1 * 68)
    assert pooling_bytes(table(1), 1, {"a": 5.0}, 100) == PoolingBytes(100 * 68 + 2000, 68)


@pytest.mark.parametrize(
    ("num_rows", "shards", "samples", "expected"),
    [
        pytest.param(50, 1, 300, True, id="few rows"),
        pytest.param(5000, 1, 300, False, id="many rows"),
        pytest.param(5000, 100, 300, True, id="split over many"),
        pytest.param(50, 1, 0, False, id="unknown"),
        pytest.param(50, 1, 20, False, id="few samples"),
    ],
)
def test_trainers_pool_by_default_if_that_moves_less(
    num_rows: int, shards: int, samples: float, expected: bool
) -> None:
    of = table(num_rows)
    assert trainers_pool(of, shards, {"a": float(IDS)}, samples) is expected
    for who in ("workers", "trainers"):
        is_said = dataclasses.replace(of, pooled_by=who)
        assert trainers_pool(is_said, shards, {}, samples) is (who == "trainers")
