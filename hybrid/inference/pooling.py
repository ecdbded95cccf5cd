"""From the rows of bags to one vector a bag, or to the places of sequences, by operations that every runtime
of ONNX has.

``embedding_bag`` becomes a loop over the bags there. This is a gather (of the rows, before), and a scatter.
"""

import torch
from torch import Tensor

from hybrid.embedding.table_spec import Pooling


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


def sequences(rows_LD: Tensor, offsets: Tensor, length: int) -> Tensor:
    """The rows of each bag side by side, zeros up to ``length`` of them, and how many there are.

    Of a bag that has more, the first. The result is (bags, length * D + 1).

    Args:
        rows_LD, offsets: see :func:`pooled`.
    """
    num_bags, dim = offsets.shape[0] - 1, rows_LD.shape[1]
    bag_L = _bag_of_each(offsets, rows_LD.shape[0])
    number_L = torch.arange(rows_LD.shape[0], device=offsets.device) - offsets[bag_L]
    # What is beyond the length goes to a place of its own, behind all others.
    place_L = torch.where(number_L < length, bag_L * length + number_L, num_bags * length)
    places_LD = place_L.unsqueeze(1).expand(-1, dim)
    rows_VD = rows_LD.new_zeros(num_bags * length + 1, dim).scatter(0, places_LD, rows_LD)
    lengths_B1 = (offsets[1:] - offsets[:-1]).clamp(max=length).unsqueeze(1)
    return torch.cat([rows_VD[:-1].view(num_bags, length * dim), lengths_B1.to(rows_LD)], dim=1)


def _bag_of_each(offsets: Tensor, num_rows: int) -> Tensor:
    """Which bag each row is of: the number of bags that end before it, or at it."""
    ends = offsets.new_zeros(num_rows + 1).scatter_add(0, offsets[1:], torch.ones_like(offsets[1:]))
    return ends.cumsum(0)[:-1]
