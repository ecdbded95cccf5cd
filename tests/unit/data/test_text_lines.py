"""Lines of text files: quotes, line ends, binary files, and long lines."""

import gzip
from pathlib import Path

import pytest
from support.samples import located, read, write

from hybrid.config import DataSection
from hybrid.data.parse import delimited_text as module
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
    with pytest.raises(DataError, match=r"a\.csv:1: a carriage return"):
        read(DataSection(format="csv", sparse=("city",)), path)
    with pytest.raises(DataError, match="line 1: a carriage return"):
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
