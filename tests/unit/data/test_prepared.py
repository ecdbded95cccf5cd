"""Prepared data sets: prepared once, atomically, and gathered at random."""

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.choices import choices_config
from support.samples import csv_config, prepared, whole, write, write_cities
from support.trained import texts_of

from hybrid.config import DataSection, RunConfig, RunSection, TableSection
from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.parse.input_files import compute_sampled_checksum
from hybrid.data.prepare.preparation import prepare
from hybrid.errors import DataError

NUM_ROWS = 1000
config_of = partial(csv_config, dense=("x",), sparse=("city", "tags"))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_cities(tmp_path / "train.csv", NUM_ROWS)


def test_prepared_rows_equal_those_of_the_file(tmp_path: Path, table: Path) -> None:
    other = write(tmp_path / "test.csv", f"{table.read_text()}\n")
    config = config_of(table, numeric_scaling="none", test_path=(str(other),))
    for dataset in prepared(config, tmp_path / "cache"):
        assert dataset.num_samples == NUM_ROWS
        assert dataset.source_rows.tolist() == list(range(NUM_ROWS))
        batch = dataset.gather(np.array([999, 0, 7]), global_size=12)
        assert batch.dense_features.tolist() == [[999], [0], [7]]
        assert batch.labels.tolist() == [1, 0, 1]
        assert batch.global_size == 12
        assert batch.dense_features.dtype == batch.labels.dtype == torch.float32
        assert dataset.report.labels[0].mean == 0.5
        assert FeatureEncoder.load(dataset.folder).input_spec == dataset.input_spec


def test_bags_gather_as_jagged_features(tmp_path: Path, table: Path) -> None:
    config = config_of(table, multi_hot_separator="|", split="none")
    dataset, _ = prepared(config, tmp_path / "cache")
    sparse = dataset.gather(np.array([5, 0, 2, 1]), 4).sparse_features
    assert sparse.offsets is not None
    assert sparse.offsets.tolist() == [0, 1, 2, 3, 4, 6, 6, 8, 9]
    assert sparse.ids_L.tolist() == [1, 1, 3, 2, 1, 2, 1, 2, 1]
    assert dataset.ids_per_sample == {"tags": 0.999}  # 333 rows each of 0, 1, 2 tags, and one of none


def test_holdout_depends_on_the_seed(tmp_path: Path, table: Path) -> None:
    config = config_of(table, split="random(0.2)", numeric_scaling="none")
    splits = []
    for seed in (1, 2):
        train, test = prepared(config.replace(run=RunSection(seed=seed)), tmp_path / "cache")
        assert sorted([*train.source_rows, *test.source_rows]) == list(range(NUM_ROWS))
        assert 150 < test.num_samples < 250
        assert whole(test).dense_features[:, 0].tolist() == test.source_rows.tolist()
        splits.append(test.source_rows.tolist())
    assert splits[0] != splits[1]


def test_encoder_is_fitted_on_training_rows_only(tmp_path: Path) -> None:
    rows = "".join(f"{i % 2},{i},v{i}\n" for i in range(200))
    path = write(tmp_path / "train.csv", f"label,x,city\n{rows}")
    train, test = prepared(config_of(path, sparse=("city",), split="random(0.3)"), tmp_path / "cache")
    assert not whole(test).sparse_features.ids_L.any()
    dense, sparse, *_ = whole(train)
    assert sorted(sparse.ids_L) == list(range(1, train.num_samples + 1))
    assert dense.mean().item() == pytest.approx(0, abs=1e-6)
    assert dense.std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_prepared_data_are_reused_until_something_changes(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, lines = tmp_path / "cache", list[str]()
    config = config_of(table)
    first = prepare(config, cache)
    same = config_of(table, shuffle="none", cache_folder="other", synthetic_rows=9)
    assert prepare(same, cache, lines.append) == first
    assert lines == [f"prepared data found in {first}"]
    unshared = {"city": TableSection(dim=3), "tags": TableSection(features=("tags",))}
    assert prepare(config.replace(tables=unshared), cache) == first
    shared = prepare(config.replace(tables={"both": TableSection(features=("city", "tags"))}), cache)
    city, tags = FeatureEncoder.load(shared).sparse
    assert city.values == tags.values
    others = [config_of(table, numeric_scaling="none"), config.replace(run=RunSection(seed=5))]
    assert len({first, shared, *(prepare(other, cache) for other in others)}) == 4
    with monkeypatch.context() as patched:
        patched.setattr(dataset_manifest, "FORMAT_VERSION", 99)
        assert prepare(config, cache) != first
    os.utime(table, ns=(1, 1))
    assert prepare(config, cache) != first


def test_synthetic_log_depends_only_on_its_keys(tmp_path: Path) -> None:
    keys = ({"label": "label"}, {"label": "clicked"}, {"synthetic_rows": 51})
    data = (DataSection(**{"synthetic_rows": 50, **each}) for each in keys)  # type: ignore[arg-type]
    first, same, other = (prepare(RunConfig(data=each), tmp_path) for each in data)
    assert first == same != other


def test_concurrent_preparations_agree(tmp_path: Path, table: Path) -> None:
    config = config_of(table)
    lines: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: prepare(config, tmp_path / "cache", lines.append), range(4)))
    assert sum(line.startswith("preparing") for line in lines) == len(set(folders)) == 1
    assert PreparedDataset(folders[0], "train").num_samples > 0
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folders[0].name]


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_files(tmp_path: Path, table: Path, text: str) -> None:
    empty = write(tmp_path / "empty.csv", text)
    columns = ("label", "x", "city", "tags")
    with pytest.raises(DataError, match=r"data\.path, data\.split"):
        prepare(config_of(empty, columns=columns), tmp_path / "cache")
    config = config_of(table, columns=columns, max_invalid_fraction=0.2, test_path=(str(empty),))
    with pytest.raises(DataError, match=r"empty\.csv: .*data\.test_path"):
        prepare(config, tmp_path / "cache")


def test_invalid_data_sets_are_refused(tmp_path: Path, table: Path) -> None:
    with pytest.raises(DataError, match=r"manifest\.json: "):
        PreparedDataset(tmp_path, "train")
    folder = prepare(config_of(table), tmp_path / "cache")
    with pytest.raises(DataError, match="validation"):
        PreparedDataset(folder, "validation")
    os.truncate(folder / "train" / "dense.npy", 200)
    with pytest.raises(DataError, match=r"dense\.npy: altered"):
        PreparedDataset(folder, "train")
    PreparedDataset(folder, "test")
    (folder / dataset_manifest.FILE_NAME).write_text('{"format": 0}')
    with pytest.raises(DataError, match="made by another version"):
        PreparedDataset(folder, "train")


def put_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def link(file: Path) -> None:
    file.rename(file.with_name("moved"))
    file.symlink_to("moved")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("train", link),
        ("train/ids.npy", link),
        ("vocabularies.parquet", link),
        ("train/ids.npy", put_fifo),
        ("train/ids.npy", lambda file: np.save(file, np.array([print]), allow_pickle=True)),
        ("train/ids.npy", lambda file: np.save(file, np.load(file)[:3])),
        ("train/dense.npy", lambda file: np.save(file, np.load(file).astype(np.int64))),
        ("train/bag_1_offsets.npy", lambda file: np.save(file, np.load(file)[::-1].copy())),
        ("train/bag_1_ids.npy", lambda file: file.unlink()),
        ("../../secret", lambda file: file.write_text("private")),
    ],
)
def test_prepared_data_of_another_user_are_data(
    tmp_path: Path, table: Path, name: str, change: Callable[[Path], object]
) -> None:
    """Checksums are no protection: who writes the files writes them, too."""
    folder = prepare(config_of(table, multi_hot_separator="|"), tmp_path / "a/cache")
    change(folder / name)
    manifest = folder / dataset_manifest.FILE_NAME
    content = json.loads(manifest.read_text())
    for listed in [*content["stored"]] + [name] * (".." in name):
        if (folder / listed).is_file():
            sampled = compute_sampled_checksum(folder / listed, follows_links=True)
            content["stored"][listed] = {"sampled": sampled, "whole": ""}
        elif not (folder / listed).exists():
            del content["stored"][listed]
    manifest.write_text(json.dumps(content))
    place = manifest if ".." in name else folder / name
    with pytest.raises(DataError, match=rf"^{place}: .*; delete"):
        PreparedDataset(folder, "train")


def test_progress_names_phase_fraction_speed_and_time_left(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(step=6.0)  # each look at the clock is late
    monkeypatch.setattr("hybrid.primitives.progress.time.monotonic", lambda: next(clock))
    lines: list[str] = []
    prepare(config_of(table, split="none"), tmp_path / "cache", lines.append)
    assert lines[2] == "reading: 1,000 rows so far"
    assert re.fullmatch(r"reading: 62%, [0-9]+ rows/s, left 0:00:[0-9]{2}", lines[3])
    phases = dict.fromkeys(line.partition(":")[0] for line in lines[1:-1])
    assert [*phases] == ["reading", "counting", "ordering values", "writing"]
    assert lines[-2].startswith("writing: 100%, left 0:00:00")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (DataError("the run has ended"), "^the run has ended$"),
        (OSError(28, "No space left on device"), r"No space left on device.*data\.cache_folder"),
        (MemoryError("no"), r"data\.vocabulary"),
    ],
)
def test_failed_preparation_leaves_nothing(
    error: Exception, message: str, tmp_path: Path, table: Path
) -> None:
    cache = tmp_path / "cache"

    def report(line: str) -> None:
        assert list(cache.iterdir())
        raise error

    with pytest.raises(DataError, match=message):
        prepare(config_of(table), cache, report)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("label", ["chosen", ""])
def test_ids_are_counted_where_samples_have_a_weight(label: str, tmp_path: Path) -> None:
    """The item column is the label of a retrieval task without another label: each row is a choice."""
    task = {"tasks.choice": {"label": label, "type": "retrieval(item)"}}
    config = choices_config(tmp_path, data={"split": "none", "weight": "importance"}, **task)
    dataset, _ = prepared(config, tmp_path / "prepared")
    features = [feature.name for feature in dataset.input_spec.sparse_features]
    counts_I = dataset.count_ids(features.index("item"))
    rows = texts_of(tmp_path / "choices.csv")
    pairs = zip(rows["item"], rows["chosen"], rows["importance"], strict=True)
    expected = Counter(
        item for item, chosen, weight in pairs if (chosen == "1" or not label) and float(weight)
    )
    values = FeatureEncoder.load(dataset.folder).sparse[features.index("item")].values
    assert values is not None
    assert dict(zip(values, counts_I[1:].tolist(), strict=True)) == expected
    assert not counts_I[0]
