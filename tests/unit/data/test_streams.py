"""Text that is read while it is written gives the rows of a file with the same content."""

import gzip
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.samples import read, write

from hybrid.config import DataSection
from hybrid.data.parse.sources import Source
from hybrid.data.parse.text_lines import STDIN, read_descriptor
from hybrid.errors import ConfigError, DataError

CSV = DataSection(format="csv", dense=("x",), sparse=("city",), max_invalid_fraction=1.0)
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


def streamed(text: Iterator[bytes], data: DataSection = CSV) -> Source:
    """Return a source that also passes the column "note" on."""
    return Source((STDIN,), data, with_labels=False, text=text, beside=(("--keep", "note"),))


@pytest.mark.parametrize("size", [3, 4, 17, 1 << 20])
def test_stream_equals_file_for_any_chunk_size(tmp_path: Path, size: int) -> None:
    expected, of_file = read(CSV, write(tmp_path / "a.csv", ROWS), with_labels=False)
    source = streamed(pieces(ROWS.encode(), size))
    log = source.new_log()
    blocks = list(source.blocks(log))
    found = np.concatenate([block.dense_BF for block in blocks])
    np.testing.assert_array_equal(found, expected.dense_BF)
    cities = pa.concat_arrays([block.sparse[0] for block in blocks])
    assert cities.to_pylist() == expected.sparse[0].to_pylist() == ["Rome", "Oslo, east", "Oslo"]
    numbers = np.concatenate([block.source_rows_B for block in blocks]).tolist()
    assert numbers == expected.source_rows_B.tolist() == [0, 2, 7]
    assert [note for block in blocks for note in block.beside["note"].to_pylist()] == ["a", "c", "é"]
    of_stream = log.finish()
    assert of_stream.counts == of_file.counts
    assert [e.replace(str(STDIN), str(tmp_path / "a.csv")) for e in of_stream.examples] == [*of_file.examples]


def test_rows_are_yielded_as_they_arrive() -> None:
    asked = []

    def lines() -> Iterator[bytes]:
        for number, line in enumerate([b"x,city,note\n", b"1,Rome,a\n", b"2,Oslo,b\n"]):
            asked.append(number)
            yield line

    given = streamed(lines()).blocks()
    assert [next(given).dense_BF.item(), list(asked)] == [1.0, [0, 1]]
    assert [next(given).dense_BF.item(), list(asked)] == [2.0, [0, 1, 2]]


def test_label_column_without_a_header_is_detected() -> None:
    data = DataSection(format="csv", columns=("label", "x", "city", "note"), dense=("x",), sparse=("city",))
    for text in (b"1,7,Rome,a\n0,8,Oslo,b\n", b"7,Rome,a\n8,Oslo,b\n"):
        found = list(streamed(pieces(text, 12), data).blocks())
        assert [block.dense_BF.item() for block in found] == [7.0, 8.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "no rows"),
        (b"\n \n", "no rows"),
        (gzip.compress(b"x,city,note\n1,Rome,a\n"), "is packed by gzip; unpack it, such as by zcat"),
        (b"PAR1\0\n", "is not text but a Parquet file"),
    ],
    ids=["empty", "blank", "gzip", "parquet"],
)
def test_stream_without_plain_text_is_refused(text: bytes, said: str) -> None:
    with pytest.raises(DataError, match=f"^standard input: {said}"):
        list(streamed(pieces(text, 7)).blocks())


def test_missing_column_of_a_stream_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^--keep = 'note': standard input has no such column; did you"):
        list(streamed(pieces(b"x,city,notes\n1,Rome,a\n", 99)).blocks())


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Yield the reading end and the writing end of a pipe."""
    reading, writing = os.pipe()
    writer = os.fdopen(writing, "wb", buffering=0)
    yield reading, writing
    writer.close()
    os.close(reading)


def test_descriptor_yields_available_bytes(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    given = read_descriptor(reading, 1 << 20, at_once=True)
    for text in (b"a\nb", b"\n", b"c\n"):
        os.write(writing, text)
        assert next(given) == text


@pytest.mark.parametrize("at_once", [True, False])
def test_terminal_is_not_read_after_its_end(at_once: bool) -> None:
    keys, terminal = os.openpty()
    os.write(keys, b"a\n\x04b\n\x04")
    found = list(islice(read_descriptor(terminal, 100, at_once=at_once), 2))
    os.close(terminal)
    os.close(keys)
    assert b"".join(found) == b"a\n"
