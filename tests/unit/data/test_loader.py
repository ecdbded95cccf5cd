"""The order of an epoch, and the batches that trainers get of it."""

import dataclasses
import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from support.samples import csv_config, prepared, write

from hybrid.batch import Batch, SparseFeatures, slice_bounds
from hybrid.data.batches.batch_loader import BatchLoader, BatchStream
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.dataset.sample_order import ShuffledOrder

NUM_ROWS = 1003
SECONDS = 5.0


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """1003 rows; the numeric column of row i is i."""
    folder = tmp_path_factory.mktemp("loader")
    rows = "".join(f"{i % 2},{i},c{i % 7}\n" for i in range(NUM_ROWS))
    path = write(folder / "train.csv", f"label,x,c\n{rows}")
    config = csv_config(path, dense=("x",), sparse=("c",), numeric_scaling="none", test_fraction=0.0)
    return prepared(config, folder)[0]


def rows_of(loader: BatchLoader, epoch: int, first_step: int = 0) -> list[list[int]]:
    with loader.batches(epoch, first_step) as stream:
        return [batch.dense_features[:, 0].int().tolist() for batch in stream]


@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 9, 63, 64, 65, 1000])
def test_every_row_comes_once(num_rows: int) -> None:
    order = ShuffledOrder(num_rows, seed=3, epoch=0, chunk_rows=8, window_chunks=3)
    assert sorted(order.indices(0, num_rows).tolist()) == list(range(num_rows))


def test_any_part_of_the_order_can_be_had_alone() -> None:
    whole = ShuffledOrder(1000, 3, 0, chunk_rows=8, window_chunks=3).indices(0, 1000)
    order = ShuffledOrder(1000, 3, 0, chunk_rows=8, window_chunks=3)
    for start, stop in [(990, 1000), (0, 5), (20, 400), (23, 25), (50, 50)]:
        np.testing.assert_array_equal(order.indices(start, stop), whole[start:stop])


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    orders = {
        (seed, epoch): ShuffledOrder(5000, seed, epoch).indices(0, 5000).tolist()
        for seed, epoch in itertools.product((1, 2), (0, 1, 2))
    }
    assert len(set(map(tuple, orders.values()))) == len(orders)
    assert orders[1, 2] == ShuffledOrder(5000, 1, 2).indices(0, 5000).tolist()


def test_rows_move_far_within_and_across_windows() -> None:
    order = ShuffledOrder(100_000, 1, 0, chunk_rows=100, window_chunks=50).indices(0, 100_000)
    window = order[:5000]
    assert len(np.unique(window // 100)) == 50
    assert np.abs(np.diff(window)).mean() > 10_000
    assert (window % 100 != order[5000:10_000] % 100).any(), "each window is shuffled in its own way"
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.1


@pytest.mark.parametrize(("size", "parts"), [(10, 3), (2, 4), (0, 3), (12, 4), (5, 1)])
def test_shares_are_balanced_and_contiguous(size: int, parts: int) -> None:
    expected = [part.tolist() for part in np.array_split(np.arange(size), parts)]
    shares = [slice_bounds(size, index, parts) for index in range(parts)]
    assert [list(range(*bounds)) for bounds in shares] == expected


@pytest.mark.parametrize(("shuffle", "lanes"), [(True, 0), (True, 16), (False, 0)])
@pytest.mark.parametrize("num_trainers", [2, 3, 5])
def test_a_step_is_the_same_for_any_number_of_trainers(
    dataset: PreparedDataset, shuffle: bool, lanes: int, num_trainers: int
) -> None:
    loader = BatchLoader(dataset, batch_size=100, seed=4, shuffle=shuffle, lanes=lanes)
    alone = rows_of(loader, epoch=2)
    assert [len(step) for step in alone] == [100] * 10 + [3]
    assert sorted(itertools.chain(*alone)) == list(range(NUM_ROWS))
    shares = [
        rows_of(dataclasses.replace(loader, trainer_index=t, num_trainers=num_trainers), epoch=2)
        for t in range(num_trainers)
    ]
    assert [list(itertools.chain(*parts)) for parts in zip(*shares, strict=True)] == alone


def test_the_last_batch_may_leave_trainers_without_samples(dataset: PreparedDataset) -> None:
    loader = BatchLoader(dataset, batch_size=100, trainer_index=4, num_trainers=5)
    with loader.batches(0) as stream:
        *_, before, last = stream
    assert (len(before.labels), before.global_size) == (20, 100)
    assert (len(last.labels), last.global_size) == (0, 3)
    assert last.dense_features.shape == (0, 1)
    assert last.sparse_features.num_features == 1


def test_an_epoch_can_be_taken_up_at_any_step(dataset: PreparedDataset) -> None:
    loader = BatchLoader(dataset, batch_size=64, seed=1, shuffle=True)
    whole = rows_of(loader, epoch=1)
    assert rows_of(loader, epoch=1, first_step=9) == whole[9:]
    by_lanes = dataclasses.replace(loader, lanes=8)
    assert rows_of(by_lanes, epoch=1) != whole
    assert rows_of(by_lanes, epoch=1, first_step=9) == rows_of(by_lanes, epoch=1)[9:]
    assert rows_of(loader, epoch=1, first_step=loader.steps_per_epoch) == []
    assert rows_of(loader, epoch=0) != whole
    as_they_are = BatchLoader(dataset, batch_size=64)
    assert rows_of(as_they_are, epoch=0) == rows_of(as_they_are, epoch=1)


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batch reader"]


def test_closing_early_ends_the_thread(dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    has_no_room = threading.Event()

    class Room(threading.Semaphore):
        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            if super().acquire(blocking=False):
                return True
            has_no_room.set()
            return super().acquire(blocking, timeout)

    monkeypatch.setattr(threading, "Semaphore", Room)
    stream = BatchLoader(dataset, batch_size=10).batches(0)
    assert has_no_room.wait(SECONDS), "the reader waits until a batch is taken"
    assert reader_threads()
    stream.close()
    assert not reader_threads()
    assert list(stream) == []
    stream.close()


def test_an_exhausted_stream_has_no_thread(dataset: PreparedDataset) -> None:
    stream = BatchLoader(dataset, batch_size=500).batches(0)
    assert len(list(stream)) == 3
    assert not reader_threads()


def some_batch(step: int) -> Batch:
    sparse = SparseFeatures(torch.tensor([step]), None, None, 1)
    return Batch(torch.zeros(1, 0), sparse, torch.zeros(1), 1)


def test_an_error_of_the_thread_is_raised_where_its_batch_is_taken() -> None:
    def read(step: int) -> Batch:
        if step == 2:
            raise OSError("the disk is gone")
        return some_batch(step)

    stream = BatchStream(read, range(10), depth=5)
    assert [next(stream).sparse_features.ids_L.item() for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)
    assert list(stream) == []
    assert not reader_threads()


def test_reading_ahead_is_bounded() -> None:
    depth, taken, ahead = 3, 0, []
    full = threading.Event()

    def read(step: int) -> Batch:
        ahead.append(step - taken)
        if step == depth - 1:
            full.set()
        return some_batch(step)

    with BatchStream(read, range(50), depth) as stream:
        assert full.wait(10)
        for _ in range(50):
            taken += 1
            next(stream)
    assert max(ahead) == depth - 1


def test_a_reader_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hybrid.data.batches.batch_loader.READ_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr("hybrid.data.batches.batch_loader.JOIN_TIMEOUT_SECONDS", 0.05)
    release = threading.Event()

    def read(step: int) -> Batch:
        release.wait(10)
        return some_batch(step)

    stream = BatchStream(read, range(1), depth=1)
    with pytest.raises(Exception, match=r"no batch in .*check the disk, or the store, of data\.cache_folder"):
        next(stream)
    release.set()
