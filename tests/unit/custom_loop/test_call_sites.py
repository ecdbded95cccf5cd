"""Which view of a batch a table is called with, and the same view of the next batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hybrid
from hybrid.custom_loop.call_sites import BatchView, CallSite, call_key, tensors_of
from hybrid.custom_loop.embedding_modules import TableCall, TableModule

TABLE: TableModule = hybrid.Embedding(100, 2)
Taken = Callable[[Any], Tensor]


def batch(size: int, width: int = 4) -> dict[str, Any]:
    ids_L = torch.arange(2 * size)  # the columns of prepared data share one memory
    return {
        "ids": torch.arange(size * width).view(size, width),
        "deep": [{"one": ids_L[:size]}, ids_L[size:]],
        "tags": hybrid.Jagged.of([[1]] * size),
        "label": "x",
    }


def view_of_next(taken: Taken, first: dict[str, Any], following: dict[str, Any]) -> Tensor | None:
    view = BatchView.find(taken(first), list(tensors_of(first)))
    return None if view is None else view.take(list(tensors_of(following)))


@pytest.mark.parametrize(
    "taken",
    [
        lambda b: b["ids"],
        lambda b: b["ids"][:, 2],
        lambda b: b["ids"][:, 1:3],
        lambda b: b["ids"][:, ::2].unsqueeze(1),
        lambda b: b["deep"][0]["one"],
        lambda b: b["deep"][1],
        lambda b: b["deep"][1].unsqueeze(1),
        lambda b: b["tags"].values,
    ],
    ids=["whole", "column", "columns", "every other", "deep", "shared memory", "unsqueezed", "jagged"],
)
@pytest.mark.parametrize("size", [5, 2])
def test_the_same_view_of_the_next_batch_is_taken(taken: Taken, size: int) -> None:
    following = batch(size)
    found = view_of_next(taken, batch(3), following)
    assert found is not None
    assert torch.equal(found, taken(following))
    assert call_key(TableCall(TABLE, found)) == call_key(TableCall(TABLE, taken(following)))


@pytest.mark.parametrize(
    "taken",
    [lambda b: b["ids"] + 0, lambda b: b["ids"][1:], lambda b: b["ids"].view(-1), lambda b: b["ids"].int()],
    ids=["computed", "fewer samples", "flat", "of another type"],
)
def test_other_tensors_are_not_found(taken: Taken) -> None:
    assert view_of_next(taken, batch(3), batch(3)) is None
    assert view_of_next(lambda b: b["ids"], batch(0), batch(3)) is None


def test_only_whole_tensors_may_change_their_width() -> None:
    found = view_of_next(lambda b: b["ids"], batch(3), batch(3, width=6))
    assert found is not None
    assert found.shape == (3, 6)
    assert view_of_next(lambda b: b["ids"][:, 1], batch(3), batch(3, width=6)) is None


def test_call_site_needs_all_tensors_of_the_call() -> None:
    first = batch(3)
    tensors, tags = list(tensors_of(first)), first["tags"]
    assert CallSite.find(TableCall(TABLE, tags.values, tags.offsets), tensors) is not None
    assert CallSite.find(TableCall(TABLE, tags.values, tags.offsets + 0), tensors) is None


def test_key_of_a_call_changes_after_a_write() -> None:
    ids = torch.arange(4)
    before = call_key(TableCall(TABLE, ids))
    ids[0] = 3
    assert call_key(TableCall(TABLE, ids)) != before
