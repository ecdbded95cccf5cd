"""Four layers, on a worker and under DDP in turn: distributed autograd gives the gradients of a local pass.

``test_ddp_dist_autograd_local_vs_remote_gpu`` of torch's ``ddp_under_dist_autograd_test.py``. There it takes
NCCL and a GPU for each of 4 trainers; here all trainers share one GPU, and gloo reduces their gradients.
"""

from functools import partial

import pytest
import torch
from comparison.cases.peers import chain, on_all_trainers
from support.cluster import Clusters

TRAINERS = 4
LAYERS = {"1", "2", "3", "4"}
UNDER_DDP = {"2", "4"}


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda:0",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_ddp_dist_autograd_local_vs_remote_gpu(device: str, clusters: Clusters) -> None:
    of_trainers = clusters.get(TRAINERS, 1, device=device).run(on_all_trainers, partial(chain, device))
    assert len(of_trainers) == TRAINERS
    for ((distributed, local),) in of_trainers:
        assert distributed.keys() == LAYERS
        torch.testing.assert_close(distributed, local)
        assert all(gradient.any() for gradient in local.values())
        ((first, _),) = of_trainers[0]
        assert all(torch.equal(distributed[layer], first[layer]) for layer in UNDER_DDP)
