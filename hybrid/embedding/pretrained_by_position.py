"""Pretrained rows by position: a matrix in a safetensors file or NumPy's ``.npy``.

A source is a path or URL; ``path#name`` is one of several tensors of a safetensors file. Files are read in
blocks: a worker with some rows of a table reads all rows, and keeps its own. A file in an object store is
fetched first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid.errors import DataError, StorageError, first_line
from hybrid.storage.files import local_copy
from hybrid.storage.remote_path import is_url, parse_path

_BLOCK_BYTES = 16 << 20


class StoredTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        shape: shape of the tensor.
        rows: returns the rows from one index to another.
    """

    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]

    @classmethod
    def of_safetensors(cls, file: Any, name: str) -> StoredTensor:
        """Return a tensor of an open file."""
        tensor = file.get_slice(name)
        return cls(tuple(tensor.get_shape()), lambda start, stop: tensor[start:stop])

    def of_shard(self, index: int, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield blocks of the rows ``index``, ``index + count``, ..., each with its start among them."""
        num_rows, dim = self.shape
        # A multiple of the number of shards, so that blocks are cut alike for each shard.
        step = max(1, _BLOCK_BYTES // (8 * dim)) * count
        for start in range(0, num_rows, step):
            yield start // count, self.rows(start, min(start + step, num_rows))[index::count]


def absolute(source: str | Path) -> str:
    """Return a source that does not depend on the working directory."""
    return str(source) if is_url(str(source)) else os.path.abspath(source)


def shape_of(source: str) -> tuple[int, int]:
    """Return the numbers of rows and columns of a source.

    Raises:
        DataError: the file has no matrix.
        StorageError: the file cannot be fetched.
    """
    with _opened(source) as matrix:
        num_rows, dim = matrix.shape
        return num_rows, dim


def read_rows(source: str, out_RD: Tensor, index: int, count: int) -> None:
    """Fill ``out_RD`` with the rows ``index``, ``index + count``, ... of a source.

    Raises:
        DataError: see :func:`shape_of`; or the size has changed.
    """
    with _opened(source) as matrix:
        num_rows, dim = matrix.shape
        if (len(range(index, num_rows, count)), dim) != tuple(out_RD.shape):
            raise DataError(f"{source}: has {num_rows} x {dim} values now, which does not fit the table")
        for start, own_RD in matrix.of_shard(index, count):
            out_RD[start : start + len(own_RD)] = own_RD


@contextmanager
def _opened(source: str) -> Iterator[StoredTensor]:
    """Open the matrix of a source."""
    # A late import: other systems of the benchmark do not have it.
    from safetensors import SafetensorError, safe_open

    path, _, name = source.partition("#")
    try:
        if path.endswith(".parquet"):
            raise LookupError("Parquet files have rows by key, which only tables of prepared data have")
        with ExitStack() as stack:
            here = stack.enter_context(local_copy(parse_path(path)))
            if path.endswith(".npy"):
                array = np.load(here, mmap_mode="r", allow_pickle=False)
                matrix = StoredTensor(array.shape, lambda i, j: torch.from_numpy(np.array(array[i:j])))
            else:
                file = stack.enter_context(safe_open(here, framework="pt"))
                names = list(file.keys())
                if not name and len(names) > 1:
                    raise LookupError(
                        f"the file has several tensors; add one of #{', #'.join(sorted(names))}"
                    )
                if (name or names[0]) not in names:
                    raise LookupError(f"the file has no tensor {name!r}, but {', '.join(sorted(names))}")
                matrix = StoredTensor.of_safetensors(file, name or names[0])
            if len(matrix.shape) != 2 or 0 in matrix.shape:
                raise DataError(
                    f"{source}: holds a tensor of shape {list(matrix.shape)}, not rows of a table"
                )
            if not matrix.rows(0, 1).is_floating_point():
                raise DataError(f"{source}: holds {matrix.rows(0, 1).dtype}, not floating-point values")
            yield matrix
    except StorageError:
        raise
    except (OSError, SafetensorError, ValueError, LookupError) as error:
        raise DataError(f"{source}: cannot be read as rows of a table: {first_line(error)}") from error
