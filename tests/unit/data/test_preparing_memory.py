"""What preparing may take, and how many processes share it."""

from pathlib import Path

import pytest

from hybrid.config import ColumnSection, DataSection
from hybrid.data import preparing_memory
from hybrid.data.layout import Layout
from hybrid.data.parts import Part
from hybrid.data.preparing_memory import MemoryLimit
from hybrid.errors import ConfigError

MIB = 1 << 20


def part(kind: str, size: int, rows: int = 0) -> Part:
    return Part(Path("a"), 0, kind, 0, 1, rows, size, True, True)


def limit(limit_bytes: int, *parts: Part, separator: str = "") -> MemoryLimit:
    data = DataSection(format="csv", dense=("x",), sparse=("user",), multi_hot_separator=separator)
    return MemoryLimit.of(limit_bytes, parts, Layout.of(data, {}, {}), 16 * MIB)


def test_processes_and_what_each_may_take_are_within_the_limit() -> None:
    found = limit(4 << 30, part("text", 10 * MIB), part("text", 64 * MIB))
    assert found.parse_bytes == 512 * MIB
    assert [found.processes(wanted) for wanted in (1, 2, 100)] == [1, 2, 6]
    for count in range(1, 7):
        assert found.job_bytes(count) >= found.parse_bytes
        assert count * (found.job_bytes(count) + 128 * MIB) + 64 * MIB <= 4 << 30
    assert found.line(1, 6).startswith(
        "preparing with 1 process, not 6: 4 GiB of memory (data.prepare_memory"
    )


def test_where_nothing_is_said_it_is_half_of_what_is_free_and_enough_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preparing_memory, "available_memory_bytes", lambda: 4 << 30)
    assert limit(0, part("text", 10 * MIB)).limit_bytes == 2 << 30
    monkeypatch.setattr(preparing_memory, "available_memory_bytes", lambda: 100)
    assert limit(0, part("text", 10 * MIB)).processes(2) == 1


@pytest.mark.parametrize(
    ("given", "separator", "need"),
    [
        (part("text", 500), "", 4000),
        (part("text", 900 * MIB), "", 512 * MIB),
        (part("text", 64 * MIB), "|", 1280 * MIB),
        (part("whole", 9), "", 512 * MIB),  # it may be packed
        (part("parquet", 5 * MIB, rows=100), "", 100 * MIB + 100 * 48 * 3),
    ],
)
def test_what_parsing_a_part_takes(given: Part, separator: str, need: int) -> None:
    assert limit(1 << 40, given, separator=separator).parse_bytes == need


def test_ids_with_weights_take_as_much_as_other_bags() -> None:
    data = DataSection(format="csv", sparse=("tags",), multi_hot_separator="|")
    columns = {"tags": ColumnSection(kind="weighted")}
    found = MemoryLimit.of(1 << 40, [part("text", 100)], Layout.of(data, columns, {}), 16 * MIB)
    assert found.parse_bytes == 2000


def test_too_little_is_refused_with_what_is_enough() -> None:
    with pytest.raises(ConfigError) as caught:
        limit(500 * MIB, part("text", 64 * MIB))
    assert str(caught.value) == (
        "data.prepare_memory_gb = 0.488: is too little for one process to read a part of the files; "
        "0.69 are enough"
    )
    assert limit(int(0.69 * 2**30), part("text", 64 * MIB)).processes(9) == 1
