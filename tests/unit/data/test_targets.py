"""Labels of several tasks, weights and groups, in files and in the synthetic click log."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.samples import csv_config, located, prepared, read, write

from hybrid.config import DataSection, RunConfig, TaskSection
from hybrid.data.dataset.dataset_manifest import LabelReport
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.prepare import synthetic_log
from hybrid.data.prepare.synthetic_log import TABLE_ROWS, ClickLog
from hybrid.errors import ConfigError, DataError

DATA = DataSection(format="csv", sparse=("user",), weight="w", group="user", max_invalid_fraction=1.0)
TASKS = {
    "click": TaskSection(),
    "buy": TaskSection(label="bought", mask="click"),
    "stars": TaskSection(type="classes(3)"),
    "spent": TaskSection(type="regression"),
}
HEADER = "click,bought,stars,spent,w,user\n"
TABLE = HEADER + "1,0,2,-3.5,1,ann\n0,,0,1e2,0.5,bob\n1,1,1.0,0,0.25,ann\n0,1,2,7,2,cid\n"


def table(path: Path, kind: str) -> Path:
    if kind == "csv":
        return write(path, TABLE)
    columns = {
        "click": [True, False, True, False],
        "bought": [0, None, 1, 1],
        "stars": pa.array([2, 0, 1, 2], pa.int8()),
        "spent": [-3.5, 100.0, 0.0, 7.0],
        "w": pa.array([1, 0.5, 0.25, 2], pa.float32()),
        "user": pa.array(["ann", "bob", "ann", "cid"]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), path)
    return path


def test_invalid_targets_are_located(tmp_path: Path) -> None:
    rows = {
        "1,1,2,1,0,ann": "",
        "2,1,2,1,1,ann": "3: click is '2'",
        "1,,2,1,1,ann": "4: bought is ''",
        "1,1,3,1,1,ann": "5: stars is '3'",
        "1,1,0.5,1,1,ann": "6: stars is '0.5'",
        "1,1,,1,1,ann": "7: stars is ''",
        "1,1,0,dear,1,ann": "8: spent is 'dear'",
        "1,1,0,1,-0.5,ann": "9: w is '-0.5'",
        "1,1,0,1,,ann": "10: w is ''",
        "1,1,0,1,1e999,ann": "11: w is '1e999'",
        "1,1,0,1,1,?": "12: user is '?'",
    }
    path = write(tmp_path / "a.csv", HEADER + "\n".join(rows))
    block, report = read(DATA, path, tasks=TASKS)
    assert block.source_rows_B.tolist() == [0]
    counts = {"unknown_label": 2, "unusable_label": 4, "unusable_weight": 3, "no_group": 1}
    assert {reason: count for reason, count in report.counts.items() if count} == counts
    assert [text.partition(",")[0] for text in located(report, path)] == [*rows.values()][1:]


def config_of(path: Path, tasks: dict[str, TaskSection], **keys: Any) -> RunConfig:
    return csv_config(path, sparse=("user",), split="none", **keys).replace(tasks=tasks)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_batches_have_the_targets_of_the_file(tmp_path: Path, kind: str) -> None:
    config = config_of(table(tmp_path / "a", kind), TASKS, weight="w", group="user")
    config = config.replace(data=dataclasses.replace(config.data, format=kind))
    train, _ = prepared(config, tmp_path / "cache")
    assert train.report.labels == (
        LabelReport("click", "binary", 4, 0.5, 0, 1),
        LabelReport("buy", "binary", 2, 0.5, 0, 1),
        LabelReport("stars", "classes", 4, 1.25, 0, 2),
        LabelReport("spent", "regression", 4, 25.875, -3.5, 100),
    )
    batch = train.gather(np.arange(4), 4)
    assert batch.labels.tolist() == [[1, 0, 2, -3.5], [0, 0, 0, 100], [1, 1, 1, 0], [0, 1, 2, 7]]
    assert batch.weights is not None
    assert batch.weights.tolist() == [[1, 1, 1, 1], [0.5, 0, 0.5, 0.5], [0.25] * 4, [2, 0, 2, 2]]
    totals = train.total_weights(np.arange(4))
    assert totals is not None
    assert totals.tolist() == [3.75, 1.25, 3.75, 3.75]
    assert batch.groups is not None
    first, second, third, fourth = batch.groups.tolist()
    assert first == third
    assert len({first, second, fourth}) == 3
    assert batch.labels.dtype == batch.weights.dtype == torch.float32


def test_only_relevant_task_keys_change_the_data_set(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "a.csv", TABLE), tmp_path / "cache"
    folders = [
        prepared(config_of(path, {"click": task}, max_invalid_fraction=1.0, **keys), cache)[0].folder
        for task, keys in (
            (TaskSection(), {}),
            (TaskSection(loss="focal", weight=3.0, metrics=("m:f",), ranking_loss="pairwise"), {}),
            (TaskSection(mask="bought"), {}),
            (TaskSection(), {"weight": "w"}),
            (TaskSection(), {"group": "user"}),
        )
    ]
    assert folders[0] == folders[1]
    assert len(set(folders)) == 4


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"buy": TASKS["buy"]}, r"label 0 .*tasks\.buy"),
        ({"buy": TaskSection(label="click", mask="w")}, r"weights .*tasks\.buy"),
    ],
)
def test_task_with_one_label_is_refused(tmp_path: Path, tasks: dict[str, TaskSection], message: str) -> None:
    path = write(tmp_path / "a.csv", "click,bought,w,user\n1,0,0,a\n0,1,0,b\n")
    with pytest.raises(DataError, match=message):
        prepared(config_of(path, tasks), tmp_path / "cache")
    write(path, "click,bought,w,user\n1,1,0,a\n1,1,0,b\n1,no,1,b\n")
    with pytest.raises(DataError, match=f"{path}:4: bought "):
        prepared(config_of(path, {"buy": TASKS["buy"]}, max_invalid_fraction=0.5), tmp_path / "cache")


SYNTHETIC = RunConfig(data=DataSection(synthetic_rows=3000))


def test_tasks_of_the_click_log(tmp_path: Path) -> None:
    tasks = {
        "click": TaskSection(label="label"),
        "buy": TaskSection(label="converted", mask="label"),
        "spent": TaskSection(type="regression"),
        "stars": TaskSection(type="classes(5)"),
    }
    data = DataSection(synthetic_rows=3000, weight="weight", group="C7")
    train, test = prepared(SYNTHETIC.replace(tasks=tasks, data=data), tmp_path)
    alone, _ = prepared(SYNTHETIC, tmp_path)
    rows = np.arange(3000)
    batch = train.gather(rows, 3000)
    assert torch.equal(batch.labels[:, 0], alone.gather(rows, 3000).labels)
    assert not (batch.labels[:, 1] > batch.labels[:, 0]).any()
    assert batch.labels[:, 3].unique().tolist() == [0, 1, 2, 3, 4]
    click, buy, spent, stars = test.report.labels
    assert [each.best_auc is None for each in (click, buy, spent, stars)] == [False, True, True, True]
    assert (click.count, buy.count, stars.count) == (500, round(500 * (click.mean or 0)), 500)
    assert batch.weights is not None
    assert batch.groups is not None
    assert 0.5 <= batch.weights[:, 0].min() < batch.weights[:, 0].max() <= 1.5
    assert len(batch.groups.unique()) > 100


@pytest.mark.parametrize(
    ("tasks", "data", "message"),
    [
        ({"a": TaskSection()}, {}, "tasks.a.label = 'a': .* label, converted"),
        ({"label": TaskSection(mask="x")}, {}, "tasks.label.mask = 'x': "),
        ({"stars": TaskSection(type="classes(4)")}, {}, "tasks.stars.type = "),
        ({}, {"weight": "w"}, "data.weight = 'w': "),
        ({}, {"group": "user"}, "data.group = 'user': "),
    ],
)
def test_unknown_columns_of_the_click_log_are_refused(
    tmp_path: Path, tasks: dict[str, TaskSection], data: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        prepared(SYNTHETIC.replace(tasks=tasks, data=DataSection(**data)), tmp_path)  # type: ignore[arg-type]


def only_block(log: ClickLog, split: str, rows: int) -> synthetic_log.SyntheticBlock:
    [block] = log.blocks(split, rows)
    return block


def test_log_depends_only_on_the_seed() -> None:
    one, two = only_block(ClickLog(1), "train", 500), only_block(ClickLog(1), "train", 500)
    np.testing.assert_array_equal(one.samples.ids_BK, two.samples.ids_BK)
    np.testing.assert_array_equal(one.samples.dense_BF, two.samples.dense_BF)
    np.testing.assert_array_equal(one.columns["label"], two.columns["label"])
    for other in (only_block(ClickLog(2), "train", 500), only_block(ClickLog(1), "test", 500)):
        assert (one.samples.ids_BK != other.samples.ids_BK).any()
        assert (one.samples.dense_BF != other.samples.dense_BF).any()


def test_log_has_the_columns_of_criteo(tmp_path: Path) -> None:
    config = RunConfig(data=DataSection(synthetic_rows=70_000))
    train, test = prepared(config, tmp_path)
    assert (train.num_samples, test.num_samples) == (70_000, 11_666)
    assert len(train.input_spec.dense_features) == 13
    assert tuple(feature.num_rows for feature in train.input_spec.sparse_features) == TABLE_ROWS
    batch = train.gather(np.arange(70_000), 70_000)
    ids_KB = batch.sparse_features.ids_L.view(26, -1)
    assert batch.sparse_features.offsets is None
    assert ids_KB.min() == 0
    assert (ids_KB.amax(1).numpy() < np.array(TABLE_ROWS)).all()
    # A half of all ids is in the first eighth of a table: id = rows * u**3.
    assert (ids_KB[-1] < TABLE_ROWS[-1] / 8).float().mean().item() == pytest.approx(0.5, abs=0.01)
    assert train.report.labels[0].mean == pytest.approx(0.25, abs=0.02)
    assert batch.labels.mean().item() == pytest.approx(train.report.labels[0].mean)
    assert 0.78 < (test.report.labels[0].best_auc or 0) < 0.86
    assert (test.report.labels[0].best_log_loss or 1) < 0.45
    assert FeatureEncoder.load(train.folder).input_spec == train.input_spec


def test_true_probabilities_are_calibrated() -> None:
    block = only_block(ClickLog(3), "train", 60_000)
    probabilities = synthetic_log.sigmoid(block.logits_B)
    for part in np.array_split(np.argsort(probabilities), 10):
        assert block.columns["label"][part].mean() == pytest.approx(probabilities[part].mean(), abs=0.02)
