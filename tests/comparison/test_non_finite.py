"""Steps whose loss or gradients are not finite are skipped by all sides alike."""

import math
from functools import partial

import pytest
from support.cluster import Clusters
from support.matrix import Case, check_against_one_process, train_case

from hybrid.batch import Batch

BAD_STEPS = (3, 4, 9)


def spoiled(case: Case, value: float, trainer: int) -> list[Batch]:
    """A case's batches, some of which hold ``value`` on the last trainer alone."""
    batches = case.batches(trainer)
    if trainer == case.trainers - 1:
        for step in BAD_STEPS:
            batches[step].dense_features[0, 0] = value
    return batches


@pytest.mark.parametrize(
    "case",
    [
        Case(ddp="outside", remote=True, optimizer="adam", dense_optimizer="AdamW"),
        Case(ddp="none", optimizer="momentum", micro_batches=2, clip_norm=0.2),
        Case(ddp="inside", optimizer="adagrad", update="pipelined", schedule="cosine"),
        Case(optimizer="adam", update="pipelined", weight_decay=0.05, all_rows=True),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.long)])
def test_a_skipped_step_changes_nothing_anywhere(case: Case, value: float, clusters: Clusters) -> None:
    case = case.skipping()
    make_batches = partial(spoiled, case, value)
    outcome = clusters.get(2, 2).run(train_case, case, make_batches)
    assert outcome.skipped_steps == [len(BAD_STEPS)] * 2
    assert check_against_one_process(case, outcome, make_batches).skipped_steps == len(BAD_STEPS)
    assert all(tensor.isfinite().all() for tensor in outcome.end.values())
