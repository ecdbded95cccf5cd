"""The file of ``hybrid predict``: its format, the kept columns, and failures."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.stores import BUCKET, Store
from support.trained import (
    clicks_config,
    history_config,
    predicted_columns,
    shop_config,
    write_clicks,
    write_shop,
    write_trained,
)

from hybrid.errors import ConfigError, DataError, HybridError
from hybrid.storage import files
from hybrid.storage.remote_path import StoragePath, parse_path
from workers.model_commands.prediction_commands import predict
from workers.model_commands.prediction_file import prediction_file

NAMES = ["p.csv", "p.parquet"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return write_trained(folder / "run", clicks_config(folder))


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_parquet_holds_what_the_csv_holds(run: Path, tmp_path: Path) -> None:
    new = write_clicks(tmp_path / "new.csv", 50, seed=4)
    keep = ["user", "tags"]
    predict(run, [str(new)], tmp_path / "p.csv", keep)
    predict(run, [str(new)], tmp_path / "p.parquet", keep)
    table = pq.read_table(tmp_path / "p.parquet")
    assert table.schema.names == ["row", "user", "tags", "probability"]
    assert [str(kind) for kind in table.schema.types] == ["int64", "string", "string", "double"]
    as_text = [{name: str(value) for name, value in row.items()} for row in table.to_pylist()]
    assert as_text == rows_of(tmp_path / "p.csv")
    given = rows_of(new)
    assert [(row["user"], row["tags"]) for row in as_text] == [(row["user"], row["tags"]) for row in given]


def test_kept_columns_skip_invalid_rows(run: Path, tmp_path: Path) -> None:
    first, second = write_clicks(tmp_path / "a.csv", 9, seed=4), write_clicks(tmp_path / "b.csv", 9, seed=5)
    lines = first.read_text().splitlines()
    lines[3] = "0,much,1,u1,i1,a"  # row 2: no number
    lines[5] = "broken"
    first.write_text("\n".join([*lines, "", ""]) + "\n")
    with pytest.raises(DataError, match="max_invalid_fraction"):
        predict(run, [str(first)], tmp_path / "none.csv")
    more = write_clicks(tmp_path / "c.csv", 9, seed=6)
    predict(run, [str(first), str(second), str(more)], tmp_path / "p.csv", ["clicked", "age"])
    found = rows_of(tmp_path / "p.csv")
    numbers = [number for number in range(27) if number not in (2, 4)]
    assert [int(row["row"]) for row in found] == numbers
    every = [
        line.split(",")
        for path in (first, second, more)
        for line in path.read_text().splitlines()[1:]
        if line
    ]
    assert [(row["clicked"], row["age"]) for row in found] == [(every[n][0], every[n][2]) for n in numbers]


def test_kept_columns_of_test_rows(run: Path, tmp_path: Path) -> None:
    predict(run, [], tmp_path / "p.csv", ["user"])
    every = rows_of(run.parent / "clicks.csv")
    found = rows_of(tmp_path / "p.csv")
    assert 20 < len(found) < 100
    assert [row["user"] for row in found] == [every[int(row["row"])]["user"] for row in found]


def test_lists_and_types_of_parquet_stay(run: Path, tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        "price": [1.5, None, 2.0],
        "age": [1, 2, 3],
        "user": pa.array(["u1", "u2", "u1"]).dictionary_encode(),
        "item": ["i1", "i2", None],
        "tags": [["a"], [], ["b", "c"]],
        "at": [10, 20, 30],
    }
    pq.write_table(pa.table(columns), tmp_path / "new.parquet")
    parquet = write_trained(
        tmp_path / "run",
        clicks_config(tmp_path, data={"format": "parquet", "path": _as_parquet(tmp_path)}),
    )
    keep = ["at", "tags", "user"]
    predict(parquet, [str(tmp_path / "new.parquet")], tmp_path / "p.parquet", keep)
    table = pq.read_table(tmp_path / "p.parquet").to_pydict()
    assert {name: table[name] for name in keep} == {
        "at": [10, 20, 30],
        "tags": [["a"], [], ["b", "c"]],
        "user": ["u1", "u2", "u1"],
    }
    predict(parquet, [str(tmp_path / "new.parquet")], tmp_path / "p.csv", ["tags"])
    assert [row["tags"] for row in rows_of(tmp_path / "p.csv")] == ["a", "", "b|c"]


def test_maps_of_weights_are_lists_of_pairs(tmp_path: Path) -> None:
    rows = rows_of(write_clicks(tmp_path / "rows.csv"))
    tags = [[(tag, i / 8) for i, tag in enumerate(row["tags"].split("|")) if tag] for row in rows]
    columns = {
        "clicked": [int(row["clicked"]) for row in rows],
        "age": [int(row["age"]) for row in rows],
        "tags": pa.array(tags, pa.map_(pa.string(), pa.float32())),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    sections: dict[str, dict[str, object]] = {
        "columns.tags": {"kind": "weighted"},
        "data": {
            "format": "parquet",
            "path": tmp_path / "rows.parquet",
            "sparse": ["tags"],
            "dense": ["age"],
        },
    }
    run = write_trained(tmp_path / "run", clicks_config(tmp_path, **sections))
    for name in ("p.csv", "p.parquet"):
        predict(run, [str(tmp_path / "rows.parquet")], tmp_path / name, ["tags"])
    written = pq.read_table(tmp_path / "p.parquet")["tags"]
    pair = pa.struct([("key", pa.string()), ("value", pa.float32())])
    assert (written.type.value_type.field(0).type, written.type) == (pa.string(), pa.list_(pair))
    assert written.to_pylist() == [[{"key": tag, "value": weight} for tag, weight in each] for each in tags]
    texts = ["|".join(f"{tag}:{weight}" for tag, weight in each) for each in tags]
    assert [row["tags"] for row in rows_of(tmp_path / "p.csv")] == texts


def test_rows_with_another_order_of_a_sequence_are_different(tmp_path: Path) -> None:
    config = history_config(tmp_path, dense={"net": "dcn_v2"})
    run, new = write_trained(tmp_path / "run", config), write_shop(tmp_path / "new.csv", 1)
    (row,) = rows_of(new)
    rows = [{**row, "seen": seen} for seen in ("i1|i2", "i2|i1", "i1|i2")]
    new.write_text("\n".join(",".join(each) for each in [[*row], *(each.values() for each in rows)]))
    one, other, same = predicted_columns(run, new)["probability"]
    assert abs(one - same) < 1e-6
    assert abs(one - other) > 1e-3


@pytest.mark.parametrize("with_labels", [True, False])
def test_columns_of_files_without_a_header(tmp_path: Path, with_labels: bool) -> None:
    """Files with or without the columns of the tasks; the group is a feature too."""
    header, *lines = write_shop(tmp_path / "with.csv").read_text().splitlines()
    (tmp_path / "bare.csv").write_text("\n".join(lines) + "\n")
    data = {"columns": header.split(","), "path": tmp_path / "bare.csv"}
    run = write_trained(tmp_path / "run", shop_config(tmp_path, data=data))
    new = lines if with_labels else [line.rsplit(",", 5)[0] for line in lines]
    (tmp_path / "new.csv").write_text("\n".join(new) + "\n")
    predict(run, [str(tmp_path / "new.csv")], tmp_path / "p.csv", ["user", "item", "time"])
    found = rows_of(tmp_path / "p.csv")
    expected = rows_of(tmp_path / "with.csv")
    names = ("user", "item", "time")
    assert [[row[n] for n in names] for row in found] == [[row[n] for n in names] for row in expected]


def _as_parquet(folder: Path) -> Path:
    rows = rows_of(write_clicks(folder / "rows.csv"))
    columns: dict[str, list[Any]] = {name: [row[name] or None for row in rows] for name in ("user", "item")}
    columns |= {name: [float(row[name]) if row[name] else None for row in rows] for name in ("price", "age")}
    columns["clicked"] = [int(row["clicked"]) for row in rows]
    columns["tags"] = [[tag for tag in row["tags"].split("|") if tag] for row in rows]
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return folder / "rows.parquet"


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (["usr"], r"--keep = 'usr': .*new\.csv has no such column; did you mean 'user'\?"),
        (["row"], "--keep = 'row': is the name of another column of the output"),
        (["probability"], "--keep = 'probability': is the name of another column of the output"),
        (["user", "user"], "--keep = 'user': names a column twice"),
    ],
)
def test_columns_that_cannot_be_kept(run: Path, tmp_path: Path, keep: list[str], message: str) -> None:
    new = write_clicks(tmp_path / "new.csv", 9)
    with pytest.raises(ConfigError, match=message):
        predict(run, [str(new)], tmp_path / "p.csv", keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.csv"]


@pytest.mark.parametrize("name", NAMES)
def test_an_unfinished_file_is_removed(folder: StoragePath, name: str) -> None:
    def write_half() -> None:
        with prediction_file(folder / name) as file:
            file.write({"row": pa.array([1])})
            raise DataError("gone")

    with pytest.raises(DataError, match="gone"):
        write_half()
    assert not files.list_entries(folder)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_appears_at_the_end(folder: StoragePath, name: str) -> None:
    with prediction_file(folder / name) as file:
        file.write({"row": pa.array([1]), "tags": pa.array([["a", "b"]])})
        assert not files.exists(folder / name)
        file.write({"row": pa.array([2]), "tags": pa.array([None], pa.list_(pa.string()))})
    assert [each.path.name for each in files.list_entries(folder)] == [name]


@pytest.mark.parametrize("name", [pytest.param(NAMES[0], marks=pytest.mark.long), NAMES[1]])
def test_a_large_file_is_uploaded_while_it_is_written(store: Store, tmp_path: Path, name: str) -> None:
    """A multipart upload has the same bytes as a local file."""
    there = parse_path(f"s3://{BUCKET}/{tmp_path.name}")
    draw = np.random.default_rng(3)
    columns = {f"x{i}": pa.array(draw.random(100_000)) for i in range(10)}
    for folder in (tmp_path, there):
        with prediction_file(folder / name) as file:
            file.write(columns)
            file.write(columns)
    assert files.require_file(there / name).size > 10 << 20
    assert files.read_bytes(there / name) == (tmp_path / name).read_bytes()


def test_numbers_have_all_their_digits(tmp_path: Path) -> None:
    with prediction_file(tmp_path / "p.csv") as file:
        file.write({"row": pa.array([7]), "x": pa.array([0.1 + 0.2])})
    assert (tmp_path / "p.csv").read_text() == "row,x\n7,0.30000000000000004\n"


def test_a_column_that_changes_its_type_is_one_line(tmp_path: Path) -> None:
    """One input file may have integers, and the next one text."""

    def write_both() -> None:
        with prediction_file(tmp_path / "p.parquet") as file:
            file.write({"user": pa.array([1])})
            file.write({"user": pa.array(["u"])})

    with pytest.raises(HybridError, match=r"p\.parquet: cannot be written: Table schema does not match"):
        write_both()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_unwritable_folders(tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(HybridError, match="cannot be written: No such file"),
        prediction_file(tmp_path / "no" / name),
    ):
        pass
    (tmp_path / f".{name}.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HybridError, match="link"), prediction_file(tmp_path / name):
        pass
    assert not (tmp_path / "elsewhere").exists()
