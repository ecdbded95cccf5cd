"""Read, write and add to given rows of a tensor."""

from typing import Any

import numpy.typing as npt
from torch import Tensor

from hybrid.embedding import kernels


def take(whole: Tensor, rows_U: Tensor) -> Tensor:
    """``whole[rows_U]``, of a contiguous matrix or vector."""
    part = whole.new_empty(len(rows_U), *whole.shape[1:])
    copy(whole, rows_U, part)
    return part


def copy(whole: Tensor, rows_U: Tensor, to: Tensor) -> None:
    """``to[:] = whole[rows_U]``, of contiguous matrices or vectors."""
    kernels.take_rows(_matrix(whole), rows_U.numpy(), _matrix(to))


def put(whole: Tensor, rows_U: Tensor, part: Tensor) -> None:
    """``whole[rows_U] = part``, for a contiguous matrix or vector."""
    kernels.put_rows(_matrix(whole), rows_U.numpy(), _matrix(part))


def add(whole_RD: Tensor, rows_U: Tensor, part_UD: Tensor, scale: float) -> None:
    """``whole_RD[rows_U] += scale * part_UD``."""
    matrix = whole_RD.numpy()
    kernels.add_rows(matrix, rows_U.numpy(), part_UD.numpy(), matrix.dtype.type(scale))


def _matrix(tensor: Tensor) -> npt.NDArray[Any]:
    return tensor.view(len(tensor), -1).numpy() if len(tensor) else tensor.new_empty(0, 1).numpy()
