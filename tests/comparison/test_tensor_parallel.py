"""Nets sharded over a tensor group equal unsharded ones: alone and under DDP.

What torch's ``test_ddp_2d_parallel.py`` shows of its transform, shown of this project's, on the trainers of
a running cluster; in float64, rounding is 1e-16 and a mistake is anything else.
"""

from functools import partial

import pytest
import torch
from comparison.cases.peers import Compared, Job, on_all_trainers
from comparison.cases.tensor import (
    gradient_of_squares,
    own_weights,
    planned,
    shards,
    shared,
    trained,
    uneven_inputs,
    uneven_mesh,
    uneven_output,
)
from support.cluster import CaseError, Clusters, RunningCluster

TRAINERS = 4
DENSE = {"net1.weight", "net1.bias", "net2.weight", "net2.bias"}
EXACT = (0.0, 0.0)


@pytest.fixture
def cluster(clusters: Clusters) -> RunningCluster:
    return clusters.get(TRAINERS, 1)


def check(cluster: RunningCluster, job: Job, rtol: float, atol: float) -> list[list[Compared]]:
    """Check that each trainer has exactly the expected values."""
    of_trainers = cluster.run(on_all_trainers, job)
    assert len(of_trainers) == TRAINERS
    for of_trainer in of_trainers:
        assert of_trainer
        for got, expected in of_trainer:
            assert got.keys() == expected.keys()
            torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    return of_trainers


def test_sharded_net_under_ddp_equals_the_unsharded_net(cluster: RunningCluster) -> None:
    """Outputs, gradients and parameters after Adam are equal, also for an input of another size."""
    compared = check(cluster, trained, rtol=0.0, atol=1e-12)
    for of_trainer in compared:
        (first, _), (second, _), (parameters, _) = of_trainer
        assert first.keys() == second.keys() == {"output", *DENSE}
        assert parameters.keys() == DENSE
        assert all(gradient.any() for gradient in first.values())
        assert (len(first["output"]), len(second["output"])) == (4, 16)
    # Ranks of a tensor group share inputs, and ranks of a data group share shards.
    outputs = [of_trainer[0][0]["output"] for of_trainer in compared]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert [of_trainer[0][0]["net1.weight"].size(0) for of_trainer in compared] == [4, 3, 4, 3]


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("cross", torch.float64, 1e-12),
        pytest.param("logits", torch.float32, 1e-5, marks=pytest.mark.long),
        pytest.param("logits", torch.bfloat16, 5e-2, marks=pytest.mark.long),
    ],
)
def test_shared_stage_equals_the_stage_on_all_samples_of_its_group(
    kind: str, dtype: torch.dtype, tolerance: float, cluster: RunningCluster
) -> None:
    """Slices have any size, and any rank may need gradients; plans are automatic, shards uneven."""
    check(cluster, partial(shared, kind, dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "texts",
    [
        ["head.2 = rowwise"],
        ["head.[04] = rowwise"],
        ["head.[02] = colwise", "head.4 = rowwise"],
        ["head.0 = colwise", "head.2 = colwise_gathered"],
        ["head.4 = colwise_gathered"],  # one output for two ranks
    ],
)
def test_sharding_styles_of_successive_layers_combine(texts: list[str], cluster: RunningCluster) -> None:
    """A layer takes full inputs, and inputs that the layer before left sharded."""
    check(cluster, partial(planned, texts), rtol=0.0, atol=1e-12)


def test_shards_of_any_size_are_gathered_to_the_parameter(cluster: RunningCluster) -> None:
    check(cluster, shards, *EXACT)


def test_sharding_a_net_needs_no_communication(cluster: RunningCluster) -> None:
    """Ranks that start from different weights keep them."""
    compared = check(cluster, own_weights, *EXACT)
    assert [float(parts["net1.bias"][0]) for ((parts, _),) in compared] == [1, 2, 3, 4]


def test_gradient_of_a_gathered_parameter_reaches_the_shards(cluster: RunningCluster) -> None:
    check(cluster, gradient_of_squares, *EXACT)


def test_group_size_that_does_not_divide_the_trainers_is_refused(cluster: RunningCluster) -> None:
    with pytest.raises(CaseError, match=r"ValueError: 4 trainers .* groups of 3"):
        cluster.run(on_all_trainers, uneven_mesh)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (uneven_inputs, r"inputs of a stage must have as many rows as each other, not \[2, 3\]"),
        (uneven_output, "the stage gives 12 rows for 6 samples"),
    ],
)
def test_shared_stage_needs_one_row_for_each_sample(job: Job, message: str, cluster: RunningCluster) -> None:
    with pytest.raises(CaseError, match=f"ValueError: {message}"):
        cluster.run(on_all_trainers, job)
