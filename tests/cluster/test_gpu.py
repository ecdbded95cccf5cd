"""Dense nets on a GPU, tables on the workers' CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.cluster import Clusters, small_config
from support.jobs import compare

STEPS = 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("update", ["sync", "pipelined"])
def test_it_equals_one_process_on_the_cpu(
    trainers: int, update: str, clusters: Clusters, cache: Path
) -> None:
    """Two trainers share the one GPU, or have one each; gloo or NCCL reduces their gradients."""
    config = small_config(
        cluster={"trainers": trainers, "workers": 2},
        dense={"device": "cuda"},
        train={"update": update, "dtype": "float64"},
    )
    clusters.get(trainers, 2, device="cuda").run(compare, config, cache, STEPS)
