"""Text that is read while it is written gives the rows of a file with the same content."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.samples import read, write

from hybrid.config import DataSection
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.delimited_text import STDIN
from hybrid.data.parse.sources import RawBlock, read_blocks
from hybrid.data.values.invalid_rows import InvalidRowLog
from hybrid.errors import DataError

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


def streamed(
    text: Iterator[bytes], data: DataSection = CSV, log: InvalidRowLog | None = None
) -> Iterator[RawBlock]:
    """Yield the rows of a stream, with the column "note" as it is."""
    layout = Layout.of(data, with_labels=False, passthrough=(("--keep", "note"),))
    return read_blocks((STDIN,), layout, log or InvalidRowLog(1.0), text=text)


@pytest.mark.parametrize("size", [3, 4, 17, 1 << 20])
def test_stream_equals_file_for_any_chunk_size(tmp_path: Path, size: int) -> None:
    expected, of_file = read(CSV, write(tmp_path / "a.csv", ROWS), with_labels=False)
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
        (gzip.compress(b"x,city,note\n1,Rome,a\n", mtime=0), "is compressed; decompress it"),
        (b"PAR1\0\n", "is not text; unpack"),
    ],
)
def test_stream_without_plain_text_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^standard input: {message}"):
        list(streamed(pieces(text, 7)))
