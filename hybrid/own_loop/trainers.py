"""What all trainers of a loop of the user's own add up, and put together."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.errors import DataError
from hybrid.own_loop.batches import checksum


class Trainers:
    """All trainers, as one of them sees them; each calls the same at once.

    Args:
        group: of all of them.
        index: of this one.
        device: where their tensors meet.
    """

    def __init__(self, group: dist.ProcessGroup, index: int, device: torch.device) -> None:
        self._group = group
        self._index = index
        self._number = group.size()
        self.device = device

    def sum(self, values: Tensor) -> Tensor:
        """The sum of all trainers' tensors, (N,)."""
        summed = values.detach().to(self.device, copy=True)
        if self._number > 1:
            dist.all_reduce(summed, group=self._group)
        return summed

    def gathered(self, values: Tensor) -> Tensor:
        """All trainers' tensors, (N, ...), one after another, on the CPU; N may differ."""
        if self._number == 1:
            return values.cpu()
        own_size = torch.eye(self._number, dtype=torch.int64)[self._index] * len(values)
        sizes = self.sum(own_size).tolist()
        padded = torch.zeros(max(sizes), *values.shape[1:], dtype=values.dtype, device=self.device)
        padded[: len(values)] = values
        parts = self._all(padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).cpu()

    def checked(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches, the first of which all trainers must have alike.

        Raises:
            DataError: they have not.
        """
        for number, batch in enumerate(batches):
            if number == 0 and self._number > 1:
                own = torch.tensor([checksum(batch)], dtype=torch.int64, device=self.device)
                if any(each.item() != own.item() for each in self._all(own)):
                    raise DataError(
                        "trainers read different batches: every trainer is to see the same ones, of which it "
                        "gets its share; seed what shuffles or draws them (torch's samplers are seeded)"
                    )
            yield batch

    def _all(self, own: Tensor) -> list[Tensor]:
        """All trainers' tensors, of one shape."""
        parts = [torch.empty_like(own) for _ in range(self._number)]
        dist.all_gather(parts, own, group=self._group)
        return parts
