"""What the kernel says of memory that ran out."""

from pathlib import Path

import pytest

from workers.launching.oom import oom_kills

GROUPS: list[tuple[str, dict[str, str], int]] = [
    (
        "version 2",
        {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.events": "oom 9\noom_kill 3\n"},
        3,
    ),
    (
        "version 1",
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n",
            "sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 2\n",
            "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 7\n",
        },
        2,
    ),
    (
        "seen from inside a container",
        {"proc/self/cgroup": "0::/../../job\n", "sys/fs/cgroup/memory.events": "oom_kill 5\n"},
        5,
    ),
    ("of the machine", {"proc/vmstat": "oom_kill 6\n"}, 6),
    ("nowhere", {}, 0),
]


@pytest.mark.parametrize(("files", "kills"), [case[1:] for case in GROUPS], ids=[case[0] for case in GROUPS])
def test_the_kernels_count_is_read_where_it_is(files: dict[str, str], kills: int, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert oom_kills(tmp_path) == kills
