"""A file of predictions exists only when it is complete."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.stores import BUCKET, Store

from hybrid.errors import DataError, HybridError
from hybrid.storage import files
from hybrid.storage.remote_path import StoragePath, parse_path
from workers.model_commands.prediction_file import prediction_file

NAMES = ["p.csv", "p.parquet"]


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


def test_the_types_of_columns_are_kept_in_parquet(tmp_path: Path) -> None:
    with prediction_file(tmp_path / "p.parquet") as file:
        for user in (1, 2):
            file.write({"row": pa.array([user]), "user": pa.array([user], pa.uint16())})
    table = pq.read_table(tmp_path / "p.parquet")
    assert (table["user"].type, table["user"].to_pylist()) == (pa.uint16(), [1, 2])
