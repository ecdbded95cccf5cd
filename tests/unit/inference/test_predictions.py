"""``hybrid predict``: formats of its file, kept columns, standard input, and failures."""

import csv
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.descriptors import redirected
from support.trained import clicks_config, write_clicks, write_trained

from hybrid.errors import ConfigError, DataError, HybridError, StorageError
from hybrid.storage import files
from hybrid.storage.remote_path import StoragePath
from workers.cli.model_commands import STDOUT, predict, prediction_file

NAMES = ["p.csv", "p.parquet"]
HEADER = "price,age,user,item,tags\n"


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_parquet_and_csv_have_the_same_content(run: Path, tmp_path: Path) -> None:
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
    texts = [line for path in (first, second, more) for line in path.read_text().splitlines()[1:]]
    every = [line.split(",") for line in texts if line]
    assert [(row["clicked"], row["age"]) for row in found] == [(every[n][0], every[n][2]) for n in numbers]


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
    data = {"format": "parquet", "path": _as_parquet(tmp_path)}
    parquet = write_trained(tmp_path / "run", clicks_config(tmp_path, data=data))
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
    with pytest.raises(ConfigError, match="--input = '-'"):
        predict(parquet, ["-"], tmp_path / "q.csv")
    (tmp_path / "prepared").rename(tmp_path / "moved")
    (tmp_path / "prepared").touch()  # predict has no option for data.cache_folder
    with pytest.raises(DataError, match=r"prepared: .*\); name files with --input$"):
        predict(parquet, [], tmp_path / "q.csv")


def test_maps_of_weights_are_lists_of_pairs(tmp_path: Path) -> None:
    rows = rows_of(write_clicks(tmp_path / "rows.csv"))
    tags = [[(tag, i / 8) for i, tag in enumerate(row["tags"].split("|")) if tag] for row in rows]
    columns = {
        "clicked": [int(row["clicked"]) for row in rows],
        "age": [int(row["age"]) for row in rows],
        "tags": pa.array(tags, pa.map_(pa.string(), pa.float32())),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    data = {"format": "parquet", "path": tmp_path / "rows.parquet", "sparse": ["tags"], "dense": ["age"]}
    weighted: dict[str, object] = {"kind": "weighted"}
    run = write_trained(tmp_path / "run", clicks_config(tmp_path, data=data, **{"columns.tags": weighted}))
    for name in NAMES:
        predict(run, [str(tmp_path / "rows.parquet")], tmp_path / name, ["tags"])
    written = pq.read_table(tmp_path / "p.parquet")["tags"]
    pair = pa.struct([("key", pa.string()), ("value", pa.float32())])
    assert (written.type.value_type.field(0).type, written.type) == (pa.string(), pa.list_(pair))
    assert written.to_pylist() == [[{"key": tag, "value": weight} for tag, weight in each] for each in tags]
    texts = ["|".join(f"{tag}:{weight}" for tag, weight in each) for each in tags]
    assert [row["tags"] for row in rows_of(tmp_path / "p.csv")] == texts


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
        (["usr"], r"--keep = 'usr': .*new\.csv .*'user'"),
        (["row"], "--keep = 'row': "),
        (["probability"], "--keep = 'probability': "),
        (["user", "user"], "--keep = 'user': "),
    ],
)
def test_invalid_kept_columns_are_refused(run: Path, tmp_path: Path, keep: list[str], message: str) -> None:
    new = write_clicks(tmp_path / "new.csv", 9)
    with pytest.raises(ConfigError, match=message):
        predict(run, [str(new)], tmp_path / "p.csv", keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.csv"]


@pytest.mark.parametrize("error", [StorageError("gone"), ValueError("gone")], ids=repr)
@pytest.mark.parametrize("name", NAMES)
def test_an_unfinished_file_is_removed(folder: StoragePath, name: str, error: Exception) -> None:
    def write_half() -> None:
        with prediction_file(folder / name) as write:
            write({"row": pa.array([1])})
            raise error

    with pytest.raises(type(error), match=r"^gone$"):
        write_half()
    assert not files.list_entries(folder)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_appears_when_it_is_complete(folder: StoragePath, name: str) -> None:
    with prediction_file(folder / name) as write:
        write({"row": pa.array([1]), "tags": pa.array([["a", "b"]])})
        assert not files.exists(folder / name)
        write({"row": pa.array([2]), "tags": pa.array([None], pa.list_(pa.string()))})
    assert [each.path.name for each in files.list_entries(folder)] == [name]


@contextmanager
def standard_input(path: Path) -> Iterator[None]:
    """Redirect standard input from a file."""
    opened = os.open(path, os.O_RDONLY)
    try:
        with redirected(0, opened):
            yield
    finally:
        os.close(opened)


def check_same(found: Path, expected: Path, num_kept: int) -> None:
    """Compare the rows of two files, and their predictions up to rounding."""
    tables = [list(csv.reader(path.read_text().splitlines())) for path in (found, expected)]
    (header, *rows), (expected_header, *expected_rows) = tables
    assert header == expected_header
    fixed = 1 + num_kept
    assert [row[:fixed] for row in rows] == [row[:fixed] for row in expected_rows]
    ours, theirs = (np.array([row[fixed:] for row in each], np.float64) for each in (rows, expected_rows))
    np.testing.assert_allclose(ours, theirs, atol=1e-7)
    assert ours.std(axis=0).min() > 1e-4


def test_standard_input_equals_files(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With invalid rows, and more rows than a batch."""
    new = write_clicks(tmp_path / "new.csv", 70, seed=4)
    lines = new.read_text().splitlines()
    lines[5:5] = ["", "0,much,1,u1,i1,a", "short"]
    new.write_text("\n".join(lines) + "\n")
    keep = ["user", "clicked", "price"]
    predict(run, [str(new)], tmp_path / "p.csv", keep)
    expected = capfd.readouterr().out.splitlines()
    with standard_input(new):
        predict(run, ["-"], tmp_path / "q.csv", keep)
    check_same(tmp_path / "q.csv", tmp_path / "p.csv", len(keep))
    message = capfd.readouterr().out.replace("standard input", str(new)).replace("q.csv", "p.csv")
    assert message.splitlines() == expected
    assert "skipped 2 invalid row(s): 1 wrong column count, 1 not a number" in message
    with standard_input(new):
        predict(run, ["-"], STDOUT, keep)
    written, beside = capfd.readouterr()
    (tmp_path / "r.csv").write_text(written)
    assert "\r" not in written
    check_same(tmp_path / "r.csv", tmp_path / "p.csv", len(keep))
    assert beside.startswith("wrote 70 predictions to standard output; checkpoint: ")
    assert "  standard input:7: price is 'much', expected a finite number\n" in beside


def test_equal_rows_are_predicted_alike(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    header, *rows = write_clicks(tmp_path / "new.csv", 9, seed=4).read_text().splitlines()
    (tmp_path / "again.csv").write_text("\n".join([header, *(rows * 40)]) + "\n")
    with standard_input(tmp_path / "again.csv"):
        predict(run, ["-"], STDOUT)
    found = [line.split(",")[1] for line in capfd.readouterr().out.splitlines()[1:]]
    assert len(found) == 360
    assert found == found[:9] * 40


@pytest.mark.parametrize(
    ("text", "keep", "message"),
    [
        ("", (), "^standard input: no rows$"),
        (HEADER, (), "^standard input: no rows$"),
        ("price,age,user,tags\n1,2,u,\n", (), "^data.sparse = 'item': standard input "),
        (f"{HEADER}1,2,u,i,\n", ("usr",), "^--keep = 'usr': "),
        (f"{HEADER}1,2,u,i,\nx,2,u,i,\n", (), "^1 of 2 rows"),
        (f"{HEADER}x,2,u,i,\n", (), "^standard input: .* line 2"),
    ],
)
def test_errors_leave_no_file(
    run: Path, tmp_path: Path, text: str, keep: tuple[str, ...], message: str
) -> None:
    (tmp_path / "new.csv").write_text(text)
    with standard_input(tmp_path / "new.csv"), pytest.raises((ConfigError, DataError), match=message):
        predict(run, ["-"], tmp_path / "p.csv", keep)
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


def test_a_closed_pipe_ends_silently(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with (
        standard_input(write_clicks(tmp_path / "new.csv", 9)),
        redirected(1, writing),
        pytest.raises(SystemExit) as end,
    ):
        predict(run, ["-"], STDOUT)
    os.close(writing)
    assert end.value.code == 1
    assert capfd.readouterr() == ("", "")


def test_a_full_device_is_reported_in_one_line(run: Path, tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with (
        standard_input(write_clicks(tmp_path / "new.csv", 9)),
        redirected(1, full),
        pytest.raises(HybridError, match=r"^standard output: .*No space.* choose another --output$"),
    ):
        predict(run, ["-"], STDOUT)
    os.close(full)


def test_the_required_columns_are_shown_on_a_terminal(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys, terminal = os.openpty()
    os.write(keys, b"user,item,tags,price,age\nu1,i1,a,2,3\n\x04")
    with redirected(0, terminal):
        predict(run, ["-"], STDOUT)
    os.close(terminal)
    os.close(keys)
    out, err = capfd.readouterr()
    assert "price, age, user, item, tags" in err
    assert [line.split(",")[0] for line in out.splitlines()] == ["row", "0"]
