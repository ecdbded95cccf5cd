"""How a trainer's data end, while others go on."""

from __future__ import annotations

import itertools
from typing import cast

import pytest
import torch
import torch.distributed as dist

from hybrid.batch import Batch
from hybrid.engine.uneven_batches import align_batches
from hybrid.errors import DataError


class Others:
    """A process group whose other trainers have batches of ``sizes``, each a list of them or a stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sizes: list[list[int]], are_lists: bool) -> None:
        self._sizes = sizes
        self._are_lists = are_lists
        self._step = itertools.count()
        self.num_calls = 0
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)

    def _all_reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType, group: Others) -> None:
        assert group is self
        self.num_calls += 1
        if operation == dist.ReduceOp.MAX:
            lengths = [len(sizes) if self._are_lists else 1 << 60 for sizes in self._sizes]
            self._meet_at_once = max(tensor.item(), *lengths, 0) < 1 << 60
            tensor.fill_(max(tensor.item(), *lengths, 0))
        elif self._meet_at_once:
            for sizes in self._sizes:
                steps = torch.tensor([[1.0, size, size] for size in sizes], dtype=torch.float64)
                tensor[: steps.numel()] += steps.flatten()
        else:
            step = next(self._step)
            going_on = [sizes[step] for sizes in self._sizes if step < len(sizes)]
            tensor += torch.tensor([len(going_on), sum(going_on), sum(going_on)], dtype=torch.float64)


@pytest.mark.parametrize("are_lists", [False, True])
@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        ([2, 2], [[2, 2]], [(2, 4, False), (2, 4, False)]),
        ([3, 1], [[2, 4], [5]], [(3, 10, False), (1, 5, False)]),
        ([2], [[2, 3, 1]], [(2, 4, False), (0, 3, True), (0, 1, True)]),
        ([], [[2]], [(0, 2, True)]),
        ([2], [[]], [(2, 2, False)]),
        ([0], [[4]], [(0, 4, False)]),  # no samples, but not its end
        ([0, 2], [[0, 3]], [(0, 0, False), (2, 5, False)]),  # nor that of all
        ([], [[]], []),
    ],
)
def test_batches_are_evened_to_the_end_of_all_trainers(
    monkeypatch: pytest.MonkeyPatch,
    own: list[int],
    others: list[list[int]],
    expected: list[tuple[int, int, bool]],
    is_list: bool,
    are_lists: bool,
) -> None:
    each = Others(monkeypatch, others, are_lists)
    batches = [Batch.empty(1, 1)._replace(labels=torch.ones(size)) for size in own]
    own_batches = batches if is_list else iter(batches)
    made = list(
        align_batches(own_batches, Batch.empty(1, 1), cast(dist.ProcessGroup, each), torch.device("cpu"))
    )
    assert [(len(b.labels), b.global_size, b.ended) for b in made] == expected
    assert each.num_calls == (2 if is_list and are_lists else len(expected) + 2)


class Sums:
    """A process group whose other trainer has one batch: as many samples and weights in each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sums: list[float]) -> None:
        self._sums = torch.tensor(sums, dtype=torch.float64)
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)

    def _all_reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType, group: Sums) -> None:
        if operation == dist.ReduceOp.SUM:
            tensor += self._sums


@pytest.mark.parametrize(
    ("weights", "others", "expected", "totals"),
    [
        (None, [1, 3, 3, 3], None, [5, 5]),
        ([[0.5, 0], [2, 1]], [1, 3, 3, 3], [[0.5, 0], [2, 1]], [5.5, 4]),
        (None, [1, 3, 0, 7.5], [[1, 1], [1, 1]], [2, 9.5]),  # the other has weights
        ([[0, 0], [0, 0]], [1, 1, 0, 0], [[0, 0], [0, 0]], [0, 0]),
    ],
)
def test_weights_add_up_over_trainers(
    monkeypatch: pytest.MonkeyPatch,
    weights: list[list[float]] | None,
    others: list[float],
    expected: list[list[float]] | None,
    totals: list[float],
) -> None:
    group = cast(dist.ProcessGroup, Sums(monkeypatch, others))
    own = Batch.empty(1, 1)._replace(
        labels=torch.zeros(2, 2), weights=None if weights is None else torch.tensor(weights)
    )
    (batch,) = align_batches([own], Batch.empty(1, 1), group, torch.device("cpu"), num_tasks=2)
    assert (None if batch.weights is None else batch.weights.tolist()) == expected
    assert batch.total_weights is not None
    assert batch.total_weights.tolist() == totals
    assert batch.global_size == 2 + others[1]
    assert batch.total_groups is None


class Groups:
    """A process group whose other trainer has one batch of samples of ``groups``, which count ``total``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, groups: list[int], total: float) -> None:
        self._others, self._sums = torch.tensor(groups), [1.0, len(groups), len(groups), total]
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)
        monkeypatch.setattr(dist, "all_gather", self._all_gather)
        self._sizes: list[int] = []

    def size(self) -> int:
        return 2

    def _all_reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType, group: Groups) -> None:
        if operation == dist.ReduceOp.SUM:
            tensor += torch.tensor(self._sums, dtype=torch.float64)

    def _all_gather(self, parts: list[torch.Tensor], own: torch.Tensor, group: Groups) -> None:
        """First of how many groups there are, then of these."""
        others = self._others if self._sizes else torch.tensor([len(self._others)])
        self._sizes.append(len(own))
        parts[0].copy_(own)
        parts[1][: len(others)] = others


def test_groups_add_up_over_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    group = cast(dist.ProcessGroup, Groups(monkeypatch, [8, 9, 4], 2.5))
    labels = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
    own = Batch.empty(1, 1)._replace(labels=labels, groups=torch.tensor([5, 5, 5, 6, 6]))
    cpu = torch.device("cpu")
    (batch,) = align_batches([own], Batch.empty(1, 1), group, cpu, num_tasks=1, has_ranking=True)
    assert batch.total_groups is not None
    assert batch.total_groups.tolist() == [4.5]  # both of its own have two labels, and weights of 1
    assert batch.total_weights is not None
    assert batch.total_weights.tolist() == [batch.global_size] == [8]


@pytest.mark.parametrize("is_list", [False, True])
def test_a_group_that_two_trainers_have_in_a_step_is_refused(
    monkeypatch: pytest.MonkeyPatch, is_list: bool
) -> None:
    group = cast(dist.ProcessGroup, Groups(monkeypatch, [8, 6, 4], 2.5))
    own = Batch.empty(1, 1)._replace(labels=torch.ones(3), groups=torch.tensor([5, 5, 6]))
    batches = [own] if is_list else iter([own])
    steps = align_batches(
        batches, Batch.empty(1, 1), group, torch.device("cpu"), num_tasks=1, has_ranking=True
    )
    message = r"^group 6 is split: trainers 0 and 1 have samples of it in one step$"
    with pytest.raises(DataError, match=message):
        next(steps)
