"""The memory that a preparation takes, and the number of threads that fit into a limit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.segments import SEGMENT_BLOCKS, Segment
from hybrid.errors import ConfigError
from hybrid.primitives.available_memory import available_memory_bytes

_SHARED_BYTES = 64 << 20  # logs and statistics of all segments
_THREAD_BYTES = 128 << 20  # what a thread holds besides the rows that it parses
# The most that parsing takes, as measured: for each byte of text with one value and with several values in a
# field; for each value of Parquet, and for each byte of its file.
_PER_BYTE, _PER_BYTE_OF_BAGS = 8, 20
_PER_VALUE, _PER_PACKED_BYTE = 48, 20


@dataclass(frozen=True)
class MemoryLimit:
    """The memory of a preparation, beyond what the process takes before it.

    Attributes:
        limit_bytes: all of it.
        parse_bytes: what parsing the largest segment takes.
    """

    limit_bytes: int
    parse_bytes: int

    @classmethod
    def of(
        cls, limit_bytes: int, segments: Iterable[Segment], layout: Layout, block_bytes: int
    ) -> MemoryLimit:
        """Return the limit for some segments.

        Args:
            limit_bytes: 0 for half of the free memory, or what one thread takes, if that is more.

        Raises:
            ConfigError: the largest segment does not fit.
        """
        has_bags = any(column.separator or column.kind == "weighted" for column in layout.sparse)
        per_byte = _PER_BYTE_OF_BAGS if has_bags else _PER_BYTE
        at_once = SEGMENT_BLOCKS * block_bytes
        parse_bytes = 0
        for segment in segments:
            if segment.format == "parquet":
                values = segment.nominal * len(layout.required)
                needed = _PER_VALUE * values + _PER_PACKED_BYTE * segment.size
            else:
                needed = per_byte * (at_once if segment.format == "whole" else min(segment.size, at_once))
            parse_bytes = max(parse_bytes, needed)
        enough = _SHARED_BYTES + _THREAD_BYTES + parse_bytes
        if not limit_bytes:
            limit_bytes = max(available_memory_bytes() // 2, enough)
        if limit_bytes < enough:
            rule = f"is too little to parse a segment of the files; {_gib(enough)} are enough"
            raise ConfigError("data.prepare_memory_gb", rule, round(limit_bytes / 2**30, 3))
        return cls(limit_bytes, parse_bytes)

    def count_threads(self, wanted: int) -> int:
        """Return how many threads fit, at most ``wanted``."""
        return min(wanted, (self.limit_bytes - _SHARED_BYTES) // (_THREAD_BYTES + self.parse_bytes))

    def job_bytes(self, count: int) -> int:
        """Return what a job of one of ``count`` threads may take."""
        return (self.limit_bytes - _SHARED_BYTES) // count - _THREAD_BYTES

    def line(self, count: int, wanted: int) -> str:
        """Return the message that reports fewer threads than ``wanted``."""
        return (
            f"preparing with {count} thread{'s' * (count != 1)}, not {wanted}: {_gib(self.limit_bytes)} GiB "
            "of memory (data.prepare_memory_gb) has room for no more"
        )


def _gib(num_bytes: int) -> str:
    """Return GiB, rounded up to hundredths."""
    return f"{math.ceil(num_bytes / 2**30 * 100) / 100:g}"
