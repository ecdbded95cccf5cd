"""Invalid batches that trainers provide are refused."""

import pytest
import torch
from support.cluster import CaseError, Clusters
from support.matrix import Case, train_case

from hybrid.batch import Batch


def with_an_unknown_id(trainer: int) -> list[Batch]:
    (first, *others) = Case().batches(trainer)
    first.sparse_features.ids_L[6 + 4] = 99  # of the second feature, sample 4
    return [first, *others]


def with_signs_as_labels(trainer: int) -> list[Batch]:
    first, second, *others = Case().batches(trainer)
    return [first, second._replace(labels=2 * (torch.arange(6) > 3).float() - 1), *others]


RANKED = Case(trainers=3, workers=2, tasks="ranked")


def with_groups_apart(trainer: int) -> list[Batch]:
    first, *others = RANKED.batches(trainer)
    assert first.groups is not None
    return [first._replace(groups=torch.tensor([1, 1, 2, 2, 1, 1])), *others]


def with_a_group_of_all(trainer: int) -> list[Batch]:
    first, second, *others = RANKED.batches(trainer)
    return [first, second._replace(groups=torch.full((6,), 7 if trainer else 8)), *others]


def without_groups(trainer: int) -> list[Batch]:
    return [batch._replace(groups=None) for batch in RANKED.batches(trainer)]


@pytest.mark.parametrize(
    ("make_batches", "message"),
    [
        (with_groups_apart, "batch 0: group 1"),
        (with_a_group_of_all, "group 7 is split: trainers 1 and 2 have samples of it in one step"),
        (without_groups, "batch 0: a batch has no groups"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_split_groups_are_refused(make_batches: object, message: str, clusters: Clusters) -> None:
    with pytest.raises(CaseError) as caught:
        clusters.get(3, 2).run(train_case, RANKED, make_batches)  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("make_batches", "message"),
    [
        (with_signs_as_labels, "trainer 0, batch 1: sample 0 has the label -1.0"),
        (with_an_unknown_id, "feature b, sample 4: id 99 is not a row of table bc (12 rows)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_invalid_batch_is_refused_before_it_is_sent(
    make_batches: object, message: str, clusters: Clusters
) -> None:
    with pytest.raises(CaseError) as caught:
        clusters.get(1, 1).run(train_case, Case(trainers=1, workers=1), make_batches)  # type: ignore[arg-type]
    assert message in str(caught.value)
