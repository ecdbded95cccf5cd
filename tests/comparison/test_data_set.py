"""A job on a prepared data set, with shuffled epochs and a last batch that is short: as one process."""

from pathlib import Path

import pytest
from support.cluster import Clusters, small_config
from support.jobs import compare

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
