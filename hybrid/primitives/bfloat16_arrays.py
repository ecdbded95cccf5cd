"""Values of bfloat16 in NumPy arrays, which lack this type.

Arrays in memory hold bfloat16 values as ``uint16``, arrays of mapped files as ``V2``: two untyped bytes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def as_array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return an array that shares the memory of a CPU tensor. For a bfloat16 tensor, its dtype is uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def to_floats(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert a ``V2`` array (bfloat16 values of a file) to float32; return any other array unchanged."""
    if array.dtype.kind != "V":
        return array
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def assign_rows(into: Tensor, rows: Any, values: npt.NDArray[Any]) -> None:
    """Assign ``values`` to ``into[rows]``. If ``rows`` contains an index twice, the later value remains.

    Values are converted to the dtype of ``into``: to bfloat16 by rounding to nearest, ties to even.
    """
    if into.dtype is not torch.bfloat16:
        into.numpy()[rows] = to_floats(values)
    elif values.dtype.kind == "V":
        as_array(into)[rows] = values.view(np.uint16)
    else:
        native = values.astype(values.dtype.newbyteorder("="), copy=False)
        as_array(into)[rows] = as_array(torch.tensor(native).to(torch.bfloat16))
