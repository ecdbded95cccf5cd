"""The memory limit of a preparation, and the number of threads that fit."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.commands import ROOT

from hybrid.config import DataSection
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.segments import Segment
from hybrid.data.prepare.memory_limit import MemoryLimit
from hybrid.errors import ConfigError

MIB = 1 << 20


def part(kind: str, size: int, rows: int = 0) -> Segment:
    return Segment(Path("a"), 0, kind, 0, 1, rows, size, True, True)


def limit(limit_bytes: int, *parts: Segment, separator: str = "") -> MemoryLimit:
    data = DataSection(format="csv", dense=("x",), sparse=("user",), multi_hot_separator=separator)
    return MemoryLimit.of(limit_bytes, parts, Layout.of(data, {}, {}), 16 * MIB)


def test_threads_stay_within_the_limit() -> None:
    found = limit(4 << 30, part("text", 10 * MIB), part("text", 64 * MIB))
    assert found.parse_bytes == 512 * MIB
    assert [found.count_threads(wanted) for wanted in (1, 2, 100)] == [1, 2, 6]
    for count in range(1, 7):
        assert found.job_bytes(count) >= found.parse_bytes
        assert count * (found.job_bytes(count) + 128 * MIB) + 64 * MIB <= 4 << 30
    assert found.line(1, 6).startswith("preparing with 1 thread, not 6: 4 GiB of memory (data.prepare_memory")


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        limit(500 * MIB, part("text", 64 * MIB))
    assert str(caught.value) == (
        "data.prepare_memory_gb = 0.488: is too little to parse a segment of the files; 0.69 are enough"
    )
    assert limit(int(0.69 * 2**30), part("text", 64 * MIB)).count_threads(9) == 1


WIDTH = 40
# Arguments: a file of digits, a folder, the limit in bytes. The script waits for a line before it prepares.
PREPARING = """
import sys
from pathlib import Path
from hybrid.config.loading import load_config
from hybrid.data.prepare.file_preparation import FilesPreparation
path, folder, limit = sys.argv[1:]
names = [f"c{i}" for i in range(WIDTH)]
columns = [f"data.label={names[0]}", f"data.sparse={names[-1]}", f"data.dense={names[1:-1]}"]
config = load_config(None, ["data.format=csv", f"data.path={path}", *columns])
nothing = lambda *said: None
parts = Path(folder, "parts")
preparation = FilesPreparation(config, Path(folder), parts, nothing, nothing, int(limit))
print(flush=True)
input()
preparation.write([Path(path)], [])
"""


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


@pytest.mark.long
@pytest.mark.parametrize("mib", [707, 1352])
def test_preparation_stays_within_the_limit(mib: int, tmp_path: Path) -> None:
    """The input needs the most memory for each byte: numbers of one digit, in two segments."""
    digits = np.random.default_rng(0).integers(48, 50, ((100 * MIB) // (2 * WIDTH), WIDTH), dtype=np.uint8)
    text = np.full((len(digits), 2 * WIDTH), ord(","), np.uint8)
    text[:, ::2], text[:, -1] = digits, ord("\n")
    header = ",".join(f"c{i}" for i in range(WIDTH)) + "\n"
    (tmp_path / "a.csv").write_bytes(header.encode() + text.tobytes())
    code = PREPARING.replace("WIDTH", str(WIDTH))
    given = tmp_path / "a.csv", tmp_path / "new", mib * MIB
    command = [sys.executable, "-c", code, *map(str, given)]
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
    assert mib * MIB / 2 < most <= mib * MIB
