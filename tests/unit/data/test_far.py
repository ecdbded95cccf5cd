"""Prepared data that lie elsewhere: sent, opened, and read chunk by chunk as from the disk."""

import dataclasses
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.far import FakeFolder
from support.samples import csv_config, write

from hybrid.batch import Batch
from hybrid.config import RunConfig, TaskSection
from hybrid.config.data_sections import ColumnSection
from hybrid.data.batches.batch_loader import BatchLoader
from hybrid.data.dataset.fetched_split import FetchedDataset
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.dataset.remote_dataset import FILE_NAME, RemoteDataset, send
from hybrid.data.dataset.sample_order import CHUNK_ROWS
from hybrid.data.prepare.preparation import prepare
from hybrid.errors import ConfigError, DataError, HybridError

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
def test_batches_are_those_of_the_disk(
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
    """Bytes in which four of the five chunks find room: a share of it is for test rows, one for weights."""
    return int(4.3 * opened(far, tmp_path)._samples.slot_bytes * 8 / 7 * 8 / 7)


def test_what_does_not_fit_is_let_go_and_fetched_again(folder: Path, far: FakeFolder, tmp_path: Path) -> None:
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
    """What the local files take on the disk."""
    residences = [dataset._samples, *([dataset._all_weights] if dataset._all_weights else [])]
    return sum(os.fstat(each._local.fileno()).st_blocks * 512 for each in residences)


def test_a_spoilt_range_is_fetched_again_once(far: FakeFolder, tmp_path: Path) -> None:
    spoilt = iter([True])
    far.spoil = lambda name, data: data[:-1] + bytes([data[-1] ^ 1]) if next(spoilt, False) else data
    dataset = opened(far, tmp_path)
    with BatchLoader(dataset, batch_size=700).batches(0) as stream:
        assert len(list(stream)) > 20
    dataset.close()


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: bytes(len(data))])
def test_one_that_stays_spoilt_is_told_in_a_line(far: FakeFolder, tmp_path: Path, spoil: object) -> None:
    far.spoil = lambda name, data: spoil(data) if name == "train/samples" else data  # type: ignore[operator]
    dataset = opened(far, tmp_path)
    message = r"^fake://data/train/samples: altered since it was prepared, bytes [\d,]+ to [\d,]+; delete its"
    with pytest.raises(DataError, match=message):
        next(BatchLoader(dataset, batch_size=700).batches(0))
    dataset.close()


def test_a_store_that_fails_in_the_middle_is_told_where_its_batch_is_taken(
    far: FakeFolder, tmp_path: Path
) -> None:
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


def test_closing_ends_a_wait_for_a_slow_store(far: FakeFolder, tmp_path: Path) -> None:
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


def test_too_little_room_is_refused_before_the_first_step(far: FakeFolder, tmp_path: Path) -> None:
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


def test_whole_groups_are_of_the_disk_alone(far: FakeFolder, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a folder as data"):
        BatchLoader(opened(far, tmp_path), batch_size=5000, by_group=True)


def test_a_folder_that_cannot_hold_the_rows_is_told(far: FakeFolder, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: cannot hold prepared data \(No such.*local_cache_folder"):
        opened(far, tmp_path / "nowhere")
