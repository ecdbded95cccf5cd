"""Sums over the trainers of one host, through memory that they share.

The process group does the same by messages over TCP, in threads of its own: on 2 cores, 2 ms for 2 MB and
0.7 ms for a number, when nobody else wants a core.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.transport.shared_memory.shared_block import SharedMemory


class SharedSum:
    """One trainer's part in the sums of a group of trainers; made by :meth:`join`."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    @classmethod
    def join(
        cls, group: dist.ProcessGroup, trainer: int, device: torch.device, timeout_seconds: float
    ) -> SharedSum | None:
        """Meet the other trainers of ``group``, all of which call this; None where memory cannot be shared.

        It can where all are processes of one Linux host with gradients in its memory, and not too many.

        Args:
            group: one that takes tensors of the CPU.
            trainer: the index of this one.
            device: where this trainer's gradients are.

        Raises:
            ClusterError: a trainer did not come in time.
        """
        memory = SharedMemory.join(group, trainer, device.type == "cpu", timeout_seconds)
        return None if memory is None or len(memory.members) < group.size() else cls(memory)

    def sum_(self, tensor_N: Tensor) -> None:
        """Replace a tensor by the sum of all trainers' tensors, the same bits on each.

        Trainers call this in the same order, with tensors of the same size and type.

        Args:
            tensor_N: contiguous, on the CPU.

        Raises:
            ClusterError: a trainer is gone, or did not come in time.
        """
        _as(tensor_N, self._memory.slot(tensor_N.nbytes)).copy_(tensor_N)
        slots = [_as(tensor_N, slot) for slot in self._memory.publish()]
        torch.add(slots[0], slots[1], out=tensor_N)
        for slot_N in slots[2:]:
            tensor_N.add_(slot_N)


def _as(tensor_N: Tensor, slot: memoryview) -> Tensor:
    """A slot's memory, as a tensor of the same size and type."""
    return torch.frombuffer(slot, dtype=tensor_N.dtype, count=tensor_N.numel())
