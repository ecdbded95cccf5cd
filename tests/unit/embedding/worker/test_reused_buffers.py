"""Buffers for copies of tables: reused once the copy is gone, never before."""

import pytest
import torch

from hybrid.embedding.worker.table_groups import ReusedBuffers

LARGE = (1 << 20, 4)  # 16 MiB


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(300, 1025), (0, 4)])
def test_a_copy_is_equal_and_independent(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.full(shape, 1.5, dtype=dtype)
    copy = ReusedBuffers().copy(tensor)
    tensor.zero_()
    assert torch.equal(copy, torch.full(shape, 1.5, dtype=dtype))


def test_a_buffer_is_reused_once_no_view_of_the_copy_lives() -> None:
    buffers = ReusedBuffers()
    first = buffers.copy(torch.ones(LARGE))
    address, content = first.data_ptr(), first[7:9].numpy().data
    del first
    second = buffers.copy(torch.zeros(LARGE))
    assert second.data_ptr() != address
    assert bytes(content) == torch.ones(2, 4).numpy().tobytes()
    del content
    assert buffers.copy(torch.ones(8)).data_ptr() != address
    assert buffers.copy(torch.ones(LARGE)).data_ptr() == address
