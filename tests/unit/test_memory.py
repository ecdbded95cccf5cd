"""How much memory is free."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid.primitives.available_memory import available_memory_bytes

FREE = 1000 << 20


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    vitals = SimpleNamespace(available=FREE)
    monkeypatch.setattr("hybrid.primitives.available_memory.psutil.virtual_memory", lambda: vitals)


def cgroup(folder: Path, limit: str, current: int, cache: int = 0) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon {current - cache}\nfile {cache}\ninactive_file {cache}\n")
    return folder


def test_without_a_container_the_host_counts(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path) == FREE
    assert available_memory_bytes(cgroup(tmp_path, "max", 10)) == FREE


def test_the_containers_limit_counts_where_it_is_nearer(tmp_path: Path) -> None:
    assert available_memory_bytes(cgroup(tmp_path, str(500 << 20), 300 << 20)) == 200 << 20
    assert available_memory_bytes(cgroup(tmp_path, str(5000 << 20), 300 << 20)) == FREE


def test_cached_files_are_not_in_the_way(tmp_path: Path) -> None:
    group = cgroup(tmp_path, str(500 << 20), 490 << 20, cache=400 << 20)
    assert available_memory_bytes(group) == 410 << 20


def test_less_than_nothing_is_nothing(tmp_path: Path) -> None:
    assert available_memory_bytes(cgroup(tmp_path, "100", 300)) == 0


def test_this_machine_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert available_memory_bytes() > 0
