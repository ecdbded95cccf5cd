"""Buffers for copies of tables: reused once the copy is gone, never before."""

import math

import pytest
import torch

from hybrid.checkpoint.reused_buffers import ReusedBuffers

LARGE = (1 << 20, 4)  # 16 MiB


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (300, 1025), (0, 4)])
def test_a_copy_is_equal_and_independent(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    buffers = ReusedBuffers()
    for value in (1.5, 2.5):
        tensor = torch.full(shape, value, dtype=dtype)
        copy = buffers.copy(tensor)
        tensor.zero_()
        assert (tuple(copy.shape), copy.dtype) == (shape, dtype)
        assert copy.sum(dtype=torch.float64).item() == value * math.prod(shape)
        del copy


def test_a_buffer_is_reused_for_the_next_copy_of_its_size() -> None:
    buffers = ReusedBuffers()
    first, second = buffers.copy(torch.ones(LARGE)), buffers.copy(torch.zeros(LARGE))
    assert first.all()
    assert not second.any()
    addresses = {first.data_ptr(), second.data_ptr()}
    del first, second
    small = buffers.copy(torch.ones(8))
    third, fourth = buffers.copy(torch.ones(LARGE)), buffers.copy(torch.ones(LARGE))
    assert {third.data_ptr(), fourth.data_ptr()} == addresses
    assert small.data_ptr() not in addresses


def test_a_buffer_is_not_reused_while_a_view_of_the_copy_lives() -> None:
    buffers = ReusedBuffers()
    content = buffers.copy(torch.ones(LARGE))[7:9].numpy().data
    buffers.copy(torch.zeros(LARGE))
    assert bytes(content) == torch.ones(2, 4).numpy().tobytes()
