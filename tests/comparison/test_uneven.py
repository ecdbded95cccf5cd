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


def with_a_group_of_all(trainer: int) -> list[Batch]:
    first, second, *others = RANKED.batches(trainer)
    return [first, second._replace(groups=torch.full((6,), 7 if trainer else 8)), *others]


def test_group_that_is_split_between_trainers_is_refused(clusters: Clusters) -> None:
    with pytest.raises(CaseError, match=r"group 7 is split: trainers 1 and 2 "):
        clusters.get(3, 2).run(train_case, RANKED, with_a_group_of_all)


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
