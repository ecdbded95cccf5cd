"""Every execution backend of a dense net equals one process, in parameters and optimizer state."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison.cases.matrix import Case, check_against_one_process, train_case
from support.cluster import CaseError, Clusters, small_config
from support.jobs import evaluate, evaluate_in_two_parts


def split(**values: Any) -> Case:
    """Return a job of four trainers with tensor groups of two."""
    return Case(trainers=4, workers=1, parallel="tensor", top_mlp=(7, 6, 5), **values)


LARGE = (2048, 2048)  # of three samples, a product that oneDNN's are for
CASES = [
    split(
        features="sum",
        micro_batches=2,
        update="lookahead",
        tensor_plan=("interaction.layers.0 = colwise_gathered", "head.[04] = colwise", "head.[26] = rowwise"),
    ),
    Case(parallel="replicas", net="deepfm", inputs="uneven", micro_batches=2),
]
LONG_CASES = [
    split(features="sum", inputs="uneven"),
    split(remote=True, micro_batches=2, update="lookahead"),
    Case(parallel="replicas", net="wide_deep", ddp="inside", remote=True),
    split(features="sum", inputs="uneven", tasks="ranked"),
    Case(parallel="replicas", net="ple", tasks="several"),
    Case(remote=True, dtype="float32", remote_mlp=LARGE),
    Case(parallel="replicas", dtype="float32", top_mlp=LARGE),
    split(net="dlrm", inputs="uneven", dense_optimizer="AdamW"),
    split(net="deepfm", ddp="inside", clip_norm=0.2),
    split(net="wide_deep", ddp="none", clip_norm=0.2),
    split(net="ple", tasks="several", ddp="inside", clip_norm=0.2),
    Case(compile="aot_eager", net="mmoe", tasks="several", remote=True),
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in LONG_CASES)],
    ids=attrgetter("name"),
)
def test_cluster_equals_one_process(case: Case, clusters: Clusters) -> None:
    check_against_one_process(case, clusters.get(case.trainers, case.workers).run(train_case, case))


@pytest.mark.long
def test_runs_continue_with_any_execution_backend(clusters: Clusters, cache: Path, tmp_path: Path) -> None:
    whole, halves, quarters = (
        small_config(
            cluster={"trainers": 4, "workers": 1},
            dense={"optimizer": "AdamW", "tensor_size": size},
            train={"dtype": "float64"},
        )
        for size in (0, 2, 4)
    )
    cluster, steps = clusters.get(4, 1), 6
    expected, metrics = cluster.run(evaluate, whole, cache, steps)
    for number, (first, later) in enumerate([(halves, whole), (whole, halves), (halves, quarters)]):
        scratch = tmp_path / str(number)
        found = cluster.run(evaluate_in_two_parts, first, cache, scratch, steps, later)
        torch.testing.assert_close(found[0], expected, rtol=0.0, atol=1e-12)
        assert found[1] == pytest.approx(metrics, rel=1e-9)


def test_invalid_sharding_plan_is_refused_before_training(clusters: Clusters) -> None:
    rule = r"dense\.tensor_plan.*head of the net fails with this backend"
    with pytest.raises(CaseError, match=rule):
        clusters.get(4, 1).run(train_case, split(tensor_plan=("head.0 = colwise",)))
