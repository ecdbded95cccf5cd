"""Placement: where rows are, how loads are balanced, and which side pools bags."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.shards import requests_of, shards_of

from hybrid.batch import SparseFeatures
from hybrid.embedding.placement import (
    MIN_SPLIT_BYTES,
    Placement,
    bytes_per_row,
    bytes_per_sample,
    place,
    should_trainers_pool,
)
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.errors import ConfigError

SGD = OptimizerSpec("sgd", 0.1)
ADAGRAD = OptimizerSpec("adagrad", 0.1)

# Distinct values of the 26 categorical columns of the Criteo display advertising challenge.
CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306,
    10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


def table(name: str, num_rows: int = 11, dim: int = 4, **more: object) -> TableSpec:
    fields: dict[str, object] = {"features": (name,), "optimizer": SGD, "init_scale": 1.0, **more}
    return TableSpec(name, num_rows, dim, Pooling.SUM, **fields)  # type: ignore[arg-type]


def criteo(divisor: int = 1) -> list[TableSpec]:
    return [
        table(f"C{i}", max(1, rows // divisor), 16, optimizer=ADAGRAD)
        for i, rows in enumerate(CRITEO_ROWS, start=1)
    ]


def workers_of(placement: Placement, name: str) -> list[int]:
    return [shard.worker for shard in shards_of(placement, name)]


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[TableSpec], int]:
    """Draw tables of every kind, and a number of workers."""
    num_workers = draw(st.integers(1, 6))
    kind = st.tuples(
        st.integers(1, 40),
        st.sampled_from([2, 4]),
        st.sampled_from([SGD, ADAGRAD]),
        st.sampled_from(["auto", "table", "row"]),
        st.lists(st.integers(0, num_workers - 1), max_size=3),
    )
    tables = [
        table(f"t{i}", rows, dim, optimizer=optimizer, placement=placement, workers=tuple(workers))
        for i, (rows, dim, optimizer, placement, workers) in enumerate(draw(st.lists(kind, max_size=8)))
    ]
    return tables, num_workers


@given(plans())
@settings(deadline=None, max_examples=60, database=None)
def test_every_row_is_on_exactly_one_allowed_worker(case: tuple[list[TableSpec], int]) -> None:
    tables, num_workers = case
    placement = place(tables, num_workers)
    for each in tables:
        shards = shards_of(placement, each.name)
        rows = [row for s in shards for row in range(s.index, each.num_rows, s.count)]
        assert sorted(rows) == list(range(each.num_rows))
        assert [s.num_rows for s in shards] == [len(range(s.index, each.num_rows, s.count)) for s in shards]
        assert all(s.num_rows for s in shards)
        workers = [s.worker for s in shards]
        assert len(set(workers)) == len(workers)
        assert set(workers) <= set(each.workers or range(num_workers))
        assert each.placement != "table" or len(shards) == 1
    assert len(placement.shards) == sum(len(placement.of_worker(w)) for w in range(num_workers))


@given(plans())
@settings(deadline=None, max_examples=60, database=None)
def test_groups_lay_out_all_shards_of_a_worker_side_by_side(case: tuple[list[TableSpec], int]) -> None:
    placement = place(*case)
    for worker in range(placement.num_workers):
        groups = placement.groups(worker)
        grouped = [shard for group in groups for shard in group.shards]
        assert sorted(grouped, key=repr) == sorted(placement.of_worker(worker), key=repr)
        assert len({(g.dim, g.optimizer) for g in groups}) == len(groups)
        for group in groups:
            ends = [start + s.num_rows for start, s in zip(group.starts, group.shards, strict=True)]
            assert list(group.starts) == [0, *ends[:-1]]
            assert group.num_rows == ends[-1]
            assert {(s.table.dim, s.table.optimizer) for s in group.shards} == {(group.dim, group.optimizer)}


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("divisor", [1, 1000])
def test_criteo_tables_balance_bytes_and_traffic(num_workers: int, divisor: int) -> None:
    """The fullest worker is within a third of the mean in bytes, and the busiest within a sixth in traffic.

    At a thousandth of the size no table is split, so whole ones must balance.
    """
    tables = criteo(divisor)
    placement = place(tables, num_workers)
    held = [sum(s.num_bytes for s in placement.of_worker(w)) for w in range(num_workers)]
    moved = [
        sum(bytes_per_sample(s.table, {}) / s.count for s in placement.of_worker(w))
        for w in range(num_workers)
    ]
    assert sum(held) == sum(t.num_rows * bytes_per_row(t) for t in tables)
    assert max(held) / (sum(held) / num_workers) < 4 / 3
    assert max(moved) / (sum(moved) / num_workers) < 7 / 6


def test_tables_with_long_bags_are_kept_apart() -> None:
    tables = [table(name, 100) for name in "abcd"]
    evenly, by_traffic = place(tables, 2), place(tables, 2, {"a": 100.0, "c": 100.0})
    assert workers_of(evenly, "a") == workers_of(evenly, "c")
    assert workers_of(by_traffic, "a") != workers_of(by_traffic, "c")


def rows_of_bytes(num_bytes: int) -> int:
    return num_bytes // bytes_per_row(table("t", 1, 4))


@pytest.mark.parametrize(
    ("big", "small", "is_split"),
    [
        (2 * MIN_SPLIT_BYTES, MIN_SPLIT_BYTES, True),
        (MIN_SPLIT_BYTES, 1024, True),
        (MIN_SPLIT_BYTES - 16, 1024, False),  # too small
        (2 * MIN_SPLIT_BYTES, 2 * MIN_SPLIT_BYTES, False),  # the mean exactly
    ],
)
def test_auto_splits_only_large_tables_above_the_mean(big: int, small: int, is_split: bool) -> None:
    placement = place([table("big", rows_of_bytes(big)), table("small", rows_of_bytes(small))], 2)
    assert (len(shards_of(placement, "big")) == 2) is is_split
    assert len(shards_of(placement, "small")) == 1


def test_placement_and_workers_of_a_table_are_kept() -> None:
    huge = rows_of_bytes(4 * MIN_SPLIT_BYTES)
    placement = place(
        [
            table("whole", huge, placement="table"),
            table("rows", 10, placement="row"),
            table("there", huge, workers=(2,)),
            table("two", 10, placement="row", workers=(3, 1)),
            table("twice", 10, placement="row", workers=(1, 1)),
        ],
        4,
    )
    assert len(workers_of(placement, "whole")) == 1
    assert workers_of(placement, "rows") == [0, 1, 2, 3]
    assert workers_of(placement, "there") == [2]
    assert workers_of(placement, "two") == [3, 1]
    assert workers_of(placement, "twice") == [1]


def test_placement_does_not_depend_on_the_order_of_tables() -> None:
    tables = criteo(1000)
    first = place(tables, 3)
    assert place(list(map(dataclasses.replace, tables)), 3) == first
    backwards = place(tables[::-1], 3)
    assert {t.name: workers_of(backwards, t.name) for t in tables} == {
        t.name: workers_of(first, t.name) for t in tables
    }
    assert [s.table.name for s in first.shards] == [t.name for t in tables]


@pytest.mark.parametrize("worker", [2, -1])
def test_unknown_worker_is_refused(worker: int) -> None:
    with pytest.raises(ConfigError, match=rf"^tables\.t\.placement = {worker}"):
        place([table("t", workers=(0, worker))], 2)


def moved_bytes(of: TableSpec, workers: int, samples: int, num_ids: int) -> float:
    """Bytes of the requests for a batch of equally likely ids, and of its vectors and gradients."""
    num_bags = len(of.features) * samples
    ids_L = torch.from_numpy(np.random.default_rng(0).integers(0, of.num_rows, num_bags * num_ids))
    sparse = SparseFeatures(ids_L, torch.arange(num_bags + 1) * num_ids, None, len(of.features))
    tables = [of.for_feature(name) for name in of.features]
    items = requests_of(tables, range(len(tables)), sparse, place([of], workers))
    requests = [bags for of_worker in items for _, bags in of_worker]
    request_bytes = sum(b.ids_L.nbytes + (b.offsets.nbytes if b.offsets is not None else 0) for b in requests)
    return request_bytes + sum(2 * b.num_bags * of.dim * 4 for b in requests)


@pytest.mark.parametrize("placement", ["table", "row"])
@pytest.mark.parametrize("features", [{}, {"poolings": (Pooling.MEAN, Pooling.SUM)}])
@pytest.mark.parametrize("num_ids", [1, 6, 20])
@pytest.mark.parametrize("num_rows", [1, 50, 150, 300, 700, 5000])
def test_trainers_pool_if_that_moves_less_than_half_the_bytes(
    placement: str, features: dict[str, object], num_ids: int, num_rows: int
) -> None:
    of = table("a", num_rows, 8, placement=placement, **{"features": ("a", "b"), **features})
    shards = len(place([of], 3).shards)
    by_workers, by_trainers = (
        moved_bytes(dataclasses.replace(of, pooled_by=side), 3, 300, num_ids)
        for side in ("workers", "trainers")
    )
    expected = by_trainers < 0.5 * by_workers
    assert should_trainers_pool(of, shards, dict.fromkeys("ab", float(num_ids)), 300) is expected


@pytest.mark.parametrize("side", ["workers", "trainers"])
def test_workers_pool_bags_of_unknown_sizes_unless_the_table_names_a_side(side: str) -> None:
    of = table("a", 50)
    assert should_trainers_pool(of, 1, {"a": 6.0}, 300)
    assert not should_trainers_pool(of, 1, {"a": 6.0}, 0)
    assert not should_trainers_pool(of, 1, {}, 300)
    of = dataclasses.replace(of, pooled_by=side)
    assert should_trainers_pool(of, 1, {}, 300) is (side == "trainers")
    of = dataclasses.replace(of, poolings=(Pooling.MAX,))
    assert [should_trainers_pool(of, num_shards, {}, 300) for num_shards in (1, 2)] == [
        side == "trainers",
        True,
    ]
