"""Sequences on a cluster equal one process, which pads them; too long ones are refused."""

from operator import attrgetter

import pytest
import torch
from support.cluster import CaseError, Clusters
from support.matrix import Case, check_against_one_process, train_case

from hybrid.batch import Batch, SparseFeatures

LONGER = 4  # than columns.b.max_ids


@pytest.mark.parametrize(
    "case",
    [
        Case(trainers=3, features="sequences", inputs="uneven", placement="row", optimizer="adagrad"),
        Case(trainers=3, features="sequences", inputs="uneven", update="lookahead"),
        Case(
            trainers=3,
            features="weighted_sequences",
            inputs="uneven",
            update="lookahead",
            placement="row",
            micro_batches=2,
            clip_norm=0.2,
            optimizer="adam",
        ),
        Case(trainers=3, features="weighted_sequences", net="dlrm", remote=True, compile="script"),
        pytest.param(
            Case(trainers=3, features="sequences", update="lookahead", net="deepfm", parallel="replicas"),
            marks=pytest.mark.long,
        ),
    ],
    ids=attrgetter("name"),
)
def test_sequences_train_as_in_one_process(case: Case, clusters: Clusters) -> None:
    """One table is shared with a feature of one id. Some sequences are empty, and some slices too."""
    outcome = clusters.get(3, 2).run(train_case, case)
    check_against_one_process(case, outcome)
    for part, rows_RD in outcome.start.items():
        assert not torch.equal(outcome.end[part], rows_RD), "every table is trained"


def with_a_longer_history(trainer: int) -> list[Batch]:
    first, *others = Case(features="sequences").batches(trainer)
    bags = [[[1]] * 6, [[1]] * 5 + [[1] * LONGER], [[1]] * 6, [[1]] * 6]
    return [first, others[0]._replace(sparse_features=SparseFeatures.from_bags(bags)), *others[1:]]


def test_too_long_sequence_is_refused_before_it_is_sent(clusters: Clusters) -> None:
    case = Case(trainers=3, features="sequences")
    with pytest.raises(CaseError) as caught:
        clusters.get(3, 2).run(train_case, case, with_a_longer_history)
    message = "feature b, sample 5: 4 ids are more than the 3 of a sequence (columns.b.max_ids)"
    assert message in str(caught.value).splitlines()[0]
