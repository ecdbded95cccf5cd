"""Sequences on a cluster equal one process, which pads them."""

from operator import attrgetter

import pytest
import torch
from support.cluster import Clusters
from support.matrix import Case, check_against_one_process, train_case


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
