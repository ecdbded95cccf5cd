"""What all trainers of a loop of the user's own add up, and put together."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.custom_loop.all_gather import gather
from hybrid.custom_loop.global_batches import checksum
from hybrid.errors import DataError


class Trainers:
    """All trainers, as one of them sees them; each calls the same at once.

    Args:
        group: of all of them.
        device: where their tensors meet.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._number = group.size()
        self.device = device

    def sum(self, values: Tensor) -> Tensor:
        """The sum of all trainers' tensors, (N,)."""
        summed = values.detach().to(self.device, copy=True)
        if self._number > 1:
            dist.all_reduce(summed, group=self._group)
        return summed

    def gathered(self, values: Tensor) -> Tensor:
        """All trainers' tensors, (N, ...), one after another; see :func:`gather`."""
        return gather(values, self._group, self.device)

    def checked(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches, the first of which all trainers must have alike.

        Raises:
            DataError: they have not.
        """
        for number, batch in enumerate(batches):
            if number == 0 and self._number > 1:
                own = torch.tensor([checksum(batch)], dtype=torch.int64, device=self.device)
                if bool((self.gathered(own) != own.cpu()).any()):
                    raise DataError(
                        "trainers read different batches: every trainer is to see the same ones, of which it "
                        "gets its share; seed what shuffles or draws them (torch's samplers are seeded)"
                    )
            yield batch
