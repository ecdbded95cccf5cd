"""Collective operations among the trainers of a custom loop."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.errors import DataError
from hybrid.primitives.row_collectives import gather_with_gradients
from hybrid.updates.ticket import DIFFERENT_BATCHES


class TrainerGroup:
    """The trainers of a custom loop. All trainers must call the same methods in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of all trainers' tensors, on the CPU."""
        total = values.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        if self.group.size() > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate all trainers' tensors, in the order of their ranks.

        A tensor that requires gradients stays on its device. Its gradient is the sum over the gradients on
        all trainers, so every trainer must use the result in its loss. Other tensors are moved to the CPU.

        Args:
            values: (n, ...); n may differ between trainers, and may be 0.

        Raises:
            DataError: ``values`` is a scalar.
        """
        if not values.dim():
            raise DataError("cluster.gather takes one value per sample, (samples, ...), and not a scalar")
        is_trained = torch.is_grad_enabled() and values.requires_grad
        values = gather_with_gradients(values, self.group)
        return values if is_trained else values.detach().cpu()

    def gather_json(self, value: Any) -> list[Any]:
        """Return the values of all trainers, in the order of their ranks; they are sent as JSON."""
        line = bytearray(f"{json.dumps(value)}\n".encode())
        lines = bytes(self.gather(torch.frombuffer(line, dtype=torch.uint8)).tolist())
        return [json.loads(each) for each in lines.splitlines()]

    def check_equal(self, checksum: int) -> None:
        """Raise DataError if the checksums of the trainers' batches differ."""
        if self.group.size() > 1:
            local = torch.tensor([checksum], dtype=torch.int64)
            if bool((self.gather(local) != local).any()):
                raise DataError(f"trainers {DIFFERENT_BATCHES}")
