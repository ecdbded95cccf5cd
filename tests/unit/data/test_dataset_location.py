"""Prepared data in a store: they are sent once, found again, and opened by their URL."""

import dataclasses
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.samples import csv_config, write
from support.stores import BUCKET, Store

from hybrid.config import RunConfig, TaskSection
from hybrid.config.loading import validate
from hybrid.data.batches.batch_loader import BatchLoader
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.dataset.remote_dataset import StoreFolder
from hybrid.data.prepare.dataset_location import (
    ensure_prepared,
    open_split,
    read_encoder,
    source_of,
)
from hybrid.data.prepare.preparation import cache_folder, prepare
from hybrid.errors import ConfigError, DataError, StorageError
from hybrid.storage.files import list_entries, remove, write_bytes
from hybrid.storage.remote_path import RemotePath, parse_path


def config_of(folder: Path, cache: str = "", name: str = "train.csv") -> RunConfig:
    rows = "".join(f"{i % 2},{i},c{i % 7}\n" for i in range(6000))
    path = write(folder / name, f"label,x,c\n{rows}")
    config = csv_config(path, dense=("x",), sparse=("c",), test_fraction=0.1, cache_folder=cache)
    data = dataclasses.replace(config.data, local_cache_folder=str(folder / "local"))
    return config.replace(data=data)


@pytest.fixture
def cache(store: Store, tmp_path: Path) -> RemotePath:
    found = parse_path(f"s3://{BUCKET}/{tmp_path.name}")
    assert isinstance(found, RemotePath)
    return found


def rows_of(dataset: PreparedDataset) -> list[float]:
    with BatchLoader(dataset, batch_size=900, shuffle=True).batches(0) as stream:
        rows = [x for batch in stream for x in batch.dense_features[:, 0].tolist()]
    dataset.close()
    return rows


def test_data_are_sent_once_and_equal_those_on_disk(tmp_path: Path, cache: RemotePath) -> None:
    config = config_of(tmp_path, str(cache))
    assert cache_folder(config) == cache
    said: list[str] = []
    folder = ensure_prepared(config, cache, said.append)
    assert source_of(folder).startswith(f"{cache}/")
    assert said[-1] == f"sending the prepared data to {source_of(folder)}"
    here = prepare(config, tmp_path / "cache")
    for split in ("train", "test"):
        expected = PreparedDataset.open(here, split)
        for source in (folder, source_of(folder)):
            assert rows_of(open_split(source, split, config.data)) == rows_of(expected)
        far = open_split(folder, split, config.data)
        np.testing.assert_array_equal(far.source_rows, expected.source_rows)
    assert read_encoder(source_of(folder)).text == read_encoder(source_of(here)).text
    assert (folder / "manifest.json").read_bytes() == (here / "manifest.json").read_bytes()
    assert list(tmp_path.glob("local/sent/prepared/*")) == [], "no rows are kept here"
    said.clear()
    before = list_entries(cache, is_deep=True)
    assert ensure_prepared(config, cache, said.append) == folder
    assert said == [f"prepared data found in {source_of(folder)}"]
    assert list_entries(cache, is_deep=True) == before


def test_data_of_another_host_are_found(tmp_path: Path, cache: RemotePath) -> None:
    config = config_of(tmp_path, str(cache))
    first = ensure_prepared(config, cache)
    elsewhere = dataclasses.replace(config.data, local_cache_folder=str(tmp_path / "other"))
    said: list[str] = []
    second = ensure_prepared(config.replace(data=elsewhere), cache, said.append)
    assert said == [f"prepared data found in {source_of(first)}"]
    assert second != first
    assert source_of(second) == source_of(first)


def test_failed_attempt_leaves_nothing_in_the_store(
    tmp_path: Path, cache: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, write_file = config_of(tmp_path, str(cache)), StoreFolder.write

    def fail(folder: StoreFolder, name: str, parts: Iterator[bytes]) -> None:
        if name == "test/samples.index":
            assert list_entries(cache, is_deep=True), "there is something to remove"
            raise StorageError("s3://bucket: cannot be written")
        write_file(folder, name, parts)

    with monkeypatch.context() as patch:
        patch.setattr(StoreFolder, "write", fail)
        with pytest.raises(StorageError, match="cannot be written"):
            ensure_prepared(config, cache)
    assert list_entries(cache, is_deep=True) == []
    assert rows_of(open_split(ensure_prepared(config, cache), "train", config.data))


def test_ended_run_stops_sending(tmp_path: Path, cache: RemotePath) -> None:
    config, said = config_of(tmp_path, str(cache)), list[str]()

    def check() -> None:
        if any(line.startswith("sending") for line in said):
            raise DataError("the run has ended")

    with pytest.raises(DataError, match="the run has ended"):
        ensure_prepared(config, cache, said.append, check)
    assert list_entries(cache, is_deep=True) == []
    assert said[-1].startswith("sending")


def test_empty_split_is_sent(tmp_path: Path, cache: RemotePath) -> None:
    config = config_of(tmp_path, str(cache))
    config = config.replace(data=dataclasses.replace(config.data, test_fraction=0.0))
    folder = ensure_prepared(config, cache)
    assert rows_of(open_split(folder, "test", config.data)) == []
    assert len(rows_of(open_split(folder, "train", config.data))) == 6000


def test_removed_data_are_a_one_line_error(tmp_path: Path, cache: RemotePath) -> None:
    config = config_of(tmp_path, str(cache))
    folder = ensure_prepared(config, cache)
    target = parse_path(source_of(folder))
    (attempt,) = [each.path for each in list_entries(target) if each.is_folder]
    remove(attempt / "train" / "samples.index")
    with pytest.raises(
        DataError, match=r"^s3://.*: lacks train/samples\.index; delete it, and it is prepared anew$"
    ):
        open_split(folder, "train", config.data)
    write_bytes(attempt / "manifest.json", b"{}")
    with pytest.raises(
        DataError, match=r"^s3://.*/manifest\.json: altered since it was prepared; delete s3://"
    ):
        open_split(folder, "train", config.data)
    remove(target)
    with pytest.raises(DataError, match=r"^s3://.*: holds no prepared data any more; start anew$"):
        open_split(folder, "train", config.data)
    assert rows_of(open_split(ensure_prepared(config, cache), "train", config.data))


def test_ended_run_does_not_wait_for_the_lock(tmp_path: Path, cache: RemotePath) -> None:
    config = config_of(tmp_path, str(cache))
    folder = ensure_prepared(config, cache)
    descriptor = os.open(folder.with_suffix(".lock"), os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)

        def check() -> None:
            raise DataError("the run has ended")

        with pytest.raises(DataError, match="the run has ended"):
            ensure_prepared(config, cache, check=check)
    finally:
        os.close(descriptor)


def test_ranking_losses_need_a_local_cache_folder(tmp_path: Path) -> None:
    config = config_of(tmp_path, "s3://bucket/prepared")
    data = dataclasses.replace(config.data, group="c")
    ranked = {"click": TaskSection(label="label", ranking_loss="pairwise")}
    validate(config.replace(data=data))
    with pytest.raises(
        ConfigError, match=r"^data\.cache_folder = 's3://bucket/prepared': must be a folder where"
    ):
        validate(config.replace(data=data, tasks=ranked))
