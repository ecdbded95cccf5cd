"""A cache of the chunks of a remote split, in a local file of bounded size.

The file has slots for a number of chunks. Each array of the split has its own range of the file, so that it
can be memory-mapped. The index of a row in it follows from the slot of its chunk::

    rows of the split    | chunk 0 | chunk 1 | chunk 2 | ...
    slots                | chunk 7 |    -    | chunk 1 |      row 4096 + r of the split is 2 * 4097 + r here

A slot has room for one row more than a chunk, since R rows have R + 1 offsets, and for as many ids as the
largest chunk has. A *pinned* chunk stays in its slot; of the others, the least recently used is evicted.

The file is unnamed, so nothing of it is left, however its process ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hybrid.data.dataset.chunk_index import ChunkArray, ChunkIndex, ChunkLayout
from hybrid.data.dataset.sample_order import CHUNK_ROWS
from hybrid.errors import DataError, OutageError

FETCH_THREADS = 8
_RANGE_BYTES = 8 << 20  # of adjacent chunks in one request
_SLOT_ROWS = CHUNK_ROWS + 1
_WAIT_SECONDS = 0.1  # between two checks of a wait
_CLOSE_SECONDS = 5.0
_WRITE_SECONDS = 10.0

_Run: TypeAlias = tuple[int, int]  # a range of chunks
_Tasks: TypeAlias = SimpleQueue[partial[None] | None]  # None ends a thread


class ChunkCache:
    """Chunks of a remote file in a local file of bounded size.

    Args:
        fetch: returns the bytes of the remote file from a start to a stop; raises HybridError.
        url: of the remote file.
        layout, index: of the remote file.
        num_rows: of the split.
        folder: of the local file.
        num_bytes: the most that the local file takes.

    Attributes:
        arrays: of the split; the rows :meth:`local` are valid.
        lock: to be held from :meth:`fits` to :meth:`pin`, if the split has several readers.
        num_chunks: of the split.
        num_slots: the number of chunks that fit.
        slot_bytes: the bytes of a slot.
        bytes_fetched: since the start.
    """

    def __init__(
        self,
        fetch: Callable[[int, int], bytes],
        url: str,
        layout: ChunkLayout,
        index: ChunkIndex,
        num_rows: int,
        folder: Path,
        num_bytes: int,
    ) -> None:
        self._fetch_range, self._url, self._layout, self._index = fetch, url, layout, index
        self._num_rows = num_rows
        self._folder = folder
        self._most_ids = index.most_ids
        self.slot_bytes = sum(self._slot_rows(array) * array.row_bytes for array in layout.arrays)
        self.num_chunks = index.num_chunks
        self.num_slots = min(index.num_chunks, num_bytes // max(1, self.slot_bytes))
        self.bytes_fetched = 0
        self._slots_C = np.full(index.num_chunks, -1, np.int64)
        self._free = list(range(self.num_slots))
        self._arrivals: dict[int, Future[None]] = {}
        self._pins: Counter[int] = Counter()
        # Chunks that are not pinned, the least recently used first.
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._tasks: _Tasks = SimpleQueue()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _end, self._tasks)
        self._count_lock = threading.Lock()
        self.lock = threading.Lock()
        sizes = [self.num_slots * self._slot_rows(array) * array.row_bytes for array in layout.arrays]
        starts = np.cumsum([0, *(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)]).tolist()
        try:
            self._local = tempfile.TemporaryFile(dir=folder, prefix="hybrid-")  # noqa: SIM115
            weakref.finalize(self, self._local.close)
            self._local.truncate(max(mmap.PAGESIZE, starts[-1]))
            memory = mmap.mmap(self._local.fileno(), 0, prot=mmap.PROT_READ)
        except OSError as error:
            raise self._refused(error) from error
        self._starts = {array.name: start for array, start in zip(layout.arrays, starts, strict=False)}
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        for array in layout.arrays:
            shape = self.num_slots * self._slot_rows(array), *array.row_shape
            count = int(np.prod(shape, dtype=np.int64))
            values = np.frombuffer(memory, array.dtype, count, self._starts[array.name])
            self.arrays[array.name] = values.reshape(shape)

    def fits(self, chunks: Iterable[int]) -> bool:
        """Return whether there is room to pin these chunks, too."""
        return len(self._pins.keys() | set(chunks)) <= self.num_slots

    def pin(self, chunks: Iterable[int]) -> None:
        """Keep these chunks until they are unpinned; begin to fetch those that are missing."""
        missing = []
        for chunk in sorted(chunks):
            arrival = None if self._pins[chunk] else self._arrivals.get(chunk)
            if arrival is not None and arrival.done() and (arrival.cancelled() or arrival.exception()):
                self._free.append(self._forget(chunk))  # the fetch failed
            self._pins[chunk] += 1
            self._unused.pop(chunk, None)
            if chunk not in self._arrivals:
                missing.append(chunk)
        for chunk in missing:
            self._slots_C[chunk] = self._free.pop() if self._free else self._evict()
            self._arrivals[chunk] = Future()
        for run in self._runs(missing):
            arrivals = {chunk: self._arrivals[chunk] for chunk in range(*run)}
            self._tasks.put(partial(self._fetch_run, run, arrivals))
        while missing and len(self._threads) < FETCH_THREADS:
            thread = threading.Thread(target=_work, args=(self._tasks,), name="chunk fetcher", daemon=True)
            self._threads.append(thread)
            thread.start()

    def unpin(self, chunks: Iterable[int]) -> None:
        """Release chunks, as often as they occur here."""
        for chunk in chunks:
            self._pins[chunk] -= 1
            if not self._pins[chunk]:
                del self._pins[chunk]
                self._unused[chunk] = None

    def wait(self, chunks: Iterable[int], seconds: float, is_over: threading.Event) -> bool:
        """Wait until these pinned chunks are in the cache; return False if it is over before.

        Raises:
            OutageError: a chunk did not arrive in ``seconds``.
            DataError: a chunk is altered.
            HybridError: a chunk cannot be fetched.
        """
        for arrival in [self._arrivals[chunk] for chunk in chunks]:
            deadline = time.monotonic() + seconds
            while not is_over.is_set() and not arrival.done():
                if time.monotonic() > deadline:
                    raise OutageError(f"{self._url}: nothing came in {seconds:.0f} s")
                wait([arrival], timeout=_WAIT_SECONDS)
            if is_over.is_set():
                return False
            arrival.result()
        return True

    def local(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the indices in the arrays of rows whose chunks are in the cache and pinned."""
        slots = self._slots_C[rows // CHUNK_ROWS]
        assert slots.min(initial=0) >= 0, "wait for a chunk before its rows are read"
        return slots * _SLOT_ROWS + rows % CHUNK_ROWS

    def close(self) -> None:
        """End the threads that fetch."""
        _end(self._tasks)
        for thread in self._threads:
            thread.join(timeout=_CLOSE_SECONDS)
        self._threads = []

    def _slot_rows(self, array: ChunkArray) -> int:
        """Return the number of rows of an array in a slot."""
        return _SLOT_ROWS if array.bag is None else self._most_ids[array.bag]

    def _evict(self) -> int:
        """Evict the least recently used chunk; return its slot."""
        for chunk in self._unused:
            if self._arrivals[chunk].done() or self._arrivals[chunk].cancel():
                return self._forget(chunk)
        chunk = next(iter(self._unused))  # all of them are being written to the local file
        if wait([self._arrivals[chunk]], timeout=_WRITE_SECONDS).not_done:
            raise DataError(f"{self._folder}: writing a chunk takes longer than {_WRITE_SECONDS:.0f} s")
        return self._forget(chunk)

    def _forget(self, chunk: int) -> int:
        """Forget a chunk; return its slot."""
        slot, self._slots_C[chunk] = int(self._slots_C[chunk]), -1
        self._unused.pop(chunk, None)
        del self._arrivals[chunk]
        return slot

    def _runs(self, chunks: Sequence[int]) -> Iterator[_Run]:
        """Yield the ranges of adjacent chunks among rising chunks, each of at most ``_RANGE_BYTES``."""
        edges = self._index.edges
        first = previous = -1
        for chunk in chunks:
            if first >= 0 and (chunk != previous + 1 or edges[chunk + 1] - edges[first] > _RANGE_BYTES):
                yield first, previous + 1
                first = chunk
            first = chunk if first < 0 else first
            previous = chunk
        if first >= 0:
            yield first, previous + 1

    def _fetch_run(self, run: _Run, arrivals: Mapping[int, Future[None]]) -> None:
        """Fetch the chunks of a run that are not evicted; in a thread.

        A chunk can be evicted until its bytes arrive, so that no thread waits for a fetch that hangs.
        """
        pending = {chunk: arrival for chunk, arrival in arrivals.items() if not arrival.cancelled()}
        try:
            for chunk, data in self._fetch(run, list(pending)):
                if not pending[chunk].set_running_or_notify_cancel():
                    del pending[chunk]
                    continue
                self._put(chunk, data)
                pending.pop(chunk).set_result(None)
        except BaseException as error:  # raised by :meth:`wait`
            for arrival in pending.values():
                if arrival.running() or arrival.set_running_or_notify_cancel():
                    arrival.set_exception(error)

    def _fetch(self, run: _Run, chunks: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
        """Yield chunks of a run, verified."""
        if not chunks:
            return
        edges = self._index.edges
        first, last = edges[run[0]], edges[run[1]]
        data = memoryview(self._read(first, last))
        for chunk in chunks:
            content = data[edges[chunk] - first : edges[chunk + 1] - first]
            if not self._index.fits(chunk, content):
                content = memoryview(self._read(edges[chunk], edges[chunk + 1]))
                if not self._index.fits(chunk, content):
                    where = f"bytes {edges[chunk]:,} to {edges[chunk + 1]:,}"
                    raise DataError(f"{self._url}: altered since it was prepared, {where}; delete its folder")
            yield chunk, content

    def _read(self, start: int, stop: int) -> bytes:
        data = self._fetch_range(start, stop)
        with self._count_lock:
            self.bytes_fetched += len(data)
        return data

    def _put(self, chunk: int, data: memoryview) -> None:
        slot = int(self._slots_C[chunk])
        num_rows = min(CHUNK_ROWS, self._num_rows - chunk * CHUNK_ROWS)
        bag = iter(self._most_ids)
        for array, rows in self._layout.unpack(data, num_rows, self._index.num_ids(chunk)):
            values = rows + slot * next(bag) if array.is_offsets else rows
            at = self._starts[array.name] + slot * self._slot_rows(array) * array.row_bytes
            content = memoryview(values.tobytes())
            try:
                while content:
                    written = os.pwrite(self._local.fileno(), content, at)
                    content, at = content[written:], at + written
            except OSError as error:
                raise self._refused(error) from error

    def _refused(self, error: OSError) -> DataError:
        return DataError(
            f"{self._folder}: cannot hold prepared data ({error.strerror}); "
            "set data.local_cache_folder, or data.local_cache_gb"
        )


def _work(tasks: _Tasks) -> None:
    """Run tasks in a thread until it ends; between tasks, the thread holds no reference."""
    while (task := tasks.get()) is not None:
        task()
        del task


def _end(tasks: _Tasks) -> None:
    """End all threads of a queue of tasks; cancel the tasks that have not begun."""
    with suppress(Empty):
        while (task := tasks.get_nowait()) is not None:
            for arrival in task.args[1].values():
                arrival.cancel()
    for _ in range(FETCH_THREADS):
        tasks.put(None)
