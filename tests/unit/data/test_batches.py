"""Batches of an epoch: the order of rows and of groups, the slices of trainers, and reading ahead."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.samples import csv_config, prepared, write

from hybrid.batch import Batch, SparseFeatures, slice_bounds
from hybrid.config import DataSection, RunConfig, TaskSection
from hybrid.data.batches import BatchLoader, BatchStream, ShuffledOrder, check_ranking_losses, group_steps
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.errors import ConfigError, DataError

NUM_ROWS = 1003


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """1003 rows; the numeric column of row i is i."""
    folder = tmp_path_factory.mktemp("loader")
    rows = "".join(f"{i % 2},{i},c{i % 7}\n" for i in range(NUM_ROWS))
    path = write(folder / "train.csv", f"label,x,c\n{rows}")
    config = csv_config(path, dense=("x",), sparse=("c",), numeric_scaling="none", split="none")
    return prepared(config, folder)[0]


def rows_of(loader: BatchLoader, epoch: int, first_step: int = 0) -> list[list[int]]:
    with loader.batches(epoch, first_step * loader.batch_size) as stream:
        return [batch.dense_features[:, 0].int().tolist() for batch in stream]


@pytest.mark.parametrize(("shuffle", "lanes"), [(True, 0), (True, 16), (False, 0)])
@pytest.mark.parametrize("num_trainers", [2, 3, 5])
def test_trainers_step_alike(dataset: PreparedDataset, shuffle: bool, lanes: int, num_trainers: int) -> None:
    loader = BatchLoader(dataset, batch_size=100, seed=4, shuffle=shuffle, lanes=lanes)
    alone = rows_of(loader, epoch=2)
    assert [len(step) for step in alone] == [100] * 10 + [3]
    assert sorted(itertools.chain(*alone)) == list(range(NUM_ROWS))
    slices = [
        rows_of(dataclasses.replace(loader, trainer_index=t, num_trainers=num_trainers), epoch=2)
        for t in range(num_trainers)
    ]
    assert [list(itertools.chain(*step)) for step in zip(*slices, strict=True)] == alone


def test_epoch_can_start_at_any_step(dataset: PreparedDataset) -> None:
    loader = BatchLoader(dataset, batch_size=64, seed=1, shuffle=True)
    whole = rows_of(loader, epoch=1)
    assert rows_of(loader, epoch=1, first_step=9) == whole[9:]
    by_lanes = dataclasses.replace(loader, lanes=8)
    assert rows_of(by_lanes, epoch=1) != whole
    assert rows_of(by_lanes, epoch=1, first_step=9) == rows_of(by_lanes, epoch=1)[9:]
    assert rows_of(loader, epoch=1, first_step=16) == []
    assert rows_of(loader, epoch=0) != whole
    in_order = BatchLoader(dataset, batch_size=64)
    assert rows_of(in_order, epoch=0) == rows_of(in_order, epoch=1)


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batch reader"]


def stream_of(read: Callable[[int], object], num_steps: int) -> BatchStream:
    """Return a stream of batches; ``read`` is called before each."""

    def batches() -> Generator[Batch, None, None]:
        for step in range(num_steps):
            read(step)
            sparse = SparseFeatures(torch.tensor([step]), None, None, 1)
            yield Batch(torch.zeros(1, 0), sparse, torch.zeros(1), 1)

    return BatchStream(batches())


def test_reading_error_is_raised_with_its_batch() -> None:
    def read(step: int) -> None:
        if step == 2:
            raise OSError("the disk is gone")

    others = reader_threads()  # of earlier tests in this process
    stream = stream_of(read, 10)
    assert [next(stream).sparse_features.ids_L.item() for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="disk"):
        next(stream)
    assert list(stream) == []
    stream.close()
    assert not {*reader_threads()} - {*others}


def test_prefetch_is_bounded() -> None:
    num_taken, ahead = 0, []
    full = threading.Event()

    def read(step: int) -> None:
        ahead.append(step - num_taken)
        if step == 1:
            full.set()

    with stream_of(read, 50) as stream:
        assert full.wait(10)
        for _ in range(50):
            num_taken += 1
            next(stream)
    assert max(ahead) == 1


def test_hanging_reader_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hybrid.data.batches.READ_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr("hybrid.data.batches.JOIN_TIMEOUT_SECONDS", 0.05)
    release = threading.Event()
    stream = stream_of(lambda step: release.wait(10), 1)
    with pytest.raises(Exception, match=r"data\.cache_folder"):
        next(stream)
    release.set()


CHUNK_ROWS = 8


@contextmanager
def small_windows(window_chunks: int) -> Iterator[None]:
    """Shuffle chunks of eight rows in windows of ``window_chunks``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybrid.data.batches.CHUNK_ROWS", CHUNK_ROWS)
        patch.setattr("hybrid.data.batches.WINDOW_CHUNKS", window_chunks)
        yield


def steps_of(order: ShuffledOrder, num_rows: int, batch_size: int) -> list[list[int]]:
    bounds = itertools.pairwise([*range(0, num_rows, batch_size), num_rows])
    return [order.indices(start, stop).tolist() for start, stop in bounds]


@settings(deadline=None)
@given(
    num_rows=st.integers(1, 400),
    num_lanes=st.integers(0, 20),
    batch_size=st.integers(1, 70),
    seed=st.integers(0, 2**32),
    first=st.integers(0, 400),
)
def test_each_row_comes_once(num_rows: int, num_lanes: int, batch_size: int, seed: int, first: int) -> None:
    with small_windows(6):
        steps = steps_of(ShuffledOrder(num_rows, seed, 3, num_lanes), num_rows, batch_size)
        first = min(first // batch_size, len(steps) - 1)
        start = first * batch_size
        resumed = ShuffledOrder(num_rows, seed, 3, num_lanes)
        assert resumed.indices(start, min(start + batch_size, num_rows)).tolist() == steps[first]
    assert all(len(step) == batch_size for step in steps[:-1])
    assert sorted(itertools.chain(*steps)) == list(range(num_rows))


def read_by(order: ShuffledOrder, num_rows: int, batch_size: int, num_slices: int) -> list[set[int]]:
    """Return the chunks that each slice of an epoch reads."""
    read: list[set[int]] = [set() for _ in range(num_slices)]
    for rows in steps_of(order, num_rows, batch_size):
        for index, chunks in enumerate(read):
            start, stop = slice_bounds(len(rows), index, num_slices)
            chunks.update(row // CHUNK_ROWS for row in rows[start:stop])
    return read


@pytest.mark.parametrize("batch_size", [12, 64, 100])
@pytest.mark.parametrize("num_slices", [1, 2, 3, 4])
def test_lane_order_limits_the_chunks_of_a_slice(num_slices: int, batch_size: int) -> None:
    num_rows = 48 * CHUNK_ROWS * 20
    with small_windows(48):
        lanes = read_by(ShuffledOrder(num_rows, 1, 0, 24), num_rows, batch_size, num_slices)
        plain = read_by(ShuffledOrder(num_rows, 1, 0), num_rows, 100, num_slices)
    assert max(map(len, lanes)) <= (1 / num_slices + 2 / 24) * num_rows / CHUNK_ROWS
    assert min(map(len, plain)) > 0.85 * num_rows / CHUNK_ROWS


def test_lanes_are_shuffled_in_each_epoch() -> None:
    num_rows = 6 * 4096
    first, second = (ShuffledOrder(num_rows, 1, epoch, 2).indices(0, num_rows) for epoch in (0, 1))
    half = num_rows // 2
    assert set(first[:half] // 4096) != set(second[:half] // 4096)
    assert abs(np.corrcoef(first[:half], np.arange(half))[0, 1]) < 0.1
    assert len(np.unique(first[:64] // 4096)) == 3, "a few rows come from all chunks of a lane"


USERS = "aabcabddddae"
TASKS = {"click": TaskSection(), "spent": TaskSection(type="regression")}


def config_of(folder: Path, users: Sequence[str] = USERS) -> RunConfig:
    """Rows of these users; x of row i is i."""
    rows = "".join(f"{i % 2},{i},{i - 3},{user}\n" for i, user in enumerate(users))
    path = write(folder / "train.csv", f"click,x,spent,user\n{rows}")
    config = csv_config(
        path, dense=("x",), sparse=("user",), group="user", numeric_scaling="none", split="none"
    )
    return config.replace(tasks=TASKS)


def test_only_training_rows_are_ordered_by_group(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    train, test = prepared(config, tmp_path / "cache")
    assert train.group_rows is not None
    assert train.group_starts is not None
    in_order = [USERS[row] for row in train.group_rows]
    assert "".join(in_order) == "aaaa" + "bb" + "c" + "dddd" + "e"
    assert train.group_starts.tolist() == [0, 4, 6, 7, 11, 12]
    assert test.group_rows is None
    for group in ("C9", ""):
        synthetic = RunConfig(data=DataSection(synthetic_rows=300, group=group))
        log, _ = prepared(synthetic, tmp_path / "cache")
        assert (sorted(log.group_rows) if log.group_rows is not None else []) == [*range(300 if group else 0)]


def ordered(sizes: Sequence[int]) -> PreparedDataset:
    """A split of groups of these sizes, whose rows are interleaved."""
    starts = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))])
    rows = np.random.default_rng(1).permutation(int(starts[-1]))
    return cast(PreparedDataset, SimpleNamespace(group_rows=rows, group_starts=starts))


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(0, 4), st.integers(0, 9))
def test_epoch_has_every_complete_group_once(sizes: list[int], epoch: int, more: int) -> None:
    dataset, batch_size = ordered(sizes), max(sizes) + more
    assert dataset.group_rows is not None
    group_of = dict(zip(dataset.group_rows.tolist(), np.repeat(np.arange(len(sizes)), sizes), strict=True))
    order = ShuffledOrder(len(sizes), 1, epoch).indices(0, len(sizes))
    ranges = [(start, start + batch_size) for start in range(0, sum(sizes), batch_size)]
    steps = [*group_steps(dataset, order, ranges)]
    assert sorted(itertools.chain(*(rows.tolist() for rows, _ in steps))) == list(range(sum(sizes)))
    position = 0
    for step, (rows, ends) in enumerate(steps):
        assert len(rows) > 0
        groups = [group_of[row] for row in rows.tolist()]
        runs = [number for number, _ in itertools.groupby(groups)]
        assert len(runs) == len(set(runs)) == len(ends)
        assert [groups.count(number) for number in runs] == [sizes[number] for number in runs]
        assert np.diff(ends, prepend=0).tolist() == [sizes[number] for number in runs]
        for end in ends.tolist():
            assert step * batch_size <= position + end - 1 < (step + 1) * batch_size
        position += len(rows)


def test_steps_by_group_are_equal_for_any_number_of_trainers(tmp_path: Path) -> None:
    users = [f"u{i * i % 37 % 19}" for i in range(200)]
    dataset, _ = prepared(config_of(tmp_path, users), tmp_path / "cache")
    loader = BatchLoader(dataset, batch_size=32, seed=5, shuffle=True, by_group=True)
    alone = rows_of(loader, epoch=1)
    assert len(alone) == 7
    assert rows_of(loader, epoch=1, first_step=3) == alone[3:]
    assert rows_of(loader, epoch=0) != alone
    in_order = rows_of(BatchLoader(dataset, batch_size=32, by_group=True), epoch=1)
    assert dataset.group_rows is not None
    assert list(itertools.chain(*in_order)) == dataset.group_rows.tolist()
    for count in (2, 3, 7):
        loaders = (dataclasses.replace(loader, trainer_index=t, num_trainers=count) for t in range(count))
        slices = [rows_of(each, epoch=1) for each in loaders]
        assert [list(itertools.chain(*step)) for step in zip(*slices, strict=True)] == alone
        for step in zip(*slices, strict=True):
            groups = [{users[row] for row in rows} for rows in step]
            assert sum(map(len, groups)) == len(set().union(*groups))


def test_batches_have_the_group_totals_of_the_step(tmp_path: Path) -> None:
    dataset, _ = prepared(config_of(tmp_path), tmp_path / "cache")
    loaders = [
        BatchLoader(dataset, batch_size=6, trainer_index=t, num_trainers=2, by_group=True) for t in range(2)
    ]
    steps = list(zip(*(list(loader.batches(0)) for loader in loaders), strict=True))
    assert [[len(local.labels) for local in step] for step in steps] == [[0, 6], [1, 5]]
    assert [local.global_size for step in steps for local in step] == [6] * 4
    # Groups a, b and d have both labels; spent differs in every group of several rows.
    totals = [local.total_ranking_weights for step in steps for local in step]
    assert torch.stack(totals).tolist() == [[2, 2], [2, 2], [1, 1], [1, 1]]
    plain = BatchLoader(dataset, batch_size=6)
    with plain.batches(0) as stream:
        assert next(stream).total_ranking_weights is None


def test_groups_and_labels_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    dataset, test = prepared(config_of(tmp_path), tmp_path / "cache")
    BatchLoader(dataset, batch_size=4, by_group=True)
    message = r"data\.group has 4 .*train\.batch_size"
    with pytest.raises(DataError, match=message):
        BatchLoader(dataset, batch_size=3, by_group=True)
    with pytest.raises(DataError):
        BatchLoader(test, batch_size=3, by_group=True)
    with pytest.raises(DataError, match=r"data\.shuffle"):
        BatchLoader(dataset, batch_size=4, by_group=True, shuffle=True, lanes=8)
    ranked = {**TASKS, "click": TaskSection(ranking_loss="pairwise")}
    with pytest.raises(DataError, match=message):
        check_ranking_losses(ranked, dataset, batch_size=3)
    check_ranking_losses(TASKS, dataset, batch_size=3)
    for loss, is_refused in (("pairwise", False), ("listwise", True)):  # a label is negative
        tasks = {**TASKS, "spent": TaskSection(type="regression", ranking_loss=loss)}
        refused = pytest.raises(ConfigError, match=r"^tasks\.spent\.ranking_loss = .* -3; ")
        with refused if is_refused else nullcontext():
            check_ranking_losses(tasks, dataset, batch_size=9)
