"""Tables of which every row takes every step, against torch.optim over whole tables."""

import dataclasses

import pytest
from support.cluster import Clusters
from support.matrix import Case, check_against_one_process, train_case


@pytest.mark.parametrize(
    "case",
    [
        Case(inputs="uneven", placement="row", optimizer="adam", remote=True),
        Case(inputs="uneven", update="pipelined", optimizer="momentum", features="sum"),
        Case(update="pipelined", optimizer="adagrad", micro_batches=2, clip_norm=0.2, schedule="cosine"),
        pytest.param(Case(inputs="uneven", optimizer="sgd", features="max"), marks=pytest.mark.long),
        pytest.param(
            Case(inputs="uneven", update="pipelined", optimizer="adamw", placement="row"),
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda case: case.name,
)
def test_every_row_takes_every_step(case: Case, clusters: Clusters) -> None:
    """With trainers that end early, and one that has no batches at all; what is touched alone is no match."""
    case = dataclasses.replace(case, trainers=3, weight_decay=0.05, all_rows=True)
    outcome = clusters.get(3, 2).run(train_case, case)
    check_against_one_process(case, outcome)
    with pytest.raises(AssertionError):
        check_against_one_process(dataclasses.replace(case, all_rows=False), outcome)
