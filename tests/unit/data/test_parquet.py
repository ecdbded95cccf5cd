"""Parquet: columns of one name, and small files that claim to be large."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.commands import ROOT
from support.samples import located, read, write

from hybrid.config import ColumnSection, DataSection
from hybrid.data.parse import parquet_blocks as module
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.sources import read_blocks
from hybrid.data.values.invalid_rows import InvalidRowLog
from hybrid.errors import DataError

DATA = DataSection(format="parquet", sparse=("city",), max_invalid_fraction=1.0)
MANY = 1_000_000


def count_blocks(path: Path, layout: Layout) -> int:
    return len(list(read_blocks([path], layout, InvalidRowLog(1.0))))


def labels(num_rows: int) -> pa.Array:
    return pa.array(np.arange(num_rows) % 2)


def long_text() -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(MANY, np.int32)), pa.array(["x" * 40_000]))


def long_list() -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, 20 * MANY]), pa.array(np.zeros(20 * MANY, np.int8)))


def long_items() -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.arange(MANY + 1, dtype=np.int32)), long_text())


READING = """
import sys
from pathlib import Path
from hybrid.config import DataSection
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.sources import read_blocks
from hybrid.data.values.invalid_rows import InvalidRowLog
layout = Layout.of(DataSection(format="parquet", sparse=("city",), max_invalid_fraction=1.0))
for name in sys.argv[1:]:
    try:
        for block in read_blocks([Path(name)], layout, InvalidRowLog(1.0)):
            pass
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_small_parquet_files_take_little_memory(tmp_path: Path) -> None:
    too_long, too_many = "at most 4,096 bytes", "claims 20,000,00[01] values"
    files = {
        "text": (long_text(), too_long),
        "list": (long_list(), too_many),
        "items": (long_items(), too_long),
    }
    for name, (cities, _) in files.items():
        columns = {"label": labels(len(cities)), "city": cities}
        pq.write_table(pa.table(columns), tmp_path / name, store_schema=False)
        assert (tmp_path / name).stat().st_size < 20_000
    command = [sys.executable, "-c", READING, *(str(tmp_path / name) for name in files)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *lines, peak_kib = ended.stdout.splitlines()
    for line, (name, (_, message)) in zip(lines, files.items(), strict=True):
        assert re.match(f"DataError: {tmp_path / name}: .*{message}", line)
    assert int(peak_kib) < 300_000


def test_blocks_are_limited_by_decoded_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DECODED_BYTES", 100)
    cities = [f"{i:02}" * (1 + i % 5) for i in range(80)]
    tags = [[city, "x" * (i % 3)] if i % 4 else None for i, city in enumerate(cities)]
    table = pa.table({"label": [*labels(80).to_pylist(), 2], "city": [*cities, "b"], "tags": [*tags, None]})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=33)
    data = DataSection(format="parquet", sparse=("city", "tags"))
    assert count_blocks(path, Layout.of(data)) > 5
    block, report = read(data, path)
    assert located(report, path) == ["81: label is '2', expected '1' or '0'"]
    assert block.sparse[0].to_pylist() == cities
    assert block.sparse[1].to_pylist() == [[item for item in items or [] if item] for items in tags]
    assert block.source_rows_B.tolist() == list(range(80))
    monkeypatch.setattr(module, "MAX_DECODED_BYTES", 5)
    with pytest.raises(DataError, match=r"a\.parquet: .* column city"):
        read(data, path)


@pytest.mark.parametrize("is_map", [True, False])
def test_blocks_are_limited_by_texts_in_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_map: bool
) -> None:
    monkeypatch.setattr(module, "MAX_DECODED_BYTES", 100)
    expected = [[(f"{i:02}" * (1 + i % 5), float(i)), ("x", 1.0)][: i % 3] for i in range(80)]
    pairs: list[Any] = [row if i % 2 else row or None for i, row in enumerate(expected)]
    kind: Any = pa.map_(pa.string(), pa.float64())
    if not is_map:
        kind = pa.list_(pa.struct([("id", pa.string()), ("weight", pa.float64())]))
        pairs = [row and [{"id": each, "weight": weight} for each, weight in row] for row in pairs]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": labels(80), "tags": pa.array(pairs, kind)}), path, row_group_size=33)
    data, columns = DataSection(format="parquet", sparse=("tags",)), {"tags": ColumnSection(kind="weighted")}
    assert count_blocks(path, Layout.of(data, columns)) > 3  # as many row groups there are
    block, _ = read(data, path, columns=columns)
    assert block.sparse[0].to_pylist() == [[each for each, _ in row] for row in expected]
    assert block.weights[0].to_pylist() == [[weight for _, weight in row] for row in expected]
    monkeypatch.setattr(module, "MAX_DECODED_BYTES", 5)
    with pytest.raises(DataError, match=r"a\.parquet: .* column tags"):
        read(data, path, columns=columns)


def test_implausible_compression_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"label": labels(MANY), "city": np.zeros(MANY, np.int64)})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    read(DATA, path)
    monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(DataError, match=r"column (city|label) claims 8,\d\d\d,\d\d\d bytes"):
        read(DATA, path)
    wide = pa.table({"label": labels(2), "city": pa.array([b"a" * 5000] * 2, pa.binary(5000))})
    pq.write_table(wide, path)
    with pytest.raises(DataError, match=r"column city .* 4,096 bytes"):
        read(DATA, path)


def test_duplicate_column_names_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    columns = [labels(4), pa.array(["a"] * 4), pa.array(["b"] * 4)]
    pq.write_table(pa.Table.from_arrays(columns, ["label", "city", "city"]), path)
    with pytest.raises(DataError, match=r"a\.parquet: columns 2 and 3 .*'city'"):
        read(DATA, path)
    pq.write_table(pa.Table.from_arrays([*columns, columns[1]], ["label", "city", "x", "x"]), path)
    read(DATA, path)
    text = write(tmp_path / "a.csv", "label,city,city\n1,a,b\n")
    with pytest.raises(DataError, match=r"a\.csv: columns 2 and 3 .*'city'"):
        read(DataSection(format="csv", sparse=("city",)), text)
