"""Histories: any number of items a sample, as a matrix that is padded, and where it is not."""

import torch
from torch import Tensor


def padded(values_LD: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors of all samples, one after another, as a matrix; what a ``hybrid.Jagged`` of ids gives.

    Args:
        values_LD: those of sample b are ``values_LD[offsets[b] : offsets[b + 1]]``.
        offsets: int64 of shape (B + 1).

    Returns:
        ``(values_BTD, is_item_BT)``: T is the most that a sample has; zeros after the last of each.
    """
    lengths_B = offsets.diff()
    longest = int(lengths_B.max()) if len(lengths_B) else 0
    is_item_BT = torch.arange(longest, device=lengths_B.device) < lengths_B.unsqueeze(1)
    is_item_BT = is_item_BT.to(values_LD.device)
    values_BTD = values_LD.new_zeros(*is_item_BT.shape, values_LD.size(1))
    places = is_item_BT.nonzero(as_tuple=True)
    return values_BTD.index_put(places, values_LD), is_item_BT
