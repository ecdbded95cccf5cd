"""Dense nets on a GPU, tables on the workers' CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.cluster import Clusters, small_config
from support.jobs import train
from support.reference import Reference

from hybrid.data.prepared import prepare

STEPS = 10

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("trainers", [1, 2])
def test_it_equals_one_process_on_the_cpu(
    trainers: int, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """Two trainers share the one GPU, or have one each; gloo or NCCL reduces their gradients."""
    config = small_config(
        cluster={"trainers": trainers, "workers": 2},
        embedding={"optimizer": "sgd"},
        dense={"device": "cuda"},
    )
    trained = clusters.get(trainers, 2, device="cuda").run(train, config, cache, tmp_path, STEPS)
    reference = Reference(config, prepare(config, cache), trained.initial_tables)
    torch.testing.assert_close(trained.losses, reference.train(STEPS), rtol=1e-4, atol=1e-5)
    for name, rows_RD in reference.tables.items():
        torch.testing.assert_close(trained.tables[name], rows_RD.detach(), rtol=1e-4, atol=1e-5)
