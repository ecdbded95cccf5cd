"""Tensors one after the other in memory, as types and shapes say it to whoever else has that memory."""

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
_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
_ALIGNMENT = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MANY_BYTES = 1 << 20  # to copy them takes longer than threads should wait for each other

# Of each tensor, the number of its type in ``DTYPES``, and its shape.
Described: TypeAlias = Sequence[tuple[int, Sequence[int]]]


def create_memory(num_bytes: int) -> int:
    """Return the descriptor of anonymous memory whose size nobody can change any more."""
    descriptor = os.memfd_create("hybrid", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    return descriptor


def map_memory(descriptor: int) -> mmap.mmap:
    """Map memory of another process, which :func:`create_memory` has created there.

    Raises:
        ValueError: the other process could truncate it, and a later access here would end in SIGBUS.
        OSError: the descriptor is not one of memory.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("its size is not sealed")
    return mmap.mmap(descriptor, 0)


def described(tensors: Iterable[Tensor]) -> Described:
    """What is to be said of tensors, in plain values."""
    return [(_NUMBERS[each.dtype], tuple(each.shape)) for each in tensors]


def num_bytes(shapes: Described) -> int:
    """How much room :func:`tensors_in` takes, from a place that is a multiple of 64 bytes."""
    return sum(aligned(math.prod(shape) * DTYPES[number].itemsize) for number, shape in shapes)


def write(tensors: Sequence[Tensor], memory: memoryview, start: int) -> None:
    """Copy tensors into ``memory``, to where :func:`tensors_in` finds them."""
    for tensor in tensors:
        if tensor.nbytes >= _MANY_BYTES:  # torch lets other threads go on meanwhile
            there = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            there.view(tensor.shape).copy_(tensor.detach())
        else:
            whole = tensor if is_contiguous(tensor) else tensor.contiguous()
            for part in memory_of(whole):
                memory[start : start + len(part)] = part
        start += aligned(tensor.nbytes)


def tensors_in(memory: memoryview, start: int, shapes: Described) -> list[Tensor]:
    """Tensors that lie in ``memory`` from the byte ``start`` on, and keep it.

    Raises:
        ValueError: one begins or ends beyond it.
    """
    tensors = []
    for number, shape in shapes:
        dtype, count = DTYPES[number], math.prod(shape)
        if count:
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
        else:  # torch makes none of memory
            flat = torch.empty(0, dtype=dtype)
        tensors.append(flat.view(tuple(shape)))
        start += aligned(count * dtype.itemsize)
    return tensors


def aligned(at: int) -> int:
    """The next place at which a tensor may begin."""
    return -(-at // _ALIGNMENT) * _ALIGNMENT
