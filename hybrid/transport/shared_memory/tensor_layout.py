"""Anonymous memory that processes share, and the layout of tensors in it."""

import fcntl
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from hybrid.security.message_signature import is_contiguous, memory_of

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int32, torch.int64, torch.uint8, torch.bool),
)
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
_ALIGNMENT = 64
_MANY_BYTES = 1 << 20  # copied by torch, which lets other threads run meanwhile
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

# Of each tensor, the number of its dtype in ``DTYPES``, and its shape.
Layout: TypeAlias = Sequence[tuple[int, Sequence[int]]]


def create_memory(num_bytes: int) -> int:
    """Return the descriptor of anonymous memory whose size nobody can change any more."""
    descriptor = os.memfd_create("hybrid", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    return descriptor


def map_memory(descriptor: int, num_bytes: int = 0) -> mmap.mmap:
    """Map memory that another process created by :func:`create_memory`; all of it by default.

    Raises:
        ValueError: the memory is smaller, or its owner could truncate it: an access would end in SIGBUS.
        OSError: the descriptor is not one of memory.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("its size is not sealed")
    return mmap.mmap(descriptor, num_bytes)


def layout_of(tensors: Iterable[Tensor]) -> Layout:
    """Return dtypes and shapes, in plain values."""
    return [(_DTYPE_NUMBERS[each.dtype], tuple(each.shape)) for each in tensors]


def num_bytes(layout: Layout) -> int:
    """Return the size of tensors in memory, from a position that is a multiple of 64 bytes."""
    return sum(align(math.prod(shape) * DTYPES[number].itemsize) for number, shape in layout)


def write_tensors(tensors: Sequence[Tensor], memory: memoryview, start: int) -> None:
    """Copy tensors into ``memory``, from byte ``start`` on."""
    for tensor in tensors:
        if tensor.nbytes >= _MANY_BYTES:
            copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            copy.view(tensor.shape).copy_(tensor.detach())
        else:
            contiguous = tensor if is_contiguous(tensor) else tensor.contiguous()
            for segment in memory_of(contiguous):
                memory[start : start + len(segment)] = segment
        start += align(tensor.nbytes)


def read_tensors(memory: memoryview, start: int, layout: Layout) -> list[Tensor]:
    """Return tensors that lie in ``memory`` from byte ``start`` on, and keep it.

    Raises:
        ValueError: one is not within the memory.
    """
    tensors = []
    for number, shape in layout:
        dtype, count = DTYPES[number], math.prod(shape)
        if count:
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
        else:  # frombuffer rejects an empty tensor
            flat = torch.empty(0, dtype=dtype)
        tensors.append(flat.view(tuple(shape)))
        start += align(count * dtype.itemsize)
    return tensors


def align(position: int) -> int:
    """Return the next position at which a tensor may start."""
    return -(-position // _ALIGNMENT) * _ALIGNMENT
