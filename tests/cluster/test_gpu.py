"""Dense nets on a GPU, tables on the workers' CPUs."""

from pathlib import Path
from typing import Any

import pytest
from support.cluster import Clusters, small_config
from support.jobs import compare

from hybrid.config import TaskSection

STEPS = 20

pytestmark = pytest.mark.gpu


def trained_on_a_gpu(
    clusters: Clusters, cache: Path, trainers: int, dense: dict[str, Any], update: str = "sync"
) -> None:
    """Compare with one process; trainers share a GPU (gloo reduces gradients) or have one each (NCCL)."""
    config = small_config(
        cluster={"trainers": trainers, "workers": 2},
        dense=dense,
        train={"update": update, "dtype": "float64"},
    )
    clusters.get(trainers, 2, device="cuda").run(compare, config, cache, STEPS)


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("update", ["sync", "lookahead"])
def test_gpu_trainers_equal_one_process_on_the_cpu(
    trainers: int, update: str, clusters: Clusters, cache: Path
) -> None:
    trained_on_a_gpu(clusters, cache, trainers, {"device": "cuda"}, update)


def test_ranking_losses_on_a_gpu_equal_one_process(clusters: Clusters, cache: Path) -> None:
    config = small_config(
        cluster={"trainers": 2, "workers": 2},
        data={"group": "C26"},
        dense={"device": "cuda"},
        train={"dtype": "float64", "micro_batches": 2},
    )
    tasks = {
        "click": TaskSection(label="label", ranking_loss="listwise"),
        "spent": TaskSection(type="regression", ranking_loss="pairwise"),
    }
    clusters.get(2, 2, device="cuda").run(compare, config.replace(tasks=tasks), cache, STEPS)


@pytest.mark.parametrize(
    "dense",
    [
        {"device": "cuda:0,cpu"},
        {"device": "cuda:0,cuda:0", "compile": "script"},
        {"compile": "trace", "device": "cuda"},
        {"compile": "inductor", "device": "cuda"},
    ],
    ids=str,
)
def test_execution_backends_on_a_gpu_equal_one_process(
    dense: dict[str, Any], clusters: Clusters, cache: Path
) -> None:
    trained_on_a_gpu(clusters, cache, 2, dense)
