"""The output of ``hybrid plan``, and columns that are known without reading files."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from hybrid.config import (
    ClusterSection,
    ColumnSection,
    DataSection,
    DenseSection,
    EmbeddingSection,
    RunConfig,
    TableSection,
    TrainSection,
)
from hybrid.data.prepare.synthetic_log import TABLE_ROWS
from hybrid.errors import ConfigError, DataError
from workers.planning.plan_report import expected_data, print_plan
from workers.planning.step_model import Hosts

HOST = Hosts(1, 4, 2.0**34, 1e9)
Planned: TypeAlias = Callable[..., str]
HASHED: dict[str, Any] = {"path": ("no.tsv",), "vocabulary": "hash(77)"}
Configured: TypeAlias = Callable[..., RunConfig]


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Planned:
    """Print the plan of the synthetic click log."""

    def plan(trainers: int = 2, workers: int = 2, hosts: Hosts = HOST, **sections: object) -> str:
        cluster = ClusterSection(trainers=trainers, workers=workers)
        config = RunConfig(cluster=cluster, train=TrainSection(update="pipelined")).replace(**sections)
        print_plan(config, tmp_path, hosts, None)
        assert not list(tmp_path.iterdir()), "no data is made"
        return capsys.readouterr().out

    return plan


def test_every_table_and_every_worker(planned: Planned) -> None:
    of_tables, of_workers, *_ = planned().split("\n\n")
    assert len(re.findall(r"(?m)^C\d+ .* worker [01]", of_tables)) == 26
    by_worker = [line.split() for line in of_workers.splitlines()[1:]]
    assert [cells[0] for cells in by_worker] == ["0", "1"]
    assert sum(int(cells[1]) for cells in by_worker) == 26
    assert sum(int(cells[2].replace(",", "")) for cells in by_worker) > 150_000


def test_optimizers_that_step_all_rows(planned: Planned) -> None:
    embedding = EmbeddingSection(optimizer="adam(weight_decay = 0.1)")
    all_rows = "adam(weight_decay = 0.1, all_rows = true)"
    of_tables = planned(
        embedding=embedding,
        tables={"C3": TableSection(optimizer=all_rows)},
    ).split("\n\n")[0]
    assert [line.split()[0] for line in of_tables.splitlines() if "adam, all rows " in line] == ["C3"]


def test_the_role_that_pools_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = DataSection(format="csv", path=("none",), label="y", sparse=("a", "b"), vocabulary="hash(100)")
    config = RunConfig(
        cluster=ClusterSection(trainers=2),
        data=data,
        train=TrainSection(batch_size=1024),
        tables={"b": TableSection(placement='auto(pooled_by = "workers")')},
        dense=DenseSection(net="dcn_v2"),
    )
    print_plan(config, tmp_path, HOST, 5.0)
    of_tables = capsys.readouterr().out.split("\n\n")[0].splitlines()[1:]
    assert [line.split()[4] for line in of_tables] == ["trainers", "workers"]


def test_equal_workers_share_a_line(planned: Planned) -> None:
    """26 unsharded tables on 100 workers: most workers are empty."""
    of_workers = planned(workers=100).split("\n\n")[1].splitlines()
    assert len(of_workers) < 40
    assert re.search(r"(?m)^[\d, -]+ +0 +0 +0.00 +0.00$", "\n".join(of_workers))


@pytest.mark.parametrize(
    ("hosts", "line"),
    [
        (HOST, r"suffices: a host needs 0\.\d\d GiB of its 16.00 GiB"),
        (
            dataclasses.replace(HOST, memory_bytes=2.0**20),
            r"DOES NOT SUFFICE: a host needs 0\.\d\d GiB of its 0.00",
        ),
    ],
    ids=["enough", "too little"],
)
def test_memory(planned: Planned, hosts: Hosts, line: str) -> None:
    printed = planned(hosts=hosts)
    assert re.search(r"(?m)^memory      \d\.\d\d GiB a worker, \d\.\d\d GiB a trainer$", printed)
    assert re.search(rf"(?m)^            {line}", printed)


def test_the_speed_and_its_limit(planned: Planned) -> None:
    printed = planned(2, 2, Hosts(4, 1, math.inf, 1e6))
    assert re.search(r"(?m)^limited by  network of a host$", printed)
    rate, samples, milliseconds = re.findall(
        r"(?m)^samples/s   ([\d,]+) \(([\d,]+) samples in ([\d,.]+) ms", printed
    )[0]
    numbers = [float(text.replace(",", "")) for text in (rate, samples, milliseconds)]
    assert numbers[0] == pytest.approx(numbers[1] / numbers[2] * 1e3, rel=0.05)
    assert re.search(r"(?m)^limited by  trainers' cores \(\w.* \d+%, .*%\)$", planned())


@pytest.fixture
def configured() -> Configured:
    """Configurations with some keys of the section [data]."""

    def build(data: dict[str, Any] | None = None) -> RunConfig:
        config = RunConfig()
        return config.replace(data=dataclasses.replace(config.data, **(data or {})))

    return build


def test_the_click_log_is_not_prepared(configured: Configured, tmp_path: Path) -> None:
    spec, means = expected_data(configured(), tmp_path)
    assert [f.num_rows for f in spec.sparse_features] == list(TABLE_ROWS)
    assert means == {}
    assert not list(tmp_path.iterdir())


def test_hashed_columns_of_one_id_need_no_file(configured: Configured, tmp_path: Path) -> None:
    spec, means = expected_data(configured(data=HASHED | {"format": "criteo"}), tmp_path)
    assert (len(spec.dense_features), len(spec.sparse_features)) == (13, 26)
    assert {(f.num_rows, f.multi_hot) for f in spec.sparse_features} == {(77, False)}
    csv = HASHED | {"format": "csv", "sparse": ("a", "b"), "dense": ("x",)}
    spec, means = expected_data(configured(data=csv), tmp_path)
    assert [f.name for f in spec.sparse_features] == ["a", "b"]
    assert means == {}


def test_given_ids_make_columns_multi_hot(configured: Configured, tmp_path: Path) -> None:
    parquet = HASHED | {"format": "parquet", "sparse": ("a", "b")}
    spec, means = expected_data(configured(data=parquet), tmp_path, 2.5)
    assert all(f.multi_hot for f in spec.sparse_features)
    assert means == {"a": 2.5, "b": 2.5}


@pytest.mark.parametrize(
    "data",
    [
        HASHED | {"format": "parquet", "sparse": ("a",)},
        HASHED | {"format": "csv", "sparse": ("a",), "multi_hot_separator": "|"},
        {"format": "criteo", "path": ("no.tsv",)},
    ],
    ids=["parquet", "separator", "vocabulary"],
)
def test_other_columns_need_files(configured: Configured, data: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^no.tsv: no such file or folder"):
        expected_data(configured(data=data), tmp_path)


@pytest.mark.parametrize("data", [{}, {"format": "criteo", "path": ("no.tsv",)}], ids=["synthetic", "built"])
def test_ids_need_hashed_columns(configured: Configured, data: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--ids = 2.0: .*data\.vocabulary"):
        expected_data(configured(data=data), tmp_path, 2.0)


def test_sections_of_columns_need_files(configured: Configured, tmp_path: Path) -> None:
    csv = configured(data=HASHED | {"format": "csv", "sparse": ("a", "b")})
    config = csv.replace(columns={"a": ColumnSection(kind="hour")})
    with pytest.raises(DataError, match=r"^no.tsv: no such file or folder"):
        expected_data(config, tmp_path)
    with pytest.raises(ConfigError, match=r"^--ids = 2.0: .*columns"):
        expected_data(config, tmp_path, 2.0)
