"""How much memory is free, and memory in large pages."""

import errno
import math
import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybrid.memory import available_memory_bytes, zeros_in_large_pages


class TestMemory:
    FREE = 1000 << 20

    @pytest.fixture(autouse=True)
    def host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        vitals = SimpleNamespace(available=self.FREE)
        monkeypatch.setattr("hybrid.memory.psutil.virtual_memory", lambda: vitals)

    def cgroup(self, folder: Path, limit: str, current: int, cache: int = 0) -> Path:
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{current}\n")
        (folder / "memory.stat").write_text(f"anon {current - cache}\nfile {cache}\ninactive_file {cache}\n")
        return folder

    def test_without_a_container_the_host_counts(self, tmp_path: Path) -> None:
        assert available_memory_bytes(tmp_path) == self.FREE
        assert available_memory_bytes(self.cgroup(tmp_path, "max", 10)) == self.FREE

    def test_the_containers_limit_counts_where_it_is_nearer(self, tmp_path: Path) -> None:
        assert available_memory_bytes(self.cgroup(tmp_path, str(500 << 20), 300 << 20)) == 200 << 20
        assert available_memory_bytes(self.cgroup(tmp_path, str(5000 << 20), 300 << 20)) == self.FREE

    def test_cached_files_are_not_in_the_way(self, tmp_path: Path) -> None:
        cgroup = self.cgroup(tmp_path, str(500 << 20), 490 << 20, cache=400 << 20)
        assert available_memory_bytes(cgroup) == 410 << 20

    def test_less_than_nothing_is_nothing(self, tmp_path: Path) -> None:
        assert available_memory_bytes(self.cgroup(tmp_path, "100", 300)) == 0

    def test_this_machine_has_some(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        assert available_memory_bytes() > 0


class TestLargePages:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
    @pytest.mark.parametrize("shape", [(3,), (5, 7), (1, 1), (300, 1025), (0,), (0, 4), (4, 0)])
    def test_they_hold_zeros_to_write_to(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        tensor = zeros_in_large_pages(shape, dtype)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert not tensor.any()
        tensor.add_(2)
        assert tensor.sum().item() == 2 * math.prod(shape)

    def test_two_share_nothing(self) -> None:
        first, second = (zeros_in_large_pages((2, 3), torch.float32) for _ in range(2))
        first.fill_(1.0)
        assert not second.any()

    def test_a_system_without_them_gives_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Refusing(mmap.mmap):
            def madvise(self, *_args: int) -> None:
                refused.append(True)
                raise OSError(errno.EINVAL, "Invalid argument")

        refused: list[bool] = []
        monkeypatch.setattr("hybrid.memory.mmap.mmap", Refusing)
        assert zeros_in_large_pages((2, 3), torch.float32).tolist() == [[0.0] * 3] * 2
        assert refused == [True]

    def test_nor_need_it_know_of_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr("hybrid.memory.mmap.MADV_HUGEPAGE", raising=False)
        assert zeros_in_large_pages((2, 3), torch.float32).tolist() == [[0.0] * 3] * 2

    def test_they_stay_as_long_as_any_part_is_used(self) -> None:
        row_D = zeros_in_large_pages((1000, 3), torch.float32)[7]
        assert row_D.fill_(4.0).tolist() == [4.0] * 3
