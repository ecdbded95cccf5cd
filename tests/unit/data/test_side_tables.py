"""Side tables: the rows are those of one file, joined beforehand."""

import csv
import gzip
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.choices import choices_config
from support.trained import write_trained

import hybrid
from hybrid.batch import Batch
from hybrid.checkpoint.checkpoint_folders import Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.config.loading import load_config
from hybrid.data.dataset.dataset_manifest import FILE_NAME, DataManifest
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.parse.column_check import check_input_columns
from hybrid.data.prepare.preparation import prepare
from hybrid.data.stream.stream_cursor import StreamCursor
from hybrid.data.stream.units import LaneReader, StreamUnit
from hybrid.errors import ConfigError, DataError, HybridError
from workers.cli.model_commands import predict

Row = Mapping[str, Any]
SIDE = ("brand", "price", "genres", "country")
LISTS = [["x", "y"], ["z"]]
ITEMS: list[Row] = [
    {"id": i, "brand": f"b{i % 7}", "price": i / 4 if i % 5 else None, "genres": LISTS[i % 4 // 2]}
    for i in range(0, 60, 2)
]
BRANDS: list[Row] = [{"brand": f"b{b}", "country": "AB"[b % 2]} for b in range(5)]
JOINS = ['table("{}/items.{}", key = "item", table_key = "id")', 'table("{}/brands.{}", key = "brand")']
RNG = np.random.default_rng(1)
LOG: list[Row] = [
    {"label": int(label), "user": f"u{user}", "item": None if item > 65 else int(item)}
    for label, user, item in zip(*(RNG.integers(size, size=3000) for size in (2, 40, 70)), strict=True)
]


def joined() -> list[Row]:
    """Join the log with a dictionary for each side table."""
    items = {row["id"]: row for row in ITEMS}
    countries = {row["brand"]: row["country"] for row in BRANDS}
    rows: list[Row] = []
    for row in LOG:
        item = items.get(row["item"], {})
        columns = {name: item.get(name) for name in SIDE} | {"country": countries.get(item.get("brand"))}
        rows.append({**row, **columns})
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write Parquet, or CSV, compressed if the name ends in gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([*rows]), path, row_group_size=500)
        return
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        for row in rows:
            lists = {name: "|".join(each) for name, each in row.items() if isinstance(each, list)}
            writer.writerow({**row, **lists})


def configure(folder: Path, log: str, side: str = "", *more: str) -> RunConfig:
    joins = [join.format(folder, side) for join in JOINS] if side else []
    settings = [
        f"data.format={'csv' if log.endswith('csv') else 'parquet'}",
        f'data.path="{folder / log}"',
        f"data.joins={json.dumps(joins)}",
        'data.dense=["price"]',
        'data.sparse=["user", "item", "brand", "genres", "country"]',
        'data.multi_hot_separator="|"',
        f"data.cache_folder={folder / 'cache'}",
        "train.batch_size=70",
    ]
    return load_config(None, [*settings, *more])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The log, the joined log, and the side tables, in each format."""
    for kind in ("csv", "parquet"):
        as_floats = [{**row, "item": row["item"] and float(row["item"])} for row in LOG]
        write_rows(tmp_path / f"log.{kind}", as_floats if kind == "csv" else LOG)
        write_rows(tmp_path / f"joined.{kind}", joined())
    for side in ("csv", "parquet", "gz"):
        rows = [{**row, "id": float(row["id"])} if side == "gz" else row for row in ITEMS]
        write_rows(tmp_path / f"items.{side}", [*rows, {**ITEMS[0], "id": None}, {**ITEMS[1], "id": None}])
        write_rows(tmp_path / f"brands.{side}", BRANDS)
    return tmp_path


def manifest(config: RunConfig, cache: Path) -> DataManifest:
    return DataManifest.read(prepare(config, cache) / FILE_NAME)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_prepared_data_are_those_of_joined_files(folder: Path, kind: str) -> None:
    """The log has missing items, and items without a row; a side table is joined by a column of another."""
    expected = manifest(configure(folder, f"joined.{kind}"), folder / "cache").stored
    for side in ("gz",) if kind == "csv" else ("csv", "parquet"):
        config = configure(folder, f"log.{kind}", side)
        check_input_columns(config)
        assert manifest(config, folder / "cache").stored == expected
    (folder / "items.csv").write_text((folder / "items.csv").read_text().partition("\n")[2])
    bare = [JOINS[0][:-1] + ', columns = ["id", "brand", "price", "genres"])', JOINS[1]]
    joins = json.dumps([join.format(folder, "csv") for join in bare])
    config = configure(folder, f"log.{kind}", "", f"data.joins={joins}")
    assert manifest(config, folder / "cache").stored == expected


STREAM = "data.stream=files(lanes = 3)", "data.vocabulary=grow", "data.shuffle=none"


def stream(folder: Path, log: str, side: str = "") -> RunConfig:
    return configure(folder, log, side, *STREAM)


def read(config: RunConfig, encoder: FeatureEncoder, unit: StreamUnit | None) -> list[list[Any]]:
    """Return the numbers and ids of each batch of two trainers."""
    assert unit is not None
    batches: list[Batch] = []
    for trainer in range(2):
        with LaneReader(config, encoder, unit, trainer, 2).batches() as found:
            batches += found
    return [
        [
            *each.dense_features.tolist(),
            each.sparse_features.ids_L.tolist(),
            str(each.sparse_features.offsets),
        ]
        for each in batches
    ]


def read_stream(config: RunConfig) -> list[list[list[Any]]]:
    """Return what :func:`read` returns of each unit."""
    cursor, units = StreamCursor(config, pytest.fail, str), []
    assert cursor.has_rows()
    encoder = cursor.fit_encoder()
    while not cursor.is_over:
        units.append(read(config, encoder, cursor.unit))
        cursor.end_unit([])
        cursor.has_rows()
    return units


def test_stream_is_that_of_joined_files(folder: Path) -> None:
    for day in range(2):
        for part in range(5):
            write_rows(folder / f"log/day={day}/{part}.parquet", LOG[part::5])
            write_rows(folder / f"joined/day={day}/{part}.parquet", joined()[part::5])
    expected = read_stream(stream(folder, "joined/day=*"))
    found = read_stream(stream(folder, "log/day=*", "csv"))
    assert len(found) == 2
    assert found == expected


def test_unit_has_the_side_tables_of_its_start_or_of_the_resume(folder: Path) -> None:
    for day in range(2):
        write_rows(folder / f"log/day={day}/a.parquet", LOG)
    config = stream(folder, "log/day=*", "parquet")
    cursor = StreamCursor(config, pytest.fail, str)
    assert cursor.has_rows()
    encoder = cursor.fit_encoder()
    before = read(config, encoder, cursor.unit)
    write_rows(folder / "items.parquet", ITEMS[1:])
    assert read(config, encoder, cursor.unit) == before
    position = cursor.pack()
    cursor.end_unit([])
    assert cursor.has_rows()
    after = read(config, encoder, cursor.unit)
    assert after != before
    stored = Checkpoint(folder, Manifest(1, 1, {}, {}, progress=json.loads(json.dumps(position))))
    resumed = StreamCursor(config, pytest.fail, str)
    resumed.restore(stored)
    assert read(config, encoder, resumed.unit) == after
    write_rows(folder / "brands.parquet", BRANDS[1:])
    resumed.restore(stored)
    write_rows(folder / "brands.parquet", BRANDS)
    with pytest.raises(DataError, match=str(folder / "brands.parquet")):  # other trainers may have read it
        read(config, encoder, resumed.unit)


def test_a_user_tower_gets_no_properties_of_the_chosen_item(tmp_path: Path) -> None:
    (tmp_path / "side.csv").write_text("key,genre\ni1,a\n")
    for key in ("user", "item"):
        joins = json.dumps([f'table("{tmp_path}/side.csv", key = "{key}", table_key = "key")'])
        data = {"joins": joins, "sparse": ["user", "item", "genre"]}
        config = choices_config(tmp_path, data=data)
        if key == "user":
            check_input_columns(config)
            continue
        with pytest.raises(ConfigError, match=r"^data\.joins = .*genre"):
            check_input_columns(config)


def test_changed_side_table_is_prepared_again(folder: Path) -> None:
    config = configure(folder, "log.csv", "csv")
    cache, found = folder / "cache", manifest(config, folder / "cache")
    assert prepare(config, cache) == prepare(config, cache)
    write_rows(folder / "items.csv", ITEMS[1:])
    now = manifest(config, cache)
    with pytest.raises(DataError, match=str(folder / "items.csv")):
        found.check_same(now, "")
    assert now.stored == manifest(config, folder / "other").stored


def test_predictions_and_tables_in_memory_are_joined(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(folder, "log.csv", "csv", "data.split=random")
    run = write_trained(folder / "run", config)
    predict(run, [str(folder / "log.csv")], folder / "p.csv", ["user", "country", "genres"])
    header, *rows = csv.reader((folder / "p.csv").read_text().splitlines())
    assert header == ["row", "user", "country", "genres", "probability"]
    lists = ["|".join(row["genres"] or ()) for row in joined()]
    expected = [(row["user"], row["country"] or "") for row in joined()]
    assert [tuple(row[1:3]) for row in rows] == expected
    assert [row[3] for row in rows] == lists
    predict(run, [], folder / "held-out.csv", ["country"])
    _, *held_out = csv.reader((folder / "held-out.csv").read_text().splitlines())
    assert [rows[int(number)][2] for number, *_ in held_out] == [country for _, country, _ in held_out]
    probabilities = [float(row[4]) for row in rows]
    assert [float(row[2]) for row in held_out] == pytest.approx(
        [probabilities[int(row[0])] for row in held_out]
    )
    names = ("price", "user", "item", "brand", "country")
    columns = {name: [row[name] for row in joined()] for name in names} | {"genres": lists}
    model = hybrid.load(run)
    predictions = model(model.encode(columns))["probability"].tolist()
    assert predictions == pytest.approx(probabilities)
    # Another user's run names no files to read: its input has the columns.
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "elsewhere"))
    with pytest.raises(ConfigError) as caught:
        predict(run, [str(folder / "log.csv")], folder / "none.csv")
    assert caught.value.key == "data.dense"
    predict(run, [str(folder / "joined.csv")], folder / "foreign.csv")
    assert (folder / "foreign.csv").read_text().count("\n") == 1 + len(LOG)


ITEM = 'table(items, key = "item", table_key = "id")'
HEAD, ROW = "id,brand,price,genres,country\n", "1,a,1,x,A\n"


@pytest.mark.parametrize(
    ("content", "join", "start"),
    [
        (f"{HEAD}{ROW}2,b,1,x,A\n1.0,c,1,x,A\n", ITEM, r"items:4: .*'1'"),
        (f"{HEAD}{ROW}2,b\n", ITEM, "items:3: "),
        (HEAD, ITEM, "items: "),
        ("", ITEM, "items: "),
        (pa.table({"id": [1.0, 2.0**60]}), ITEM, "items:2: "),
        (pa.table({"id": [{"a": 1}]}), ITEM, "items: "),
        (pa.table({"id": [[1], [2]]}), ITEM, "data.joins = 'id': "),
        (f"item_{HEAD}{ROW}", ITEM, "data.joins = 'id': items .*'item_id'"),
        (HEAD.replace("price", "cost") + ROW, ITEM, r"data.dense = 'price': \S*log.csv "),
        (HEAD.replace("country", "user") + ROW, ITEM, r"data.joins = 'user': \S*log.csv and items "),
        (HEAD.replace("country", "item") + ROW, ITEM, "data.joins = 'item': .*items"),
        (f"{HEAD}{ROW}", ITEM.replace('"item"', '"itme"'), r"data.joins = 'itme': \S*log.csv .*'item'"),
        (HEAD, ITEM.replace("items", "nowhere"), r"nowhere: .*data\.joins"),
        (f"{HEAD}x1,a,1,x,A\n", ITEM, r"none .*'x1'.*data\.joins"),  # no key of the log
        (None, ITEM, "data.joins = 'brand': .*more"),  # a column of two side tables
    ],
    ids=str,
)
def test_bad_side_table_is_an_error(
    content: Any, join: str, start: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    if isinstance(content, pa.Table):
        pq.write_table(content, "items")
    else:
        Path("items").write_text(HEAD + ROW if content is None else content)
    Path("more").write_text("user,brand\nu1,b\n")
    joins = [join, 'table(more, key = "user")'] if content is None else [join]
    config = configure(folder, "log.csv", "", f"data.joins={json.dumps(joins)}")
    for check in (check_input_columns, partial(prepare, cache=folder / "cache")):
        is_found_early = start.startswith("data") and not isinstance(content, pa.Table)
        if is_found_early or check is not check_input_columns:
            with pytest.raises(HybridError, match=f"^{start}") as caught:
                check(config)
            assert "\n" not in str(caught.value)
