"""Invalid batches that trainers provide are refused."""

import pytest
from comparison.cases.matrix import Case, train_case
from support.cluster import CaseError, Clusters

from hybrid.batch import Batch


def with_an_unknown_id(trainer: int) -> list[Batch]:
    (first, *others) = Case().batches(trainer)
    first.sparse_features.ids_L[6 + 4] = 99  # of the second feature, sample 4
    return [first, *others]


def test_invalid_batch_is_refused_before_it_is_sent(clusters: Clusters) -> None:
    with pytest.raises(CaseError, match="feature b, sample 4: id 99 is not a row of table bc"):
        clusters.get(3, 2).run(train_case, Case(trainers=3), with_an_unknown_id)
