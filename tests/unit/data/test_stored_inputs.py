"""Input files in a store give the samples of local files; errors of the store are one line."""

import gzip
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.samples import csv_config, write
from support.stores import Proxy, Store, sent

from hybrid.config import RunConfig
from hybrid.data.parse import delimited_text
from hybrid.data.parse.input_files import find_input_files, list_files, path_columns
from hybrid.data.prepare import file_preparation
from hybrid.data.prepare.preparation import fingerprint, prepare
from hybrid.errors import DataError, StorageError
from hybrid.storage import files
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
    config = csv_config(*paths, dense=("x",), sparse=("user",))
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
    """The files have many segments, which several threads read."""
    (here := tmp_path / "here").mkdir()
    write_files(here)
    sent(here, there)
    monkeypatch.setattr(delimited_text, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr("hybrid.data.parse.sources.SEGMENT_ROWS", 500)
    kind = "parquet" if write_files is write_parquet else "csv"
    expected = prepare(config_of(here, format=kind), tmp_path / "cache")
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

    with pytest.raises(DataError, match=f"{file}: has changed"):
        prepare(config, tmp_path / "cache", write_again)
    assert not list((tmp_path / "cache").iterdir())


def test_stored_folder_lists_its_files(there: RemotePath) -> None:
    for name in ("b", "a b", "_SUCCESS", ".hidden"):
        files.write_bytes(there / "days" / name, b"1")
    assert list_files([str(there / "days")], "data.path") == (there / "days" / "a b", there / "days" / "b")
    parts = [there / "days" / f"day={day}" / "a" for day in ("1", "a b")]
    for part in parts:
        files.write_bytes(part, b"1")
    assert [*list_files([str(there / "days")], "data.path")[2:]] == parts
    assert [*list_files([f"{there}/days/day=*/?"], "data.path")] == parts
    assert list_files([f"{there}/days/day=[1-9]"], "data.path") == (parts[0],)
    assert path_columns(parse_path(str(parts[1]))) == {"day": "a b"}
    files.write_bytes(there / "days" / "old" / "a", b"1")
    with pytest.raises(DataError, match=r"old: .*data\.path"):
        list_files([str(there / "days")], "data.path")
    with pytest.raises(StorageError, match="there is no such bucket"):
        list_files(["s3://no-such-bucket/a.csv"], "data.path")
