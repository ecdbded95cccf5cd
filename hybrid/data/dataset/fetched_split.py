"""A split of a prepared data set in a store: chunks of rows are fetched before their rows are gathered.

Fetched chunks are in local files of bounded size, one per array. A file has slots, one per chunk. The slot of
a chunk determines the indices of its rows::

    rows of the split    | chunk 0 | chunk 1 | chunk 2 | ...
    slots                | chunk 7 |    -    | chunk 1 |      row 4096 + r of the split is 2 * 4097 + r here

A slot has room for one row more than a chunk, because R rows have R + 1 offsets. For ids, a slot has room for
the largest chunk. A *pinned* chunk stays in its slot; of the others, the least recently used is evicted.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.batch import Batch
from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.dataset_manifest import DataManifest
from hybrid.data.dataset.prepared_dataset import PreparedDataset, StepRows
from hybrid.data.dataset.remote_dataset import SAMPLES, ChunkIndex, altered_error, missing_error
from hybrid.data.dataset.sample_order import CHUNK_ROWS, WINDOW_CHUNKS
from hybrid.errors import ConfigError, DataError, OutageError
from hybrid.storage.files import local_copy, open_ranges
from hybrid.storage.remote_path import StoragePath

FETCH_THREADS = 8
_SLOT_ROWS = CHUNK_ROWS + 1
_AHEAD_ROWS = 2 * WINDOW_CHUNKS * CHUNK_ROWS  # rows of all trainers in this window and the next
_HELD_OUT_FRACTION = 1 / 8  # fraction of data.local_cache_gb for each split but "train"
_POLL_SECONDS = 0.1
_WAIT_SECONDS = 110.0  # less than a reader waits for a batch


class ChunkCache:
    """Chunks of a remote file in local files of bounded size.

    Args:
        path: the remote file.
        index: the chunks of the file.
        folder: the folder of the local files, which have no names, so the system removes them when the
            process ends.
        num_bytes: the maximum size of the local files.

    Attributes:
        arrays: the arrays of the split; only rows that :meth:`local` returns are valid.
        lock: must be held from :meth:`fits` to :meth:`pin`, and during :meth:`unpin`.
        num_chunks: the number of chunks of the split.
        num_slots: the number of chunks that fit.
        slot_bytes: the bytes of a slot.
    """

    def __init__(self, path: StoragePath, index: ChunkIndex, folder: Path, num_bytes: int) -> None:
        self._path, self._index = path, index
        self._read = open_ranges(path)
        sizes_C = index.row_bytes_A @ index.lengths_AC
        self._edges = np.concatenate([[0], np.cumsum(sizes_C)]).tolist()
        is_item = {name: name.startswith("bag_") and not name.endswith("_offsets") for name in index.arrays}
        most_A = index.lengths_AC.max(1, initial=0).tolist()
        self._room = {
            name: most if is_item[name] else _SLOT_ROWS
            for name, most in zip(index.arrays, most_A, strict=True)
        }
        self.num_chunks = len(index.checksums_C)
        self.slot_bytes = int(index.row_bytes_A @ [*self._room.values()])
        self.num_slots = min(self.num_chunks, num_bytes // max(1, self.slot_bytes))
        self._slots_C = np.full(self.num_chunks, -1, np.int64)
        self._free = list(range(self.num_slots))
        self._arrivals: dict[int, Future[None]] = {}
        self._pins: Counter[int] = Counter()
        self._unused: dict[int, None] = {}  # chunks that are not pinned, the least recently used first
        self.lock = threading.Lock()
        try:
            self.arrays = {
                name: _allocate(folder, each.dtype, (self.num_slots * self._room[name], *each.shape[1:]))
                for name, each in index.arrays.items()
            }
        except OSError as error:
            raise DataError(
                f"{folder}: cannot hold prepared data ({error.strerror}); "
                "set data.local_cache_folder, or data.local_cache_gb"
            ) from error
        self._threads = ThreadPoolExecutor(FETCH_THREADS, "chunk fetcher")

    def fits(self, chunks: Iterable[int]) -> bool:
        """Return whether there is room to pin these chunks, too."""
        return len(self._pins.keys() | set(chunks)) <= self.num_slots

    def pin(self, chunks: Iterable[int]) -> None:
        """Keep these chunks until they are unpinned; begin to fetch those that are missing."""
        missing = []
        for chunk in sorted(chunks):
            arrival = self._arrivals.get(chunk)
            if arrival is not None and not self._pins[chunk] and arrival.done() and arrival.exception():
                self._free.append(self._forget(chunk))
            self._pins[chunk] += 1
            self._unused.pop(chunk, None)
            if chunk not in self._arrivals:
                missing.append(chunk)
        for chunk in missing:
            slot = self._free.pop() if self._free else self._evict()
            self._slots_C[chunk] = slot
            self._arrivals[chunk] = self._threads.submit(self._fetch, chunk, slot)

    def unpin(self, chunks: Iterable[int]) -> None:
        """Release chunks that were pinned together."""
        for chunk in chunks:
            self._pins[chunk] -= 1
            if not self._pins[chunk]:
                del self._pins[chunk]
                self._unused[chunk] = None

    def wait(self, chunks: Iterable[int], seconds: float, is_over: threading.Event) -> None:
        """Wait until these pinned chunks are in the cache.

        Args:
            is_over: an event that ends the wait.

        Raises:
            OutageError: a chunk did not arrive in ``seconds``.
            DataError: a chunk is altered, or the wait was ended.
            HybridError: a chunk cannot be fetched.
        """
        deadline = time.monotonic() + seconds
        for arrival in [self._arrivals[chunk] for chunk in chunks]:
            while wait([arrival], _POLL_SECONDS).not_done:
                if is_over.is_set():
                    raise DataError("reading was stopped")
                if time.monotonic() > deadline:
                    raise OutageError(f"{self._path}: no data arrived in {seconds:.0f} s")
            arrival.result()

    def local(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the indices in the arrays of rows whose chunks are in the cache and pinned."""
        slots = self._slots_C[rows // CHUNK_ROWS]
        assert slots.min(initial=0) >= 0, "wait for a chunk before its rows are read"
        return slots * _SLOT_ROWS + rows % CHUNK_ROWS

    def close(self) -> None:
        """End the threads that fetch."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _evict(self) -> int:
        """Evict the least recently used chunk, even while it is fetched; return its slot."""
        chunk = next(iter(self._unused))
        self._arrivals[chunk].cancel()
        return self._forget(chunk)

    def _forget(self, chunk: int) -> int:
        slot, self._slots_C[chunk] = int(self._slots_C[chunk]), -1
        self._unused.pop(chunk, None)
        del self._arrivals[chunk]
        return slot

    def _fetch(self, chunk: int, slot: int) -> None:
        """Fetch a chunk into its slot; in a thread."""
        start, stop = self._edges[chunk : chunk + 2]
        checksum = self._index.checksums_C[chunk].tobytes()
        data = self._read(start, stop - start)
        if hashlib.sha256(data).digest() != checksum:
            data = self._read(start, stop - start)
            if hashlib.sha256(data).digest() != checksum:
                raise altered_error(self._path, f", bytes {start:,} to {stop:,}")
        with self.lock:
            if self._slots_C[chunk] != slot:  # evicted meanwhile
                return
            at = 0
            for (name, array), length in zip(
                self.arrays.items(), self._index.lengths_AC[:, chunk].tolist(), strict=True
            ):
                first = slot * self._room[name]
                rows = array[first : first + length]
                rows[:] = np.frombuffer(data, array.dtype, rows.size, at).reshape(rows.shape)
                if name.endswith("_offsets"):
                    rows += slot * self._room[name.replace("_offsets", "_ids")]
                at += rows.nbytes


def _allocate(folder: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return an array in an unnamed file."""
    with tempfile.TemporaryFile(dir=folder, prefix="hybrid-") as file:
        # If the disk is full, this fails; a write to the array would kill the process.
        os.posix_fallocate(file.fileno(), 0, max(1, dtype.itemsize * math.prod(shape)))
        return np.ndarray(shape, dtype, mmap.mmap(file.fileno(), 0))


class FetchedDataset(PreparedDataset):
    """A split in a store. The rows of a step can be gathered from when :meth:`fetch_ahead` yields the step.

    Rows stay available until the next step is requested. The store has no order of groups, so batches of
    complete groups are not possible.

    Args:
        folder: the folder of the data set in a store.
        split: "train", "validation" or "test".
        cache_folder: the local folder for fetched rows.
        cache_bytes: the maximum size of the fetched rows of all splits.

    Raises:
        DataError: the data set is incomplete, or altered.
        HybridError: the data set cannot be read.
    """

    def __init__(self, folder: StoragePath, split: str, cache_folder: Path, cache_bytes: int) -> None:
        index = ChunkIndex.read(folder, split)
        self._path, self._cache_folder, self._lengths = folder / split, cache_folder, index.lengths_AC
        self._manifest, self._split = DataManifest.read(folder / dataset_manifest.FILE_NAME), split
        held_out = len(self._manifest.splits) - 1
        self._cache_fraction = 1 - held_out * _HELD_OUT_FRACTION if split == "train" else _HELD_OUT_FRACTION
        # Every trainer needs the weights of the whole step.
        self._all_weights = self._fetch_array("weights") if "weights" in index.arrays else np.empty(0)
        room = int(cache_bytes * self._cache_fraction) - self._all_weights.nbytes
        self._cache = ChunkCache(self._path / SAMPLES, index, cache_folder, max(0, room))
        self._names = [*index.arrays]
        super().__init__(self._cache.arrays, self._manifest.input_spec, self._manifest.splits[split])

    @cached_property
    def source_rows(self) -> npt.NDArray[np.int64]:
        """See :class:`PreparedDataset`; fetched at the first use."""
        return self._fetch_array("source_rows")

    @property
    def total_ids(self) -> Sequence[int]:
        """See :class:`PreparedDataset`."""
        totals = dict(zip(self._names, self._lengths.sum(1).tolist(), strict=True))
        return [totals[f"bag_{k}_ids"] for k in self._bags]

    def _fetch_array(self, name: str) -> npt.NDArray[Any]:
        """Fetch a full array into an unnamed local file."""
        path = self._path / f"{name}.npy"
        checksum = self._manifest.stored[f"{self._split}/{name}.npy"].whole
        try:
            with local_copy(path, checksum, self._cache_folder) as local:
                return np.asarray(np.load(local, mmap_mode="r"))
        except FileNotFoundError as error:
            raise missing_error(path) from error
        except ValueError as error:
            raise altered_error(path) from error

    def fetch_ahead(
        self, steps: Generator[StepRows, None, None], chunks_at_once: int, is_over: threading.Event
    ) -> Generator[StepRows, None, None]:
        """See :class:`PreparedDataset`.

        Raises:
            ConfigError: the cache is too small for so many chunks.
        """
        needed = min(chunks_at_once, self._cache.num_chunks)
        if needed > self._cache.num_slots:
            num_bytes = needed * self._cache.slot_bytes + self._all_weights.nbytes
            gib = math.ceil(num_bytes / self._cache_fraction / 2**30 * 100) / 100
            rule = f"must be at least {gib:g}, for the rows that a trainer reads at once"
            raise ConfigError("data.local_cache_gb", rule)
        return self._fetch_steps(steps, is_over)

    def _fetch_steps(
        self, steps: Generator[StepRows, None, None], is_over: threading.Event
    ) -> Generator[StepRows, None, None]:
        """Yield the rows of steps whose chunks are in the cache.

        The chunks of a step are pinned when the cache has room for them and for those of all earlier steps.
        They are released when the next step is requested. So a step never waits for room that a later step
        takes.
        """
        cache, num_ahead = self._cache, 0
        pinned: deque[tuple[StepRows, set[int]]] = deque()
        next_step: tuple[StepRows, set[int]] | None = None
        try:
            while not is_over.is_set():
                with cache.lock:
                    while num_ahead <= _AHEAD_ROWS:
                        if next_step is None:
                            if (rows := next(steps, None)) is None:
                                break
                            next_step = rows, set(np.unique(rows.local // CHUNK_ROWS).tolist())
                        if not cache.fits(next_step[1]):
                            break
                        cache.pin(next_step[1])
                        pinned.append(next_step)
                        num_ahead += len(next_step[0].rows)
                        next_step = None
                if not pinned:
                    if next_step is not None:
                        raise DataError(
                            "a step needs more rows than data.local_cache_gb has room for; set it higher"
                        )
                    return
                rows, chunks = pinned[0]
                cache.wait(chunks, _WAIT_SECONDS, is_over)
                yield rows
                pinned.popleft()
                num_ahead -= len(rows.rows)
                with cache.lock:
                    cache.unpin(chunks)
        finally:
            with cache.lock:
                for _, chunks in pinned:
                    cache.unpin(chunks)

    def close(self) -> None:
        """See :class:`PreparedDataset`."""
        self._cache.close()

    def total_weights(self, rows: npt.NDArray[np.int64]) -> Tensor | None:
        """See :class:`PreparedDataset`; ``rows`` are all rows of a step."""
        if self._weights is None:
            return None
        return torch.from_numpy(self._all_weights.take(rows, axis=0).sum(0, dtype=np.float64))

    def gather(
        self,
        rows: npt.NDArray[np.int64],
        global_size: int,
        total_weights: Tensor | None = None,
        total_groups: Tensor | None = None,
    ) -> Batch:
        """See :class:`PreparedDataset`; ``rows`` are a slice of a step."""
        return super().gather(self._cache.local(rows), global_size, total_weights, total_groups)
