"""Rows of a table in a file of the user's own: safetensors, or NumPy's ``.npy``.

A source is the file's path; where a safetensors file holds several tensors, ``path#name`` is one of them.
Files are read block by block: whoever holds some rows of a table reads all, and keeps its own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid.errors import DataError, first_line

_BLOCK_BYTES = 16 << 20


class _Matrix(NamedTuple):
    """A matrix in a file.

    Attributes:
        rows: gives those from one to another.
    """

    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]


def shape_of(source: str) -> tuple[int, int]:
    """Rows and columns of a source.

    Raises:
        DataError: it is no file of a matrix; names it.
    """
    with _opened(source) as matrix:
        num_rows, dim = matrix.shape
        return num_rows, dim


def read_rows(source: str, out_RD: Tensor, index: int, count: int) -> None:
    """Fill ``out_RD`` with the rows ``index``, ``index + count``, ... of a source.

    Raises:
        DataError: see :func:`shape_of`; or it is of another size than it was.
    """
    with _opened(source) as matrix:
        num_rows, dim = matrix.shape
        if (len(range(index, num_rows, count)), dim) != tuple(out_RD.shape):
            raise DataError(f"{source}: has {num_rows} x {dim} values now, which do not fit the table")
        step = (
            max(1, _BLOCK_BYTES // (8 * dim)) * count
        )  # a multiple: each block has the same place for its first
        for start in range(0, num_rows, step):
            own_RD = matrix.rows(start, min(start + step, num_rows))[index::count]
            out_RD[start // count : start // count + len(own_RD)] = own_RD


@contextmanager
def _opened(source: str) -> Iterator[_Matrix]:
    """The matrix that a source is."""
    from safetensors import SafetensorError, safe_open  # late: the bench's other systems come without it

    path, _, name = source.partition("#")
    try:
        if path.endswith(".parquet"):
            raise LookupError("Parquet has rows by value, which a table of prepared data alone has")
        if path.endswith(".npy"):
            yield _checked(source, _of_numpy(path))
        else:
            with safe_open(path, framework="pt") as file:
                yield _checked(source, _of_safetensors(file, name))
    except (OSError, SafetensorError, ValueError, LookupError) as error:
        raise DataError(f"{source}: cannot be read as rows of a table: {first_line(error)}") from error


def _of_numpy(path: str) -> _Matrix:
    array = np.load(Path(path), mmap_mode="r", allow_pickle=False)
    return _Matrix(array.shape, lambda start, stop: torch.from_numpy(np.array(array[start:stop])))


def _of_safetensors(file: Any, name: str) -> _Matrix:
    names = list(file.keys())
    if not name and len(names) > 1:
        raise LookupError(f"it holds several tensors; add one of #{', #'.join(sorted(names))}")
    if (name or names[0]) not in names:
        raise LookupError(f"it holds no {name!r}, but {', '.join(sorted(names))}")
    part = file.get_slice(name or names[0])
    return _Matrix(tuple(part.get_shape()), lambda start, stop: part[start:stop])


def _checked(source: str, matrix: _Matrix) -> _Matrix:
    if len(matrix.shape) != 2 or 0 in matrix.shape:
        raise DataError(f"{source}: holds a tensor of shape {list(matrix.shape)}, and no rows of a table")
    if not matrix.rows(0, 1).is_floating_point():
        raise DataError(f"{source}: holds {matrix.rows(0, 1).dtype}, and no floating point")
    return matrix
