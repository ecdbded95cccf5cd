"""Lines of text: quotes, line ends, binary files, long lines, and text that is read while it is written."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.samples import located, read, write

from hybrid.config import DataSection
from hybrid.data.parse import delimited_text as module
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.delimited_text import STDIN
from hybrid.data.parse.sources import RawBlock, read_blocks
from hybrid.data.values.invalid_rows import InvalidRowLog
from hybrid.errors import DataError

CSV = DataSection(
    format="csv", columns=("label", "x", "city"), dense=("x",), sparse=("city",), max_invalid_fraction=1.0
)
TWO_BREAKS = '1,1,a\n1,2,"first\n0,3,second"\n0,4,"x, ""y"" z"\n1,5,"three\n\n0,6,lines"\n0,7,b'
BREAKS = {2: "a line break within quotes, to line 3", 5: "a line break within quotes, to line 7"}
OPEN = "a quote is not closed"
RETURN = "a carriage return within the line"


@pytest.mark.parametrize("block_bytes", [1, 7, 30, 1 << 20])
@pytest.mark.parametrize(
    ("text", "cities", "invalid"),
    [
        (TWO_BREAKS, {0: "a", 3: 'x, "y" z', 6: "b"}, BREAKS),
        (TWO_BREAKS.replace("\n", "\r\n"), {0: "a", 3: 'x, "y" z', 6: "b"}, BREAKS),
        ('1,1,a\n1,2,"open\n0,3,"b"\n1,4,c', {0: "a", 2: "b", 3: "c"}, {2: OPEN}),
        ('1,1,a\n1,2,"open\n0,3,5" pipe\n1,4,c', {0: "a", 2: '5" pipe', 3: "c"}, {2: OPEN}),
        ('1,1,a\n1,2,"open\n0,3,"b\n1,4,c', {0: "a", 3: "c"}, {2: OPEN, 3: OPEN}),
        ('1,1,a\n1,2,"open\n0,3,b"\n1,4,c', {0: "a", 3: "c"}, {2: BREAKS[2]}),
        ('1,1,a\n1,2,"open', {0: "a"}, {2: OPEN}),
        ('1,1,5" pipe\n0,2,"6"" pipe"\n', {0: '5" pipe', 1: '6" pipe'}, {}),
        (
            '1,1,a\r\r\n1,2,b\rc\n0,3,d\r\n1,4,"e\rf"\n0,5,g\r',
            {0: "a", 2: "d", 4: "g"},
            {2: RETURN, 4: RETURN},
        ),
        ('1,1,a\n1,2,"b\rc" \n0,3,d\n', {0: "a", 2: "d"}, {2: RETURN}),
        ("1,1,a\n1,2,b\r \n0,3,d\n", {0: "a", 2: "d"}, {2: RETURN}),
        ("1,1,a\n\r1,2,b \n0,3,d\n", {0: "a", 2: "d"}, {2: RETURN}),
    ],
)
def test_stray_quotes_and_returns_invalidate_only_their_rows(
    tmp_path: Path, text: str, cities: dict[int, str], invalid: dict[int, str], block_bytes: int
) -> None:
    path = write(tmp_path / "a.csv", text)
    block, report = read(CSV, path, block_bytes=block_bytes)
    assert dict(zip(block.source_rows_B.tolist(), block.sparse[0].to_pylist(), strict=True)) == cities
    assert located(report, path) == [f"{line}: {reason}" for line, reason in invalid.items()]
    assert report.counts["broken_text"] == report.total == len(invalid)


def test_carriage_returns_as_line_ends_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "label,x,city\r1,1,a\r0,2,b\r")
    with pytest.raises(DataError, match=r"a\.csv:1: .*carriage return"):
        read(DataSection(format="csv", sparse=("city",)), path)
    with pytest.raises(DataError, match=r"line 1: .*carriage return"):
        read(CSV, path)


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04\x14\0\0\0\x08\0abc\nde,f",
        b"\xfd7zXZ\0",
        "label,x,city\n".encode("utf-16"),
        b"1,2,a\n1,2,\0\n",
        gzip.compress(b"PK\x03\x04", mtime=0),
    ],
)
@pytest.mark.parametrize("columns", [(), ("label", "x", "city")])
def test_binary_formats_are_refused(tmp_path: Path, content: bytes, columns: tuple[str, ...]) -> None:
    path = write(tmp_path / "a.csv", content)
    with pytest.raises(DataError, match=r"a\.csv: .* data\.format") as raised:
        read(DataSection(format="csv", columns=columns, sparse=("city",)), path)
    assert str(raised.value).isprintable()


def test_too_long_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 1 << 20)
    path = write(tmp_path / "a.csv.gz", gzip.compress(b"1" * (4 << 20)))
    with pytest.raises(DataError):
        read(CSV, path, block_bytes=1 << 18)


NOTED = DataSection(format="csv", dense=("x",), sparse=("city",), max_invalid_fraction=1.0)
ROWS = """\ufeffx,city,note\r
1,Rome,a
much,Oslo,b

2,"Oslo, east",c
3,"a
break",d
4,Rome
5,"open,f
-6,Oslo,é
"""


def pieces(text: bytes, size: int) -> Iterator[bytes]:
    """Return ``text`` in chunks of ``size`` bytes."""
    return (text[i : i + size] for i in range(0, len(text), size))


def streamed(
    text: Iterator[bytes], data: DataSection = NOTED, log: InvalidRowLog | None = None
) -> Iterator[RawBlock]:
    """Yield the rows of a stream, with the column "note" as it is."""
    layout = Layout.of(data, with_labels=False, passthrough=(("--keep", "note"),))
    return read_blocks((STDIN,), layout, log or InvalidRowLog(1.0), text=text)


@pytest.mark.parametrize("size", [3, 4, 17, 1 << 20])
def test_stream_equals_file_for_any_chunk_size(tmp_path: Path, size: int) -> None:
    expected, of_file = read(NOTED, write(tmp_path / "a.csv", ROWS), with_labels=False)
    log = InvalidRowLog(1.0)
    blocks = list(streamed(pieces(ROWS.encode(), size), log=log))
    found = np.concatenate([block.dense_BF for block in blocks])
    np.testing.assert_array_equal(found, expected.dense_BF)
    cities = pa.concat_arrays([block.sparse[0] for block in blocks])
    assert cities.to_pylist() == expected.sparse[0].to_pylist() == ["Rome", "Oslo, east", "Oslo"]
    numbers = np.concatenate([block.source_rows_B for block in blocks]).tolist()
    assert numbers == expected.source_rows_B.tolist() == [0, 2, 7]
    assert [note for block in blocks for note in block.passthrough["note"].to_pylist()] == ["a", "c", "é"]
    of_stream = log.finish()
    assert of_stream.counts == of_file.counts
    assert [e.replace(str(STDIN), str(tmp_path / "a.csv")) for e in of_stream.examples] == [*of_file.examples]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\n \n", "no rows"),
        (gzip.compress(b"x,city,note\n1,Rome,a\n", mtime=0), "compressed"),
        (b"PAR1\0\n", "not text"),
    ],
)
def test_stream_without_plain_text_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^standard input: .*{message}"):
        list(streamed(pieces(text, 7)))
