"""Padding of histories of different lengths."""

import torch
from torch import Tensor


def padded(values_LD: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Pad the vectors of all samples, as an embedding returns them for a ``hybrid.Jagged`` of ids.

    Args:
        values_LD: the vectors of sample b are ``values_LD[offsets[b] : offsets[b + 1]]``.
        offsets: int64, (B + 1).

    Returns:
        ``(values_BTD, is_item_BT)``, where T is the longest history; padding is zero and False.
    """
    lengths_B = offsets.diff()
    longest = int(lengths_B.max()) if len(lengths_B) else 0
    is_item_BT = torch.arange(longest, device=lengths_B.device) < lengths_B.unsqueeze(1)
    is_item_BT = is_item_BT.to(values_LD.device)
    values_BTD = values_LD.new_zeros(*is_item_BT.shape, values_LD.size(1))
    indices = is_item_BT.nonzero(as_tuple=True)
    return values_BTD.index_put(indices, values_LD), is_item_BT
