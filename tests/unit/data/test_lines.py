"""Lines of text files: what belongs together, what is no text, and how much is held of it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from hybrid.config import DataSection
from hybrid.data import lines as module
from hybrid.data.bad_rows import BadRowReport
from hybrid.data.lines import MAX_BLOCK_LINES, MAX_RECORD_BYTES, line_blocks
from hybrid.data.sources import Source
from hybrid.errors import DataError

CSV = DataSection(
    format="csv", columns=("label", "x", "city"), dense=("x",), sparse=("city",), max_bad_fraction=1.0
)


def read(path: Path, block_bytes: int = 1 << 20) -> tuple[list[str], list[int], BadRowReport]:
    """The cities of the good rows, their numbers, and the report."""
    source = Source((path,), CSV, block_bytes=block_bytes)
    log = source.new_log()
    cities, rows = [], []
    for block in source.blocks(log):
        cities += block.sparse[0].to_pylist()
        rows += block.source_rows_B.tolist()
    return cities, rows, log.finish()


@pytest.mark.parametrize("block_bytes", [1, 7, 30, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_break_within_quotes_makes_no_row_of_its_second_half(
    tmp_path: Path, block_bytes: int, end: str
) -> None:
    path = tmp_path / "a.csv"
    lines = [
        "1,1,a",
        '1,2,"first',
        '0,3,second"',
        '0,4,"x, ""y"" z"',
        '1,5,"three',
        "",
        '0,6,lines"',
        "0,7,b",
    ]
    path.write_bytes(end.join(lines).encode())
    cities, rows, report = read(path, block_bytes)
    assert cities == ["a", 'x, "y" z', "b"]
    assert rows[0] == 0
    assert report.counts["broken_text"] == report.total == 2
    assert [example.removeprefix(f"{path}:") for example in report.examples] == [
        "2: a line break within quotes, to line 3",
        "5: a line break within quotes, to line 7",
    ]


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
@pytest.mark.parametrize("after", ['0,3,"b"', '0,3,b"', "0,3,b", '0,3,5" pipe', '0,3,"b'])
def test_a_stray_quote_spoils_its_own_line_unless_what_follows_closes_it(
    tmp_path: Path, after: str, block_bytes: int
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f'1,1,a\n1,2,"open\n{after}\n1,4,c\n')
    cities, _, report = read(path, block_bytes)
    assert (cities[0], cities[-1]) == ("a", "c")
    is_closed = after == '0,3,b"'
    assert len(cities) == (2 if is_closed or after == '0,3,"b' else 3)
    assert report.total == (2 if after == '0,3,"b' else 1)


def test_a_quote_is_looked_for_in_a_few_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    between = "1,2,b\n" * (MAX_RECORD_BYTES // 6)
    path.write_text(f'1,1,"open\n{between}1,2,close"\n')
    cities, _, report = read(path)
    assert len(cities) == MAX_RECORD_BYTES // 6 + 1
    assert report.examples == (f"{path}:1: a quote is not closed",)


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_a_carriage_return_within_a_line_is_no_field(tmp_path: Path, block_bytes: int) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'1,1,a\r\r\n1,2,b\rc\n0,3,d\r\n1,4,"e\rf"\n0,5,g\r')
    cities, rows, report = read(path, block_bytes)
    assert (cities, rows) == (["a", "d", "g"], [0, 2, 4])
    assert [example.removeprefix(f"{path}:") for example in report.examples] == [
        "2: a carriage return within the line",
        "4: a carriage return within the line",
    ]


@pytest.mark.parametrize("line", ['1,2,"b\rc"', "1,2,b\r", "\r1,2,b"])
def test_one_carriage_return_among_good_lines(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(f"1,1,a\n{line} \n0,3,d\n".encode())
    cities, _, report = read(path)
    assert cities == ["a", "d"]
    assert report.examples == (f"{path}:2: a carriage return within the line",)


def test_a_file_of_carriage_returns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"label,x,city\r1,1,a\r0,2,b\r")
    header = DataSection(format="csv", path=(str(path),), sparse=("city",))
    with pytest.raises(DataError, match=r"a\.csv:1: a carriage return within the header; lines must end in"):
        list(Source((path,), header).blocks())
    with pytest.raises(DataError, match="no row can be used, 1 of 1 as line 1: a carriage return within the"):
        read(path)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"PK\x03\x04\x14\0\0\0\x08\0abc\nde,f", "a zip archive; unpack it"),
        (b"PAR1\x15\x04", "a Parquet file; set data.format = parquet"),
        (b"BZh91AY&SY", "packed by bzip2"),
        (b"\xfd7zXZ\0", "packed by xz"),
        (b"\x28\xb5\x2f\xfd\x04", "packed by zstd"),
        ("label,x,city\n".encode("utf-16"), "UTF-16 text; save it as UTF-8"),
        (b"a" * 257 + b"ustar\x0000", "a tar archive"),
        (b"1,2,a\n1,2,\0\n", "binary; check the file and data.format"),
        (gzip.compress(b"PK\x03\x04", mtime=0), "a zip archive"),
    ],
)
@pytest.mark.parametrize("columns", [(), ("label", "x", "city")])
def test_what_is_no_text_is_said_to_be_so(
    tmp_path: Path, content: bytes, what: str, columns: tuple[str, ...]
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    data = DataSection(format="csv", columns=columns, sparse=("city",))
    with pytest.raises(DataError, match=rf"a\.csv: is not text but {what}") as raised:
        list(Source((path,), data).blocks())
    assert str(raised.value).isprintable()


def test_a_line_without_end_is_refused_before_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"1" * (4 << 20)))
    with pytest.raises(DataError, match="a line is longer than 1 MiB; is it a text file"):
        read(path, block_bytes=1 << 18)


def test_blocks_hold_few_lines_however_short_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"\n" * (2 * MAX_BLOCK_LINES + 1) + b"1,2,a"))
    blocks = list(line_blocks(path, 1 << 30))
    assert [block.count(b"\n") for block in blocks] == [MAX_BLOCK_LINES, MAX_BLOCK_LINES, 1, 1]
    assert read(path)[0] == ["a"]


def test_a_value_too_long_for_a_vocabulary_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"1,1,{'a' * 4096}\n1,2,{'b' * 4097}\n")
    cities, _, report = read(path)
    assert [len(city) for city in cities] == [4096]
    assert report.counts["too_long_value"] == 1
    shown = f"city is '{'b' * 60}'... (4,097 characters), expected at most 4,096 bytes"
    assert report.examples == (f"{path}:2: {shown}",)


def test_ids_that_floats_have_rounded_are_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("1,1,12345678901234567\n1,2,1.2345678901234568e+16\n1,3,5.0\n")
    cities, _, report = read(path)
    assert cities == ["12345678901234567", "5"]
    assert report.examples == (
        f"{path}:2: city is '1.2345678901234568e+16', expected an id that a float holds exactly",
    )
