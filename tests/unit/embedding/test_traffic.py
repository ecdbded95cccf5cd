"""Traffic: as many distinct rows as there are, and as many bytes as the routes of a batch ask for."""

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.embedding.bags import Bags, Item
from hybrid.embedding.placement import Placement, place
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.traffic import distinct_rows, traffic
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.embeddings import make_routes

SAMPLES, HOTNESS = 400, 5


def table(name: str, num_rows: int, placement: str = "table", optimizer: str = "sgd") -> TableSpec:
    spec = OptimizerSpec(optimizer, 0.1)
    return TableSpec(name, num_rows, 8, Pooling.SUM, (name,), spec, 1.0, placement=placement)


def skewed(num_rows: int, size: int, seed: int = 0) -> Tensor:
    uniform = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (num_rows * uniform.pow(3)).long()


@pytest.mark.parametrize(
    ("num_rows", "draws"), [(1, 7), (3, 1000), (500, 400), (20_000, 1024), (3_000_000, 50_000)]
)
def test_distinct_rows_equal_those_of_random_ids(num_rows: int, draws: int) -> None:
    drawn = [len(skewed(num_rows, draws, seed).unique()) for seed in range(10)]
    assert distinct_rows(num_rows, draws) == pytest.approx(np.mean(drawn), rel=0.02)


def asked(tables: list[TableSpec], placement: Placement, bags: list[int]) -> list[tuple[int, int]]:
    """Bytes of ids, and vectors asked for, of each worker, by what the routes of a batch really ask."""
    lengths_KB = torch.ones(len(tables), SAMPLES, dtype=torch.int64)
    lengths_KB[bags] = HOTNESS
    lengths_KB[[k for k, table in enumerate(tables) if table.sequence]] = HOTNESS
    sizes = lengths_KB.sum(1).tolist()
    ids = [skewed(t.num_rows, n, seed) for seed, (t, n) in enumerate(zip(tables, sizes, strict=True))]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_KB.flatten().cumsum(0)])
    batch = BatchIds(SparseFeatures(torch.cat(ids), offsets, None, len(tables)))
    items: dict[int, list[Item]] = defaultdict(list)
    rows = [k for k in range(len(tables)) if k not in bags]
    for route in make_routes(rows, bags, tables, placement):
        route.start(batch, items)
    return [(sum(map(_id_bytes, of)), sum(b.num_bags for _, b in of)) for _, of in sorted(items.items())]


def _id_bytes(item: Item) -> int:
    bags: Bags = item[1]
    return bags.ids_L.nbytes + (0 if bags.offsets is None else bags.offsets.nbytes)


@pytest.mark.parametrize("bags", [[], [0, 2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("by_trainers", ["", "ab", "abc"])
def test_traffic_equals_bytes_of_a_batch(bags: list[int], by_trainers: str) -> None:
    tables = [table("a", 300, "row"), table("b", 5_000), table("c", 90_000, "row")]
    placement = dataclasses.replace(place(tables, 3), pooled_by_trainers=tuple(by_trainers))
    means = {tables[k].name: float(HOTNESS) for k in bags}
    found = traffic(tables, placement, means, SAMPLES, trainers=2)
    for worker, (id_bytes, vectors) in enumerate(asked(tables, placement, bags)):
        vector_bytes = vectors * 8 * 4
        spread = 0.1 if by_trainers else 0.05  # distinct rows of a shard are few
        assert found.down_bytes_W[worker] == pytest.approx(vector_bytes, rel=spread)
        assert found.up_bytes_W[worker] == pytest.approx(id_bytes + vector_bytes, rel=spread)


@pytest.mark.parametrize("sequences", [[0], [0, 1, 2]], ids=str)
def test_traffic_of_sequences_equals_bytes_of_a_batch(sequences: list[int]) -> None:
    tables = [table("a", 300, "row"), table("b", 5_000), table("c", 90_000, "row")]
    for k in sequences:
        tables[k] = dataclasses.replace(tables[k], sequences=(HOTNESS + 2,))
    placement = place(tables, 3)
    means = {tables[k].name: float(HOTNESS) for k in sequences}
    found = traffic(tables, placement, means, SAMPLES, trainers=2)
    read = [each.read_by(each.name) for each in tables]
    for worker, (id_bytes, vectors) in enumerate(asked(read, placement, [])):
        vector_bytes = vectors * 8 * 4
        assert found.down_bytes_W[worker] == pytest.approx(vector_bytes, rel=0.08)
        assert found.up_bytes_W[worker] == pytest.approx(id_bytes + vector_bytes, rel=0.08)
    places = sum(each.num_vectors for each in read)
    assert found.values == SAMPLES * places * 8
    assert found.ids == SAMPLES * (len(sequences) * HOTNESS + 3 - len(sequences))


def test_worker_reads_per_trainer_and_updates_once() -> None:
    tables = [table("a", 10, optimizer="adagrad")]
    one, four = (traffic(tables, place(tables, 1), {}, 10_000, trainers) for trainers in (1, 4))
    assert (one.rows_W[0], four.rows_W[0]) == pytest.approx((10, 40))
    assert four.values_W[0] == pytest.approx(40 * 8)
    assert (one.updated_W[0], four.updated_W[0]) == pytest.approx((160, 160))  # with state


@pytest.mark.parametrize(("decay", "is_whole"), [(0.1, True), (0.0, False)])
def test_worker_updates_all_rows_with_weight_decay(decay: float, is_whole: bool) -> None:
    spec = OptimizerSpec("adagrad", 0.1, weight_decay=decay, all_rows=True)
    touched = table("a", 90_000, "row", "adagrad")
    whole = dataclasses.replace(touched, optimizer=spec)
    few, found = (traffic([each], place([each], 3), {}, 100, trainers=2) for each in (touched, whole))
    assert few.updated_W[0] < 200 * 16
    assert found.updated_W[0] == pytest.approx(30_000 * 16 if is_whole else few.updated_W[0])
    assert found.values_W == pytest.approx(few.values_W)


def test_each_shard_of_a_pooled_table_sends_partial_vectors() -> None:
    tables = [table("a", 10, "row")]
    one_id, pooled = (traffic(tables, place(tables, 5), means, 100, trainers=1) for means in ({}, {"a": 3.0}))
    assert (one_id.ids, one_id.values) == (100, 100 * 8)
    assert (pooled.ids, pooled.values) == (100 * 3 * 5, 100 * 8 * 5)
    placement = dataclasses.replace(place(tables, 5), pooled_by_trainers=("a",))
    here = traffic(tables, placement, {"a": 3.0}, 100, trainers=1)
    assert (here.ids, here.values) == (100 * 3, 100 * 3 * 8)
    assert here.rows_W == pytest.approx([2.0] * 5, rel=1e-4)  # distinct ones
