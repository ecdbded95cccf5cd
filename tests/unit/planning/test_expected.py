"""Columns that are known without reading files."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from hybrid.config import ColumnSection, RunConfig
from hybrid.data.prepare.synthetic_log import TABLE_ROWS
from hybrid.errors import ConfigError, DataError
from workers.planning.plan_report import expected_data

HASHED: dict[str, Any] = {"path": ("no.tsv",), "vocabulary": "hash(77)"}
Configured: TypeAlias = Callable[..., RunConfig]


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
