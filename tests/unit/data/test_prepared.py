"""Prepared data sets: prepared once, atomically; held-out rows, unknown values, and gathering at random."""

import dataclasses
import itertools
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.choices import choices_config
from support.samples import csv_config, prepared, whole, write, write_cities
from support.trained import texts_of

from hybrid.config import ColumnSection, DataSection, RunConfig, RunSection, TableSection
from hybrid.config.loading import validate
from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.dataset_manifest import DatasetReport, LabelReport
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.parse.input_files import compute_sampled_checksum
from hybrid.data.prepare import spill
from hybrid.data.prepare.preparation import fingerprint, prepare
from hybrid.data.values.invalid_rows import InvalidRowReport
from hybrid.errors import ConfigError, DataError
from workers.console import data_notes, unknown_fractions

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


def test_only_unchanged_data_are_reused(tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(DataError, match=dataset_manifest.FILE_NAME):
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


def test_progress_names_phase_and_speed(tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_failed_prepare_leaves_nothing(error: Exception, message: str, tmp_path: Path, table: Path) -> None:
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


NUM_LOGGED = 600


def rows_of(path: Path, **keys: Any) -> tuple[list[int], list[int]]:
    """Return the training rows and the test rows of a file."""
    config = csv_config(path, sparse=("item",), **keys)
    validate(config)
    train, test = prepared(config, path.parent / "cache")
    return train.source_rows.tolist(), test.source_rows.tolist()


def log(path: Path, when: list[str]) -> Path:
    draw = random.Random(0)
    rows = [f"{i % 2},i{i % 7},u{draw.randrange(60)},{at}\n" for i, at in enumerate(when)]
    return write(path, "label,item,user,when\n" + "".join(rows))


@pytest.mark.parametrize("kind", ["numbers", "dates", "times"])
def test_time_split_holds_out_latest_rows(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order = np.random.default_rng(1).permutation(NUM_LOGGED)
    when = {
        "numbers": [f"{1.5e9 + number}" for number in order],
        "dates": [str(np.datetime64("2023-12-01") + number) for number in order],
        "times": [str(np.datetime64("2023-12-31T23:00:00") + 60 * number) for number in order],
    }[kind]
    path = log(tmp_path / "a.csv", when)
    train, test = rows_of(path, split="time(when, fraction = 0.2)")
    assert sorted(order[test]) == list(range(NUM_LOGGED * 8 // 10, NUM_LOGGED))
    assert sorted(order[train]) == list(range(NUM_LOGGED * 8 // 10))
    monkeypatch.setattr(spill, "MAX_SAMPLED", 100)  # of very many rows, the border is that of a sample
    _, sampled = rows_of(path, split="time(when, fraction = 0.2)", numeric_scaling="none")
    assert sorted(order[sampled]) == list(range(NUM_LOGGED - len(sampled), NUM_LOGGED))
    assert 0.1 < len(sampled) / NUM_LOGGED < 0.3


@pytest.mark.parametrize("by", ["random", "column", "time"])
def test_validation_rows_are_held_out_from_training(tmp_path: Path, by: str) -> None:
    path = log(tmp_path / "a.csv", [str(i) for i in range(NUM_LOGGED)])
    column = {"random": "", "column": "user, ", "time": "when, "}[by]
    split = f"{by}({column}fraction = 0.25)"
    keys = {"dense": ("number",), "sparse": ("item", "when"), "split": split, "validation": split}
    config = csv_config(path, **keys).replace(columns={"number": ColumnSection(source=("when",))})
    validate(config)
    folder = prepare(config, tmp_path / "cache")
    opened = [PreparedDataset(folder, split) for split in ("train", "validation", "test")]
    train, validation, test = (dataset.source_rows.tolist() for dataset in opened)
    assert test == rows_of(path, split=split)[1]
    assert sorted(train + validation + test) == list(range(NUM_LOGGED))
    assert all(0.1 < len(rows) / NUM_LOGGED < 0.4 for rows in (validation, test))
    if by == "time":
        assert max(train) < min(validation) <= max(validation) < min(test)
    if by == "column":
        users = [line.split(",")[2] for line in path.read_text().splitlines()[1:]]
        of_train, of_validation, of_test = ({users[i] for i in rows} for rows in (train, validation, test))
        assert not of_train & of_validation | of_test & (of_train | of_validation)
    # The encoder is fitted on the training rows; the vocabulary has a further row for unknown values.
    assert opened[0].input_spec.sparse_features[1].num_rows == len(train) + 1
    numbers = whole(opened[0]).dense_features
    assert numbers.mean().item() == pytest.approx(0, abs=1e-6)
    assert numbers.std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_validation_files_are_read_as_test_files_are(tmp_path: Path) -> None:
    path = log(tmp_path / "a.csv", ["0"] * NUM_LOGGED)
    other = write(tmp_path / "b.csv", "label,item,when\n1,i0,5\n0,new,soon\n")
    config = csv_config(path, sparse=("item",), split="time(when)", validation=f"path({other})")
    validate(config)
    folder = prepare(config, tmp_path / "cache")
    assert PreparedDataset(folder, "validation").source_rows.tolist() == [0, 1]
    data = dataclasses.replace(config.data, validation=f'path("{tmp_path}/./b.csv")')
    assert fingerprint(config.replace(data=data)) == folder.name
    with pytest.raises(ConfigError, match=rf"^data\.validation = '{path}': "):
        rows_of(path, validation=f"path({path})")


def test_split_by_a_list_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": [0, 1], "item": ["a", "b"], "user": [["a"], ["b"]]}), path)
    config = csv_config(path, sparse=("item",), split="column(user)")
    config = config.replace(data=dataclasses.replace(config.data, format="parquet"))
    with pytest.raises(ConfigError, match=r"^data\.split = 'user': "):
        prepared(config, tmp_path)


@pytest.mark.parametrize("key", ["split", "validation"])
def test_unknown_column_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.{key} = 'usr': "):
        rows_of(log(tmp_path / "a.csv", ["0"] * 20), **{key: "column(usr)"})


ROWS = [(i % 2, f"c{i % 4}", "|".join(["a", f"t{i}"][: i % 3])) for i in range(60)]


def write_tags(path: Path, rows: list[tuple[int, str, str]]) -> Path:
    path.write_text("label,city,tags\n" + "".join(f"{label},{city},{tags}\n" for label, city, tags in rows))
    return path


def report_of(tmp_path: Path, rows: list[tuple[int, str, str]], minimum: int = 1) -> DatasetReport:
    config = csv_config(
        write_tags(tmp_path / "train.csv", ROWS),
        sparse=("city", "tags"),
        multi_hot_separator="|",
        test_path=(str(write_tags(tmp_path / "new.csv", rows)),),
        vocabulary=f"build({minimum})",
    )
    return prepared(config, tmp_path / "cache")[1].report


def test_unknown_values_are_counted_by_column(tmp_path: Path) -> None:
    rows = [(1, "c0", ""), (0, "nowhere", "a|new|newer"), (0, "", "a"), (1, "?", "|")]
    city, tags = report_of(tmp_path, rows).unknown
    assert (city.name, city.count, city.num_values, city.fraction) == ("city", 1, 2, 0.5)
    assert (tags.name, tags.count, tags.num_values, tags.fraction) == ("tags", 2, 4, 0.5)


@pytest.mark.parametrize(("minimum", "expected"), [(1, 20 / 60), (2, 20 / 60), (40, 1.0)])
def test_expected_unknown_fraction(tmp_path: Path, minimum: int, expected: float) -> None:
    """20 rows have only the tag "a", and 20 rows have "a" and a distinct tag."""
    city, tags = report_of(tmp_path, ROWS[1:], minimum).unknown
    assert city.expected == (minimum > 15)
    assert tags.expected == pytest.approx(expected)


def test_excess_of_unknown_values_is_a_warning(tmp_path: Path) -> None:
    report = report_of(tmp_path, [(label, f"city-{city}", tags) for label, city, tags in ROWS])
    (note,) = data_notes(report)
    assert note.startswith("warning: ")
    assert "100% of city (0% expected)" in note
    assert unknown_fractions(report.unknown) == "city 100.00%"
    assert report.unknown[1].count == 0


def test_several_ids_in_a_column_of_one_are_a_warning(tmp_path: Path) -> None:
    report = report_of(tmp_path, [(1, "c0|c0", "a"), (0, "c0|c1", "a"), (0, "c1", "a")])
    (note,) = data_notes(report)
    assert "2 row(s)" in note
    assert "columns.city.multi_hot_separator" in note


def test_split_by_time_gives_no_warning(tmp_path: Path) -> None:
    rows = "".join(f"{i % 2},{'new' if i > 90 else 'old'}{i % 3},{i}\n" for i in range(120))
    (tmp_path / "a.csv").write_text(f"label,item,day\n{rows}")
    config = csv_config(tmp_path / "a.csv", sparse=("item",), split="random(0.25)")
    data = dataclasses.replace(config.data, split="time(day, fraction = 0.25)")
    _, test = prepared(config.replace(data=data), tmp_path / "cache")
    assert (test.report.unknown[0].fraction, test.report.unknown[0].expected) == (29 / 30, None)
    assert not list(data_notes(test.report))


def test_undefined_auc_is_reported() -> None:
    report = DatasetReport(9, (LabelReport("label", "binary", 9, 1.0, 1, 1),), InvalidRowReport({}, ()))
    assert list(data_notes(report)) == ["all 9 evaluated rows have label 1: AUC is undefined for them"]
    report = DatasetReport(2, (LabelReport("label", "binary", 2, 0.5, 0, 1),), InvalidRowReport({}, ()))
    assert not list(data_notes(report))
