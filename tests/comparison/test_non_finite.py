"""Steps whose loss or gradients are not finite are skipped by all sides alike."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from support.cluster import Clusters
from support.matrix import STEPS, Case, train_case

from hybrid.batch import Batch
from workers.jobs.snapshot import reference_snapshot

BAD_STEPS = (3, 4, 11)


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
    ],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_skipped_step_changes_nothing_anywhere(case: Case, value: float, clusters: Clusters) -> None:
    case = case.skipping()
    make_batches = partial(spoiled, case, value)
    outcome = clusters.get(2, 2).run(train_case, case, make_batches)
    assert outcome.skipped_steps == [len(BAD_STEPS)] * 2
    reference = case.reference(outcome.start)
    for shares in case.shares(make_batches):
        reference.step(shares)
    assert reference.skipped_steps == len(BAD_STEPS)
    assert len(outcome.losses) == STEPS
    end = reference_snapshot(reference)
    assert outcome.end.keys() == end.keys()
    for part, tensor in end.items():
        assert tensor.isfinite().all()
        torch.testing.assert_close(outcome.end[part], tensor, rtol=1e-12, atol=1e-12, msg=str(part))
