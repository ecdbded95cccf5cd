"""Every execution backend of a dense net equals one process, in parameters and optimizer state."""

import dataclasses
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison.cases.checkpoints import reloaded
from comparison.cases.matrix import Case, check_against_one_process, train_case
from support.cluster import CaseError, Clusters


def split(**values: Any) -> Case:
    """Return a job of four trainers with tensor groups of two."""
    return Case(trainers=4, workers=1, parallel="tensor", top_mlp=(7, 6, 5), **values)


LARGE = (2048, 2048)  # of three samples, a product that oneDNN's are for
CASES = [
    split(remote=True, micro_batches=2, update="lookahead"),
    split(
        features="sum",
        inputs="uneven",
        tasks="ranked",
        tensor_plan=("interaction.layers.0 = colwise_gathered", "head.[04] = colwise", "head.[26] = rowwise"),
    ),
    Case(parallel="replicas", net="deepfm", inputs="uneven", micro_batches=2),
    Case(parallel="replicas", net="wide_deep", compile="script", ddp="inside", remote=True),
]
LONG_CASES = [
    Case(parallel="replicas", net="ple", tasks="several", compile="script"),
    Case(remote=True, dtype="float32", remote_mlp=LARGE),
    Case(parallel="replicas", compile="script", dtype="float32", top_mlp=LARGE),
    split(net="dlrm", inputs="uneven", dense_optimizer="AdamW"),
    split(net="deepfm", ddp="inside", clip_norm=0.2),
    split(net="wide_deep", ddp="none", clip_norm=0.2),
    Case(parallel="replicas", compile="aot_eager"),
    split(net="ple", tasks="several", ddp="inside", clip_norm=0.2),
    Case(compile="aot_eager", net="mmoe", tasks="several"),
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in LONG_CASES)],
    ids=attrgetter("name"),
)
def test_cluster_equals_one_process(case: Case, clusters: Clusters) -> None:
    check_against_one_process(case, clusters.get(case.trainers, case.workers).run(train_case, case))


@pytest.mark.long
def test_checkpoint_loads_with_any_execution_backend(clusters: Clusters, tmp_path: Path) -> None:
    halves = split(dense_optimizer="AdamW")
    quarters = dataclasses.replace(halves, tensor_size=4)
    whole = dataclasses.replace(halves, parallel="none")
    cluster = clusters.get(4, 1)
    for number, (saved, loaded) in enumerate([(halves, whole), (whole, halves), (halves, quarters)]):
        before, after = cluster.run(reloaded, saved, loaded, tmp_path / str(number))
        assert after.keys() == before.keys()
        assert [part for part, tensor in before.items() if not torch.equal(after[part], tensor)] == []


def test_invalid_sharding_plan_is_refused_before_training(clusters: Clusters) -> None:
    rule = r"dense\.tensor_plan.*head of the net fails with this backend"
    with pytest.raises(CaseError, match=rule):
        clusters.get(4, 1).run(train_case, split(tensor_plan=("head.0 = colwise",)))
