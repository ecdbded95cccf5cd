"""Blocks of stored rows, and readers of matrices in files. A row of a matrix has no key but its position.

A matrix is a tensor in a safetensors file or in a NumPy file (``.npy``). A source is a path or URL;
``path#name`` selects one of several tensors of a safetensors file. A file in an object store is fetched.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybrid.checkpoint.tensor_file import read_header
from hybrid.errors import DataError, StorageError, first_line
from hybrid.storage.file_formats import map_array
from hybrid.storage.files import local_copy
from hybrid.storage.remote_path import is_url, parse_path

_BLOCK_BYTES = 16 << 20

# Returns "weight" (n, D) and the optimizer state of the rows at n ascending indices.
ReadRows: TypeAlias = Callable[[npt.NDArray[np.int64]], Mapping[str, npt.NDArray[Any]]]

_Rows: TypeAlias = Callable[[slice], npt.NDArray[Any]]  # returns a range of the rows of a matrix


class SavedRows(NamedTuple):
    """A block of stored rows: the keys of all its rows, and a function that reads some of its rows."""

    # The identities of the rows. Either values: an Arrow array of texts, perhaps with a dictionary, with null
    # for the row of missing and unknown values. Or row numbers (for a growing table, keys): a NumPy array.
    keys: Any
    # Function from n indices into ``keys`` to "weight" (n, D) and the optimizer state of these rows.
    read: ReadRows


def make_absolute(source: str | Path) -> str:
    """Return a source as an absolute path; a URL is unchanged."""
    return str(source) if is_url(str(source)) else os.path.abspath(source)


def read_shape(source: str) -> tuple[int, ...]:
    """Return the numbers of rows and columns of a matrix; errors as in :func:`open_matrix`."""
    with open_matrix(source) as (shape, _):
        return shape


def matrix_blocks(source: str, shape: tuple[int, int]) -> Iterator[SavedRows]:
    """Yield the rows of a matrix, which must have ``shape``, in blocks.

    Raises:
        DataError: the source is not a matrix of floating-point values of this shape.
        StorageError: the file cannot be fetched.
    """
    with open_matrix(source) as (stored_shape, rows):
        num_rows, dim = stored_shape
        if stored_shape != shape:
            raise DataError(
                f"{source}: has {num_rows} x {dim} values now, which is not the size of the table"
            )
        step = max(1, _BLOCK_BYTES // (8 * dim))
        for start in range(0, num_rows, step):
            rows_RD = rows(slice(start, min(start + step, num_rows)))
            yield SavedRows(np.arange(start, start + len(rows_RD)), rows_of(rows_RD))


def rows_of(rows_BD: npt.NDArray[Any]) -> ReadRows:
    """Return a function from indices i to ``{"weight": rows_BD[i]}``, for rows without optimizer state."""
    return lambda index: {"weight": rows_BD[index]}


@contextmanager
def open_matrix(source: str) -> Iterator[tuple[tuple[int, ...], _Rows]]:
    """Open the matrix of a source; yield its shape, and a function that reads a slice of its rows.

    Raises:
        DataError: the source cannot be read, or is not a matrix of floating-point values, or is empty.
        StorageError: the file cannot be fetched.
    """
    path, _, name = source.partition("#")
    try:
        if path.endswith(".parquet"):
            raise LookupError("Parquet files have rows by key, which only tables of prepared data have")
        with ExitStack() as stack:
            if path.endswith(".npy"):
                array = map_array(parse_path(path), follows_links=True)
                shape = array.shape
                rows: _Rows = array.__getitem__
            else:
                local_path = stack.enter_context(local_copy(parse_path(path), follows_links=True))
                read_header(local_path)  # checks its length
                file = stack.enter_context(safe_open(local_path, framework="pt"))
                names = list(file.keys())
                known = ", ".join(f"#{each}" if each.isprintable() else repr(each) for each in sorted(names))
                name = names[0] if not name and len(names) == 1 else name
                if name not in names:
                    raise LookupError(f"it has no tensor {name!r}; add one of {known}")
                tensor = file.get_slice(name)
                shape = tuple(tensor.get_shape())
                rows = lambda part: _to_array(tensor[part])  # noqa: E731
            if len(shape) != 2 or 0 in shape:
                raise DataError(f"{source}: has shape {list(shape)}, but must have rows and columns")
            dtype = rows(slice(0, 1)).dtype
            if dtype.kind != "f":
                raise DataError(f"{source}: holds {dtype}, not floating-point values")
            yield shape, rows
    except StorageError:
        raise
    except (OSError, SafetensorError, ValueError, LookupError, RuntimeError, TypeError) as error:
        # RuntimeError: torch cannot map the file, which may be larger than it looks. TypeError: float8.
        raise DataError(f"{source}: cannot be read as rows of a table: {first_line(error):.300}") from error


def _to_array(rows_BD: Tensor) -> npt.NDArray[Any]:
    return (rows_BD.float() if rows_BD.dtype == torch.bfloat16 else rows_BD).numpy()
