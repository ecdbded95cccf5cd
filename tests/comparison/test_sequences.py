"""Sequences on a cluster: as one process of plain torch, which pads them; and those that are too long."""

from operator import attrgetter
from pathlib import Path

import pytest
import torch
from support.cluster import CaseError, Clusters, small_config
from support.jobs import opened
from support.matrix import Case, check_against_one_process, train_case

from hybrid.batch import Batch, SparseFeatures
from hybrid.config import ColumnSection, RunConfig
from workers.rendezvous.bootstrap import JoinedCluster

LONGER = 4  # than the sequences of these cases may be


@pytest.mark.parametrize(
    "case",
    [
        Case(trainers=3, features="sequences", inputs="uneven", placement="row", optimizer="adagrad"),
        Case(trainers=3, features="sequences", inputs="uneven", update="pipelined"),
        Case(
            trainers=3,
            features="weighted_sequences",
            inputs="uneven",
            update="pipelined",
            placement="row",
            micro_batches=2,
            clip_norm=0.2,
            optimizer="adam",
        ),
        Case(trainers=3, features="weighted_sequences", net="dlrm", remote=True, compile="script"),
        pytest.param(
            Case(trainers=3, features="sequences", update="pipelined", net="deepfm", parallel="replicas"),
            marks=pytest.mark.long,
        ),
    ],
    ids=attrgetter("name"),
)
def test_they_train_as_in_one_process(case: Case, clusters: Clusters) -> None:
    """A table of their own, and one that a feature of one id reads too; some have no ids, and some shares no
    samples."""
    outcome = clusters.get(3, 2).run(train_case, case)
    check_against_one_process(case, outcome)
    for part, rows_RD in outcome.start.items():
        assert not torch.equal(outcome.end[part], rows_RD), "every table is trained"


def with_a_longer_history(trainer: int) -> list[Batch]:
    first, *others = Case(features="sequences").batches(trainer)
    bags = [[[1]] * 6, [[1]] * 5 + [[1] * LONGER], [[1]] * 6, [[1]] * 6]
    return [first, others[0]._replace(sparse_features=SparseFeatures.from_bags(bags)), *others[1:]]


def test_a_history_too_long_is_refused_before_it_is_sent(clusters: Clusters) -> None:
    case = Case(trainers=3, features="sequences")
    with pytest.raises(CaseError) as caught:
        clusters.get(3, 2).run(train_case, case, with_a_longer_history)
    said = "feature b, sample 5: 4 ids are more than the 3 of a sequence (columns.b.max_ids)"
    assert said in str(caught.value).splitlines()[0]


def different_samples(cluster: JoinedCluster, config: RunConfig, cache: Path) -> int:
    """How many of the test samples that trainers evaluate are different."""
    with opened(cluster, config, cache) as session:
        parts = [each.rows for predictions in session.evaluation(0) for each in predictions]
        return len(torch.cat(parts).unique())


def test_samples_that_differ_in_the_order_of_a_history_are_not_alike(
    clusters: Clusters, tmp_path: Path
) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text("label,seen\n" + "0,a|b\n1,b|a\n" * 20)
    data = {"format": "csv", "path": (str(path),), "sparse": ("seen",), "multi_hot_separator": "|"}
    config = small_config(
        cluster={"trainers": 3, "workers": 2}, data={**data, "test_fraction": 0.5}, dense={"net": "dcn_v2"}
    )
    for pooling, num_different in (("sum", 1), ("none", 2)):
        columns = {"seen": ColumnSection(pooling=pooling, max_ids=2)}
        of = config.replace(columns=columns)
        assert clusters.get(3, 2).run(different_samples, of, tmp_path / "cache") == num_different
