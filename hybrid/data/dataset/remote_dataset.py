"""The format of a prepared data set in an object store: chunks of rows that can be read separately.

::

    CACHE/FINGERPRINT/ATTEMPT/        a file beside it names the complete attempt (dataset_location.py)
      manifest.json, ...              the files beside the splits of a folder (prepared_dataset.py)
      train/source_rows.npy           as in a folder; weights.npy, too, since every trainer needs all of it
      train/samples                   the rows, chunk after chunk
      test/...
      chunks.npz                      the index of the chunks of each split; written last

The arrays of prepared_dataset.py hold a split column by column, so some rows are one range of each array.
Here a chunk of 4096 rows (those of sample_order.py) is one range of one file::

    samples          | chunk 0                                            | chunk 1 ...
                     | dense | ids | labels | bag_0 offsets | bag_0 ids |
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.dataset_manifest import DataManifest
from hybrid.data.dataset.prepared_dataset import map_arrays
from hybrid.data.dataset.sample_order import CHUNK_ROWS
from hybrid.errors import DataError
from hybrid.primitives.progress import Progress, ignore_progress
from hybrid.storage.files import copy, open_writer, read_bytes, write_bytes
from hybrid.storage.remote_path import StoragePath

SAMPLES = "samples"
_INDEX = "chunks.npz"
_COPIED = ("source_rows", "weights")  # arrays that are sent as files
_NOT_IN_CHUNKS = ("source_rows", "group_rows", "group_starts")


class ChunkIndex(NamedTuple):
    """The chunks of a split in a store.

    Attributes:
        arrays: A empty arrays by name, with the types and row shapes of the arrays in a chunk, in their
            order.
        lengths_AC: int64, the number of rows of each array in each of C chunks. Offsets of a bag have one row
            more than the chunk, and the first is 0.
        checksums_C: uint8 (C, 32), the SHA-256 of each chunk.
    """

    arrays: dict[str, npt.NDArray[Any]]
    lengths_AC: npt.NDArray[np.int64]
    checksums_C: npt.NDArray[np.uint8]

    @property
    def row_bytes_A(self) -> npt.NDArray[np.int64]:
        """The bytes of a row of each array."""
        return np.array([each.itemsize * np.prod(each.shape[1:]) for each in self.arrays.values()], np.int64)

    @classmethod
    def read(cls, folder: StoragePath, split: str) -> ChunkIndex:
        """Read the index of a split.

        Raises:
            DataError: the data set is incomplete, or altered.
            HybridError: the index cannot be read.
        """
        path = folder / _INDEX
        try:
            with np.load(BytesIO(read_bytes(path)), allow_pickle=False) as content:
                names = [name for name in content.files if name.startswith(f"{split}/")]
                arrays = {name.partition("/")[2]: content[name] for name in names}
                return cls(arrays, content[f"{split}.lengths"], content[f"{split}.checksums"])
        except FileNotFoundError as error:
            raise missing_error(path) from error
        except KeyError as error:
            raise DataError(f"{path}: has no split {split}") from error
        except (ValueError, BadZipFile) as error:
            raise altered_error(path) from error


def missing_error(path: StoragePath) -> DataError:
    """Return the error for a missing file of a data set in a store."""
    return DataError(f"{path}: is missing; delete its folder, and the data are prepared again")


def altered_error(path: StoragePath, where: str = "") -> DataError:
    """Return the error for an altered file of a data set in a store."""
    return DataError(f"{path}: altered since it was prepared{where}; delete its folder")


def send_dataset(
    folder: Path,
    target: StoragePath,
    report: Callable[[str], None] = ignore_progress,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Send a prepared data set to a store.

    Args:
        target: the folder of the data set in the store.
        report: receives progress, one line at a time.
        check: called between chunks; an exception from it ends the transfer.

    Raises:
        HybridError: the data set cannot be sent.
    """
    index: dict[str, npt.NDArray[Any]] = {}
    for split, split_report in DataManifest.read(folder / dataset_manifest.FILE_NAME).splits.items():
        arrays = map_arrays(folder / split)
        for name in _COPIED:
            if name in arrays:
                copy(folder / split / f"{name}.npy", target / split / f"{name}.npy")
        arrays = {name: array for name, array in arrays.items() if name not in _NOT_IN_CHUNKS}
        path = target / split / SAMPLES
        progress, num_rows = Progress(report, f"sending {path}"), split_report.num_rows
        lengths, checksums = list[list[int]](), list[bytes]()
        with open_writer(path) as file:
            for start in range(0, num_rows, CHUNK_ROWS):
                check()
                stop = min(start + CHUNK_ROWS, num_rows)
                slices = _slices(arrays, start, stop)
                data = b"".join(each.tobytes() for each in slices)
                file.write(data)
                lengths.append([*map(len, slices)])
                checksums.append(hashlib.sha256(data).digest())
                progress.add(stop - start)
        index |= {f"{split}/{name}": array[:0] for name, array in arrays.items()}
        index[f"{split}.lengths"] = np.array(lengths, np.int64).reshape(-1, len(arrays)).T
        index[f"{split}.checksums"] = np.frombuffer(b"".join(checksums), np.uint8).reshape(-1, 32)
    for source in sorted(folder.iterdir()):
        if source.is_file():
            copy(source, target / source.name)
    content = BytesIO()
    np.savez(content, **index)  # type: ignore[arg-type]
    write_bytes(target / _INDEX, content.getvalue())


def _slices(arrays: dict[str, npt.NDArray[Any]], start: int, stop: int) -> list[npt.NDArray[Any]]:
    """Return the slice of each array for the samples from ``start`` to ``stop``."""
    slices = []
    for name, array in arrays.items():
        if name.endswith("_offsets"):
            slices.append(array[start : stop + 1] - array[start])
        elif name.startswith("bag_"):
            offsets = arrays[f"{name.rpartition('_')[0]}_offsets"]
            slices.append(array[offsets[start] : offsets[stop]])
        else:
            slices.append(array[start:stop])
    return slices
