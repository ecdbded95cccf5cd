"""Prepared data in a store: sent once, found again, and fetched once by each host."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from support.samples import csv_config, write

from hybrid.config import RunConfig
from hybrid.data.batches import BatchLoader
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.prepare.preparation import ensure_prepared, open_split, prepare
from hybrid.errors import DataError
from hybrid.storage.files import list_entries, read_bytes, remove, write_bytes
from hybrid.storage.remote_path import RemotePath, StoragePath


def on_host(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration of a role on a host with this local folder."""
    return config.replace(data=dataclasses.replace(config.data, local_cache_folder=str(folder)))


@pytest.fixture
def config(tmp_path: Path, there: RemotePath) -> RunConfig:
    """A configuration with prepared data in the store."""
    rows = "".join(f"{i % 2},{i},c{i % 7}\n" for i in range(6000))
    path = write(tmp_path / "train.csv", f"label,x,c\n{rows}")
    config = csv_config(path, dense=("x",), sparse=("c",), cache_folder=str(there))
    return on_host(config, tmp_path / "local")


def rows_of(dataset: PreparedDataset) -> list[float]:
    with BatchLoader(dataset, batch_size=900, shuffle=True).batches(0) as stream:
        return [x for batch in stream for x in batch.dense_features[:, 0].tolist()]


def test_data_are_sent_once_and_equal_those_on_disk(
    tmp_path: Path, there: RemotePath, config: RunConfig
) -> None:
    lines: list[str] = []
    folder = ensure_prepared(config, lines.append)
    assert f"sending the prepared data to {folder.parent}" in lines
    local = prepare(config, tmp_path / "cache")
    other_host = on_host(config, tmp_path / "other")
    for split in ("train", "test"):
        expected = PreparedDataset(local, split)
        for source in (folder, str(folder)):
            for each in (config, other_host):
                assert rows_of(open_split(source, split, each.data)) == rows_of(expected)
        fetched = open_split(folder, split, other_host.data)
        np.testing.assert_array_equal(fetched.source_rows, expected.source_rows)
    assert FeatureEncoder.load(folder) == FeatureEncoder.load(local)
    names = sorted(str(path.relative_to(local)) for path in local.rglob("*"))
    for host in ("local", "other"):
        (found,) = (tmp_path / host).iterdir()
        assert sorted(str(path.relative_to(found)) for path in found.rglob("*")) == names
    lines.clear()
    before = list_entries(there, is_deep=True)
    for each in (config, other_host):
        assert ensure_prepared(each, lines.append) == folder
    assert lines == [f"prepared data found in {folder.parent}"] * 2
    assert list_entries(there, is_deep=True) == before


def test_ended_run_leaves_nothing_in_the_store(
    there: RemotePath, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_last(path: StoragePath, content: bytes) -> None:
        if path.name == "attempt.txt":
            assert list_entries(there, is_deep=True), "there is none to remove"
            raise DataError("the run has ended")
        write_bytes(path, content)

    with monkeypatch.context() as patched:
        patched.setattr("hybrid.storage.files.write_bytes", write_last)
        with pytest.raises(DataError, match="the run has ended"):
            ensure_prepared(config)
    assert list_entries(there, is_deep=True) == []
    assert rows_of(open_split(ensure_prepared(config), "train", config.data))


def test_altered_and_removed_data_are_refused(tmp_path: Path, there: RemotePath, config: RunConfig) -> None:
    folder, other_host = ensure_prepared(config), on_host(config, tmp_path / "other")
    before = read_bytes(folder / "train/source_rows.npy")
    write_bytes(folder / "train/source_rows.npy", b"altered")
    with pytest.raises(DataError, match=r"^s3://.*/source_rows\.npy: altered"):
        open_split(folder, "train", other_host.data)
    remove(folder / "train/source_rows.npy")
    with pytest.raises(DataError, match=r"^s3://.*/source_rows\.npy"):
        open_split(folder, "train", other_host.data)
    assert [path.name for path in (tmp_path / "other").iterdir()] == [], "nothing is left"
    write_bytes(folder / "train/source_rows.npy", before)
    write_bytes(folder / "features.json", b"{}")
    with pytest.raises(DataError, match=r"^s3://.*/features\.json: altered"):
        ensure_prepared(config)
    remove(folder.parent)
    assert rows_of(open_split(ensure_prepared(config), "train", config.data))


def test_unusable_local_folder_is_reported(tmp_path: Path, there: RemotePath, config: RunConfig) -> None:
    folder = ensure_prepared(config)
    with pytest.raises(DataError, match=r"train\.csv: .*data\.local_cache_folder"):
        open_split(folder, "train", on_host(config, tmp_path / "train.csv").data)
