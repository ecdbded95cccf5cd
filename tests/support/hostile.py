"""Damaged input files, which a reader must turn into rows or one clear error."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from unittest.mock import patch

import numpy as np

from hybrid.config import ColumnSection, DataSection
from hybrid.data.parse import delimited_text
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.sources import read_blocks
from hybrid.data.values.invalid_rows import InvalidRowLog, InvalidRowReport
from hybrid.errors import HybridError

_HEADED = DataSection(
    format="csv",
    label="label",
    dense=("x",),
    sparse=("city", "tags"),
    multi_hot_separator="|",
    max_invalid_fraction=1.0,
)
LAYOUTS = (
    _HEADED,
    dataclasses.replace(_HEADED, columns=("label", "x", "city", "tags")),
    DataSection(format="criteo", max_invalid_fraction=1.0),
)
# Bytes that a reader may misread, and those of valid files.
TOKENS = (
    *(b"label", b"x", b"city", b"tags", b"label,x,city,tags\n", b'0,.5,"a,b",c\n', b"1,2,a,b|c\n"),
    *(b",", b"\t", b"\n", b"\r\n", b"\r", b"|", b'"', b'""', b"'", b" ", b"?", b"-", b"0", b"1"),
    *(b"1e999", b"nan", b"inf", b"0x1p3", b"1_000", b"9" * 400, "\u0661".encode(), "é".encode()),
    *(b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80"),
    *(b"\x0b", b"\x0c", b"\x1c", b"\xc2\x85", b"\x1f\x8b"),
    b"\t".join([b"1", *[b"3"] * 13, *[b"68fd1e64"] * 26]) + b"\n",
)


def check_line(error: HybridError) -> None:
    """Check that the message of an error is one line."""
    assert len(str(error).splitlines()) == 1, f"several lines, or none: {error!r}"


def read_hostile(
    path: Path,
    data: DataSection,
    with_labels: bool,
    block_bytes: int,
    columns: Mapping[str, ColumnSection] = MappingProxyType({}),
) -> tuple[InvalidRowReport, list[int]] | None:
    """Return the report of invalid rows and the numbers of the valid ones; None if the file is refused.

    Raises:
        AssertionError: an error has several lines, or a block is inconsistent.
        Exception: any error that is not a HybridError.
    """
    log = InvalidRowLog(data.max_invalid_fraction)
    rows: list[int] = []
    try:
        layout = Layout.of(data, columns, with_labels=with_labels)
        with patch.object(delimited_text, "BLOCK_BYTES", block_bytes):
            blocks = list(read_blocks((path,), layout, log))
        for block in blocks:
            size = len(block.source_rows_B)
            assert {len(block.dense_BF), *map(len, block.sparse), *map(len, block.weights)} == {size}
            for weights in block.weights:
                weights_L = np.asarray(weights.flatten())
                assert np.isfinite(weights_L).all()
                assert (weights_L >= 0).all()
            assert block.targets is None or set(block.targets.labels_BT[:, 0].tolist()) <= {0, 1}
            rows += block.source_rows_B.tolist()
        report = log.finish()
    except HybridError as error:
        check_line(error)
        return None
    assert rows == sorted(set(rows)), "rows come once, in order"
    return report, rows
