import pytest
import torch
from torch import Tensor

import hybrid
from hybrid.custom_loop.call_sites import Site, View, key_of, tensors_of
from hybrid.custom_loop.embedding_modules import Call, TableModule

TABLE: TableModule = hybrid.Embedding(100, 2)


def batch(size: int, width: int = 4) -> dict[str, object]:
    ids = torch.arange(size * width).view(size, width)
    return {
        "ids": ids,
        "deep": [{"one": torch.arange(size)}],
        "tags": hybrid.Jagged.of([[1]] * size),
        "label": "x",
    }


def test_tensors_are_found_in_dicts_and_lists_in_order() -> None:
    found = list(tensors_of(batch(3)))
    assert [tuple(each.shape) for each in found] == [(3, 4), (3,), (3,), (4,)]


@pytest.mark.parametrize(
    "taken",
    [
        lambda b: b["ids"],
        lambda b: b["ids"][:, 2],
        lambda b: b["ids"][:, 1:3],
        lambda b: b["ids"][:, ::2].unsqueeze(1),
        lambda b: b["deep"][0]["one"],
        lambda b: b["tags"].values,
    ],
    ids=["whole", "column", "columns", "every other", "deep", "jagged"],
)
def test_the_same_view_of_another_batch_is_taken(taken: object) -> None:
    assert callable(taken)
    first, second = batch(3), batch(5)
    view = View.find(taken(first), list(tensors_of(first)))
    assert view is not None
    found = view.taken(list(tensors_of(second)))
    assert found is not None
    assert torch.equal(found, taken(second))
    assert key_of(Call(TABLE, found)) == key_of(Call(TABLE, taken(second)))


@pytest.mark.parametrize(
    "taken",
    [lambda b: b["ids"] + 0, lambda b: b["ids"][1:], lambda b: b["ids"].view(-1), lambda b: b["ids"].int()],
    ids=["computed", "fewer samples", "flat", "of another type"],
)
def test_what_is_no_view_of_the_same_of_every_sample_is_not_found(taken: object) -> None:
    assert callable(taken)
    first = batch(3)
    assert View.find(taken(first), list(tensors_of(first))) is None


def test_columns_that_lie_in_one_memory_are_told_apart() -> None:
    """As those of prepared data do: a column is itself, not the first one and so many samples further."""
    first, second = (list(torch.arange(3 * size).split(size)) for size in (4, 2))
    view = View.find(first[2], first)
    assert view is not None
    found = view.taken(second)
    assert found is not None
    assert torch.equal(found, second[2])


def test_all_of_a_tensor_may_change_its_width_and_a_part_may_not() -> None:
    narrow, wide = batch(3), batch(3, width=6)
    whole = View.find(narrow["ids"], list(tensors_of(narrow)))  # type: ignore[arg-type]
    column = View.find(narrow["ids"][:, 1], list(tensors_of(narrow)))  # type: ignore[index]
    assert whole is not None
    assert column is not None
    found = whole.taken(list(tensors_of(wide)))
    assert isinstance(found, Tensor)
    assert found.shape == (3, 6)
    assert column.taken(list(tensors_of(wide))) is None


def test_of_no_samples_nothing_is_told() -> None:
    empty = batch(0)
    assert View.find(empty["ids"], list(tensors_of(empty))) is None  # type: ignore[arg-type]


def test_a_call_of_several_tensors_needs_all_of_them() -> None:
    first = batch(3)
    tensors = list(tensors_of(first))
    tags = first["tags"]
    assert isinstance(tags, hybrid.Jagged)
    assert Site.find(Call(TABLE, tags.values, tags.offsets), tensors) is not None
    assert Site.find(Call(TABLE, tags.values, tags.offsets + 0), tensors) is None


def test_a_call_after_a_write_is_another() -> None:
    ids = torch.arange(4)
    before = key_of(Call(TABLE, ids))
    ids[0] = 3
    assert key_of(Call(TABLE, ids)) != before


@pytest.mark.parametrize("name", ["a", "b"])
def test_tensors_that_share_memory_are_told_apart(name: str) -> None:
    """The columns of prepared data lie one after another in one memory; the last batch is smaller."""

    def prepared(size: int) -> dict[str, Tensor]:
        ids_L = torch.arange(2 * size)
        return {"a": ids_L[:size], "b": ids_L[size:]}

    first, last = prepared(5), prepared(2)
    view = View.find(first[name].unsqueeze(1), list(tensors_of(first)))
    assert view is not None
    found = view.taken(list(tensors_of(last)))
    assert found is not None
    assert torch.equal(found.view(-1), last[name])
