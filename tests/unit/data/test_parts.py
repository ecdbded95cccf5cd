"""Where input files are cut: at rows, and by the file alone."""

import gzip
import random
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import pytest
from support.samples import write

from hybrid.config import DataSection
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.segments import SEGMENT_BLOCKS, Segment, read_segment, split_files

LAYOUT = Layout.of(DataSection(format="csv", dense=("x",), sparse=("note",)), with_labels=False)
BLOCK_BYTES = 40
SECONDS = 20.0


def records(end: str) -> list[bytes]:
    """The header, and rows some of which have line breaks within quotes."""
    draw = random.Random(3)
    kinds = ["{},plain", '{},"quoted, and long enough"', '{},"of two\nlines"', '{},"of\nthree\nlines"']
    rows = [draw.choice(kinds).format(i) for i in range(300)]
    return [f"{row}\n".replace("\n", end).encode() for row in ["x,note", *rows]]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_text_is_cut_at_rows_near_every_few_blocks(tmp_path: Path, end: str) -> None:
    given = records(end)
    path = write(tmp_path / "a.csv", b"".join(given))
    begins = [0, *accumulate(map(len, given))]
    content, size = path.read_bytes(), path.stat().st_size
    nominal = range(SEGMENT_BLOCKS * BLOCK_BYTES, size, SEGMENT_BLOCKS * BLOCK_BYTES)
    lines = [content.rfind(b"\n", 0, at) + 1 for at in nominal]
    expected = sorted({0, *(begins[bisect_right(begins, line) - 1] for line in lines)})
    parts = split_files([path], LAYOUT, BLOCK_BYTES)
    assert [part.start for part in parts] == expected
    assert [part.stop for part in parts] == [*expected[1:], size]
    assert sum(line not in begins for line in lines) > 5, "some cuts would be within rows"
    assert [part.is_first for part in parts] == [True] + [False] * (len(parts) - 1)
    assert sum(rows_of(part) for part in parts) == len(given) - 1


def rows_of(part: Segment) -> int:
    """How many rows a part has, bad ones included; those of several lines are bad."""
    return sum(len(table.lines) + len(table.invalid) for table, _ in read_segment(part, LAYOUT, BLOCK_BYTES))


def test_a_packed_file_is_one_part(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv.gz", gzip.compress(b"".join(records("\n"))))
    (part,) = split_files([path], LAYOUT, BLOCK_BYTES)
    shares = [share for _, share in read_segment(part, LAYOUT, BLOCK_BYTES)]
    assert shares[-1] == 1.0
    assert rows_of(part) == 300
