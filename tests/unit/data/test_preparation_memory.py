"""The memory limit of a preparation: the number of threads, and vocabularies that are merged on disk."""

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.commands import ROOT

from hybrid.config import DataSection
from hybrid.config.data_sections import Column, columns_of
from hybrid.data.encode.fitting import ValueCounts
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.sources import RawBlock, Segment
from hybrid.data.prepare import spill
from hybrid.data.prepare.file_preparation import limit_memory
from hybrid.data.prepare.vocabulary_order import rank_values
from hybrid.data.values.model_columns import Targets
from hybrid.errors import ConfigError

NO_TARGETS = Targets(np.empty((0, 1), np.float32))
MIB = 1 << 20
Words = dict[str, int]


def limit(limit_bytes: int, max_threads: int, *sizes: int) -> tuple[int, int]:
    """Return the limits for segments of text."""
    layout = Layout.of(DataSection(format="csv", dense=("x",), sparse=("user",)))
    segments = [Segment(Path("a"), 0, size, size) for size in sizes]
    return limit_memory(limit_bytes, segments, layout, max_threads)


def test_threads_stay_within_the_limit() -> None:
    for max_threads, expected in ((1, 1), (2, 2), (6, 6), (100, 6)):
        count, job_bytes = limit(4 << 30, max_threads, 10 * MIB, 64 * MIB)
        assert count == expected
        assert job_bytes >= 512 * MIB, "parsing takes as much"
        assert count * (job_bytes + 128 * MIB) + 64 * MIB <= 4 << 30


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^data\.prepare_memory_gb = 0\.488: .* 0\.69 "):
        limit(500 * MIB, 1, 64 * MIB)
    assert limit(int(0.69 * 2**30), 9, 64 * MIB)[0] == 1


def column(min_count: int) -> Column:
    data = DataSection(format="csv", sparse=("c",), vocabulary=f"build({min_count})")
    return columns_of(data, {})[1][0]


def write_pieces(folder: Path, pieces: list[list[Words]]) -> list[Path]:
    """Write pieces as parsing and counting leave them."""
    folders = []
    for i, columns in enumerate(pieces):
        coded = (pa.array([*words], pa.large_string()).dictionary_encode() for words in columns)
        block = RawBlock(
            np.empty((0, 0)), tuple(each[:0] for each in coded), NO_TARGETS, np.empty(0, np.int64)
        )
        spill.write_piece(folder / f"piece-{i}", [block], 0)
        for k, words in enumerate(columns):
            np.save(spill.counts_path(folder / f"piece-{i}", k), np.array([*words.values()], np.int64))
        folders.append(folder / f"piece-{i}")
    return folders


def peak_bytes(order: Callable[[], object]) -> int:
    """Return the peak memory of Arrow, Python and NumPy."""
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        order()
        return int(pool.max_memory()) + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)


def test_ordering_stays_within_its_memory(tmp_path: Path) -> None:
    """The vocabulary has 100,000 distinct values."""
    folders = write_pieces(tmp_path, [[{f"{5_000 * i + j:x}": 1 for j in range(5_000)}] for i in range(20)])
    checks: list[int] = []

    def order(memory_bytes: int) -> ValueCounts:
        folder = tmp_path / str(memory_bytes)
        return rank_values({0: column(1)}, folders, folder, memory_bytes, lambda: checks.append(1))

    enough, little = 1 << 40, 4 << 20
    texts = order(little).values
    assert len(checks) > len(folders) + 1, "a check for each piece, and for each run"
    assert peak_bytes(lambda: order(little)) < little < peak_bytes(lambda: order(enough)) / 2
    assert texts.equals(order(enough).values)
    assert len(texts) == 100_000


PREPARING = """
import sys
from pathlib import Path
from hybrid.config.loading import load_config
from hybrid.data.prepare.preparation import prepare
config = load_config(None, sys.argv[2:])
print(flush=True)
input()
prepare(config, Path(sys.argv[1]))
"""


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process; 0 if it has ended."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
    return 0


@pytest.mark.long
@pytest.mark.parametrize("mib", [707, 1352])
def test_preparation_stays_within_the_limit(mib: int, tmp_path: Path) -> None:
    """The input needs the most memory for each byte: numbers of one digit, in two segments."""
    names = [f"c{i}" for i in range(40)]
    digits = np.random.default_rng(0).integers(48, 50, ((100 * MIB) // 80, 40), dtype=np.uint8)
    text = np.full((len(digits), 80), ord(","), np.uint8)
    text[:, ::2], text[:, -1] = digits, ord("\n")
    (tmp_path / "a.csv").write_bytes((",".join(names) + "\n").encode() + text.tobytes())
    columns = [f"data.label={names[0]}", f"data.sparse={names[-1]}", f"data.dense={names[1:-1]}"]
    keys = ["data.format=csv", f"data.path={tmp_path / 'a.csv'}", f"data.prepare_memory_gb={mib / 1024}"]
    command = [sys.executable, "-c", PREPARING, str(tmp_path / "cache"), *columns, *keys]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        before, most = anonymous_bytes(process.pid), 0
        process.stdin.write(b"\n")
        process.stdin.close()
        while process.poll() is None:
            most = max(most, anonymous_bytes(process.pid) - before)
        assert process.returncode == 0
    assert mib * MIB / 3 < most <= mib * MIB  # two threads may not reach their peaks at the same time
