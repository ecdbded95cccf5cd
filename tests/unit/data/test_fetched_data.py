"""Prepared data in a store: rows are fetched by chunks into a cache, and are those of the disk."""

import dataclasses
import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from support.far import FakeFolder
from support.samples import csv_config, write

from hybrid.batch import Batch
from hybrid.config import RunConfig, TaskSection
from hybrid.config.data_sections import ColumnSection
from hybrid.data.batches.batch_loader import BatchLoader
from hybrid.data.dataset.chunk_cache import ChunkCache
from hybrid.data.dataset.chunk_index import ChunkArray, ChunkIndex, ChunkLayout
from hybrid.data.dataset.fetched_split import FetchedDataset
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.dataset.remote_dataset import FILE_NAME, RemoteDataset, send
from hybrid.data.dataset.sample_order import CHUNK_ROWS
from hybrid.data.prepare.preparation import prepare
from hybrid.errors import ConfigError, DataError, HybridError, OutageError

NUM_ROWS = 5 * CHUNK_ROWS + 100
PLENTY = 1 << 30
SEED = 3


def config_of(path: Path) -> RunConfig:
    """Weights, groups, two tasks, bags with weights and without."""
    config = csv_config(
        path,
        dense=("x",),
        sparse=("c", "tags", "rated"),
        multi_hot_separator="|",
        weight="w",
        group="c",
        numeric_scaling="none",
        test_fraction=0.1,
    )
    columns = {"rated": ColumnSection(kind="weighted"), "c": ColumnSection(multi_hot_separator="")}
    tasks = {"click": TaskSection(), "spent": TaskSection(type="regression")}
    return config.replace(columns=columns, tasks=tasks)


def rows() -> Iterator[str]:
    draw = np.random.default_rng(1)
    for i in range(NUM_ROWS):
        tags = "|".join(f"t{t}" for t in draw.integers(0, 30, int(draw.integers(0, 5)) + (i < 9000) * 6))
        rated = "|".join(f"r{t}:{t + 1}" for t in draw.integers(0, 9, int(draw.integers(0, 3))))
        yield f"{i % 2},{i * 0.5},{i},{1 + i % 3},c{i % 7},{tags},{rated}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("far")
    path = write(scratch / "train.csv", "click,spent,x,w,c,tags,rated\n" + "".join(rows()))
    return prepare(config_of(path), scratch / "cache")


@pytest.fixture(scope="module")
def sent(folder: Path) -> dict[str, bytes]:
    far = FakeFolder()
    send(folder, far)
    assert list(far.files)[-1] == FILE_NAME, "what makes it whole comes last"
    return far.files


@pytest.fixture
def far(sent: dict[str, bytes]) -> FakeFolder:
    fake = FakeFolder()
    fake.files = dict(sent)
    return fake


def opened(far: FakeFolder, tmp_path: Path, split: str = "train", num_bytes: int = PLENTY) -> FetchedDataset:
    return RemoteDataset(far).open(split, tmp_path, num_bytes)


def assert_same(ours: Batch, expected: Batch) -> None:
    pairs = zip([*ours, *ours.sparse_features], [*expected, *expected.sparse_features], strict=True)
    for got, wanted in pairs:
        if isinstance(wanted, torch.Tensor):
            assert isinstance(got, torch.Tensor)
            assert torch.equal(got, wanted)
        elif not isinstance(wanted, tuple):
            assert got == wanted


@pytest.mark.parametrize(("shuffle", "lanes"), [(False, 0), (True, 0), (True, 16)])
def test_fetched_batches_equal_batches_on_disk(
    folder: Path, far: FakeFolder, tmp_path: Path, shuffle: bool, lanes: int
) -> None:
    dataset = opened(far, tmp_path)
    disk = BatchLoader(
        PreparedDataset.open(folder, "train"),
        batch_size=1000,
        trainer_index=1,
        num_trainers=2,
        seed=SEED,
        shuffle=shuffle,
        lanes=lanes,
    )
    here = dataclasses.replace(disk, dataset=dataset)
    for epoch, first_step in ((0, 0), (1, 7)):
        with disk.batches(epoch, first_step) as expected, here.batches(epoch, first_step) as ours:
            for each, wanted in zip(ours, expected, strict=True):
                assert_same(each, wanted)
    assert dataset.ids_per_sample == disk.dataset.ids_per_sample
    np.testing.assert_array_equal(dataset.source_rows, disk.dataset.source_rows)
    dataset.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "chunk fetcher"]


def room_for_four(far: FakeFolder, tmp_path: Path) -> int:
    """Return a cache size for four of the five chunks, besides the fractions for test rows and weights."""
    return int(4.3 * opened(far, tmp_path)._samples.slot_bytes * 8 / 7 * 8 / 7)


def test_evicted_chunks_are_fetched_again(folder: Path, far: FakeFolder, tmp_path: Path) -> None:
    bound = room_for_four(far, tmp_path)
    dataset = opened(far, tmp_path, num_bytes=bound)
    assert (dataset._samples.num_slots, dataset._samples.num_chunks) == (4, 5)
    expected = BatchLoader(PreparedDataset.open(folder, "train"), batch_size=500)
    here = dataclasses.replace(expected, dataset=dataset)
    for epoch in (0, 1):
        with expected.batches(epoch) as disk, here.batches(epoch) as ours:
            for each, wanted in zip(ours, disk, strict=True):
                assert_same(each, wanted)
                assert os_bytes(dataset) <= bound
    assert dataset.bytes_fetched > len(far.files["train/samples"]) * 1.3
    dataset.close()


def os_bytes(dataset: FetchedDataset) -> int:
    """Return the size of the local files on the disk."""
    residences = [dataset._samples, *([dataset._all_weights] if dataset._all_weights else [])]
    return sum(os.fstat(each._local.fileno()).st_blocks * 512 for each in residences)


def test_corrupt_range_is_fetched_once_more(far: FakeFolder, tmp_path: Path) -> None:
    spoilt = iter([True])
    far.spoil = lambda name, data: data[:-1] + bytes([data[-1] ^ 1]) if next(spoilt, False) else data
    dataset = opened(far, tmp_path)
    with BatchLoader(dataset, batch_size=700).batches(0) as stream:
        assert len(list(stream)) > 20
    dataset.close()


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: bytes(len(data))])
def test_permanently_corrupt_range_is_a_one_line_error(
    far: FakeFolder, tmp_path: Path, spoil: object
) -> None:
    far.spoil = lambda name, data: spoil(data) if name == "train/samples" else data  # type: ignore[operator]
    dataset = opened(far, tmp_path)
    message = r"^fake://data/train/samples: altered since it was prepared, bytes [\d,]+ to [\d,]+; delete its"
    with pytest.raises(DataError, match=message):
        next(BatchLoader(dataset, batch_size=700).batches(0))
    dataset.close()


def test_store_failure_is_raised_with_its_batch(far: FakeFolder, tmp_path: Path) -> None:
    def fail(name: str, data: bytes) -> bytes:
        if len(far.ranges) > 3:
            raise HybridError("fake://data: no answer")
        return data

    far.spoil = fail
    dataset = opened(far, tmp_path, num_bytes=room_for_four(far, tmp_path))
    loader = BatchLoader(dataset, batch_size=500)
    with loader.batches(0) as stream, pytest.raises(HybridError, match=r"^fake://data: no answer$"):
        for _ in stream:
            pass
    far.spoil = lambda name, data: data
    with loader.batches(0) as stream:  # and another try fetches what failed
        assert len(list(stream)) == loader.steps_per_epoch
    dataset.close()


def test_close_ends_a_wait_for_a_slow_store(far: FakeFolder, tmp_path: Path) -> None:
    asked, release = threading.Event(), threading.Event()

    def hang(name: str, data: bytes) -> bytes:
        asked.set()
        release.wait(20)
        return data

    far.spoil = hang
    dataset = opened(far, tmp_path)
    stream = BatchLoader(dataset, batch_size=500).batches(0)
    assert asked.wait(20)
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "batch reader"]
    release.set()
    dataset.close()


def test_too_small_a_cache_is_refused_before_the_first_step(far: FakeFolder, tmp_path: Path) -> None:
    dataset = opened(far, tmp_path, num_bytes=room_for_four(far, tmp_path))
    with pytest.raises(ConfigError, match=r"^data\.local_cache_gb: must be at least 0\.01, for the rows"):
        BatchLoader(dataset, batch_size=500, shuffle=True).batches(0)


def test_altered_files_are_refused(far: FakeFolder, tmp_path: Path) -> None:
    for name in ("manifest.json", "train/samples.index"):
        altered = FakeFolder()
        altered.files = {**far.files, name: far.files[name].replace(b"1", b"2", 1) + b" "}
        with pytest.raises(
            DataError, match=rf"^fake://data/{name}: altered since it was prepared; delete fake"
        ):
            opened(altered, tmp_path)
    content = json.loads(far.files[FILE_NAME])
    far.files[FILE_NAME] = json.dumps({**content, "format": 99}).encode()
    with pytest.raises(DataError, match="made by another version of this program"):
        opened(far, tmp_path)
    with pytest.raises(HybridError, match="is not there"):
        opened(FakeFolder(), tmp_path)


def test_fetched_data_have_no_complete_groups(far: FakeFolder, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a folder as data"):
        BatchLoader(opened(far, tmp_path), batch_size=5000, by_group=True)


def test_unusable_cache_folder_is_reported(far: FakeFolder, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: cannot hold prepared data \(No such.*local_cache_folder"):
        opened(far, tmp_path / "nowhere")


NUM_CHUNKS, NUM_SLOTS = 9, 4
CACHED_ROWS = (NUM_CHUNKS - 1) * CHUNK_ROWS + 5
SECONDS = 20.0
LAYOUT = ChunkLayout((ChunkArray("labels", np.dtype(np.uint8), (1,)),), ())
LABELS = np.random.default_rng(1).integers(0, 255, (CACHED_ROWS, 1), np.uint8)


class CountedFile:
    """A file of chunks in memory; counts its ranges."""

    def __init__(self) -> None:
        index = ChunkIndex.of({"labels": LABELS}, LAYOUT, CACHED_ROWS)
        parts = [LAYOUT.pack({"labels": LABELS}, chunk, CACHED_ROWS) for chunk in range(NUM_CHUNKS)]
        for chunk, part in enumerate(parts):
            index.add(chunk, part)
        self.index = ChunkIndex.read(index.table.tobytes(), LAYOUT, CACHED_ROWS, "index")
        self.content = b"".join(parts)
        self.ranges: list[tuple[int, int]] = []

    def read_range(self, start: int, stop: int) -> bytes:
        self.ranges.append((start, stop))
        return self.content[start:stop]


def cache_of(file: CountedFile, folder: Path) -> ChunkCache:
    room = NUM_SLOTS * (CHUNK_ROWS + 1)
    cache = ChunkCache(file.read_range, "fake://data", LAYOUT, file.index, CACHED_ROWS, folder, room)
    assert cache.num_slots == NUM_SLOTS
    return cache


def assert_here(cache: ChunkCache, chunks: Sequence[int]) -> None:
    assert cache.wait(chunks, SECONDS, threading.Event())
    for chunk in chunks:
        rows = np.arange(chunk * CHUNK_ROWS, min((chunk + 1) * CHUNK_ROWS, CACHED_ROWS))
        np.testing.assert_array_equal(cache.arrays["labels"][cache.local(rows)], LABELS[rows])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sets=st.lists(st.sets(st.integers(0, NUM_CHUNKS - 1), max_size=NUM_SLOTS), max_size=25))
def test_pinned_chunks_stay_in_the_cache(tmp_path: Path, sets: list[set[int]]) -> None:
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


def test_unreferenced_cache_ends_its_threads(tmp_path: Path) -> None:
    cache = cache_of(CountedFile(), tmp_path)
    cache.pin([1])
    assert_here(cache, [1])
    threads = [thread for thread in threading.enumerate() if thread.name == "chunk fetcher"]
    assert threads
    del cache
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_late_chunk_is_an_outage(tmp_path: Path) -> None:
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


def test_unpinned_chunks_are_evicted_while_their_fetch_hangs(tmp_path: Path) -> None:
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
