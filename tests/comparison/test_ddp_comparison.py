"""Distributed autograd has the gradients of a local backward pass, with DDP and remote layers.

These are the tests of ``DdpComparisonTest`` in torch's ``ddp_under_dist_autograd_test.py``, under the same
names.
"""

from functools import partial

import pytest
import torch
from comparison.cases import peers
from comparison.cases.peers import Compared, on_all_trainers
from support.cluster import Clusters, RunningCluster

TRAINERS = 4


@pytest.fixture
def cluster(clusters: Clusters) -> RunningCluster:
    return clusters.get(TRAINERS, 1)


def check(of_trainers: list[list[Compared]], names: set[str], shared: set[str]) -> None:
    """Check that both gradients are equal, and those of ``shared`` parameters on all trainers."""
    assert len(of_trainers) == TRAINERS
    for of_trainer in of_trainers:
        for distributed, local in of_trainer:
            assert distributed.keys() == names
            torch.testing.assert_close(distributed, local)
            assert all(gradient.any() for gradient in local.values())
    for of_step in zip(*of_trainers, strict=False):  # a trainer may have had fewer
        for name in names:
            first, *others = (distributed[name] for distributed, _ in of_step)
            assert all(torch.equal(first, other) for other in others) == (name in shared)


def test_ddp_comparison(cluster: RunningCluster) -> None:
    compared = cluster.run(on_all_trainers, partial(peers.hybrid_model, False))
    assert [len(of_trainer) for of_trainer in compared] == [1, 1, 1, 1]
    check(compared, {"bottom.weight", "bottom.bias"}, {"bottom.weight", "bottom.bias"})


def test_ddp_comparison_uneven_inputs(cluster: RunningCluster) -> None:
    compared = cluster.run(on_all_trainers, partial(peers.hybrid_model, True))
    assert [len(of_trainer) for of_trainer in compared] == [3, 3, 3, 3]
    check(compared, {"bottom.weight", "bottom.bias"}, {"bottom.weight", "bottom.bias"})


def test_ddp_dist_autograd_sparse_grads(cluster: RunningCluster) -> None:
    check(cluster.run(on_all_trainers, peers.sparse_gradients), {"weight"}, {"weight"})


@pytest.mark.parametrize("remote_device", [pytest.param("worker0/cpu", marks=pytest.mark.long), "worker0"])
def test_ddp_dist_autograd_local_vs_remote(remote_device: str, cluster: RunningCluster) -> None:
    compared = cluster.run(on_all_trainers, partial(peers.local_vs_remote, remote_device))
    check(compared, names={"1", "2"}, shared={"2"})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_ddp_dist_autograd_local_vs_remote_gpu(device: str, clusters: Clusters) -> None:
    """Upstream needs NCCL and one GPU per trainer; here, gloo reduces and all trainers share one GPU."""
    of_trainers = clusters.get(TRAINERS, 1, device=device).run(on_all_trainers, partial(peers.chain, device))
    check(of_trainers, names={"1", "2", "3", "4"}, shared={"2", "4"})
