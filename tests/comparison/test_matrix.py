"""Training on a cluster equals one process of plain torch: every parameter, every optimizer's state."""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from comparison.cases.matrix import GROWTH, Case, Outcome, check_against_one_process, train_case
from support.cluster import CaseError, Clusters

from hybrid.batch import Batch
from hybrid.config.sections import SCHEDULE_CALLS
from hybrid.config.table_sections import TABLE_OPTIMIZERS

FEATURES = ("one_hot", "sum", "mean", "max", "weights")
CHOICES = {
    "trainers": (1, 2, 3),
    "workers": (1, 2, 3),
    "ddp": ("none", "inside", "outside"),
    "placement": ("table", "row"),
    "pooled_by": ("workers", "trainers"),
    "optimizer": TABLE_OPTIMIZERS.names,
    "inputs": ("even", "uneven"),
    "features": FEATURES,
    "remote": (False, True),
    "dtype": ("float64", "float32"),
    "update": ("sync", "lookahead"),
    "micro_batches": (1, 2),
    "clip_norm": (None, 0.2),
    "schedule": SCHEDULE_CALLS.names,
    "weight_decay": (0.0, 0.01),
    "all_rows": (False, True),
    "dense_optimizer": ("SGD", "AdamW"),
    "has_many_hosts": (False, True),
    "parallel": ("none", "replicas"),
    "tasks": ("one", "weighted", "several", "ranked"),
}
# Unit tests compare each optimizer, schedule and pooling with torch.
NOT_EACH_IN_A_QUICK_CASE = {"optimizer", "schedule", "features"}
INDEPENDENT_OF_GROWTH = {
    *("ddp", "pooled_by", "remote", "schedule", "all_rows", "dense_optimizer", "parallel", "tasks")
}
CHOICES_OF_GROWING_TABLES = {
    **{name: values for name, values in CHOICES.items() if name not in INDEPENDENT_OF_GROWTH},
    "trainers": (1, 2),
    "features": (*FEATURES, "sequences", "weighted_sequences"),
    "growing": (*GROWTH,),
}


def covering_rows(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return few rows with one value of each choice, such that any two values occur together in one.

    Greedy: each row is the best of 60 random ones that contain a pair not covered yet. Deterministic.
    """
    generator = random.Random(1)
    missing = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(choices, 2)
        for a, b in itertools.product(choices[one], choices[other])
    }
    rows = []
    while missing:
        fixed = dict(min(missing, key=repr))  # a set of texts has another order in each process
        drawn = [{n: generator.choice(values) for n, values in choices.items()} | fixed for _ in range(60)]
        rows.append(
            max(drawn, key=lambda row: len(missing.intersection(itertools.combinations(row.items(), 2))))
        )
        missing.difference_update(itertools.combinations(rows[-1].items(), 2))
    return rows


def covering_cases(choices: Mapping[str, Sequence[Any]], *clusters: tuple[int, int, bool]) -> list[Any]:
    """Return cases as parameters: few that have nearly every value, on ``clusters``, and all, marked as long.

    They are sorted by cluster, because a cluster runs until another one is needed.

    Args:
        clusters: numbers of trainers and workers, and whether trainers act as if on many hosts.
    """
    rows = covering_rows(choices)
    quick: list[Case] = []
    shapes = itertools.cycle([*clusters, *clusters[:-1]])  # few cases on the last one, which has one trainer
    names = choices.keys() - NOT_EACH_IN_A_QUICK_CASE
    missing = {(name, value) for name in names for value in choices[name]}
    while missing:
        cluster = zip(("trainers", "workers", "has_many_hosts"), next(shapes), strict=True)
        quick.append(Case(**rows[len(quick)] | dict(cluster)))
        missing.difference_update(vars(quick[-1]).items())
    every = [Case(**row) for row in rows]
    for cases in (quick, every):
        cases.sort(key=lambda case: (case.trainers, case.workers % 3, case.has_many_hosts))
    return [*quick, *(pytest.param(case, marks=pytest.mark.long) for case in every if case not in quick)]


# These cases add numbers in the order of torch. Each multi-hot table is on its own worker: torch sorts the
# ids of a bag's backward pass, and several tables in one sort change the order. The learning rate is
# constant, because the schedulers of torch multiply rates step by step. The bits of every row optimizer are
# compared in unit/embedding/worker.
SAME_BITS = (
    [
        Case(
            trainers=1,
            workers=3,
            optimizer="adam",
            features=features,
            dtype=("float32", "float64")[number % 2],
            remote=number % 2 == 0,
            update=("sync", "lookahead")[number // 2 % 2],
            dense_optimizer="AdamW",
            shared_table=False,
        )
        for number, features in enumerate(FEATURES)
    ]
    + [
        # A trainer pools rows in the order of their bags.
        Case(
            trainers=1,
            workers=3,
            placement="row",
            pooled_by="trainers",
            features=features,
            update=("sync", "lookahead")[number % 2],
            shared_table=False,
        )
        for number, features in enumerate(FEATURES[1:])
    ]
    + [
        Case(trainers=1, workers=3, dtype="float32", autocast="bfloat16", remote=True, shared_table=False),
        Case(
            trainers=1, workers=3, dtype="float32", features="sequences", optimizer="adam", shared_table=False
        ),
        Case(trainers=1, workers=3, placement="row", growing="all", optimizer="adam", shared_table=False),
    ]
    + [
        Case(
            trainers=1,
            workers=3,
            optimizer="adam",
            features=features,
            dtype="float32",
            row_dtype=row_dtype,
            update=update,
            growing=growing,
            shared_table=False,
        )
        for features, update, growing, row_dtype in (
            ("max", "sync", "", "bfloat16"),
            ("mean", "lookahead", "", "bfloat16"),
            ("one_hot", "sync", "all", "bfloat16"),
            ("sum", "sync", "", "mixed"),
            ("one_hot", "lookahead", "all", "mixed"),
        )
    ]
)
QUICK_FEATURES = {"workers": ("one_hot", "mean", "sequences"), "trainers": ("sum",)}


def is_quick(case: Case) -> bool:
    return case.features in QUICK_FEATURES[case.pooled_by] and case.row_dtype != "bfloat16"


SEQUENCES = partial(Case, trainers=3, features="sequences")
WEIGHTED_SEQUENCES = partial(Case, trainers=3, features="weighted_sequences")
UNEVEN = partial(Case, trainers=3, inputs="uneven")
# Combinations that the covering rows lack; one table of sequences is shared with a feature of one id.
FURTHER_CASES = [
    WEIGHTED_SEQUENCES(
        inputs="uneven", update="lookahead", placement="row", micro_batches=2, clip_norm=0.2, optimizer="adam"
    ),
    UNEVEN(growing="all", row_dtype="bfloat16", optimizer="ftrl", placement="row"),
    UNEVEN(row_dtype="mixed", placement="row", pooled_by="trainers", update="lookahead", features="mean"),
    SEQUENCES(
        row_dtype="bfloat16", update="lookahead", optimizer="momentum", all_rows=True, weight_decay=0.1
    ),
]
FURTHER_LONG_CASES = [
    SEQUENCES(inputs="uneven", update="lookahead"),
    UNEVEN(update="lookahead", remote=True, ddp="inside", clip_norm=0.2),
    UNEVEN(micro_batches=3, tasks="ranked", features="mean"),
    UNEVEN(net="ple", tasks="several", update="lookahead", remote=True),
    UNEVEN(growing="all", clip_norm=0.2, features="weights"),
    SEQUENCES(inputs="uneven", placement="row", optimizer="adagrad"),
    WEIGHTED_SEQUENCES(net="dlrm", remote=True, compile="aot_eager"),
    UNEVEN(net="mmoe", tasks="several"),
]


def trained(clusters: Clusters, case: Case) -> Outcome:
    cluster = clusters.get(case.trainers, case.workers, has_many_hosts=case.has_many_hosts)
    return cluster.run(train_case, case)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread, as roles do; bits of torch operators may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if is_quick(case) else pytest.mark.long) for case in SAME_BITS],
    ids=attrgetter("name"),
)
def test_one_trainer_has_the_bits_of_plain_torch(case: Case, clusters: Clusters) -> None:
    check_against_one_process(case, trained(clusters, case), bits=True)


@pytest.mark.parametrize(
    "case", covering_cases(CHOICES, (3, 2, False), (2, 3, True), (1, 1, False)), ids=attrgetter("name")
)
def test_cluster_equals_one_process(case: Case, clusters: Clusters) -> None:
    outcome = trained(clusters, case)
    check_against_one_process(case, outcome)
    for part, rows_RD in outcome.start.items():
        assert not torch.equal(outcome.end[part], rows_RD), "every table is trained"


@pytest.mark.parametrize(
    "case",
    covering_cases(CHOICES_OF_GROWING_TABLES, (2, 2, False), (2, 3, True), (1, 1, False)),
    ids=attrgetter("name"),
)
def test_growing_tables_equal_one_process(case: Case, clusters: Clusters) -> None:
    """Keys get rows, lose them, and get rows again, on the same steps as in one process."""
    # 33 steps evict keys of both workers.
    rounds = 4 if case.workers == 2 and case.growing in ("age", "all") else 2
    cluster = clusters.get(case.trainers, case.workers, has_many_hosts=case.has_many_hosts)
    reference = check_against_one_process(case, cluster.run(train_case, case, rounds=rounds), rounds=rounds)
    for table, keys in reference.keys.items():
        num_removed = len(reference.tables[table]) - len(keys.row_of)
        num_pending = len(keys.seen) - len(keys.row_of)
        assert num_removed or case.growing not in ("age", "limit")
        assert num_pending or case.growing == "age"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(inputs="uneven", placement="row", optimizer="adam", remote=True), marks=pytest.mark.long
        ),
        Case(inputs="uneven", update="lookahead", optimizer="momentum", features="sum"),
    ],
    ids=attrgetter("name"),
)
def test_all_rows_take_every_step(case: Case, clusters: Clusters) -> None:
    """Some trainers have fewer batches or none. Updates of touched rows only have another result."""
    case = dataclasses.replace(case, trainers=3, weight_decay=0.05, all_rows=True)
    outcome = clusters.get(3, 2).run(train_case, case)
    check_against_one_process(case, outcome)
    with pytest.raises(AssertionError):
        check_against_one_process(dataclasses.replace(case, all_rows=False), outcome)


@pytest.mark.parametrize(
    "case",
    [*FURTHER_CASES, *(pytest.param(case, marks=pytest.mark.long) for case in FURTHER_LONG_CASES)],
    ids=attrgetter("name"),
)
def test_further_cases_equal_one_process(case: Case, clusters: Clusters) -> None:
    """Trainers start with a batch again after all have run out of batches."""
    outcome = clusters.get(3, 2).run(train_case, case, rounds=2)
    check_against_one_process(case, outcome, rounds=2)


INVALID_STEPS = (3, 4, 7)


def with_value(case: Case, value: float, trainer: int) -> list[Batch]:
    """Return the batches of a case, some of which contain ``value`` on the last trainer."""
    batches = case.batches(trainer)
    if trainer == case.trainers - 1:
        for step in INVALID_STEPS:
            batches[step].dense_features[0, 0] = value
    return batches


@pytest.mark.parametrize(
    "case",
    [
        Case(ddp="none", remote=True, optimizer="adam", dense_optimizer="AdamW", clip_norm=0.2),
        Case(growing="all", optimizer="adam", update="lookahead", weight_decay=0.05, all_rows=True),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (Case(ddp="outside", optimizer="momentum"), Case(micro_batches=2, update="lookahead"))
        ),
    ],
    ids=attrgetter("name"),
)
@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.long)])
def test_skipped_step_changes_no_parameter(case: Case, value: float, clusters: Clusters) -> None:
    case = dataclasses.replace(case, non_finite="skip")
    make_batches = partial(with_value, case, value)
    outcome = clusters.get(2, 2).run(train_case, case, make_batches)
    assert outcome.skipped_steps == [len(INVALID_STEPS)] * 2
    assert check_against_one_process(case, outcome, make_batches).skipped_steps == len(INVALID_STEPS)
    assert all(tensor.isfinite().all() for tensor in outcome.end.values())


def with_an_unknown_id(trainer: int) -> list[Batch]:
    (first, *others) = Case().batches(trainer)
    first.sparse_features.ids_L[6 + 4] = 99  # of the second feature, sample 4
    return [first, *others]


def test_invalid_batch_is_refused_before_it_is_sent(clusters: Clusters) -> None:
    with pytest.raises(CaseError, match="feature b, sample 4: id 99 is not a row of table bc"):
        clusters.get(2, 2).run(train_case, Case(), with_an_unknown_id)
