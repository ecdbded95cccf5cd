"""How much memory preparing takes, and how many processes fit into a limit. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.segments import PART_BLOCKS, Part
from hybrid.errors import ConfigError, DataError
from hybrid.primitives.available_memory import available_memory_bytes

_PARENT_BYTES = 64 << 20  # what the parent holds of all parts
_PROCESS_BYTES = 128 << 20  # what a process holds when it has done a job: modules, and what it keeps at hand
# What parsing takes, at most, as measured: for each byte of text, of single values and of several in a field;
# for each value of Parquet, and for each byte of its file.
_A_BYTE, _A_BYTE_OF_BAGS = 8, 20
_A_VALUE, _A_PACKED_BYTE = 48, 20


@dataclass(frozen=True)
class MemoryLimit:
    """What preparing may take beyond what is there before it: the parent and its processes together.

    Attributes:
        limit_bytes: all of it.
        parse_bytes: what parsing the largest part takes.
    """

    limit_bytes: int
    parse_bytes: int

    @classmethod
    def of(cls, limit_bytes: int, parts: Iterable[Part], layout: Layout, block_bytes: int) -> MemoryLimit:
        """For these parts.

        Args:
            limit_bytes: 0 for half of what is free, or what one process takes, where that is more.

        Raises:
            ConfigError: the largest does not fit.
        """
        parse_bytes = max((_parse_bytes(part, layout, block_bytes) for part in parts), default=0)
        enough = _PARENT_BYTES + _PROCESS_BYTES + parse_bytes
        if not limit_bytes:
            limit_bytes = max(free_bytes(), enough)
        if limit_bytes < enough:
            rule = f"is too little for one process to read a part of the files; {_gib(enough)} are enough"
            raise ConfigError("data.prepare_memory_gb", rule, round(limit_bytes / 2**30, 3))
        return cls(limit_bytes, parse_bytes)

    @property
    def process_bytes(self) -> int:
        """What a process takes that reads."""
        return _PROCESS_BYTES + self.parse_bytes

    def processes(self, wanted: int) -> int:
        """How many processes it has room for, at most so many as are wanted."""
        return min(wanted, (self.limit_bytes - _PARENT_BYTES) // self.process_bytes)

    def job_bytes(self, count: int) -> int:
        """What a job of one of so many processes may take."""
        return self.share_bytes(count) - _PROCESS_BYTES

    def share_bytes(self, count: int) -> int:
        """What one of so many processes may take."""
        return (self.limit_bytes - _PARENT_BYTES) // count

    def line(self, count: int, wanted: int) -> str:
        """What is said where there is no room for all."""
        plural = "" if count == 1 else "es"
        return (
            f"preparing with {count} process{plural}, not {wanted}: {_gib(self.limit_bytes)} GiB of memory "
            "(data.prepare_memory_gb) has room for no more"
        )


@contextmanager
def memory_at_hand() -> Iterator[None]:
    """Turn a MemoryError in here into one line for the user."""
    try:
        yield
    except MemoryError as error:
        rule = (
            "give it more, set data.prepare_memory_gb lower, or data.vocabulary = hash, which holds no values"
        )
        raise DataError(f"out of memory while preparing the data: {rule}") from error


def free_bytes() -> int:
    """What preparing takes of this host's memory, where nobody says how much: half of what is free."""
    return available_memory_bytes() // 2


def _parse_bytes(part: Part, layout: Layout, block_bytes: int) -> int:
    if part.format == "parquet":
        return _A_VALUE * part.nominal * len(layout.wanted) + _A_PACKED_BYTE * part.size
    at_once = PART_BLOCKS * block_bytes
    has_bags = any(column.separator or column.kind == "weighted" for column in layout.sparse)
    text = at_once if part.format == "whole" else min(part.size, at_once)
    return (_A_BYTE_OF_BAGS if has_bags else _A_BYTE) * text


def _gib(num_bytes: int) -> str:
    """Rounded up to hundredths."""
    return f"{math.ceil(num_bytes / 2**30 * 100) / 100:g}"
