"""A job on a prepared data set, with shuffled epochs and a last batch that is short: as one process."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.cluster import Clusters, small_config
from support.jobs import compare

from hybrid.config import ColumnSection, DenseGroupSection, TableSection, TaskSection

STEPS = 30  # more than an epoch of 24, whose last batch has 56 samples


@pytest.mark.parametrize(
    ("trainers", "update"),
    [
        pytest.param(1, "sync", marks=pytest.mark.long),
        (2, "pipelined"),
        (3, "sync"),
        pytest.param(3, "pipelined", marks=pytest.mark.long),
    ],
)
def test_it_trains_as_one_process(trainers: int, update: str, clusters: Clusters, cache: Path) -> None:
    config = small_config(
        cluster={"trainers": trainers, "workers": 2},
        dense={"optimizer": "Adam"},
        train={"epochs": 2, "update": update, "dtype": "float64"},
        schedule={"kind": "cosine", "warmup_steps": 5},
    )
    clusters.get(trainers, 2).run(compare, config, cache, STEPS)


@pytest.mark.parametrize("update", ["sync", pytest.param("pipelined", marks=pytest.mark.long)])
def test_several_tasks_with_masks_and_weights_train_as_in_one_process(
    update: str, clusters: Clusters, cache: Path
) -> None:
    config = small_config(
        cluster={"trainers": 3, "workers": 2},
        data={"weight": "weight", "group": "C7"},
        train={"update": update, "dtype": "float64", "micro_batches": 2},
    )
    tasks = {
        "click": TaskSection(label="label", metrics=("gauc",)),
        "buy": TaskSection(label="converted", mask="label", loss="focal", weight=0.5),
        "spent": TaskSection(kind="regression"),
        "stars": TaskSection(kind="classes", classes=5),
    }
    clusters.get(3, 2).run(compare, config.replace(tasks=tasks), cache, STEPS)


COLUMNS = {
    "age": ColumnSection(kind="buckets", quantiles=5),
    "hour": ColumnSection(kind="hour", source=("time",)),
    "both": ColumnSection(kind="cross", source=("user", "place"), hash_rows=50),
    "tags": ColumnSection(kind="weighted"),
    "seen": ColumnSection(kind="weighted", max_ids=2, too_many_ids="keep_last"),
    "mean_likes": ColumnSection(source=("likes",), pooling="mean"),
}
TABLES = {
    "tags": TableSection(pooling="mean", placement="row", init="normal", init_scale=0.1),
    "seen": TableSection(placement="row"),
    "likes": TableSection(features=("likes", "mean_likes"), pooling="max"),
}

GROUPS = {
    "cross": DenseGroupSection(parameters=("interaction.*",), learning_rate=0.001),
    "plain": DenseGroupSection(
        parameters=("head.*.bias", "remote.0.bias"), optimizer_options=("eps = 1e-3",)
    ),
}


@pytest.mark.parametrize("update", ["sync", "pipelined"])
def test_columns_of_every_kind_train_as_in_one_process(
    update: str, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """Weighted bags that are summed and averaged, of split tables and whole ones, beside plain ones; and a
    table that is frozen, with rows of a file; and dense parameters at rates of their own."""
    draw = random.Random(5)

    def bag(with_weights: bool) -> str:
        tags = [f"t{draw.randrange(9)}" for _ in range(draw.randrange(4))]
        return "|".join(tag + (f":{draw.random():.3f}" if with_weights else "") for tag in tags)

    rows = (
        f"{draw.randrange(2)},{draw.random():.2f},2024-01-0{1 + i % 9} {i % 24:02}:30,u{draw.randrange(20)},"
        f"{i % 3},{bag(True)},{bag(True)},{bag(False)}\n"
        for i in range(600)
    )
    path = tmp_path / "clicks.csv"
    path.write_text("label,age,time,user,place,tags,seen,likes\n" + "".join(rows))
    users = tmp_path / "users.parquet"
    vectors = [[draw.random() for _ in range(4)] for _ in range(15)]
    pq.write_table(pa.table({"user": [f"u{i}" for i in range(15)], "vector": vectors}), users)
    config = small_config(
        cluster={"trainers": 2, "workers": 2},
        data={
            "format": "csv",
            "path": (str(path),),
            "sparse": ("age", "hour", "user", "both", "tags", "seen", "likes", "mean_likes"),
            "multi_hot_separator": "|",
        },
        embedding={"dim": 4},
        dense={"net": "dcn_v2", "optimizer": "Adam", "remote_mlp": (8,)},
        train={"batch_size": 60, "epochs": 2, "update": update, "dtype": "float64", "clip_norm": 0.5},
    )
    tables = {**TABLES, "user": TableSection(initial=str(users), frozen=True)}
    config = config.replace(tables=tables, columns=COLUMNS, dense_groups=GROUPS)
    clusters.get(2, 2).run(compare, config, cache, 14)
