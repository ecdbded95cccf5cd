"""Streams: which files are read, which rows belong to a step, and where a stream continues."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import torch
from support.stores import sent

from hybrid.batch import Batch
from hybrid.checkpoint.checkpoint_folders import Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.config.loading import load_config
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.prepare.preparation import open_split, prepare
from hybrid.data.stream import units
from hybrid.data.stream.stream_cursor import StreamCursor
from hybrid.data.stream.units import FileSource, LanePosition, LaneReader, StreamUnit, with_scaling_of
from hybrid.errors import ConfigError, DataError
from hybrid.storage.remote_path import RemotePath

ROWS, BATCH = 24_000, 700
Scaling = tuple[float, float, float]


def table(seed: int, num_rows: int = ROWS) -> pa.Table:
    """Return rows with a number that is unique, by which tests know a row."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.integers(4, size=num_rows), dtype=np.int32)
    codes = pa.array(rng.integers(5, size=ends[-1]))
    tags = pa.DictionaryArray.from_arrays(codes, [f"t{t}" for t in range(5)]).dictionary_decode()
    return pa.table(
        {
            "label": rng.integers(2, size=num_rows),
            "number": seed * num_rows + np.arange(num_rows),
            "user": rng.integers(-5, 300, size=num_rows),
            "item": [f"i{i}" for i in rng.integers(99, size=num_rows)],
            "tags": pa.ListArray.from_arrays(np.append(np.int32(0), ends), tags),
        }
    )


def write(path: Path, rows: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(rows, path, row_group_size=5000)
        return
    joined = ["|".join(tags) for tags in rows["tags"].to_pylist()]
    rows = rows.set_column(rows.schema.get_field_index("tags"), "tags", pa.array(joined))
    with (gzip.open if path.suffix == ".gz" else open)(path, "wb") as file:
        pacsv.write_csv(rows, file)


def configure(path: str | Sequence[str], kind: str = "parquet", *more: str) -> RunConfig:
    settings = [
        f'data.format = "{kind}"',
        f"data.path = {json.dumps([path] if isinstance(path, str) else [*path])}",
        'data.stream = "files(lanes = 5)"',
        'data.dense = ["number"]',
        'data.sparse = ["user", "item", "tags"]',
        'data.vocabulary = "grow"',
        'data.numeric_scaling = "none"',
        'data.multi_hot_separator = "|"' if kind == "csv" else 'data.shuffle = "rows"',
        f"train.batch_size = {BATCH}",
        *more,
    ]
    return load_config(None, settings)


def first_unit(config: RunConfig) -> tuple[StreamUnit, FeatureEncoder]:
    files = FileSource(config, pytest.fail)
    unit = files.find(None)
    assert unit is not None
    return unit, units.fit_on_blocks(config, files.sample(unit))


def read(config: RunConfig, unit: StreamUnit, encoder: FeatureEncoder, trainers: int) -> list[list[Batch]]:
    """Return the batches of all trainers from a position on."""
    batches = []
    for trainer in range(trainers):
        with LaneReader(config, encoder, unit, trainer, trainers).batches() as stream:
            batches.append([*stream])
    return batches


def numbers_by_step(batches: list[list[Batch]]) -> list[list[float]]:
    """Return the sorted numbers of the rows of each step."""
    steps = max(map(len, batches))
    of_steps = ([b[s].dense_features[:, 0] for b in batches if s < len(b)] for s in range(steps))
    return [torch.cat(each).sort().values.tolist() for each in of_steps]


@pytest.mark.parametrize("names", [("a.parquet", "b.parquet"), ("a.csv", "b.csv.gz")])
def test_step_has_the_same_rows_for_any_number_of_trainers(names: tuple[str, str], tmp_path: Path) -> None:
    for part, name in enumerate(names):
        write(tmp_path / "day" / name, table(part))
    config = configure(str(tmp_path / "day"), "parquet" if "b.parquet" in names else "csv")
    unit, encoder = first_unit(config)
    alone, *others = (numbers_by_step(read(config, unit, encoder, trainers)) for trainers in (1, 2, 3))
    assert others == [alone, alone]
    assert sorted(number for step in alone for number in step) == [*range(2 * ROWS)]
    if "b.parquet" in names:  # the metadata have the number of rows, so all lanes end at the same step
        assert {len(step) for step in alone[:-1]} == {BATCH}
    assert any(np.diff(step).max() > BATCH for step in alone[:-1])  # rows of several lanes


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_stream_continues_at_any_step_with_other_trainers(name: str, tmp_path: Path) -> None:
    for part in range(7):  # two segments in some lanes
        write(tmp_path / f"day/{part}-{name}", table(part, 2500))
    config = configure(str(tmp_path / "day"), "parquet" if "parquet" in name else "csv")
    unit, encoder = first_unit(config)
    whole = numbers_by_step(read(config, unit, encoder, 1))
    readers = [LaneReader(config, encoder, unit, trainer, 2) for trainer in range(2)]
    streams = [reader.batches() for reader in readers]
    for step in range(len(whole)):
        if step in (0, 1, 11, len(whole) - 1):
            found = {lane: at for reader in readers for lane, at in reader.positions(step).items()}
            lanes = tuple(found[lane] for lane in sorted(found))
            now = replace(unit, step=step, lanes=lanes)
            assert numbers_by_step(read(config, now, encoder, 1 + step % 2 * 2)) == whole[step:]
        for stream in streams:
            next(stream, None)
    for stream in streams:
        stream.close()


def test_unit_in_a_store_has_the_rows_of_local_files(there: RemotePath, tmp_path: Path) -> None:
    for part in range(3):
        write(tmp_path / f"day=1/{part}.parquet", table(part, 1000))
    (tmp_path / "day=1/_SUCCESS").touch()
    found = []
    for day in (tmp_path / "day=1", sent(tmp_path / "day=1", there / "day=1")):
        stream = f"data.stream = \"files(lanes = 2, marker = '_SUCCESS', until = '{day}')\""
        config = configure(str(day.parent / "day=*"), "parquet", stream)
        unit, encoder = first_unit(config)
        found.append(numbers_by_step(read(config, unit, encoder, 2)))
    assert found[0] == found[1] != []


def test_rows_of_a_block_are_shuffled_unless_the_order_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", table(0, 4000))
    orders = []
    for shuffle in ("none", "rows", "rows"):
        config = configure(str(tmp_path / "a.parquet"), "parquet", f'data.shuffle = "{shuffle}"')
        (batches,) = read(config, *first_unit(config), 1)
        orders.append(torch.cat([batch.dense_features[:, 0] for batch in batches]).tolist())
    assert orders[0] == [*range(4000)]
    assert orders[1] == orders[2] != orders[0]


def test_files_lanes_and_units_of_equal_size_are_shuffled_differently(tmp_path: Path) -> None:
    for day in range(2):
        for part in range(10):  # two in each lane
            write(tmp_path / f"day={day}/{part}.parquet", table(day, 2000))
    config, unit, orders = configure(str(tmp_path / "day=*")), None, []
    _, encoder = first_unit(config)
    while (unit := FileSource(config, pytest.fail).find(unit)) is not None:
        for batches in read(config, unit, encoder, 5):
            for numbers in torch.cat([batch.dense_features[:, 0] for batch in batches]).chunk(2):
                orders.append(tuple((numbers - numbers.min()).tolist()))
    assert len(orders) == len({*orders}) == 20


def test_streamed_row_means_what_a_prepared_row_means(tmp_path: Path) -> None:
    write(tmp_path / "day/a.parquet", table(1, 5000))
    for vocabulary in ("grow", "hash(500)"):
        chosen = str(tmp_path / "day"), "parquet", f'data.vocabulary = "{vocabulary}"'
        config = configure(*chosen)
        (batches,) = read(config, *first_unit(config), 1)
        prepared = configure(*chosen, 'data.stream = "none"', 'data.split = "none"')
        dataset = open_split(prepare(prepared, tmp_path / "cache"), "train", prepared.data)
        for batch in batches:
            rows = batch.dense_features[:, 0].numpy().astype(np.int64) - 5000
            same = dataset.gather(rows, len(rows))
            assert torch.equal(batch.sparse_features.ids_L, same.sparse_features.ids_L)
            assert torch.equal(batch.labels, same.labels)


def test_units_come_in_order_once_they_are_complete(tmp_path: Path) -> None:
    stream = f"data.stream = \"files(marker = '_SUCCESS', until = '{tmp_path}/log/day=10')\""
    config, warnings = configure(str(tmp_path / "log/day=*"), "parquet", stream), list[str]()
    files = FileSource(config, warnings.append)
    assert files.find(None) is None
    for day in (2, 1, 10, 11):
        write(tmp_path / f"log/day={day:02}/a.parquet", table(day, 50))
    assert files.find(None) is None
    for day in (1, 10, 11):
        (tmp_path / f"log/day={day:02}/_SUCCESS").touch()
    first = files.find(None)
    assert first is not None
    assert files.find(first) is None  # day 10 is complete, but day 2 comes first
    (tmp_path / "log/day=02/_SUCCESS").touch()
    second = files.find(first)
    write(tmp_path / "log/day=00/a.parquet", table(0, 50))
    found = [first, second, *(each.find(second) for each in (files, files, FileSource(config, pytest.fail)))]
    names = [str(tmp_path / f"log/day={day:02}") for day in (1, 2, 10, 10, 10)]
    assert [unit and unit.name for unit in found] == names
    write(tmp_path / "log/day=02/late.parquet", table(0, 50))
    assert files.find(second) == found[-1]
    assert [warning.partition(":")[0] for warning in warnings] == [str(tmp_path / "log/day=00"), names[1]]
    assert names[1] + "/late.parquet" in warnings[1]
    assert files.find(found[-1]) is None  # no unit after ``until``


def test_paths_are_units_in_the_order_of_the_list(tmp_path: Path) -> None:
    names = [str(tmp_path / f"{name}.parquet") for name in "bac"]
    for number, name in enumerate(names):
        write(Path(name), table(number, 20))
    files, unit, found = FileSource(configure(names), pytest.fail), None, []
    while (unit := files.find(unit)) is not None:
        found.append(unit.name)
    assert found == names


def scalings(config: RunConfig, before: FeatureEncoder | None = None) -> list[dict[str, Scaling]]:
    """Return shift, scale and scaled missing value of each column in each unit, up to the last one."""
    cursor, scaled = StreamCursor(config, pytest.fail, str), []
    assert cursor.has_rows()
    encoder = (
        cursor.fit_encoder() if before is None else with_scaling_of(config, before, cursor.fit_encoder())
    )
    while not cursor.is_over:
        encoder = cursor.scale(encoder)
        assert cursor.scale(encoder) == encoder, "a unit counts once"
        scaled.append({each.name: (each.shift, each.scale, each.missing) for each in encoder.dense})
        cursor.end_unit([])
        cursor.has_rows()
    return scaled


NUMBERS: dict[str, list[list[float | None]]] = {  # by day
    "drifts": [[0, 2, 4, None], [10, 30], [None, 90, 91, 95]],
    "deviates by 1": [[-1, 1, -1, 1], [8, 10], [0, 2, 0, 2]],
    "absent": [[None] * 4, [5, 7], [None] * 4],
    "constant": [[3] * 4, [8, 10], [8] * 4],
    "range": [[0, 1, 2, None], [-2, 2], [1, 1, 2, 4]],
    "given": [[1, 2, 3, 4], [50, 60], [-1] * 4],
    "none": [[1, 2, 3, 4], [50, 60], [-1] * 4],
}


def write_numbers(root: Path, momentum: float, *more: str) -> RunConfig:
    for day in range(3):
        columns = {name: pa.array(days[day], pa.float64()) for name, days in NUMBERS.items()}
        columns["label"] = columns["user"] = pa.array([1] * len(columns["drifts"]))
        (root / f"day={day}").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), root / f"day={day}/a.parquet")
    return configure(
        str(root / "day=*"),
        "parquet",
        f"data.stream = 'files(scaling_momentum = {momentum})'",
        f"data.dense = {json.dumps([*NUMBERS])}",
        "data.sparse = ['user']",
        "data.numeric_scaling = 'standardize'",
        "columns.range.numeric_scaling = 'min_max'",
        "columns.given.numeric_scaling = 'given(3, std = 7)'",
        "columns.none.numeric_scaling = 'none'",
        *more,
    )


def mixture(momentum: float, *days: Sequence[float | None]) -> tuple[float, float]:
    """Return mean and deviation of numbers of which each day has ``momentum`` of the weight of all so far."""
    numbers, weights = np.empty(0), np.empty(0)
    for day in days:
        of_day = np.array([number for number in day if number is not None])
        if not len(of_day):
            continue
        total = weights.sum() or momentum
        weights = np.append(weights * (1 - momentum) / total, np.full(len(of_day), momentum / len(of_day)))
        numbers = np.append(numbers, of_day)
    mean = np.average(numbers, weights=weights)
    return mean, np.average((numbers - mean) ** 2, weights=weights) ** 0.5


def test_scaling_follows_the_units(tmp_path: Path) -> None:
    config = write_numbers(tmp_path, 0.25)
    first, second, third = found = scalings(config)
    for day, scaling in enumerate(found):
        mean, deviation = mixture(0.25, *NUMBERS["drifts"][: day + 1])
        assert scaling["drifts"] == pytest.approx((mean, deviation, 0))
        expected = mixture(0.25, *NUMBERS["deviates by 1"][: day + 1])
        assert scaling["deviates by 1"] == pytest.approx((*expected, 0))
        assert (scaling["given"], scaling["none"]) == ((3, 7, 0), (0, 1, 0))
    assert [each["absent"] for each in found] == [(0, 1, 0), pytest.approx((6, 1, 0)), second["absent"]]
    assert first["constant"][0] == 3
    assert second["constant"] == pytest.approx((9, 1, 0)), "a constant column has no scale to follow"
    assert third["constant"] == pytest.approx((*mixture(0.25, [8, 10], [8]), 0))
    assert first["range"] == pytest.approx((0, 2, 0.5))
    assert second["range"] == pytest.approx((-2, 4, (0.75 + 2) / 4))
    assert third["range"] == pytest.approx((-2, 6, (0.75 * 0.75 + 0.25 * 2 + 2) / 6))


@pytest.mark.parametrize("momentum", [0, 1])
def test_scaling_may_stay_or_forget(momentum: int, tmp_path: Path) -> None:
    found = scalings(write_numbers(tmp_path, momentum))
    for day, scaling in enumerate(found):
        expected = mixture(1, NUMBERS["drifts"][day * momentum])
        assert scaling["drifts"] == pytest.approx((*expected, 0))
        assert scaling["range"][:2] == ((0, 2), (-2, 4), (1, 3))[day * momentum]


@pytest.mark.parametrize("momentum", [0, 0.5])
def test_stream_goes_on_from_the_scaling_of_an_earlier_run(momentum: float, tmp_path: Path) -> None:
    given = "columns.given.numeric_scaling = 'standardize'"
    _, before = first_unit(write_numbers(tmp_path, 0.5, given, f"data.path = '{tmp_path}/day=1'"))
    found = scalings(write_numbers(tmp_path, momentum), before)
    first, second, _ = NUMBERS["drifts"]
    expected = mixture(0.5, second, first) if momentum else mixture(1, second)
    assert found[0]["drifts"] == pytest.approx((*expected, 0))
    assert found[0]["absent"] == pytest.approx((6, 1, 0))
    assert found[0]["given"] == (3, 7, 0)


def test_unit_that_cannot_be_sampled_has_not_begun(tmp_path: Path) -> None:
    config = write_numbers(tmp_path, 0.5)
    cursor = StreamCursor(config, pytest.fail, str)
    assert cursor.has_rows()
    encoder = cursor.scale(cursor.fit_encoder())
    cursor.end_unit([])
    file = tmp_path / "day=1/a.parquet"
    content = file.read_bytes()
    file.write_bytes(bytes(len(content)))
    assert cursor.has_rows()
    with pytest.raises(DataError, match=str(file)):
        cursor.scale(encoder)
    assert cursor.pack()["stream"]["unit"] is None
    file.write_bytes(content)
    assert cursor.has_rows()
    assert cursor.scale(encoder) != encoder


def test_files_that_the_last_unit_gets_are_named_at_the_end_of_a_resumed_run(tmp_path: Path) -> None:
    config = configure(str(tmp_path / "day"), "parquet")
    write(tmp_path / "day/a.parquet", table(0, 50))
    cursor = StreamCursor(config, pytest.fail, str)
    assert cursor.has_rows()
    cursor.end_unit([])
    position = json.loads(json.dumps(cursor.pack()))
    cursor.restore(Checkpoint(tmp_path, Manifest(1, 1, {}, {}, progress=position)))
    assert cursor.source.check_end(cursor.last) == ""
    write(tmp_path / "day/late.parquet", table(0, 50))
    assert str(tmp_path / "day/late.parquet") in cursor.source.check_end(cursor.last)
    position["stream"]["last"]["files"] = []  # as earlier versions stored it
    cursor.restore(Checkpoint(tmp_path, Manifest(1, 1, {}, {}, progress=position)))
    assert cursor.source.check_end(cursor.last) == ""


def test_missing_integer_has_the_key_of_a_missing_text(tmp_path: Path) -> None:
    rows = table(1, BATCH)
    texts = rows.set_column(2, "user", rows["user"].cast(pa.string()))
    write(tmp_path / "integers.parquet", rows)
    write(tmp_path / "texts.parquet", texts)
    ids = []
    for name in ("integers", "texts"):
        path = str(tmp_path / f"{name}.parquet")
        config = configure(path, "parquet", 'data.missing = ["", "-3", "2", "99999999999999999999"]')
        ((batch,),) = read(config, *first_unit(config), 1)
        ids.append(batch.sparse_features.ids_L)
    assert torch.equal(*ids)
    is_missing = pc.is_in(rows["user"], value_set=pa.array([-3, 2]))
    assert (ids[0] == 0).sum() == pc.sum(is_missing).as_py() > 0


def test_invalid_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = table(1, 9000)
    labels = rows["label"].to_pylist()
    labels[5] = labels[8000] = 7
    write(tmp_path / "a.parquet", rows.set_column(0, "label", pa.array(labels)))
    config = configure(str(tmp_path / "a.parquet"))
    unit, encoder = first_unit(config)
    reader = LaneReader(config, encoder, unit, 0, 1)
    with reader.batches() as stream:
        assert sum(len(batch.labels) for batch in stream) == 8998
    report = reader.invalid_rows()
    assert report.counts["unknown_label"] == 2
    assert report.examples[0].startswith(f"{tmp_path}/a.parquet:")


def test_position_of_other_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", table(1, 100))
    config = configure(str(tmp_path / "a.parquet"))
    unit, encoder = first_unit(config)
    for lanes in ((LanePosition(),), (LanePosition(9),) * 5, (LanePosition(0, -1),) * 5):
        moved = replace(unit, step=1, lanes=lanes)
        with pytest.raises(DataError, match=unit.name):
            LaneReader(config, encoder, moved, 0, 1)


@pytest.mark.parametrize(
    ("column", "error"), [("nope", ConfigError), ("tags", ConfigError), ("item", DataError)]
)
def test_column_without_times_is_refused(column: str, error: type[Exception], tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", table(1, 900))
    config = configure(str(tmp_path), "parquet", f"data.stream = \"files(time = '{column}')\"")
    with pytest.raises(error, match=rf"(?s){column}.*data\.stream|data\.stream.*{column}"):
        first_unit(config)
