"""Prepared data in a store: sent once, found again, and fetched by chunks into a cache."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from support.samples import csv_config, write
from support.stores import BUCKET, Store

from hybrid.batch import Batch
from hybrid.config import DataSection, RunConfig, TaskSection
from hybrid.config.data_sections import ColumnSection
from hybrid.config.loading import validate
from hybrid.data.batches.batch_loader import BatchLoader
from hybrid.data.dataset import fetched_split
from hybrid.data.dataset.fetched_split import ChunkCache, FetchedDataset
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.dataset.remote_dataset import ChunkIndex, send_dataset
from hybrid.data.dataset.sample_order import CHUNK_ROWS
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.prepare import dataset_location
from hybrid.data.prepare.dataset_location import ensure_prepared, open_split
from hybrid.data.prepare.preparation import cache_folder, prepare
from hybrid.errors import ConfigError, DataError, HybridError, OutageError
from hybrid.storage.files import list_entries, open_ranges, read_bytes, remove, write_bytes
from hybrid.storage.remote_path import RemotePath, StoragePath, parse_path

NUM_ROWS = 5 * CHUNK_ROWS + 100
PLENTY = 1 << 30
SECONDS = 20.0


def config_of(path: Path) -> RunConfig:
    """Weights, groups, two tasks, bags with weights and without."""
    keys = {"multi_hot_separator": "|", "weight": "w", "group": "c", "numeric_scaling": "none"}
    config = csv_config(path, dense=("x",), sparse=("c", "tags", "rated"), split="random(0.1)", **keys)
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
    scratch = tmp_path_factory.mktemp("prepared")
    path = write(scratch / "train.csv", "click,spent,x,w,c,tags,rated\n" + "".join(rows()))
    return prepare(config_of(path), scratch / "cache")


class Ranges:
    """Reads ranges of files as a store does; ``answer`` may delay, alter or refuse them."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.answer: Callable[[bytes], bytes] = lambda data: data

    def open(self, path: StoragePath) -> Callable[[int, int], bytes]:
        read_file = open_ranges(path)

        def read(start: int, length: int) -> bytes:
            self.requests.append(start)
            return self.answer(read_file(start, length))

        return read


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    ranges = Ranges()
    monkeypatch.setattr(fetched_split, "open_ranges", ranges.open)
    return ranges


@pytest.fixture(scope="module")
def remote(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store, on this machine."""
    target = tmp_path_factory.mktemp("remote")
    for split in ("train", "test"):
        (target / split).mkdir()
    send_dataset(folder, target)
    return target


@pytest.fixture
def dataset(remote: Path, ranges: Ranges, tmp_path: Path) -> Iterator[FetchedDataset]:
    with closing(FetchedDataset(remote, "train", tmp_path, PLENTY)) as dataset:
        yield dataset


@pytest.fixture
def small(remote: Path, ranges: Ranges, tmp_path: Path) -> Iterator[FetchedDataset]:
    """A dataset whose cache has room for four of the five chunks, besides the weights and the test rows."""
    chunks = ChunkCache(remote / "train/samples", ChunkIndex.read(remote, "train"), tmp_path, 0)
    num_bytes = 4.9 * chunks.slot_bytes + (remote / "train/weights.npy").stat().st_size
    with closing(FetchedDataset(remote, "train", tmp_path, int(num_bytes * 8 / 7))) as dataset:
        yield dataset


def assert_same(batch: Batch, expected: Batch) -> None:
    pairs = zip([*batch, *batch.sparse_features], [*expected, *expected.sparse_features], strict=True)
    for value, of_disk in pairs:
        if isinstance(of_disk, torch.Tensor):
            assert isinstance(value, torch.Tensor)
            assert torch.equal(value, of_disk)
        elif not isinstance(of_disk, tuple):
            assert value == of_disk


def assert_equal_batches(loader: BatchLoader, folder: Path, *epochs: tuple[int, int]) -> None:
    disk = dataclasses.replace(loader, dataset=PreparedDataset.open(folder, "train"))
    for epoch, first_step in epochs:
        with disk.batches(epoch, first_step) as expected, loader.batches(epoch, first_step) as batches:
            for batch, of_disk in zip(batches, expected, strict=True):
                assert_same(batch, of_disk)


@pytest.mark.parametrize(("shuffle", "lanes"), [(False, 0), (True, 0), (True, 16)])
def test_fetched_batches_equal_batches_on_disk(
    folder: Path, dataset: FetchedDataset, shuffle: bool, lanes: int
) -> None:
    loader = BatchLoader(
        dataset, batch_size=1000, trainer_index=1, num_trainers=2, shuffle=shuffle, lanes=lanes
    )
    assert_equal_batches(loader, folder, (0, 0), (1, 7))
    on_disk = PreparedDataset.open(folder, "train")
    assert dataset.ids_per_sample == on_disk.ids_per_sample
    np.testing.assert_array_equal(dataset.source_rows, on_disk.source_rows)


def test_evicted_chunks_are_fetched_again(folder: Path, small: FetchedDataset, ranges: Ranges) -> None:
    assert_equal_batches(BatchLoader(small, batch_size=500), folder, (0, 0), (1, 0))
    assert len(ranges.requests) > 5


def test_corrupt_range_is_fetched_once_more(folder: Path, dataset: FetchedDataset, ranges: Ranges) -> None:
    is_altered = iter([True])
    ranges.answer = lambda data: data[:-1] + bytes([data[-1] ^ 1]) if next(is_altered, False) else data
    assert_equal_batches(BatchLoader(dataset, batch_size=700), folder, (0, 0))
    assert len(ranges.requests) == 6


def test_permanently_corrupt_range_is_a_one_line_error(dataset: FetchedDataset, ranges: Ranges) -> None:
    ranges.answer = lambda data: bytes(len(data))
    with pytest.raises(DataError, match=r"^/.*train/samples: altered since .*, bytes [\d,]+ to [\d,]+; "):
        next(BatchLoader(dataset, batch_size=700).batches(0))


def test_store_failure_is_raised_with_its_batch(dataset: FetchedDataset, ranges: Ranges) -> None:
    def fail(data: bytes) -> bytes:
        raise HybridError("s3://data: no answer")

    ranges.answer = fail
    loader = BatchLoader(dataset, batch_size=500)
    with loader.batches(0) as stream, pytest.raises(HybridError, match=r"^s3://data: no answer$"):
        next(stream)
    ranges.answer = lambda data: data
    with loader.batches(0) as stream:  # another try fetches the failed chunks
        assert len(list(stream)) == loader.steps_per_epoch


def test_close_ends_a_wait_for_a_slow_store(dataset: FetchedDataset, ranges: Ranges) -> None:
    is_requested, may_answer = threading.Event(), threading.Event()

    def hang(data: bytes) -> bytes:
        is_requested.set()
        may_answer.wait(SECONDS)
        return data

    ranges.answer = hang
    stream = BatchLoader(dataset, batch_size=500).batches(0)
    assert is_requested.wait(SECONDS)
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "batch reader"]
    may_answer.set()


def test_closed_stream_releases_its_chunks(small: FetchedDataset) -> None:
    loader = BatchLoader(small, batch_size=500)
    first = loader.batches(0)
    next(first)  # four chunks are pinned
    time.sleep(0.2)  # until the reader has no room for another batch
    first.close()
    with loader.batches(0, loader.steps_per_epoch - 1) as last:
        assert next(last).global_size > 0


def test_chunks_of_coming_steps_are_fetched_ahead(dataset: FetchedDataset, ranges: Ranges) -> None:
    with BatchLoader(dataset, batch_size=500, prefetch_batches=1).batches(0) as stream:
        next(stream)
        deadline = time.monotonic() + SECONDS
        while len(ranges.requests) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_too_small_a_cache_is_refused_before_the_first_step(small: FetchedDataset) -> None:
    with pytest.raises(ConfigError, match=r"^data\.local_cache_gb: must be at least 0\.01, for the rows"):
        BatchLoader(small, batch_size=500, shuffle=True).batches(0)


@pytest.mark.parametrize("position", [0, 200, -10])
def test_altered_index_is_refused(tmp_path: Path, remote: Path, position: int) -> None:
    content = bytearray((remote / "chunks.npz").read_bytes())
    content[position] ^= 1
    (tmp_path / "chunks.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"chunks\.npz: altered since it was prepared; delete its folder$"):
        ChunkIndex.read(tmp_path, "train")


def test_unusable_cache_folder_is_reported(
    remote: Path, ranges: Ranges, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"nowhere: cannot hold prepared data \(No such.*local_cache_folder"):
        FetchedDataset(remote, "train", tmp_path / "nowhere", PLENTY)

    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(DataError, match=r"cannot hold prepared data \(No space left.*data\.local_cache_gb"):
        FetchedDataset(remote, "train", tmp_path, PLENTY)


NUM_SLOTS = 3


@pytest.fixture(scope="module")
def index(remote: Path) -> ChunkIndex:
    return ChunkIndex.read(remote, "train")


@pytest.fixture
def cache(remote: Path, index: ChunkIndex, ranges: Ranges, tmp_path: Path) -> Iterator[ChunkCache]:
    """A cache with three slots for five chunks."""
    slot_bytes = ChunkCache(remote / "train/samples", index, tmp_path, 0).slot_bytes
    cache = ChunkCache(remote / "train/samples", index, tmp_path, NUM_SLOTS * slot_bytes)
    assert (cache.num_slots, cache.num_chunks) == (NUM_SLOTS, 5)
    assert sum(array.nbytes for array in cache.arrays.values()) == NUM_SLOTS * slot_bytes
    yield cache
    cache.close()


def assert_cached(cache: ChunkCache, folder: Path, chunks: Sequence[int]) -> None:
    cache.wait(chunks, SECONDS, threading.Event())
    expected = np.load(folder / "train" / "dense.npy")
    for chunk in chunks:
        rows = np.arange(chunk * CHUNK_ROWS, min((chunk + 1) * CHUNK_ROWS, len(expected)))
        np.testing.assert_array_equal(cache.arrays["dense"][cache.local(rows)], expected[rows])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sets=st.lists(st.sets(st.integers(0, 4), max_size=NUM_SLOTS), max_size=25))
def test_pinned_chunks_stay_in_the_cache(cache: ChunkCache, folder: Path, sets: list[set[int]]) -> None:
    pinned: list[set[int]] = []
    for chunks in sets:
        while not cache.fits(chunks):
            cache.unpin(pinned.pop(0))
        with cache.lock:
            cache.pin(chunks)
        pinned.append(chunks)
        for each in pinned:
            assert_cached(cache, folder, sorted(each))
    for each in pinned:
        cache.unpin(each)


def test_late_chunk_is_an_outage(cache: ChunkCache, folder: Path, ranges: Ranges) -> None:
    may_answer = threading.Event()
    ranges.answer = lambda data: data if may_answer.wait(SECONDS) else b""
    cache.pin([0])
    with pytest.raises(OutageError, match=r": no data arrived in 0 s$"):
        cache.wait([0], 0.01, threading.Event())
    may_answer.set()
    assert_cached(cache, folder, [0])


def test_unpinned_chunks_are_evicted_while_their_fetch_hangs(
    cache: ChunkCache, folder: Path, ranges: Ranges
) -> None:
    may_answer, hanging = threading.Event(), threading.Semaphore(0)

    def hang(data: bytes) -> bytes:
        hanging.release()
        assert may_answer.wait(SECONDS)
        return data

    ranges.answer = hang
    cache.pin(range(NUM_SLOTS))
    assert all(hanging.acquire(timeout=SECONDS) for _ in range(NUM_SLOTS))
    ranges.answer = lambda data: data
    cache.unpin(range(NUM_SLOTS))
    cache.pin([4])
    assert_cached(cache, folder, [4])
    cache.pin([0])
    may_answer.set()
    assert_cached(cache, folder, [0, 4])


def stored_config(folder: Path, cache: str = "") -> RunConfig:
    rows = "".join(f"{i % 2},{i},c{i % 7}\n" for i in range(6000))
    path = write(folder / "train.csv", f"label,x,c\n{rows}")
    config = csv_config(path, dense=("x",), sparse=("c",), split="random(0.1)", cache_folder=cache)
    data = dataclasses.replace(config.data, local_cache_folder=str(folder / "local"))
    return config.replace(data=data)


@pytest.fixture
def bucket(store: Store, tmp_path: Path) -> RemotePath:
    found = parse_path(f"s3://{BUCKET}/{tmp_path.name}")
    assert isinstance(found, RemotePath)
    return found


def rows_of(dataset: PreparedDataset) -> list[float]:
    with BatchLoader(dataset, batch_size=900, shuffle=True).batches(0) as stream:
        rows = [x for batch in stream for x in batch.dense_features[:, 0].tolist()]
    dataset.close()
    return rows


def test_data_are_sent_once_and_equal_those_on_disk(tmp_path: Path, bucket: RemotePath) -> None:
    config = stored_config(tmp_path, str(bucket))
    assert cache_folder(config) == bucket
    lines: list[str] = []
    folder = ensure_prepared(config, bucket, lines.append)
    assert lines[-1] == f"sending the prepared data to {folder.parent}"
    local = prepare(config, tmp_path / "cache")
    for split in ("train", "test"):
        expected = PreparedDataset.open(local, split)
        for source in (folder, str(folder)):
            assert rows_of(open_split(source, split, config.data)) == rows_of(expected)
        remote = open_split(folder, split, config.data)
        np.testing.assert_array_equal(remote.source_rows, expected.source_rows)
    assert FeatureEncoder.load(folder) == FeatureEncoder.load(local)
    assert read_bytes(folder / "manifest.json") == (local / "manifest.json").read_bytes()
    assert list(tmp_path.glob("local/sent/*")) == [], "no rows are kept on this machine"
    lines.clear()
    before = list_entries(bucket, is_deep=True)
    other_host = dataclasses.replace(config.data, local_cache_folder=str(tmp_path / "other"))
    for each in (config, config.replace(data=other_host)):
        assert ensure_prepared(each, bucket, lines.append) == folder
    assert lines == [f"prepared data found in {folder.parent}"] * 2
    assert list_entries(bucket, is_deep=True) == before


def test_ended_run_leaves_nothing_in_the_store(tmp_path: Path, bucket: RemotePath) -> None:
    config, lines = stored_config(tmp_path, str(bucket)), list[str]()

    def check() -> None:
        if lines[-1].startswith("sending"):
            assert list_entries(bucket, is_deep=True), "there is something to remove"
            raise DataError("the run has ended")

    with pytest.raises(DataError, match="the run has ended"):
        ensure_prepared(config, bucket, lines.append, check)
    assert list_entries(bucket, is_deep=True) == []
    assert rows_of(open_split(ensure_prepared(config, bucket), "train", config.data))


def test_empty_split_is_sent(tmp_path: Path, bucket: RemotePath) -> None:
    config = stored_config(tmp_path, str(bucket))
    config = config.replace(data=dataclasses.replace(config.data, split="none"))
    folder = ensure_prepared(config, bucket)
    assert rows_of(open_split(folder, "test", config.data)) == []


def test_altered_and_removed_data_are_refused(tmp_path: Path, bucket: RemotePath) -> None:
    config = stored_config(tmp_path, str(bucket))
    folder = ensure_prepared(config, bucket)
    write_bytes(folder / "train/source_rows.npy", b"altered")
    with pytest.raises(DataError, match=r"^s3://.*/source_rows\.npy: altered since it was prepared; delete"):
        assert open_split(folder, "train", config.data).source_rows
    write_bytes(folder / "features.json", b"{}")
    with pytest.raises(DataError, match=r"^s3://.*/features\.json: altered since it was prepared; delete"):
        ensure_prepared(config, bucket)
    remove(folder / "chunks.npz")
    with pytest.raises(
        DataError, match=r"^s3://.*: is missing; delete its folder, and the data are prepared"
    ):
        open_split(folder, "train", config.data)
    remove(folder.parent)
    assert rows_of(open_split(ensure_prepared(config, bucket), "train", config.data))


def test_ended_run_does_not_wait_for_the_lock(
    tmp_path: Path, bucket: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one process sends data, another one that has to send them waits, and can be interrupted."""
    config = stored_config(tmp_path, str(bucket))

    def check() -> None:
        raise DataError("the run has ended")

    def write_last(path: StoragePath, content: bytes) -> None:
        with pytest.raises(DataError, match="the run has ended"):
            ensure_prepared(config, bucket, check=check)
        write_bytes(path, content)

    monkeypatch.setattr(dataset_location, "write_bytes", write_last)
    assert rows_of(open_split(ensure_prepared(config, bucket), "train", config.data))


def test_ranking_losses_need_a_local_cache_folder() -> None:
    data = DataSection(group="C1", cache_folder="s3://bucket/prepared")
    tasks = {"click": TaskSection(label="label", ranking_loss="pairwise")}
    with pytest.raises(ConfigError, match=r"^data\.cache_folder = 's3://bucket/prepared': must be a folder"):
        validate(RunConfig(data=data, tasks=tasks))
