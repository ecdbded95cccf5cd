"""Input files: changes are detected, and unsuitable files are refused."""

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from support.samples import csv_config, prepared, read

from hybrid.config import DataSection, RunConfig, RunSection
from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.dataset_manifest import DataManifest
from hybrid.data.parse.column_check import check_columns
from hybrid.data.parse.input_files import find_input_files, list_files
from hybrid.data.prepare.preparation import fingerprint, prepare
from hybrid.errors import ConfigError, DataError

config_of = partial(csv_config, sparse=("c",))


def write(path: Path, num_rows: int = 200, label: Callable[[int], int] = lambda i: i % 2) -> Path:
    """A CSV of two columns and rows of 8 bytes each, the header as well."""
    path.write_text("label,c\n" + "".join(f"{label(i)},{i % 97:05}\n" for i in range(1, num_rows)))
    return path


def replace(path: Path, old: bytes, new: bytes, at: int = 0) -> None:
    """Replace ``old`` by ``new``; size and modification time stay the same."""
    assert len(old) == len(new)
    before = path.stat()
    content = path.read_bytes()
    place = content.index(old, at)
    path.write_bytes(content[:place] + new + content[place + len(old) :])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_replaced_file_of_equal_size_and_time_is_prepared_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv")
    first = prepare(config_of(path), tmp_path / "cache")
    replace(path, b"\n1,", b"\n0,")
    assert prepare(config_of(path), tmp_path / "cache") != first


def test_resumed_run_names_the_changed_input(tmp_path: Path) -> None:
    def manifest_of(config: RunConfig) -> DataManifest:
        return DataManifest.read(prepare(config, tmp_path / "cache") / dataset_manifest.FILE_NAME)

    def refused(config: RunConfig) -> str:
        with pytest.raises(DataError) as caught:
            then.check_same(manifest_of(config), "resume")
        return str(caught.value)

    first, second = write(tmp_path / "a.csv"), write(tmp_path / "b.csv")
    config = config_of(first, second)
    then = manifest_of(config)
    assert refused(config.replace(run=RunSection(seed=9))).endswith("; resume")
    assert refused(config_of(first)).startswith("data.path names 1 file(s), and 2")
    moved = first.rename(tmp_path / "c.csv")
    then.check_same(manifest_of(config_of(moved, second)), "resume")  # the samples are the same
    replace(second, b"\n1,", b"\n0,")
    assert refused(config_of(moved, second)).startswith(f"{second}: ")


def test_file_that_changes_during_preparation_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv")

    def append(line: str) -> None:
        with path.open("a") as file:
            file.write("1,00001\n")

    with pytest.raises(DataError, match=f"{path}: has changed"):
        prepare(config_of(path), tmp_path / "cache", append)
    assert not list((tmp_path / "cache").iterdir())


def test_training_file_as_test_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv")
    copy, link = tmp_path / "copy.csv", tmp_path / "link.csv"
    copy.write_bytes(path.read_bytes())
    link.symlink_to(path)
    for twin in (path, copy, link):
        with pytest.raises(ConfigError, match=rf"data\.test_path = '{twin}': .* {path} of data\.path"):
            find_input_files(config_of(path, test_path=(str(twin),)).data)
    empty = [tmp_path / "1.csv", tmp_path / "2.csv"]
    for each in empty:
        each.touch()
    find_input_files(config_of(empty[0], test_path=(str(empty[1]),)).data)


def test_nested_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.csv")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "_temporary").mkdir()
    assert list_files((str(tmp_path),), "data.path") == (tmp_path / "a.csv",)
    (tmp_path / "old").mkdir()
    with pytest.raises(DataError, match=r"old: .*data\.path"):
        list_files((str(tmp_path),), "data.path")


@pytest.mark.parametrize("file_format", ["csv", "parquet"])
def test_partitions_are_columns(tmp_path: Path, file_format: str) -> None:
    """The values of folders are columns in training, and in new files; a column of a file comes first."""
    days = ("2024-01-31", "2024-02-01%2009%3A30%3A00", "__HIVE_DEFAULT_PARTITION__")
    for i, day in enumerate(days):
        folder = tmp_path / f"logs/day={day}/c=x"
        (folder / "_temporary/0").mkdir(parents=True)
        table = pa.table({"label": [0, 1], "c": [f"c{i}", "c"]})
        if file_format == "csv":
            pa.csv.write_csv(table, folder / "part")
        else:
            pq.write_table(table, folder / "part")
    (tmp_path / "logs/_SUCCESS").touch()
    data = DataSection(format=file_format, sparse=("c", "day"))
    block, _ = read(data, tmp_path / "logs")
    assert block.sparse[0].to_pylist() == ["c0", "c", "c1", "c", "c2", "c"]
    assert block.sparse[1].to_pylist() == ["2024-01-31"] * 2 + ["2024-02-01 09:30:00"] * 2 + [None] * 2
    new, _ = read(dataclasses.replace(data, sparse=("day",)), tmp_path / "logs/day=*-*/*", with_labels=False)
    assert new.sparse[0].to_pylist() == ["2024-01-31"] * 2 + ["2024-02-01 09:30:00"] * 2
    path = (str(tmp_path / "logs/day=2*"),)
    config = RunConfig(data=dataclasses.replace(data, path=path, split="time(day, fraction = 0.5)"))
    train, test = prepared(config, tmp_path / "cache")
    assert (train.source_rows.tolist(), test.source_rows.tolist()) == ([0, 1], [2, 3])
    before = fingerprint(config)
    os.rename(tmp_path / f"logs/day={days[0]}", tmp_path / "logs/day=2024-01-30")
    assert fingerprint(config) != before


def test_fingerprint_ignores_the_spelling_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a/c.csv")
    write(tmp_path / "a/t.csv", label=lambda i: (i + 1) % 2)
    monkeypatch.chdir(tmp_path)
    spellings = ["a/", "./a/", "a/../a/", f"{tmp_path}/a/"]
    found = {
        fingerprint(config_of(Path(f"{each}c.csv"), test_path=(f"{other}t.csv",)))
        for each, other in zip(spellings, reversed(spellings), strict=True)
    }
    assert len(found) == 1
    assert fingerprint(config_of(Path("a/t.csv"))) not in found


def test_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "a.csv")
    for path in (pipe, tmp_path):
        with pytest.raises(DataError, match=rf"^{pipe}: .*data\.path$"):
            list_files([str(path)], "data.path")


@pytest.mark.parametrize("file_format", ["csv", "parquet"])
def test_columns_are_checked_before_preparation(tmp_path: Path, file_format: str) -> None:
    path = tmp_path / f"a.{file_format}"
    if file_format == "csv":
        write(path)
    else:
        pq.write_table(pa.table({"label": [0, 1], "c": ["a", "b"]}), path)
    data = DataSection(format=file_format, path=(str(path),), sparse=("c",))
    check_columns(RunConfig(data=data))
    with pytest.raises(ConfigError, match=rf"^data\.sparse = 'labels': {path} .*'label'"):
        check_columns(RunConfig(data=dataclasses.replace(data, sparse=("c", "labels"))))
    with pytest.raises(DataError, match=r"nowhere: .*data\.test_path"):
        check_columns(RunConfig(data=dataclasses.replace(data, test_path=("nowhere",))))
