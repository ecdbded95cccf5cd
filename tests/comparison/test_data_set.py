"""A job on a prepared data set, with shuffled epochs and a last batch that is short: as one process."""

from pathlib import Path

import pytest
from support.cluster import Clusters, small_config
from support.jobs import compare

from hybrid.config import TaskSection

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
