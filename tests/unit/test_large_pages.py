"""Memory in large pages."""

import errno
import math
import mmap

import pytest
import torch

from hybrid.primitives.huge_pages import zeros_in_large_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("shape", [(3,), (5, 7), (1, 1), (300, 1025), (0,), (0, 4), (4, 0)])
def test_they_hold_zeros_to_write_to(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = zeros_in_large_pages(shape, dtype)
    assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
    assert tensor.is_contiguous()
    assert not tensor.any()
    tensor.add_(2)
    assert tensor.sum().item() == 2 * math.prod(shape)


def test_two_share_nothing() -> None:
    first, second = (zeros_in_large_pages((2, 3), torch.float32) for _ in range(2))
    first.fill_(1.0)
    assert not second.any()


def test_a_system_without_them_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_args: int) -> None:
            refused.append(True)
            raise OSError(errno.EINVAL, "Invalid argument")

    refused: list[bool] = []
    monkeypatch.setattr("hybrid.primitives.huge_pages.mmap.mmap", Refusing)
    assert zeros_in_large_pages((2, 3), torch.float32).tolist() == [[0.0] * 3] * 2
    assert refused == [True]


def test_nor_need_it_know_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("hybrid.primitives.huge_pages.mmap.MADV_HUGEPAGE", raising=False)
    assert zeros_in_large_pages((2, 3), torch.float32).tolist() == [[0.0] * 3] * 2


def test_they_stay_as_long_as_any_part_is_used() -> None:
    row_D = zeros_in_large_pages((1000, 3), torch.float32)[7]
    assert row_D.fill_(4.0).tolist() == [4.0] * 3
