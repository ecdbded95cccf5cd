"""Pooling of bags and padding of sequences, by operators that every ONNX runtime has.

``embedding_bag`` would become a loop over the bags in ONNX. These functions use gathers and scatters.
"""

import torch
from torch import Tensor

from hybrid.embedding.table_spec import Pooling


def pool_bags(rows_LD: Tensor, offsets: Tensor, pooling: Pooling) -> Tensor:
    """Return one vector per bag, of shape (bags, D); zeros for an empty bag.

    Args:
        rows_LD: the rows of all bags, one bag after another.
        offsets: int64 of shape (bags + 1), where each bag starts.
    """
    num_bags = offsets.shape[0] - 1
    bags_LD = _bag_indices(offsets, rows_LD.shape[0]).unsqueeze(1).expand(-1, rows_LD.shape[1])
    lengths_B1 = (offsets[1:] - offsets[:-1]).unsqueeze(1)
    if pooling is Pooling.MAX:
        lowest_BD = rows_LD.new_full((num_bags, rows_LD.shape[1]), float("-inf"))
        highest_BD = lowest_BD.scatter_reduce(0, bags_LD, rows_LD, "amax", include_self=True)
        return torch.where(lengths_B1 > 0, highest_BD, torch.zeros_like(highest_BD))
    sums_BD = rows_LD.new_zeros(num_bags, rows_LD.shape[1]).scatter_add(0, bags_LD, rows_LD)
    return sums_BD / lengths_B1.clamp(min=1) if pooling is Pooling.MEAN else sums_BD


def pad_sequences(rows_LD: Tensor, offsets: Tensor, length: int) -> Tensor:
    """Return the first ``length`` rows of each bag side by side, padded with zeros, and their number.

    The result has the shape (bags, length * D + 1).

    Args:
        rows_LD, offsets: see :func:`pool_bags`.
    """
    num_bags, dim = offsets.shape[0] - 1, rows_LD.shape[1]
    bag_L = _bag_indices(offsets, rows_LD.shape[0])
    position_L = torch.arange(rows_LD.shape[0], device=offsets.device) - offsets[bag_L]
    # Rows beyond the length go to an extra row at the end, which is dropped.
    target_L = torch.where(position_L < length, bag_L * length + position_L, num_bags * length)
    targets_LD = target_L.unsqueeze(1).expand(-1, dim)
    rows_VD = rows_LD.new_zeros(num_bags * length + 1, dim).scatter(0, targets_LD, rows_LD)
    lengths_B1 = (offsets[1:] - offsets[:-1]).clamp(max=length).unsqueeze(1)
    return torch.cat([rows_VD[:-1].view(num_bags, length * dim), lengths_B1.to(rows_LD)], dim=1)


def _bag_indices(offsets: Tensor, num_rows: int) -> Tensor:
    """Return the index of the bag of each row: the number of bags that end before or at it."""
    ends = offsets.new_zeros(num_rows + 1).scatter_add(0, offsets[1:], torch.ones_like(offsets[1:]))
    return ends.cumsum(0)[:-1]
