"""``hybrid plan``: its output, the messages and bytes of a step, and memory."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from support.shards import requests_of
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.config import (
    ClusterSection,
    ColumnSection,
    DataSection,
    DenseSection,
    RunConfig,
    TableSection,
    TrainSection,
)
from hybrid.data.prepare.synthetic_log import TABLE_ROWS
from hybrid.embedding.bags import Bags, Item
from hybrid.embedding.placement import Placement, place
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.errors import ConfigError, DataError
from hybrid.input_spec import FeatureSpec, InputSpec
from workers.cli.planning import Hosts, Plan, distinct_rows, expected_data, make_plan, print_plan, traffic

HOST = Hosts(1, 2.0**34, 1e9)
Printed: TypeAlias = Callable[..., str]
HASHED: dict[str, Any] = {"path": ("no.tsv",), "vocabulary": "hash(77)"}


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """Print the plan of the synthetic click log."""
    monkeypatch.chdir(tmp_path)

    def plan(workers: int = 2, hosts: Hosts = HOST, **sections: object) -> str:
        cluster = ClusterSection(workers=workers)
        config = RunConfig(cluster=cluster, train=TrainSection(update="lookahead")).replace(**sections)
        print_plan(config, hosts, None)
        assert not list(tmp_path.iterdir()), "no data is made"
        return capsys.readouterr().out

    return plan


def test_output_has_each_table_and_worker(printed: Printed) -> None:
    tables = {"C1": TableSection(placement="row"), "C3": TableSection(optimizer="adam(all_rows = true)")}
    of_tables, of_workers, of_transfers, _ = printed(tables=tables).split("\n\n")
    placements = dict(re.findall(r"(?m)^(C\d+) .* (workers? [\d, ]+?) *$", of_tables))
    assert set(placements) == {f"C{k}" for k in range(1, 27)}
    assert placements.pop("C1") == "workers 0, 1"
    assert set(placements.values()) == {"worker 0", "worker 1"}
    assert [line.split()[0] for line in of_tables.splitlines() if "adam, all rows " in line] == ["C3"]
    by_worker = [line.split() for line in of_workers.splitlines()[1:]]
    assert [cells[0] for cells in by_worker] == ["0", "1"]
    assert sum(int(cells[1]) for cells in by_worker) == 27
    assert sum(int(cells[2].replace(",", "")) for cells in by_worker) > 150_000
    assert max(len(line.rstrip()) for line in of_tables.splitlines()) <= 70
    assert [line[:17] for line in of_transfers.splitlines()[1:]] == ["trainer -> worker", "worker -> trainer"]


@pytest.mark.parametrize(
    ("vocabulary", "rows", "is_assumed"),
    [("grow", 1_000_000, True), ("grow(max_rows = 3000000)", 3_000_000, False)],
)
def test_growing_tables_are_estimated(printed: Printed, vocabulary: str, rows: int, is_assumed: bool) -> None:
    data = DataSection(format="csv", path=("no.csv",), sparse=("a", "b"), vocabulary=vocabulary)
    text = printed(1, data=data)
    bytes_per_row = 2 * 16 * 4  # with the state of adagrad
    for name in ("a", "b"):
        (found,) = re.findall(rf"(?m)^{name} +([\d,]+) \(grows\) +16 +adagrad +([\d,.]+) ", text)
        assert int(found[0].replace(",", "")) == rows
        assert float(found[1].replace(",", "")) * 2**20 > rows * bytes_per_row
    assert ("growing " in text) == is_assumed


def test_output_has_the_side_that_pools(capsys: pytest.CaptureFixture[str]) -> None:
    data = DataSection(format="csv", path=("none",), label="y", sparse=("a", "b"), vocabulary="hash(100)")
    config = RunConfig(
        data=data,
        tables={"b": TableSection(placement='auto(pooled_by = "workers")')},
        dense=DenseSection(net="dcn_v2"),
    )
    print_plan(config, HOST, 5.0)
    of_tables = capsys.readouterr().out.split("\n\n")[0].splitlines()[1:]
    assert [line.split()[-1] for line in of_tables] == ["trainers", "workers"]


@pytest.mark.parametrize(
    ("memory", "verdict"), [(2.0**34, "suffices: .* 16.00"), (2.0**20, "DOES NOT SUFFICE: .* 0.00")]
)
def test_output_compares_memory(printed: Printed, memory: float, verdict: str) -> None:
    text = printed(hosts=dataclasses.replace(HOST, memory_bytes=memory))
    assert re.search(r"(?m)^memory      \d\.\d\d GiB a worker, .*; \d\.\d\d GiB a trainer$", text)
    assert re.search(rf"(?m)^            {verdict} GiB, besides .* the master$", text)


def test_ids_of_a_stream_are_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("label,a,b\n1,x|y,z\n")
    data = {"path": (str(tmp_path / "a.csv"),), "vocabulary": "hash(9)", "multi_hot_separator": "|"}
    print_plan(configured(**data, format="csv", sparse=("a", "b"), stream="files()"), HOST, None)
    assert re.search("(?m)^multi-hot +columns .* one id", capsys.readouterr().out)


def configured(**data: Any) -> RunConfig:
    return RunConfig(data=DataSection(**data))


def test_hashed_columns_of_one_id_need_no_file() -> None:
    spec, means = expected_data(configured(**HASHED, format="criteo"))
    assert (len(spec.dense_features), len(spec.sparse_features)) == (13, 26)
    assert {(f.num_rows, f.multi_hot) for f in spec.sparse_features} == {(77, False)}
    spec, means = expected_data(configured(**HASHED, format="csv", sparse=("a", "b")))
    assert ([f.name for f in spec.sparse_features], means) == (["a", "b"], {})
    spec, means = expected_data(RunConfig())
    assert ([f.num_rows for f in spec.sparse_features], means) == (list(TABLE_ROWS), {})


def test_given_ids_make_columns_multi_hot() -> None:
    spec, means = expected_data(configured(**HASHED, format="parquet", sparse=("a", "b")), 2.5)
    assert all(f.multi_hot for f in spec.sparse_features)
    assert means == {"a": 2.5, "b": 2.5}


CSV = configured(**HASHED, format="csv", sparse=("a", "b"))
WITH_COLUMNS = CSV.replace(columns={"a": ColumnSection(kind="hour")})


@pytest.mark.parametrize(
    "config",
    [
        configured(**HASHED, format="csv", sparse=("a",), multi_hot_separator="|"),
        configured(format="criteo", path=("no.tsv",)),
        WITH_COLUMNS,
    ],
    ids=["separator", "vocabulary", "columns"],
)
def test_other_columns_need_files(config: RunConfig) -> None:
    with pytest.raises(DataError, match=r"^no\.tsv: "):
        expected_data(config)


@pytest.mark.parametrize("config", [RunConfig(), configured(format="criteo", path=("x",)), WITH_COLUMNS])
def test_ids_need_hashed_columns(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"^--ids = 2.0: .*data\.vocabulary"):
        expected_data(config, 2.0)


SPEC = InputSpec(("x", "y"), tuple(FeatureSpec(f"c{k}", 1000) for k in range(4)))


def plan(hosts: Hosts | int = 1, **sections: dict[str, Any]) -> Plan:
    """Plan a lookahead run; keyword arguments are keys of their sections."""
    config = RunConfig()
    sections["train"] = {"update": "lookahead"} | sections.get("train", {})
    for name, keys in sections.items():
        config = config.replace(**{name: dataclasses.replace(getattr(config, name), **keys)})
    if isinstance(hosts, int):
        hosts = Hosts(hosts, math.inf, math.inf)
    return make_plan(config, SPEC, {}, hosts)


@pytest.mark.parametrize(
    ("train", "trainers", "workers", "hosts", "expected"),
    [
        ({"update": "async"}, 3, 2, 1, 6),
        ({"update": "sync"}, 3, 2, 1, 12),
        ({"micro_batches": 4}, 3, 2, 1, 24),
        ({}, 8, 8, 2, 64),
    ],
    ids=str,
)
def test_messages(train: dict[str, Any], trainers: int, workers: int, hosts: int, expected: int) -> None:
    found = plan(hosts, train=train, cluster={"trainers": trainers, "workers": workers}).transfers
    assert [found[name][0] for name in ("trainer -> worker", "worker -> trainer")] == [expected] * 2


def test_bytes_between_hosts_limit_the_network() -> None:
    """Trainer 0 with worker 1, trainer 1 with workers 0 and 2, and a ring of two."""
    found = plan(Hosts(2, math.inf, 1.0), cluster={"trainers": 2, "workers": 3})
    up_W, down_W = found.traffic.up_bytes_W, found.traffic.down_bytes_W
    messages, ring = found.transfers["trainer -> trainer"]
    assert messages == 4
    out = (up_W[0] + up_W[2] + down_W[1], up_W[1] + down_W[0] + down_W[2])
    assert found.network_seconds == pytest.approx(max(out) + ring / 2)


def test_memory_of_workers_has_rows_state_and_the_copy_of_a_checkpoint() -> None:
    """Adagrad has a value of state for each of 16 values of 4 bytes."""
    few, many = (
        make_plan(RunConfig(), InputSpec((), (FeatureSpec("a", rows), FeatureSpec("b", 9))), {}, HOST)
        for rows in (10**6, 3 * 10**6)
    )
    assert many.host_bytes - few.host_bytes == pytest.approx(2 * 10**6 * 32 * 4 * 2, rel=0.01)


def test_any_dense_net_has_a_plan() -> None:
    for dense in ({"remote_mlp": (8,)}, {"tensor_size": 2}, {"device": "cuda:1"}, {"device": "cpu,cpu"}):
        assert plan(dense=dense).trainer_bytes > 52e6


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


def request_sizes(tables: list[TableSpec], placement: Placement, bags: list[int]) -> list[tuple[int, int]]:
    """Return the bytes of ids, and the number of vectors, that a batch requests from each worker."""
    lengths_KB = torch.ones(len(tables), SAMPLES, dtype=torch.int64)
    lengths_KB[[*bags, *(k for k, table in enumerate(tables) if table.sequence)]] = HOTNESS
    sizes = lengths_KB.sum(1).tolist()
    ids = [skewed(t.num_rows, n, seed) for seed, (t, n) in enumerate(zip(tables, sizes, strict=True))]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_KB.flatten().cumsum(0)])
    sparse = SparseFeatures(torch.cat(ids), offsets, None, len(tables))
    requests = requests_of(tables, bags, sparse, placement)
    return [(sum(map(_id_bytes, of)), sum(b.num_bags for _, b in of)) for of in requests]


def _id_bytes(item: Item) -> int:
    bags: Bags = item[1]
    return bags.ids_L.nbytes + (0 if bags.offsets is None else bags.offsets.nbytes)


@pytest.mark.parametrize(
    ("bags", "sequences", "by_trainers"),
    [
        *(([], [], ""), ([0, 2], [], ""), ([0, 1, 2], [], "")),
        *(([], [], "ab"), ([0, 2], [], "ab"), ([0, 1, 2], [], "abc")),
        *(([], [0], ""), ([], [0, 1, 2], "")),
    ],
    ids=str,
)
def test_traffic_equals_bytes_of_a_batch(bags: list[int], sequences: list[int], by_trainers: str) -> None:
    tables = [table("a", 300, "row"), table("b", 5_000), table("c", 90_000, "row")]
    for k in sequences:
        tables[k] = dataclasses.replace(tables[k], sequences=(HOTNESS + 2,))
    placement = dataclasses.replace(place(tables, 3), pooled_by_trainers=tuple(by_trainers))
    means = {tables[k].name: float(HOTNESS) for k in (*bags, *sequences)}
    found = traffic(tables, placement, means, SAMPLES)
    read = [each.for_feature(each.name) for each in tables]
    for worker, (id_bytes, vectors) in enumerate(request_sizes(read, placement, bags)):
        vector_bytes = vectors * 8 * 4
        spread = 0.1 if by_trainers or sequences else 0.05  # distinct rows of a shard are few
        assert found.down_bytes_W[worker] == pytest.approx(vector_bytes, rel=spread)
        assert found.up_bytes_W[worker] == pytest.approx(id_bytes + vector_bytes, rel=spread)
    if sequences:
        assert found.vector_values == SAMPLES * sum(each.num_vectors for each in read) * 8


def test_each_shard_of_a_pooled_table_sends_partial_vectors() -> None:
    tables = [table("a", 10, "row")]
    one_id, pooled = (traffic(tables, place(tables, 5), means, 100) for means in ({}, {"a": 3.0}))
    assert (one_id.vector_values, pooled.vector_values) == (100 * 8, 100 * 8 * 5)
    placement = dataclasses.replace(place(tables, 5), pooled_by_trainers=("a",))
    assert traffic(tables, placement, {"a": 3.0}, 100).vector_values == 100 * 3 * 8
