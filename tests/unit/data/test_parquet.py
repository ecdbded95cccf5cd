"""Parquet: columns of one name, and small files that claim to be large."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybrid.config import DataSection
from hybrid.data import parquet as module
from hybrid.data.sources import Source
from hybrid.errors import DataError

DATA = DataSection(format="parquet", sparse=("city",), max_bad_fraction=1.0)
MANY = 1_000_000


def labels(num_rows: int) -> pa.Array:
    return pa.array(np.arange(num_rows) % 2)


def coded(value: str, num_rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), pa.array([value]))


def long_text(path: Path) -> None:
    pq.write_table(
        pa.table({"label": labels(MANY), "city": coded("x" * 40_000, MANY)}), path, store_schema=False
    )


def long_list(path: Path) -> None:
    lists = pa.ListArray.from_arrays(pa.array([0, 20 * MANY]), pa.array(np.zeros(20 * MANY, np.int8)))
    pq.write_table(pa.table({"label": labels(1), "city": lists}), path)


def long_items(path: Path) -> None:
    offsets = pa.array(np.arange(MANY + 1, dtype=np.int32))
    lists = pa.ListArray.from_arrays(offsets, coded("x" * 40_000, MANY))
    pq.write_table(pa.table({"label": labels(MANY), "city": lists}), path, store_schema=False)


READING = """
import sys
from pathlib import Path
from hybrid.config import DataSection
from hybrid.data.sources import Source
data = DataSection(format="parquet", sparse=("city",), max_bad_fraction=1.0)
try:
    for block in Source((Path(sys.argv[1]),), data).blocks():
        pass
except Exception as error:
    print(f"{type(error).__name__}: {error}")
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (long_text, "expected at most 4,096 bytes"),
        (long_list, "claims 20,000,00[01] values in .* bytes; write it anew, in row groups of fewer rows"),
        (long_items, "expected at most 4,096 bytes"),
    ],
)
def test_a_small_file_takes_little_memory(
    tmp_path: Path, write: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "a.parquet"
    write(path)
    assert path.stat().st_size < 20_000
    command = [sys.executable, "-c", READING, str(path)]
    root = Path(__file__).parents[3]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    *said, peak_kib = ended.stdout.splitlines()
    assert int(peak_kib) < 300_000
    [line] = said
    assert re.search(message, line)
    assert line.startswith(f"DataError: {path}: ")


def test_blocks_are_cut_to_what_their_texts_take_and_rows_stay_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNFOLDED_BYTES", 100)
    cities = [f"{i:02}" * (1 + i % 5) for i in range(80)]
    tags = [[city, "x" * (i % 3)] if i % 4 else None for i, city in enumerate(cities)]
    table = pa.table({"label": labels(80), "city": cities, "tags": tags})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=33)
    data = DataSection(format="parquet", sparse=("city", "tags"))
    blocks = list(Source((tmp_path / "a.parquet",), data).blocks())
    assert len(blocks) > 5
    assert [city for block in blocks for city in block.sparse[0].to_pylist()] == cities
    assert [items for block in blocks for items in block.sparse[1].to_pylist()] == [
        [item for item in items or [] if item] for items in tags
    ]
    assert np.concatenate([block.source_rows_B for block in blocks]).tolist() == list(range(80))
    monkeypatch.setattr(module, "MAX_UNFOLDED_BYTES", 5)
    with pytest.raises(DataError, match=r"a\.parquet: a row has more than 0 MiB in column city"):
        list(Source((tmp_path / "a.parquet",), data).blocks())


def test_pages_packed_beyond_belief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"label": labels(MANY), "city": np.zeros(MANY, np.int64)})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    list(Source((path,), DATA).blocks())
    monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(
        DataError, match=r"column (city|label) claims 8,\d\d\d,\d\d\d bytes out of [\d,]+; write it"
    ):
        list(Source((path,), DATA).blocks())
    wide = pa.table({"label": labels(2), "city": pa.array([b"a" * 5000] * 2, pa.binary(5000))})
    pq.write_table(wide, path)
    with pytest.raises(DataError, match="values of column city are longer than 4,096 bytes"):
        list(Source((path,), DATA).blocks())


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    columns = [labels(4), pa.array(["a"] * 4), pa.array(["b"] * 4)]
    pq.write_table(pa.Table.from_arrays(columns, ["label", "city", "city"]), path)
    message = (
        r"a\.parquet: columns 2 and 3 have the same name, 'city'; rename one, since data\.sparse names it"
    )
    with pytest.raises(DataError, match=message):
        list(Source((path,), DATA).blocks())
    pq.write_table(pa.Table.from_arrays([*columns, columns[1]], ["label", "city", "x", "x"]), path)
    list(Source((path,), DATA).blocks())
    text = tmp_path / "a.csv"
    text.write_text("label,city,city\n1,a,b\n")
    with pytest.raises(DataError, match=message.replace("parquet:", "csv:")):
        list(Source((text,), DataSection(format="csv", sparse=("city",))).blocks())


def test_ids_that_floats_have_rounded_are_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": labels(3), "city": [5.0, 1e16, 7.0]}), path)
    source = Source((path,), DATA)
    log = source.new_log()
    [block] = source.blocks(log)
    assert block.sparse[0].to_pylist() == ["5", "7"]
    message = f"{path}:2: city is '1e+16', expected an id that a float holds exactly"
    assert log.finish().examples == (message,)


def test_more_values_than_a_dictionary_page_holds(tmp_path: Path) -> None:
    """Writers then go on without one, within a row group."""
    path = tmp_path / "a.parquet"
    cities = [f"city-{i % 700:05}" for i in range(2000)]
    table = pa.table({"label": labels(2000), "city": cities, "tags": [[city] for city in cities]})
    pq.write_table(table, path, dictionary_pagesize_limit=1000, data_page_size=500, row_group_size=900)
    blocks = list(Source((path,), DataSection(format="parquet", sparse=("city", "tags"))).blocks())
    assert [city for block in blocks for city in block.sparse[0].to_pylist()] == cities
    assert [city for block in blocks for [city] in block.sparse[1].to_pylist()] == cities
