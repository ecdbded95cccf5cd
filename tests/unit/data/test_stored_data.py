"""Input files and prepared data in a store equal those on a disk; errors of the store are one line."""

import dataclasses
import errno
import gzip
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.samples import csv_config, write
from support.stores import Proxy, Store, sent

from hybrid.config import RunConfig
from hybrid.data.batches import BatchLoader
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.parse import delimited_text
from hybrid.data.parse.input_files import find_input_files, list_files, path_columns
from hybrid.data.prepare import file_preparation
from hybrid.data.prepare.preparation import ensure_prepared, fingerprint, open_split, prepare
from hybrid.errors import DataError, StorageError
from hybrid.storage import files
from hybrid.storage.files import list_entries, read_bytes, remove, write_bytes
from hybrid.storage.remote_path import RemotePath, StoragePath, parse_path

BLOCK_BYTES = 9000


def columns(num_rows: int, seed: int) -> dict[str, list[object]]:
    draw = random.Random(seed)
    return {
        "label": [draw.randrange(2) for _ in range(num_rows)],
        "x": [draw.gauss(0, 9) for _ in range(num_rows)],
        "user": [f"u{int(2 ** (7 * draw.random()))}, or so" for _ in range(num_rows)],
    }


def text(num_rows: int, seed: int) -> str:
    rows = zip(*columns(num_rows, seed).values(), strict=True)
    return "label,x,user\n" + "".join(f'{label},{x:.3f},"{user}"\n' for label, x, user in rows)


def write_csv(folder: Path) -> None:
    for i in range(2):
        write(folder / f"{i}.csv", text(2500, i))


def write_gzip(folder: Path) -> None:
    for i in range(2):
        write(folder / f"{i}.csv.gz", gzip.compress(text(1500, i).encode()))


def write_parquet(folder: Path) -> None:
    # Names that are written otherwise in a URL have their order all the same.
    for i, name in enumerate(("a b", "a%2", "é")):
        pq.write_table(pa.table(columns(900, i)), folder / f"{name}.parquet", row_group_size=200)


def config_of(*paths: StoragePath, **keys: Any) -> RunConfig:
    config = csv_config(*paths, dense=("x",), sparse=("user",), numeric_scaling="min_max")
    return config.replace(data=replace(config.data, **keys))


def samples_of(folder: Path) -> dict[str, bytes]:
    """Return the files of prepared data that do not hold the names of input files."""
    names = [*folder.rglob("*.npy"), folder / "features.json", *folder.glob("*.parquet")]
    assert len(names) > 4
    return {str(path.relative_to(folder)): path.read_bytes() for path in names}


@pytest.mark.parametrize(("write_files", "threads"), [(write_csv, 2), (write_gzip, 1), (write_parquet, 1)])
def test_samples_of_stored_files_equal_those_of_local_files(
    write_files: Callable[[Path], None],
    threads: int,
    tmp_path: Path,
    there: RemotePath,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the store, the files have many segments, which several threads read; on the disk, each has one."""
    (here := tmp_path / "here").mkdir()
    write_files(here)
    sent(here, there)
    kind = "parquet" if write_files is write_parquet else "csv"
    expected = prepare(config_of(here, format=kind), tmp_path / "cache")
    monkeypatch.setattr(delimited_text, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr("hybrid.data.parse.sources.SEGMENT_ROWS", 500)
    monkeypatch.setattr(file_preparation, "_BYTES_PER_THREAD", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(threads))
    found = prepare(config_of(there, format=kind), tmp_path / "cache")
    assert found != expected
    assert samples_of(found) == samples_of(expected)


def test_segments_of_stored_files_are_read_once(
    tmp_path: Path, there: RemotePath, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text is fetched once, except for the starts of segments; of Parquet, only required columns are."""
    (here := tmp_path / "here").mkdir()
    write(here / "a.csv", text(15_000, 1))
    rows = columns(9_000, 1)
    pq.write_table(pa.table({**rows, **{f"other{i}": rows["x"] for i in range(9)}}), here / "a.parquet")
    sent(here, there)
    monkeypatch.setattr(delimited_text, "BLOCK_BYTES", 50_000)
    for name in ("MAX_RECORD_BYTES", "PEEK_BYTES"):
        monkeypatch.setattr(f"hybrid.data.parse.delimited_text.{name}", 2000)
    for name, least, most in (("a.csv", 1.0, 1.3), ("a.parquet", 0.2, 0.5)):
        with Proxy(store) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{proxy.address}")
            prepare(config_of(there / name, format=name[2:]), tmp_path / "cache")
        assert least < proxy.num_bytes / (here / name).stat().st_size < most


def test_rewritten_stored_file_has_another_fingerprint(tmp_path: Path, there: RemotePath) -> None:
    file = there / "a.csv"
    files.write_bytes(file, text(200, 1).encode())
    config = config_of(file)
    before = fingerprint(config)
    assert fingerprint(config) == before
    (found,) = find_input_files(config.data)["train"]
    assert (found.path, found.real_path, found.sampled) == (str(file), str(file), files.content_tag(file))
    files.write_bytes(file, text(200, 1).replace("\n1,", "\n0,", 1).encode())
    assert fingerprint(config) != before

    def write_again(line: str) -> None:
        files.write_bytes(file, text(200, 2).encode())

    with pytest.raises(DataError, match=f"^{file}: "):
        prepare(config, tmp_path / "cache", write_again)
    assert not list((tmp_path / "cache").iterdir())


def test_folder_lists_its_files(folder: StoragePath) -> None:
    days = folder / "days"

    def listed(path: str = str(days)) -> list[StoragePath]:
        return [*list_files([path], "data.path")]

    def add(name: str) -> StoragePath:
        if isinstance(days, Path):
            (days / name).parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(days / name, b"1")
        return days / name

    own = [add(name) for name in ("_SUCCESS", ".hidden/a", "_temporary/a", "a b", "b")][3:]
    assert listed() == own
    parts = [add(f"day={day}/a") for day in ("1", "a b")]
    assert listed() == [*own, *parts]
    assert listed(f"{days}/day=*/?") == parts
    assert listed(f"{days}/day=[1-9]") == parts[:1]
    assert path_columns(parse_path(str(parts[1]))) == {"day": "a b"}
    add("old/a")
    with pytest.raises(DataError, match=r"old: .*data\.path"):
        listed()


def test_missing_bucket_is_refused(store: Store) -> None:
    with pytest.raises(StorageError, match="no-such-bucket"):
        list_files(["s3://no-such-bucket/a.csv"], "data.path")


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


def test_data_are_sent_once_as_on_disk(tmp_path: Path, there: RemotePath, config: RunConfig) -> None:
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


def test_ended_runs_clean_up(there: RemotePath, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_last(path: StoragePath, content: bytes) -> None:
        if path.name == "attempt.txt":
            assert list_entries(there, is_deep=True), "there is none to remove"
            raise DataError("ended")
        write_bytes(path, content)

    with monkeypatch.context() as patched:
        patched.setattr("hybrid.storage.files.write_bytes", write_last)
        with pytest.raises(DataError, match="ended"):
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


@pytest.mark.parametrize("name", ["manifest.json", "features.json"])
def test_incomplete_data_are_sent_again(tmp_path: Path, config: RunConfig, name: str) -> None:
    folder = ensure_prepared(config)
    assert isinstance(folder, RemotePath)
    remove(folder / name)
    sent_again = ensure_prepared(config)
    assert sent_again != folder
    assert rows_of(open_split(sent_again, "train", on_host(config, tmp_path / "other").data))
    assert ensure_prepared(config) == sent_again


def test_local_folder_is_checked(tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ensure_prepared(config)
    with pytest.raises(DataError, match=r"train\.csv: .*data\.local_cache_folder"):
        open_split(folder, "train", on_host(config, tmp_path / "train.csv").data)
    remove(parse_path(folder).parent)
    with pytest.raises(DataError, match=r"train\.csv: .*data\.local_cache_folder"):
        ensure_prepared(on_host(config, tmp_path / "train.csv"))

    def fail(line: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DataError, match=r"No space left on device.*data\.local_cache_folder"):
        ensure_prepared(on_host(config, tmp_path / "full"), fail)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(DataError, match=r"another user; set data\.local_cache_folder"):
        ensure_prepared(config)
