"""Jobs on prepared data equal one process: shuffled epochs, a short last batch, tasks, and retrieval."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.choices import choices_config
from support.cluster import Clusters, small_config
from support.jobs import compare, evaluate, opened
from support.stores import Store, in_store

from hybrid.config import ColumnSection, DenseGroupSection, RunConfig, TableSection, TaskSection
from hybrid.metrics import Metrics
from hybrid.storage.remote_path import StoragePath, parse_path
from workers.rendezvous.bootstrap import JoinedCluster

ROWS, BATCH_SIZE, STEPS = 750, 240, 5  # more than an epoch of 4, whose last batch has 30 samples


@pytest.mark.parametrize(
    ("trainers", "update", "lanes"),
    [(2, "sync", 16), pytest.param(3, "lookahead", 0, marks=pytest.mark.long)],
)
def test_data_set_trains_as_in_one_process(
    trainers: int, update: str, lanes: int, clusters: Clusters, cache: Path
) -> None:
    config = small_config(
        cluster={"trainers": trainers, "workers": 2},
        data={"shuffle": f"lanes({lanes})" if lanes else "rows", "synthetic_rows": ROWS},
        dense={"optimizer": "Adam"},
        train={"epochs": 2, "update": update, "dtype": "float64", "batch_size": BATCH_SIZE},
        schedule={"kind": "cosine(warmup_steps = 5)"},
    )
    clusters.get(trainers, 2).run(compare, config, cache, STEPS)


@pytest.mark.parametrize("lanes", [16, pytest.param(0, marks=pytest.mark.long)])
def test_stored_data_have_the_bits_of_local_data(
    lanes: int, clusters: Clusters, store: Store, cache: Path, tmp_path: Path
) -> None:
    data = {"shuffle": f"lanes({lanes})" if lanes else "rows", "synthetic_rows": 1500, "weight": "weight"}
    config = small_config(data=data)
    stored = in_store(config, store, tmp_path)
    cluster = clusters.get(2, 2)
    rows, metrics = cluster.run(evaluate, config, cache, STEPS)
    stored_rows, stored_metrics = cluster.run(evaluate, stored, parse_path(stored.data.cache_folder), STEPS)
    assert stored_metrics == metrics
    assert stored_rows.keys() == rows.keys()
    assert all(torch.equal(stored_rows[name], values) for name, values in rows.items())


PLAIN_TASKS = {
    "click": TaskSection(label="label", metrics=("gauc",)),
    "buy": TaskSection(label="converted", mask="label", loss="focal", weight=0.5),
    "spent": TaskSection(type="regression"),
    "stars": TaskSection(type="classes(5)"),
}
RANKED_TASKS = {
    "click": TaskSection(label="label", metrics=("gauc",), ranking_loss="listwise"),
    "buy": TaskSection(label="converted", mask="label", weight=0.5, ranking_loss="pairwise"),
    "spent": TaskSection(type="regression", ranking_loss="pairwise(1)"),
}


@pytest.mark.parametrize(
    ("tasks", "trainers", "update", "shuffle"),
    [
        (RANKED_TASKS, 2, "lookahead", "rows"),
        pytest.param(PLAIN_TASKS, 3, "lookahead", "rows", marks=pytest.mark.long),
        pytest.param(RANKED_TASKS, 3, "sync", "none", marks=pytest.mark.long),
    ],
    ids=["ranked", "plain", "ranked, not shuffled"],
)
def test_several_tasks_with_masks_and_weights_train_as_in_one_process(
    tasks: dict[str, TaskSection], trainers: int, update: str, shuffle: str, clusters: Clusters, cache: Path
) -> None:
    """Groups have one to dozens of 750 rows, so ranked slices are uneven and micro-batches often empty."""
    config = small_config(
        cluster={"trainers": trainers, "workers": 2},
        data={"weight": "weight", "group": "C26", "shuffle": shuffle, "synthetic_rows": ROWS},
        train={
            "epochs": 2,
            "update": update,
            "dtype": "float64",
            "micro_batches": 2,
            "batch_size": BATCH_SIZE,
        },
    )
    clusters.get(trainers, 2).run(compare, config.replace(tasks=tasks), cache, STEPS)


def pooled_by_trainers(cluster: JoinedCluster, config: RunConfig, cache: Path) -> tuple[str, ...]:
    with opened(cluster, config, cache) as session:
        return session.placement.pooled_by_trainers


COLUMNS = {
    "age": ColumnSection(kind="quantiles(5)"),
    "hour": ColumnSection(kind="hour", source=("time",)),
    "both": ColumnSection(kind="cross", source=("user", "place"), vocabulary="hash(50)"),
    "tags": ColumnSection(kind="weighted", pooling="mean"),
    "likes": ColumnSection(pooling="max"),
    "seen": ColumnSection(kind="weighted", max_ids=2, too_many_ids="keep_last"),
    "mean_likes": ColumnSection(source=("likes",), pooling="mean"),
    "last_likes": ColumnSection(source=("likes",), pooling="none", max_ids=2, too_many_ids="keep_last"),
    "one_tag": ColumnSection(kind="weighted", source=("tags",), pooling="none", max_ids=3),
}
TABLES = {
    "tags": TableSection(placement="row", init="normal(0.1)"),
    "seen": TableSection(placement="row"),
    "likes": TableSection(features=("likes", "mean_likes", "last_likes")),
}

GROUPS = {
    "cross": DenseGroupSection(parameters=("interaction.*",), optimizer_options=("lr = 0.001",)),
    "plain": DenseGroupSection(
        parameters=("head.*.bias", "remote.0.bias"), optimizer_options=("eps = 1e-3",)
    ),
}


@pytest.mark.parametrize("update", [pytest.param("sync", marks=pytest.mark.long), "lookahead"])
def test_columns_of_every_kind_train(update: str, clusters: Clusters, cache: Path, tmp_path: Path) -> None:
    """Weighted and plain bags, split and unsplit tables, sequences, pretrained rows, and groups of
    dense parameters."""
    draw = random.Random(5)

    def bag(with_weights: bool) -> str:
        tags = [f"t{draw.randrange(9)}" for _ in range(draw.randrange(4))]
        return "|".join(tag + (f":{draw.random():.3f}" if with_weights else "") for tag in tags)

    rows = (
        f"{draw.randrange(2)},{draw.random():.2f},2024-01-0{1 + i % 9} {i % 24:02}:30,u{draw.randrange(20)},"
        f"{i % 3},{bag(True)},{bag(True)},{bag(False)}\n"
        for i in range(300)
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
            "sparse": ("age", "hour", "user", "both", "tags", "seen", "likes", *list(COLUMNS)[-3:]),
            "multi_hot_separator": "|",
        },
        embedding={"dim": 4},
        dense={"net": "dcn_v2", "optimizer": "Adam", "remote_mlp": (8,)},
        train={"batch_size": 60, "epochs": 2, "update": update, "dtype": "float64", "clip_norm": 0.5},
    )
    tables = {**TABLES, "user": TableSection(initial=str(users), frozen=True)}
    config = config.replace(tables=tables, columns=COLUMNS, dense_groups=GROUPS)
    clusters.get(2, 2).run(compare, config, cache, 7)
    # These tables are small, so the placement lets trainers pool their bags.
    assert clusters.get(2, 2).run(pooled_by_trainers, config, cache) == ("tags", "seen", "likes")


@pytest.mark.parametrize(
    ("update", "ddp", "weight"), [("lookahead", "outside", "importance"), ("sync", "inside", "")]
)
def test_two_towers_train(update: str, ddp: str, weight: str, clusters: Clusters, tmp_path: Path) -> None:
    """The last batch of an epoch has 20 samples, with and without choices."""
    config = choices_config(
        tmp_path,
        data={"weight": weight},
        dense={"net": "two_towers", "top_mlp": [6], "ddp": ddp},
        train={"batch_size": 31, "epochs": 2, "update": update, "dtype": "float64"},
        run={"seed": 3},
    )
    clusters.get(2, 2).run(compare, config, tmp_path / "prepared", 9)


def evaluate_twice(
    cluster: JoinedCluster, config: RunConfig, cache: StoragePath, num_steps: int
) -> tuple[Metrics, Metrics]:
    """Return the metrics before and after some steps of one job."""
    with opened(cluster, config, cache) as session:
        before = session.evaluate(0)
        session.train(0, num_steps)
        return before, session.evaluate(num_steps)


def test_each_evaluation_ranks_the_items_of_that_time(clusters: Clusters, tmp_path: Path) -> None:
    config, cluster = choices_config(tmp_path), clusters.get(2, 2)
    before, after = cluster.run(evaluate_twice, config, tmp_path / "prepared", 4)
    _, expected = cluster.run(evaluate, config, tmp_path / "prepared", 4)
    assert after == expected
    assert before != after
