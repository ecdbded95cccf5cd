"""What torch's ``ddp_under_dist_autograd_test.py`` shows of its hybrid model, shown of this project's.

The tests of gradients bear the names they have there. 4 trainers, a worker and a master, as there;
``comparison/cases/hybrid_trainer.py`` says which part stands for which. Its ``DdpComparisonTest`` and
``CudaDdpComparisonTest`` are in ``test_ddp_comparison.py``. What it also has:

- ``_call_method``, ``_remote_method``, ``_remote_method_async``: ``wire.Remote.call``; all tests use it.
- ``_trainer_process``, ``_remote_worker_process``, ``_master_process``, ``_do_test``: ``workers/``, likewise.
- ``destroy_pg``: the trainers' process group is that of their processes, and ends when they leave the
  cluster; the master is not in it, so there is no ``new_group`` that every rank must call.
- ``init_logger``: has no counterpart; each role's standard error is its log.
- ``DDP.join``: is not in the training path; ``test_ddp_comparison.py`` shows that it works all the same.
"""

import pytest
import torch
import torch.distributed as dist
from comparison.cases.examples import (
    DIM,
    HIDDEN,
    NUM_DENSE,
    NUM_ROWS,
    OUT,
    ROW_VALUE,
    get_linear,
    get_training_examples,
)
from comparison.cases.hybrid_trainer import RATE, echo, train
from support.cluster import CaseError, Clusters, RunningCluster
from torch import Tensor

from hybrid.batch import Batch, SparseFeatures
from hybrid.topology import MASTER, Topology
from workers.rendezvous.bootstrap import JoinedCluster, announce_stop, await_stop

TRAINERS, ROUNDS = 4, 3
REMOTE_WEIGHT = get_linear(NUM_DENSE + DIM, HIDDEN).weight.detach()


@pytest.fixture
def cluster(clusters: Clusters) -> RunningCluster:
    return clusters.get(TRAINERS, 1)


def whole_batches() -> list[list[Batch]]:
    """Each trainer's examples, as one batch."""
    return [[batch] for batch in get_training_examples(TRAINERS)]


def check_even(cluster: RunningCluster, mode: str, cancelling: set[str]) -> None:
    """Train on whole batches; the gradients of ``cancelling`` parameters must be zero, no others."""
    trained = cluster.run(train, mode, whole_batches(), ROUNDS)
    of_trainers = [gradients for of_round in trained.gradients for gradients in of_round]
    assert len(of_trainers) == ROUNDS * TRAINERS
    for gradients in of_trainers:
        assert gradients.keys() == {"bottom.weight", "head.weight"}
        assert {name for name, gradient in gradients.items() if not gradient.any()} == cancelling
    # On the worker the parts of all trainers meet in every mode, and cancel too.
    assert torch.equal(trained.rows, torch.full((NUM_ROWS, DIM), ROW_VALUE))
    assert torch.equal(trained.weight, REMOTE_WEIGHT)


def test_backward_no_ddp(cluster: RunningCluster) -> None:
    check_even(cluster, "none", cancelling=set())


def test_backward_ddp_outside(cluster: RunningCluster) -> None:
    check_even(cluster, "outside", cancelling={"bottom.weight", "head.weight"})


def test_backward_ddp_inside(cluster: RunningCluster) -> None:
    check_even(cluster, "inside", cancelling={"head.weight"})


def one_process(shares: list[list[Batch]]) -> tuple[list[dict[str, Tensor]], Tensor, Tensor]:
    """What ``train`` gives, by plain torch: each round's last gradients, the rows, the remote weight."""
    bottom, head = get_linear(NUM_DENSE, NUM_DENSE).weight, get_linear(HIDDEN, OUT).weight
    rows = torch.full((NUM_ROWS, DIM), ROW_VALUE, requires_grad=True)
    remote = REMOTE_WEIGHT.clone().requires_grad_()
    gradients = []
    for _ in range(ROUNDS):
        for step in range(max(map(len, shares))):
            batches = [share[step] for share in shares if step < len(share)]
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
    """Trainers 0 and 1 have half as many batches. Beyond torch's test: every gradient is the right one."""
    shares = [batch.split(2) for batch in get_training_examples(TRAINERS)]
    shares = [share[:1] if trainer < TRAINERS // 2 else share for trainer, share in enumerate(shares)]
    trained = cluster.run(train, "outside", shares, ROUNDS)
    gradients, rows, weight = one_process(shares)
    for of_round, expected in zip(trained.gradients, gradients, strict=True):
        assert all(gradient.any() for gradient in expected.values())
        for of_trainer in of_round:
            torch.testing.assert_close(of_trainer, expected)
    torch.testing.assert_close(trained.rows, rows)
    torch.testing.assert_close(trained.weight, weight)
    assert not torch.equal(rows, torch.full_like(rows, ROW_VALUE))


@pytest.mark.parametrize(
    "sparse",
    [
        SparseFeatures(torch.tensor([0, 1]), None, None, 1),
        SparseFeatures.from_bags([[[0], [1, 1]]], [[[1.0], [0.5, 2.0]]]),
    ],
    ids=["one id a sample", "weighted bags"],
)
def test_a_batch_travels_by_rpc(sparse: SparseFeatures, cluster: RunningCluster) -> None:
    """torch's ``FeatureSet`` is a ``Batch``."""
    batch = Batch(torch.randn(2, NUM_DENSE), sparse, torch.ones(2), 2)
    there_and_back = cluster.run(echo, batch)
    assert isinstance(there_and_back, Batch)
    torch.testing.assert_close(there_and_back, batch, rtol=0, atol=0)


@pytest.mark.parametrize("num_ids", [1, 3, 5])
def test_a_batch_of_two_sizes_is_an_error(num_ids: int, cluster: RunningCluster) -> None:
    ids = SparseFeatures(torch.zeros(num_ids, dtype=torch.int64), None, None, 1)
    shares = [[batch._replace(sparse_features=ids)] for batch in get_training_examples(TRAINERS)]
    with pytest.raises(CaseError, match=rf"trainer \d\b.*\b4\b.*\b{num_ids}\b"):
        cluster.run(train, "outside", shares, 1)


def test_a_word_to_stop_that_comes_early_is_not_lost() -> None:
    """torch's signal is a condition variable: nobody hears it who does not wait yet."""
    store, topology = dist.HashStore(), Topology(TRAINERS, 1)
    announce_stop(JoinedCluster(MASTER, topology, store, {}))
    await_stop(JoinedCluster(topology.trainers[0], topology, store, {}))
