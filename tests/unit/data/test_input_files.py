"""Input files: changes, unsuitable files, and parsing in segments, which gives the bytes of whole files."""

import dataclasses
import os
import random
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from support.samples import csv_config, prepared, read, write

from hybrid.config import ColumnSection, DataSection, RunConfig, RunSection, TableSection, TaskSection
from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.dataset_manifest import DataManifest
from hybrid.data.parse import delimited_text
from hybrid.data.parse.column_check import check_input_columns
from hybrid.data.parse.input_files import InputFile, find_input_files, list_files
from hybrid.data.prepare import file_preparation
from hybrid.data.prepare.file_preparation import FilesPreparation
from hybrid.data.prepare.preparation import fingerprint, prepare
from hybrid.errors import ConfigError, DataError, HybridError
from hybrid.primitives.progress import ignore_progress

HEAD = "label,x,user,tags,seen,when,score,w"
# Rows, blank lines, and every kind of invalid row.
ODD = ["", "1,2", '1,1,"two\nlines",,,5,0,1', '0,1,"open,,,5,0,1', "?,1,u,,,5,0,1", "1,much,u,,,5,0,1", " "]
SECTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bags": {
        "columns": {
            "tags": ColumnSection(kind="weighted"),
            "bucket": ColumnSection(kind="quantiles(5)", source=("x",)),
            "both": ColumnSection(kind="cross", source=("user", "when"), vocabulary="hash(50)"),
            "seen": ColumnSection(max_ids=2, too_many_ids="keep_last"),
        },
        "tables": {"people": TableSection(features=("user", "seen"))},
    },
    "tasks": {
        "tasks": {
            "a": TaskSection(label="label"),
            "b": TaskSection(label="score", type="regression", mask="label"),
        }
    },
}
DATA: dict[str, dict[str, Any]] = {
    "plain": {},
    "bags": {"sparse": ("user", "tags", "bucket", "both", "seen"), "multi_hot_separator": "|"},
    "tasks": {"label": "", "weight": "w", "vocabulary": "build(3)"},
    "hash": {"vocabulary": "hash(30)", "group": "user"},
    "time": {"split": "time(when)"},
    "column": {"split": "column(user)"},
}


def config_of(path: Path, kind: str, **keys: Any) -> RunConfig:
    given = {"dense": ("x",), "sparse": ("user", "when"), "max_invalid_fraction": 0.5, **DATA[kind], **keys}
    return csv_config(path, **given).replace(**SECTIONS.get(kind, {}))


def text(num_rows: int, seed: int, end: str = "\n") -> bytes:
    draw = random.Random(seed)
    lines = [HEAD]
    for _ in range(num_rows):
        user = f"u{int(2 ** (7 * draw.random()))}"
        tags = "|".join(f"t{draw.randrange(9)}:{draw.random():.2f}" for _ in range(draw.randrange(3)))
        seen = "|".join(f"u{draw.randrange(30)}" for _ in range(draw.randrange(4)))
        when, score = draw.randrange(400), f"{draw.gauss(0, 1):.4f}"
        lines.append(f"{draw.randrange(2)},{draw.gauss(0, 9):.3f},{user},{tags},{seen},{when},{score},0.5")
        if draw.random() < 0.1:
            lines.append(draw.choice(ODD))
    return (end.join(lines) + end).encode()


def outcome(config: RunConfig, folder: Path, paths: tuple[Path, ...], block_bytes: int) -> Any:
    """Return all prepared content of some files, or the error."""
    files = {"train": tuple(map(InputFile.of, paths)), "test": ()}
    try:
        with patch.object(delimited_text, "BLOCK_BYTES", block_bytes):
            encoder, reports = FilesPreparation(config, files, folder, ignore_progress).write()
    except HybridError as error:
        return f"{type(error).__name__}: {error}"
    arrays = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.npy")}
    assert len(arrays) >= 8
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".npy"}
    return arrays, [asdict(each) for each in encoder.sparse], {k: asdict(v) for k, v in reports.items()}


def in_segments(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Cut files into small segments, and read them in ``threads`` threads."""
    monkeypatch.setattr(file_preparation, "_BYTES_PER_THREAD", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(threads))


@pytest.mark.parametrize("kind", DATA)
def test_segments_join_to_whole_files(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = "\r\n" if kind == "column" else "\n"
    monkeypatch.setattr("hybrid.data.values.invalid_rows.MAX_EXAMPLES", 10_000)  # the lines of all
    paths = tuple(write(tmp_path / f"{i}.csv", text(800, i, ends)) for i in range(2))
    config = config_of(paths[0], kind, numeric_scaling="min_max")
    whole = outcome(config, tmp_path / "whole", paths, 16 << 20)
    if kind == "bags":  # in threads, and the values of many pieces are added up in several steps
        monkeypatch.setattr(file_preparation, "RANKED_AT_ONCE", 1)
    in_segments(monkeypatch, 3 if kind == "bags" else 1)
    # Some records have line breaks, and must not be cut.
    monkeypatch.setattr("hybrid.data.parse.delimited_text.MAX_RECORD_BYTES", 2000)
    parts = outcome(config, tmp_path / "parts", paths, 4000)
    assert not isinstance(whole, str)
    assert parts == whole


def test_first_error_in_file_order_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = text(3000, 2).replace(b'"', b"").splitlines()
    good = [line for line in lines if line.count(b",") == 7 and line[:1] in b"01" and b"much" not in line]
    late = len(good) - 5
    good[late] = b"1,nothing,u,,,5,0,1"
    path = write(tmp_path / "a.csv", b"\n".join([HEAD.encode(), *good]))
    in_segments(monkeypatch, 2)
    found = outcome(config_of(path, "plain", max_invalid_fraction=0.0), tmp_path / "new", (path,), 5000)
    assert found.startswith(f"DataError: {path}:{late + 2}: x is 'nothing', expected a finite number; ")
    found = outcome(config_of(path, "plain", sparse=("nobody",)), tmp_path / "other", (path,), 5000)
    assert found.startswith(f"ConfigError: data.sparse = 'nobody': {path} has no such column")


def test_vocabulary_beyond_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "".join(f"{i % 2},{i},{i}\n" for i in range(2000))
    path = write(tmp_path / "a.csv", f"label,x,user\n{rows}".encode())
    config = csv_config(path, dense=("x",), sparse=("user",))
    for part, free in (("ranked", [2000 * 220]), ("indexed", [1 << 40, 1000 * 60])):
        found = [1 << 40, *free, 1 << 40]  # the first and the last are for the number of threads
        monkeypatch.setattr(file_preparation, "available_memory_bytes", iter(found).__next__)
        with pytest.raises(DataError, match=r"^user: .*data\.vocabulary"):
            prepare(config, tmp_path / part)
        assert not [*(tmp_path / part).iterdir()]
    hashed = config.replace(data=dataclasses.replace(config.data, vocabulary="hash(100)"))
    assert prepare(hashed, tmp_path / "hashed").exists()


pairs_config = partial(csv_config, sparse=("c",))


def write_pairs(path: Path, num_rows: int = 200, label: Callable[[int], int] = lambda i: i % 2) -> Path:
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


def test_resumed_run_names_the_changed_input(tmp_path: Path) -> None:
    def manifest_of(config: RunConfig) -> DataManifest:
        return DataManifest.read(prepare(config, tmp_path / "cache") / dataset_manifest.FILE_NAME)

    def refused(config: RunConfig) -> str:
        with pytest.raises(DataError) as caught:
            then.check_same(manifest_of(config), "resume")
        return str(caught.value)

    first, second = write_pairs(tmp_path / "a.csv"), write_pairs(tmp_path / "b.csv")
    config = pairs_config(first, second)
    then = manifest_of(config)
    assert refused(config.replace(run=RunSection(seed=9))).endswith("; resume")
    assert refused(pairs_config(first)).startswith("data.path names 1 file(s), and 2")
    moved = first.rename(tmp_path / "c.csv")
    then.check_same(manifest_of(pairs_config(moved, second)), "resume")  # the samples are the same
    replace(second, b"\n1,", b"\n0,")
    assert refused(pairs_config(moved, second)).startswith(f"{second}: ")


def test_file_that_changes_during_preparation_is_refused(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.csv")

    def append(line: str) -> None:
        with path.open("a") as file:
            file.write("1,00001\n")

    with pytest.raises(DataError, match=f"^{path}: "):
        prepare(pairs_config(path), tmp_path / "cache", append)
    assert not list((tmp_path / "cache").iterdir())


def test_training_file_as_test_file_is_refused(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.csv")
    copy, link = tmp_path / "copy.csv", tmp_path / "link.csv"
    copy.write_bytes(path.read_bytes())
    link.symlink_to(path)
    for twin in (path, copy, link):
        with pytest.raises(ConfigError, match=rf"data\.test_path = '{twin}': .* {path} of data\.path"):
            find_input_files(pairs_config(path, test_path=(str(twin),)).data)
    empty = [tmp_path / "1.csv", tmp_path / "2.csv"]
    for each in empty:
        each.touch()
    find_input_files(pairs_config(empty[0], test_path=(str(empty[1]),)).data)


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
    write_pairs(tmp_path / "a/c.csv")
    write_pairs(tmp_path / "a/t.csv", label=lambda i: (i + 1) % 2)
    monkeypatch.chdir(tmp_path)
    spellings = ["a/", "./a/", "a/../a/", f"{tmp_path}/a/"]
    found = {
        fingerprint(pairs_config(Path(f"{each}c.csv"), test_path=(f"{other}t.csv",)))
        for each, other in zip(spellings, reversed(spellings), strict=True)
    }
    assert len(found) == 1
    assert fingerprint(pairs_config(Path("a/t.csv"))) not in found


def test_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "a.csv")
    for path in (pipe, tmp_path):
        with pytest.raises(DataError, match=rf"^{pipe}: .*data\.path$"):
            list_files([str(path)], "data.path")


@pytest.mark.parametrize("file_format", ["csv", "parquet"])
def test_columns_are_checked_before_preparation(tmp_path: Path, file_format: str) -> None:
    path = tmp_path / f"a.{file_format}"
    if file_format == "csv":
        write_pairs(path)
    else:
        pq.write_table(pa.table({"label": [0, 1], "c": ["a", "b"]}), path)
    data = DataSection(format=file_format, path=(str(path),), sparse=("c",))
    check_input_columns(RunConfig(data=data))
    with pytest.raises(ConfigError, match=rf"^data\.sparse = 'labels': {path} .*'label'"):
        check_input_columns(RunConfig(data=dataclasses.replace(data, sparse=("c", "labels"))))
    with pytest.raises(DataError, match=r"nowhere: .*data\.test_path"):
        check_input_columns(RunConfig(data=dataclasses.replace(data, test_path=("nowhere",))))
