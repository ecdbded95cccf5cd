"""Predictions of rows from standard input equal those of rows from files."""

import csv
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.descriptors import redirected
from support.trained import clicks_config, shop_config, write_clicks, write_shop, write_trained

from hybrid.errors import ConfigError, DataError, HybridError
from workers.model_commands.prediction_commands import predict
from workers.model_commands.prediction_file import STDOUT


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return write_trained(folder / "run", clicks_config(folder))


@contextmanager
def standard_input(path: Path) -> Iterator[None]:
    """Redirect standard input from a file."""
    opened = os.open(path, os.O_RDONLY)
    try:
        with redirected(0, opened):
            yield
    finally:
        os.close(opened)


def table_of(path: Path) -> tuple[list[str], list[list[str]]]:
    header, *rows = csv.reader(path.read_text().splitlines())
    return header, rows


def check_same(found: Path, expected: Path, num_kept: int) -> None:
    """Compare the rows of two files, and their predictions up to rounding."""
    header, rows = table_of(found)
    wanted, expected_rows = table_of(expected)
    assert header == wanted
    fixed = 1 + num_kept
    assert [row[:fixed] for row in rows] == [row[:fixed] for row in expected_rows]
    ours, theirs = (np.array([row[fixed:] for row in each], np.float64) for each in (rows, expected_rows))
    np.testing.assert_allclose(ours, theirs, atol=1e-7)
    assert ours.std(axis=0).min() > 1e-4


def test_predictions_equal_those_of_files(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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
    message = (
        capfd.readouterr().out.replace("standard input", str(new)).replace("q.csv", "p.csv").splitlines()
    )
    assert message == expected
    assert "skipped 2 invalid row(s): 1 wrong column count, 1 not a number" in message
    with standard_input(new):
        predict(run, ["-"], STDOUT, keep)
    written, beside = capfd.readouterr()
    (tmp_path / "r.csv").write_text(written)
    assert "\r" not in written
    check_same(tmp_path / "r.csv", tmp_path / "p.csv", len(keep))
    assert beside.startswith("wrote 70 predictions to standard output; checkpoint: ")
    assert "  standard input:7: price is 'much', expected a finite number\n" in beside


def test_columns_of_every_kind_and_several_tasks(tmp_path: Path) -> None:
    run = write_trained(tmp_path / "run", shop_config(tmp_path))
    new = write_shop(tmp_path / "new.csv", 90, seed=2)
    predict(run, [str(new)], tmp_path / "p.csv", ["time"])
    predict(run, [str(new)], tmp_path / "p.parquet", ["time"])
    with standard_input(new):
        predict(run, ["-"], tmp_path / "q.csv", ["time"])
    check_same(tmp_path / "q.csv", tmp_path / "p.csv", 1)
    with standard_input(new):
        predict(run, ["-"], tmp_path / "q.parquet", ["time"])
    found, expected = (pq.read_table(tmp_path / name) for name in ("q.parquet", "p.parquet"))
    assert found.schema == expected.schema
    assert found["time"].equals(expected["time"])


def test_equal_rows_of_a_block_have_equal_predictions(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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
        ("price,age,user,item,tags\n", (), "^standard input: no rows$"),
        ("price,age,user,tags\n1,2,u,\n", (), "^data.sparse = 'item': standard input has no such column"),
        ("price,age,user,item,tags\n1,2,u,i,\n", ("usr",), "^--keep = 'usr': .*did you mean 'user'"),
        ("price,age,user,item,tags\n1,2,u,i,\n", ("row",), "^--keep = 'row': is the name of another"),
        (
            "price,age,user,item,tags\n1,2,u,i,\nx,2,u,i,\n",
            (),
            "^1 of 2 rows are invalid, more than data.max",
        ),
        ("price,age,user,item,tags\nx,2,u,i,\n", (), "^standard input: no row can be used, 1 of 1 as line 2"),
    ],
)
def test_errors_leave_no_file(
    run: Path, tmp_path: Path, text: str, keep: tuple[str, ...], message: str
) -> None:
    (tmp_path / "new.csv").write_text(text)
    with standard_input(tmp_path / "new.csv"), pytest.raises((ConfigError, DataError), match=message):
        predict(run, ["-"], tmp_path / "p.csv", keep)
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


def test_parquet_is_refused(tmp_path: Path) -> None:
    columns = {"clicked": [0, 1] * 30, "age": [*range(60)], "user": ["u1", "u2", "u3"] * 20}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    data = {"format": "parquet", "path": tmp_path / "rows.parquet", "sparse": ["user"], "dense": ["age"]}
    run = write_trained(tmp_path / "run", clicks_config(tmp_path, data=data))
    message = "^--input = '-': must name files where data.format is parquet"
    with standard_input(tmp_path / "rows.parquet"), pytest.raises(ConfigError, match=message):
        predict(run, ["-"], tmp_path / "p.csv")


def test_a_closed_pipe_ends_the_command_silently(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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


def test_a_full_device_is_one_line(run: Path, tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    message = "^standard output: cannot be written: No space left on device$"
    with (
        standard_input(write_clicks(tmp_path / "new.csv", 9)),
        redirected(1, full),
        pytest.raises(HybridError, match=message),
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
    awaited = "price, age, user, item, tags, after a line with their names"
    assert err.startswith(f"waiting for rows with {awaited}; Ctrl-D ends them\n")
    assert [line.split(",")[0] for line in out.splitlines()] == ["row", "0"]
