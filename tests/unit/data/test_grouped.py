"""Rows in whole groups: how they are prepared, ordered, and shared."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.samples import csv_config, prepared, write

from hybrid.config import DataSection, RunConfig, TaskSection
from hybrid.data.batches.batch_loader import BatchLoader
from hybrid.data.dataset.group_order import GroupedOrder, check_ranking_losses
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.dataset.sample_order import ShuffledOrder
from hybrid.errors import ConfigError, DataError

USERS = "aabcabddddae"
TASKS = {"click": TaskSection(), "spent": TaskSection(type="regression")}


def config_of(folder: Path, users: Sequence[str] = USERS) -> RunConfig:
    """Rows of these users; x of row i is i."""
    rows = "".join(f"{i % 2},{i},{i - 3},{user}\n" for i, user in enumerate(users))
    path = write(folder / "train.csv", f"click,x,spent,user\n{rows}")
    config = csv_config(
        path, dense=("x",), sparse=("user",), group="user", numeric_scaling="none", test_fraction=0.0
    )
    return config.replace(tasks=TASKS)


def test_training_rows_are_prepared_by_group_and_test_rows_as_they_are(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    train, test = prepared(config, tmp_path / "cache")
    assert train.group_rows is not None
    assert train.group_starts is not None
    in_order = [USERS[row] for row in train.group_rows]
    assert "".join(in_order) == "aaaa" + "bb" + "c" + "dddd" + "e"
    assert train.group_starts.tolist() == [0, 4, 6, 7, 11, 12]
    assert test.group_rows is None
    synthetic = RunConfig(data=DataSection(synthetic_rows=300, group="C9"))
    log, _ = prepared(synthetic, tmp_path / "cache")
    assert log.group_rows is not None
    assert sorted(log.group_rows.tolist()) == list(range(300))
    without, _ = prepared(RunConfig(data=DataSection(synthetic_rows=300)), tmp_path)
    assert without.group_rows is None


def ordered(sizes: Sequence[int]) -> PreparedDataset:
    """A split of groups of these sizes, whose rows are interleaved."""
    starts = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))])
    rows = np.random.default_rng(1).permutation(int(starts[-1]))
    return cast(PreparedDataset, SimpleNamespace(group_rows=rows, group_starts=starts))


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(0, 4), st.integers(0, 9))
def test_an_epoch_has_every_row_once_in_whole_groups_and_no_step_is_empty(
    sizes: list[int], epoch: int, more: int
) -> None:
    dataset, batch_size = ordered(sizes), max(sizes) + more
    assert dataset.group_rows is not None
    group_of = dict(
        zip(dataset.group_rows.tolist(), np.repeat(np.arange(len(sizes)), sizes).tolist(), strict=True)
    )
    order = GroupedOrder(dataset, ShuffledOrder(len(sizes), 1, epoch).indices(0, len(sizes)))
    steps = [order.indices(start, start + batch_size) for start in range(0, sum(sizes), batch_size)]
    assert sorted(itertools.chain(*(rows.tolist() for rows, _ in steps))) == list(range(sum(sizes)))
    position = 0
    for step, (rows, ends) in enumerate(steps):
        assert len(rows) > 0
        groups = [group_of[row] for row in rows.tolist()]
        runs = [number for number, _ in itertools.groupby(groups)]
        assert len(runs) == len(set(runs)) == len(ends)
        assert [groups.count(number) for number in runs] == [sizes[number] for number in runs]
        assert np.diff(ends, prepend=0).tolist() == [sizes[number] for number in runs]
        for end in ends.tolist():
            assert step * batch_size <= position + end - 1 < (step + 1) * batch_size
        position += len(rows)


def rows_of(loader: BatchLoader, epoch: int, first_step: int = 0) -> list[list[int]]:
    with loader.batches(epoch, first_step) as stream:
        return [batch.dense_features[:, 0].int().tolist() for batch in stream]


def test_any_number_of_trainers_has_the_same_steps_and_each_whole_groups(tmp_path: Path) -> None:
    users = [f"u{i * i % 37 % 19}" for i in range(200)]
    dataset, _ = prepared(config_of(tmp_path, users), tmp_path / "cache")
    whole = BatchLoader(dataset, batch_size=32, seed=5, shuffle=True, by_group=True)
    alone = rows_of(whole, epoch=1)
    assert len(alone) == whole.steps_per_epoch == 7
    assert sorted(itertools.chain(*alone)) == list(range(200))
    assert rows_of(whole, epoch=1, first_step=3) == alone[3:]
    assert rows_of(whole, epoch=0) != alone
    in_order = rows_of(BatchLoader(dataset, batch_size=32, by_group=True), epoch=1)
    assert dataset.group_rows is not None
    assert list(itertools.chain(*in_order)) == dataset.group_rows.tolist()
    for num_trainers in (2, 3, 7):
        loaders = [
            dataclasses.replace(whole, trainer_index=t, num_trainers=num_trainers)
            for t in range(num_trainers)
        ]
        shares = [rows_of(loader, epoch=1) for loader in loaders]
        assert [list(itertools.chain(*parts)) for parts in zip(*shares, strict=True)] == alone
        for parts in zip(*shares, strict=True):
            held = [{users[row] for row in part} for part in parts]
            assert sum(map(len, held)) == len(set().union(*held))


def test_trainers_know_what_the_groups_of_the_whole_step_count(tmp_path: Path) -> None:
    dataset, _ = prepared(config_of(tmp_path), tmp_path / "cache")
    loaders = [
        BatchLoader(dataset, batch_size=6, trainer_index=t, num_trainers=2, by_group=True) for t in range(2)
    ]
    steps = list(zip(*(list(loader.batches(0)) for loader in loaders), strict=True))
    assert [[len(share.labels) for share in step] for step in steps] == [[0, 6], [1, 5]]
    assert [share.global_size for step in steps for share in step] == [6] * 4
    # Of a, b, d: both labels; spent differs in every group of several rows.
    totals = [share.total_groups for step in steps for share in step]
    expected = [[2.0, 2.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0]]
    for total, wanted in zip(totals, expected, strict=True):
        assert total is not None
        assert total.tolist() == pytest.approx(wanted)
    plain = BatchLoader(dataset, batch_size=6)
    with plain.batches(0) as stream:
        assert next(stream).total_groups is None


def test_a_group_larger_than_a_batch_is_refused(tmp_path: Path) -> None:
    dataset, test = prepared(config_of(tmp_path), tmp_path / "cache")
    BatchLoader(dataset, batch_size=4, by_group=True)
    message = r"^the largest group of data\.group has 4 training rows, more than a batch of 3, .*batch_size$"
    with pytest.raises(DataError, match=message):
        BatchLoader(dataset, batch_size=3, by_group=True)
    with pytest.raises(DataError, match="complete groups need"):
        BatchLoader(test, batch_size=3, by_group=True)
    with pytest.raises(
        DataError, match=r"^complete groups are not shuffled by lanes: set data\.shuffle to rows$"
    ):
        BatchLoader(dataset, batch_size=4, by_group=True, shuffle=True, lanes=8)
    ranked = {**TASKS, "click": TaskSection(ranking_loss="pairwise")}
    with pytest.raises(DataError, match=message):
        check_ranking_losses(ranked, dataset, batch_size=3)
    check_ranking_losses(TASKS, dataset, batch_size=3)


def test_negative_labels_of_a_listwise_loss_are_refused_before_training(tmp_path: Path) -> None:
    dataset, _ = prepared(config_of(tmp_path), tmp_path / "cache")
    for kind in ("pairwise", "listwise"):
        tasks = {**TASKS, "spent": TaskSection(type="regression", ranking_loss=kind)}
        if kind == "pairwise":
            check_ranking_losses(tasks, dataset, batch_size=9)
            continue
        with pytest.raises(ConfigError) as refused:
            check_ranking_losses(tasks, dataset, batch_size=9)
    assert str(refused.value) == (
        "tasks.spent.ranking_loss = 'listwise': takes labels of at least 0, and a training row has -3; "
        "try pairwise"
    )
