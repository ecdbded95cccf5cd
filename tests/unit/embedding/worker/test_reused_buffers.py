"""Buffers of large tensors: reused once the tensor is gone, never before."""

from contextlib import ExitStack

import torch
from support.shards import cluster, prefetch, specs
from torch import Tensor

from hybrid.embedding.bags import Bags
from hybrid.embedding.worker.table_groups import ReusedBuffers

LARGE = (1 << 20, 4)  # 16 MiB


def copy(buffers: ReusedBuffers, tensor: Tensor) -> Tensor:
    return buffers.empty(tensor.shape, tensor.dtype).copy_(tensor)


def test_a_buffer_is_reused_once_no_view_of_the_tensor_lives() -> None:
    buffers = ReusedBuffers()
    first = copy(buffers, torch.ones(LARGE))
    address, content = first.data_ptr(), first[7:9].numpy().data
    del first
    second = copy(buffers, torch.zeros(LARGE))
    assert second.data_ptr() != address
    assert bytes(content) == torch.ones(2, 4).numpy().tobytes()
    del content
    assert copy(buffers, torch.ones(8)).data_ptr() != address
    assert copy(buffers, torch.ones(LARGE[0] - 9, 4)).data_ptr() == address  # a similar size


def test_large_responses_reuse_memory_and_keep_their_values(stack: ExitStack) -> None:
    (host,) = cluster(stack, specs(), 1).hosts.values()
    rows_RD = host.groups[0].weight_RD

    def look_up(step: int, seed: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(len(rows_RD), (1_000_000,), generator=torch.Generator().manual_seed(seed))
        (vectors,) = host.lookup(prefetch(step), [(0, Bags(ids.int()))]).wait()
        return vectors, rows_RD[ids]

    first, expected = look_up(0, 0)
    address = first.data_ptr()
    second, _ = look_up(0, 1)
    assert second.data_ptr() != address
    assert torch.equal(first, expected)
    del first
    third, expected = look_up(0, 2)
    assert third.data_ptr() == address
    assert torch.equal(third, expected)
