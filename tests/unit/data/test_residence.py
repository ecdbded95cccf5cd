"""Chunks in the slots of a local file: pinned, let go of, and fetched again."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from hybrid.data.dataset.chunk_cache import ChunkCache
from hybrid.data.dataset.chunk_index import ChunkArray, ChunkIndex, ChunkLayout
from hybrid.data.dataset.sample_order import CHUNK_ROWS
from hybrid.errors import OutageError

NUM_CHUNKS, NUM_SLOTS = 9, 4
NUM_ROWS = (NUM_CHUNKS - 1) * CHUNK_ROWS + 5
SECONDS = 20.0
LAYOUT = ChunkLayout((ChunkArray("labels", np.dtype(np.uint8), (1,)),), ())
LABELS = np.random.default_rng(1).integers(0, 255, (NUM_ROWS, 1), np.uint8)


class CountedFile:
    """A file of chunks in memory; counts its ranges."""

    def __init__(self) -> None:
        index = ChunkIndex.of({"labels": LABELS}, LAYOUT, NUM_ROWS)
        parts = [LAYOUT.pack({"labels": LABELS}, chunk, NUM_ROWS) for chunk in range(NUM_CHUNKS)]
        for chunk, part in enumerate(parts):
            index.add(chunk, part)
        self.index = ChunkIndex.read(index.table.tobytes(), LAYOUT, NUM_ROWS, "index")
        self.content = b"".join(parts)
        self.ranges: list[tuple[int, int]] = []

    def read_range(self, start: int, stop: int) -> bytes:
        self.ranges.append((start, stop))
        return self.content[start:stop]


def cache_of(file: CountedFile, folder: Path) -> ChunkCache:
    room = NUM_SLOTS * (CHUNK_ROWS + 1)
    cache = ChunkCache(file.read_range, "fake://data", LAYOUT, file.index, NUM_ROWS, folder, room)
    assert cache.num_slots == NUM_SLOTS
    return cache


def assert_here(cache: ChunkCache, chunks: Sequence[int]) -> None:
    assert cache.wait(chunks, SECONDS, threading.Event())
    for chunk in chunks:
        rows = np.arange(chunk * CHUNK_ROWS, min((chunk + 1) * CHUNK_ROWS, NUM_ROWS))
        np.testing.assert_array_equal(cache.arrays["labels"][cache.local(rows)], LABELS[rows])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sets=st.lists(st.sets(st.integers(0, NUM_CHUNKS - 1), max_size=NUM_SLOTS), max_size=25))
def test_what_is_pinned_stays_whatever_comes_and_goes(tmp_path: Path, sets: list[set[int]]) -> None:
    cache = cache_of(CountedFile(), tmp_path)
    held: list[set[int]] = []
    for chunks in sets:
        while not cache.fits(chunks):
            cache.unpin(held.pop(0))
        cache.pin(chunks)
        held.append(chunks)
        for each in held:
            assert_here(cache, sorted(each))
    cache.close()


def test_one_that_nobody_closes_ends_its_threads(tmp_path: Path) -> None:
    cache = cache_of(CountedFile(), tmp_path)
    cache.pin([1])
    assert_here(cache, [1])
    threads = [thread for thread in threading.enumerate() if thread.name == "chunk fetcher"]
    assert threads
    del cache
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_what_does_not_come_in_time_is_an_outage(tmp_path: Path) -> None:
    file, is_let_go = CountedFile(), threading.Event()
    read = file.read_range

    def stall(start: int, stop: int) -> bytes:
        assert is_let_go.wait(SECONDS)
        return read(start, stop)

    file.read_range = stall  # type: ignore[method-assign]
    cache = cache_of(file, tmp_path)
    cache.pin([0])
    with pytest.raises(OutageError, match=r": nothing came in 0 s$"):
        cache.wait([0], 0.01, threading.Event())
    is_let_go.set()
    assert_here(cache, [0])
    cache.close()


def test_room_is_made_while_fetches_that_nobody_waits_for_hang(tmp_path: Path) -> None:
    file, may_read = CountedFile(), threading.Event()
    read = file.read_range

    def hang(start: int, stop: int) -> bytes:
        if start < NUM_SLOTS * CHUNK_ROWS:
            assert may_read.wait(SECONDS)
        return read(start, stop)

    file.read_range = hang  # type: ignore[method-assign]
    cache = cache_of(file, tmp_path)
    cache.pin(range(NUM_SLOTS))
    cache.unpin(range(NUM_SLOTS))
    pinning = threading.Thread(target=cache.pin, args=([NUM_SLOTS + 1],), daemon=True)
    pinning.start()
    pinning.join(SECONDS / 4)
    assert not pinning.is_alive(), "the thread holds the lock that close() needs"
    assert_here(cache, [NUM_SLOTS + 1])
    cache.pin([0])
    may_read.set()
    assert_here(cache, [0, NUM_SLOTS + 1])
    cache.close()
