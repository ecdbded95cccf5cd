"""Tests of the hybrid model in torch's ``ddp_under_dist_autograd_test.py``, with the model of this project.

The tests of gradients have the same names and the same roles: 4 trainers, a worker and a master.
``comparison/cases/hybrid_trainer.py`` maps the classes.
"""

import pytest
import torch
import torch.distributed as dist
from comparison.cases.hybrid_trainer import (
    DIM,
    HIDDEN,
    NUM_DENSE,
    NUM_ROWS,
    OUT,
    RATE,
    ROW_VALUE,
    get_linear,
    get_training_examples,
    train,
)
from support.cluster import Clusters, RunningCluster
from torch import Tensor

from hybrid.batch import Batch
from hybrid.topology import MASTER, Topology
from workers.rendezvous.bootstrap import JoinedCluster, announce_stop, await_stop

TRAINERS, ROUNDS = 4, 3
REMOTE_WEIGHT = get_linear(NUM_DENSE + DIM, HIDDEN).weight.detach()


@pytest.fixture
def cluster(clusters: Clusters) -> RunningCluster:
    return clusters.get(TRAINERS, 1)


def whole_batches() -> list[list[Batch]]:
    """Return the examples of each trainer as one batch."""
    return [[batch] for batch in get_training_examples(TRAINERS)]


def check_even(cluster: RunningCluster, mode: str, cancelling: set[str]) -> None:
    """Train on these batches; only the gradients of ``cancelling`` parameters must be zero."""
    trained = cluster.run(train, mode, whole_batches(), ROUNDS)
    of_trainers = [gradients for of_round in trained.gradients for gradients in of_round]
    assert len(of_trainers) == ROUNDS * TRAINERS
    for gradients in of_trainers:
        assert gradients.keys() == {"bottom.weight", "head.weight"}
        assert {name for name, gradient in gradients.items() if not gradient.any()} == cancelling
    # The worker sums the gradients of all trainers in every mode, and they cancel.
    assert torch.equal(trained.rows, torch.full((NUM_ROWS, DIM), ROW_VALUE))
    assert torch.equal(trained.weight, REMOTE_WEIGHT)


def test_backward_no_ddp(cluster: RunningCluster) -> None:
    check_even(cluster, "none", cancelling=set())


def test_backward_ddp_outside(cluster: RunningCluster) -> None:
    check_even(cluster, "outside", cancelling={"bottom.weight", "head.weight"})


def test_backward_ddp_inside(cluster: RunningCluster) -> None:
    check_even(cluster, "inside", cancelling={"head.weight"})


def one_process(slices: list[list[Batch]]) -> tuple[list[dict[str, Tensor]], Tensor, Tensor]:
    """Return the results of ``train`` by plain torch: last gradients of each round, rows, remote weight."""
    bottom, head = get_linear(NUM_DENSE, NUM_DENSE).weight, get_linear(HIDDEN, OUT).weight
    rows = torch.full((NUM_ROWS, DIM), ROW_VALUE, requires_grad=True)
    remote = REMOTE_WEIGHT.clone().requires_grad_()
    gradients = []
    for _ in range(ROUNDS):
        for step in range(max(map(len, slices))):
            batches = [part[step] for part in slices if step < len(part)]
            values_B = torch.cat([b.labels for b in batches])
            vectors_BD = rows[torch.cat([b.sparse_features.ids_L for b in batches])]
            bottom_BH = torch.cat([b.dense_features for b in batches]) @ bottom.t()
            hidden_BH = torch.relu(torch.cat([bottom_BH, vectors_BD], dim=1) @ remote.t())
            loss = ((hidden_BH @ head.t()).view(-1) * values_B).mean()
            of_bottom, of_head, of_rows, of_remote = torch.autograd.grad(loss, [bottom, head, rows, remote])
            with torch.no_grad():
                rows -= RATE * of_rows
                remote -= RATE * of_remote
        gradients.append({"bottom.weight": of_bottom, "head.weight": of_head})
    return gradients, rows.detach(), remote.detach()


def test_backward_ddp_outside_uneven_inputs(cluster: RunningCluster) -> None:
    """Trainers 0 and 1 have half as many batches. Unlike upstream, this checks every gradient."""
    slices = [batch.split(2) for batch in get_training_examples(TRAINERS)]
    slices = [part[:1] if trainer < TRAINERS // 2 else part for trainer, part in enumerate(slices)]
    trained = cluster.run(train, "outside", slices, ROUNDS)
    gradients, rows, weight = one_process(slices)
    for of_round, expected in zip(trained.gradients, gradients, strict=True):
        assert all(gradient.any() for gradient in expected.values())
        for of_trainer in of_round:
            torch.testing.assert_close(of_trainer, expected)
    torch.testing.assert_close(trained.rows, rows)
    torch.testing.assert_close(trained.weight, weight)
    assert not torch.equal(rows, torch.full_like(rows, ROW_VALUE))


def test_early_request_to_stop_is_not_lost() -> None:
    """Upstream uses a condition variable, whose signal only reaches threads that already wait."""
    store, topology = dist.HashStore(), Topology(TRAINERS, 1)
    announce_stop(JoinedCluster(MASTER, topology, store, {}))
    await_stop(JoinedCluster(topology.trainers[0], topology, store, {}))
