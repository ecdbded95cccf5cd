"""From the rows of bags to one vector a bag, by operations that every runtime of ONNX has.

``embedding_bag`` becomes a loop over the bags there. This is a gather (of the rows, before), and a scatter.
"""

import torch
from torch import Tensor

from hybrid.embedding.spec import Pooling


def pooled(rows_LD: Tensor, offsets: Tensor, pooling: Pooling) -> Tensor:
    """One vector a bag, (bags, D); zeros for an empty bag.

    Args:
        rows_LD: those of all bags, one bag after another.
        offsets: int64 of shape (bags + 1), where each bag starts.
    """
    num_bags = offsets.shape[0] - 1
    bags_LD = _bag_of_each(offsets, rows_LD.shape[0]).unsqueeze(1).expand(-1, rows_LD.shape[1])
    lengths_B1 = (offsets[1:] - offsets[:-1]).unsqueeze(1)
    if pooling is Pooling.MAX:
        lowest_BD = rows_LD.new_full((num_bags, rows_LD.shape[1]), float("-inf"))
        highest_BD = lowest_BD.scatter_reduce(0, bags_LD, rows_LD, "amax", include_self=True)
        return torch.where(lengths_B1 > 0, highest_BD, torch.zeros_like(highest_BD))
    sums_BD = rows_LD.new_zeros(num_bags, rows_LD.shape[1]).scatter_add(0, bags_LD, rows_LD)
    return sums_BD / lengths_B1.clamp(min=1) if pooling is Pooling.MEAN else sums_BD


def _bag_of_each(offsets: Tensor, num_rows: int) -> Tensor:
    """Which bag each row is of: the number of bags that end before it, or at it."""
    ends = offsets.new_zeros(num_rows + 1).scatter_add(0, offsets[1:], torch.ones_like(offsets[1:]))
    return ends.cumsum(0)[:-1]
