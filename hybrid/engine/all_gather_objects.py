"""What every trainer has, put together on each of them."""

import torch
import torch.distributed as dist
from torch import Tensor


def gathered_parts(values: Tensor, group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    """All trainers' tensors, on ``device``, in the order of the trainers; all of them call it at once.

    Args:
        values: this trainer's, (n, ...); n may be another with each, and 0.
        device: where the group's collectives take tensors.
    """
    own = torch.tensor([len(values)], device=device)
    counted = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(counted, own, group=group)
    sizes = [int(each) for each in counted]
    # Collectives take tensors of one shape.
    padded = torch.zeros(max(sizes), *values.shape[1:], dtype=values.dtype, device=device)
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]
