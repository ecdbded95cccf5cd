"""Files that are parsed in segments, by several threads, give the bytes of whole files."""

import dataclasses
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.samples import csv_config, write

from hybrid.config import ColumnSection, RunConfig, TableSection, TaskSection
from hybrid.data.parse import delimited_text
from hybrid.data.prepare import file_preparation
from hybrid.data.prepare.file_preparation import FilesPreparation
from hybrid.data.prepare.preparation import prepare
from hybrid.errors import DataError, HybridError
from hybrid.primitives.progress import ignore_progress

HEAD = "label,x,user,tags,seen,when,score,w"
# Rows, blank lines, and every kind of invalid row.
ODD = ["", "1,2", '1,1,"two\nlines",,,5,0,1', '0,1,"open,,,5,0,1', "?,1,u,,,5,0,1", "1,much,u,,,5,0,1", " "]
SECTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bags": {
        "columns": {
            "tags": ColumnSection(kind="weighted"),
            "bucket": ColumnSection(kind="quantiles(5)", source=("x",)),
            "both": ColumnSection(kind="cross", source=("user", "when"), vocabulary="hash(50)"),
            "seen": ColumnSection(max_ids=2, too_many_ids="keep_last"),
        },
        "tables": {"people": TableSection(features=("user", "seen"))},
    },
    "tasks": {
        "tasks": {
            "a": TaskSection(label="label"),
            "b": TaskSection(label="score", type="regression", mask="label"),
        }
    },
}
DATA: dict[str, dict[str, Any]] = {
    "plain": {},
    "bags": {"sparse": ("user", "tags", "bucket", "both", "seen"), "multi_hot_separator": "|"},
    "tasks": {"label": "", "weight": "w", "vocabulary": "build(3)"},
    "hash": {"vocabulary": "hash(30)", "group": "user"},
    "time": {"split": "time(when)"},
    "column": {"split": "column(user)"},
}


def config_of(path: Path, kind: str, **keys: Any) -> RunConfig:
    given = {"dense": ("x",), "sparse": ("user", "when"), "max_invalid_fraction": 0.5, **DATA[kind], **keys}
    return csv_config(path, **given).replace(**SECTIONS.get(kind, {}))


def text(num_rows: int, seed: int, end: str = "\n") -> bytes:
    draw = random.Random(seed)
    lines = [HEAD]
    for _ in range(num_rows):
        user = f"u{int(2 ** (7 * draw.random()))}"
        tags = "|".join(f"t{draw.randrange(9)}:{draw.random():.2f}" for _ in range(draw.randrange(3)))
        seen = "|".join(f"u{draw.randrange(30)}" for _ in range(draw.randrange(4)))
        when, score = draw.randrange(400), f"{draw.gauss(0, 1):.4f}"
        lines.append(f"{draw.randrange(2)},{draw.gauss(0, 9):.3f},{user},{tags},{seen},{when},{score},0.5")
        if draw.random() < 0.1:
            lines.append(draw.choice(ODD))
    return (end.join(lines) + end).encode()


def outcome(config: RunConfig, folder: Path, paths: tuple[Path, ...], block_bytes: int) -> Any:
    """Return all prepared content of some files, or the error."""
    preparation = FilesPreparation(config, folder, ignore_progress)
    try:
        with patch.object(delimited_text, "BLOCK_BYTES", block_bytes):
            encoder, reports = preparation.write({"train": paths, "test": ()})
    except HybridError as error:
        return f"{type(error).__name__}: {error}"
    arrays = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.npy")}
    assert len(arrays) >= 8
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".npy"}
    return arrays, [asdict(each) for each in encoder.sparse], {k: asdict(v) for k, v in reports.items()}


def in_segments(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Cut files into small segments, and read them in ``threads`` threads."""
    monkeypatch.setattr(file_preparation, "_BYTES_PER_THREAD", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(threads))


@pytest.mark.parametrize("kind", DATA)
def test_segments_give_the_bytes_of_whole_files(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = "\r\n" if kind == "column" else "\n"
    monkeypatch.setattr("hybrid.data.values.invalid_rows.MAX_EXAMPLES", 10_000)  # the lines of all
    paths = tuple(write(tmp_path / f"{i}.csv", text(1500, i, ends)) for i in range(2))
    config = config_of(paths[0], kind, numeric_scaling="min_max")
    whole = outcome(config, tmp_path / "whole", paths, 16 << 20)
    in_segments(monkeypatch, 1)
    # Some records have line breaks, and must not be cut.
    monkeypatch.setattr("hybrid.data.parse.delimited_text.MAX_RECORD_BYTES", 2000)
    parts = outcome(config, tmp_path / "parts", paths, 4000)
    assert not isinstance(whole, str)
    assert parts == whole


def test_threads_and_many_pieces_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of many pieces are added up in several steps."""
    paths = tuple(write(tmp_path / f"{i}.csv", text(2000, i).replace(b'"', b"")) for i in range(2))
    config = config_of(paths[0], "bags")
    in_segments(monkeypatch, 1)
    alone = outcome(config, tmp_path / "alone", paths, 20_000)
    assert not isinstance(alone, str)
    in_segments(monkeypatch, 3)
    monkeypatch.setattr("hybrid.data.prepare.stages.RANKED_AT_ONCE", 1)
    assert outcome(config, tmp_path / "threads", paths, 20_000) == alone


def test_row_groups_give_the_bytes_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    rows = {"label": [i % 2 for i in range(3000)], "x": [draw.random() for _ in range(3000)]}
    rows["user"] = [int(2 ** (8 * draw.random())) for _ in range(3000)]
    rows["when"] = [[f"a{draw.randrange(9)}"] * draw.randrange(3) for _ in range(3000)]
    pq.write_table(pa.table(rows), tmp_path / "a.parquet", row_group_size=500)
    config = config_of(tmp_path / "a.parquet", "plain")
    config = config.replace(data=dataclasses.replace(config.data, format="parquet"))
    whole = outcome(config, tmp_path / "whole", (tmp_path / "a.parquet",), 16 << 20)
    monkeypatch.setattr("hybrid.data.parse.sources.SEGMENT_ROWS", 1000)
    in_segments(monkeypatch, 2)
    assert outcome(config, tmp_path / "parts", (tmp_path / "a.parquet",), 16 << 20) == whole


def test_first_error_in_file_order_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = text(3000, 2).replace(b'"', b"").splitlines()
    good = [line for line in lines if line.count(b",") == 7 and line[:1] in b"01" and b"much" not in line]
    late = len(good) - 5
    good[late] = b"1,nothing,u,,,5,0,1"
    path = write(tmp_path / "a.csv", b"\n".join([HEAD.encode(), *good]))
    in_segments(monkeypatch, 2)
    found = outcome(config_of(path, "plain", max_invalid_fraction=0.0), tmp_path / "new", (path,), 5000)
    assert found.startswith(f"DataError: {path}:{late + 2}: x is 'nothing', expected a finite number; ")
    found = outcome(config_of(path, "plain", sparse=("nobody",)), tmp_path / "other", (path,), 5000)
    assert found.startswith(f"ConfigError: data.sparse = 'nobody': {path} has no such column")


def test_killed_preparation_is_begun_anew(tmp_path: Path) -> None:
    """What a killed process has left is not used."""
    config = config_of(write(tmp_path / "a.csv", text(500, 2)), "plain")
    undisturbed = prepare(config, tmp_path / "other")
    cache = tmp_path / "cache"
    torn = cache / f".building-{undisturbed.name}" / "segments" / "train-0"
    torn.mkdir(parents=True)
    found = prepare(config, cache)
    for file in (each.relative_to(undisturbed) for each in undisturbed.rglob("*") if each.is_file()):
        assert (found / file).read_bytes() == (undisturbed / file).read_bytes(), file
    assert [*cache.iterdir()] == [found]


def test_vocabulary_beyond_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "".join(f"{i % 2},{i},{i}\n" for i in range(2000))
    path = write(tmp_path / "a.csv", f"label,x,user\n{rows}".encode())
    config = csv_config(path, dense=("x",), sparse=("user",))
    for part, free in (("ranked", [2000 * 220]), ("indexed", [1 << 40, 1000 * 60])):
        monkeypatch.setattr("hybrid.data.prepare.stages.available_memory_bytes", iter(free).__next__)
        with pytest.raises(DataError, match=r"^user: .* data\.vocabulary = hash or grow"):
            prepare(config, tmp_path / part)
        assert not [*(tmp_path / part).iterdir()]
    hashed = config.replace(data=dataclasses.replace(config.data, vocabulary="hash(100)"))
    assert prepare(hashed, tmp_path / "hashed").exists()
