"""The order of an epoch, and the batches that trainers get of it."""

import dataclasses
import itertools
import threading
from pathlib import Path

import pytest
import torch
from support.samples import csv_config, prepared, write

from hybrid.batch import Batch, SparseFeatures
from hybrid.data.batches.batch_loader import BatchLoader, BatchStream
from hybrid.data.dataset.prepared_dataset import PreparedDataset

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
