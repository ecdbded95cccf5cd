"""Values of bfloat16 in NumPy arrays, which lack this type.

In an array, bfloat16 is ``uint16``, or, in a mapped file, two bytes without a type (``V2``).
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def as_array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor as an array that shares its memory."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def to_floats(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a float32 copy of bfloat16 numbers of a mapped file (dtype ``V2``), or another array itself."""
    if array.dtype.kind != "V":
        return array
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def assign_rows(into: Tensor, rows: Any, values: npt.NDArray[Any]) -> None:
    """Compute ``into[rows] = values`` by NumPy. If a row occurs several times, its last value is assigned.

    Either side may have bfloat16. Other values are rounded to the nearest value of bfloat16, ties to even.
    """
    if into.dtype is not torch.bfloat16:
        into.numpy()[rows] = to_floats(values)
    elif values.dtype.kind == "V":
        as_array(into)[rows] = values.view(np.uint16)
    else:
        native = values.astype(values.dtype.newbyteorder("="), copy=False)
        as_array(into)[rows] = as_array(torch.tensor(native).to(torch.bfloat16))
