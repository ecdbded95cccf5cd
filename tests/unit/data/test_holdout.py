"""The held-out rows: complete users, or the latest rows."""

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.samples import csv_config, prepared, write

from hybrid.config.loading import validate
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.prepare import stages
from hybrid.data.prepare.preparation import fingerprint, prepare
from hybrid.errors import ConfigError

NUM_ROWS = 600


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


def test_split_by_column_separates_users(tmp_path: Path) -> None:
    path = log(tmp_path / "a.csv", ["0"] * NUM_ROWS)
    train, test = rows_of(path, split="column(user, fraction = 0.3)")
    users = [line.split(",")[2] for line in path.read_text().splitlines()[1:]]
    assert sorted(train + test) == list(range(NUM_ROWS))
    assert not {users[i] for i in train} & {users[i] for i in test}
    assert 0.1 < len(test) / NUM_ROWS < 0.5


@pytest.mark.parametrize("kind", ["numbers", "dates", "times"])
def test_split_by_time_holds_out_the_latest_rows(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = np.random.default_rng(1).permutation(NUM_ROWS)
    when = {
        "numbers": [f"{1.5e9 + number}" for number in order],
        "dates": [str(np.datetime64("2023-12-01") + number) for number in order],
        "times": [str(np.datetime64("2023-12-31T23:00:00") + 60 * number) for number in order],
    }[kind]
    path = log(tmp_path / "a.csv", when)
    train, test = rows_of(path, split="time(when, fraction = 0.2)")
    assert sorted(order[test]) == list(range(NUM_ROWS * 8 // 10, NUM_ROWS))
    assert sorted(order[train]) == list(range(NUM_ROWS * 8 // 10))
    monkeypatch.setattr(stages, "MAX_SAMPLED", 100)  # of very many rows, the border is that of a sample
    _, sampled = rows_of(path, split="time(when, fraction = 0.2)", numeric_scaling="none")
    assert sorted(order[sampled]) == list(range(NUM_ROWS - len(sampled), NUM_ROWS))
    assert 0.1 < len(sampled) / NUM_ROWS < 0.3


@pytest.mark.parametrize("by", ["random", "column", "time"])
def test_validation_rows_are_held_out_from_training(tmp_path: Path, by: str) -> None:
    path = log(tmp_path / "a.csv", [str(i) for i in range(NUM_ROWS)])
    column = {"random": "", "column": "user, ", "time": "when, "}[by]
    split = f"{by}({column}fraction = 0.25)"
    config = csv_config(path, sparse=("item", "when"), split=split, validation=split)
    validate(config)
    folder = prepare(config, tmp_path / "cache")
    opened = [PreparedDataset(folder, split) for split in ("train", "validation", "test")]
    train, validation, test = (dataset.source_rows.tolist() for dataset in opened)
    assert test == rows_of(path, split=split)[1]
    assert sorted(train + validation + test) == list(range(NUM_ROWS))
    assert 0.1 < len(validation) / NUM_ROWS < 0.3
    if by == "time":
        assert max(train) < min(validation) <= max(validation) < min(test)
    if by == "column":
        users = [line.split(",")[2] for line in path.read_text().splitlines()[1:]]
        assert not {users[i] for i in train} & {users[i] for i in validation}
    # The vocabulary has the values of the training rows, and a row for unknown values.
    assert opened[0].input_spec.sparse_features[1].num_rows == len(train) + 1


def test_validation_files_are_read_as_test_files_are(tmp_path: Path) -> None:
    path = log(tmp_path / "a.csv", ["0"] * NUM_ROWS)
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


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"split": "time"}, "data.split = 'time'"),
        ({"split": "random(user)"}, "data.split = 'random(user)'"),
        ({"split": 'time(w, column = "v")'}, "data.split = "),
        ({"validation": "column(usr)"}, "data.validation = 'usr'"),
        ({"validation": "path()"}, "data.validation = 'path()'"),
        ({"split": "time(w)", "test_path": ("b.csv",)}, "data.split = 'time(w)'"),
        ({"split": "column(usr)"}, "data.split = 'usr'"),
    ],
)
def test_contradictory_split_keys_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        rows_of(log(tmp_path / "a.csv", ["0"] * 20), **keys)
