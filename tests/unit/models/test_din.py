"""DIN against its equation, a sample and an item at a time, and padded histories."""

import pytest
import torch
from torch import Tensor
from unit.models.equations import Parameters, check_model, plain_logit, vectors

from hybrid.models.din import DIN
from hybrid.models.layers import pad_histories

DIM, OTHER, LENGTHS = 3, 2, (4, 0, 1, 3, 2)


def interest(parameters: Parameters, candidate: Tensor, items: list[Tensor]) -> Tensor:
    total = torch.zeros(DIM, dtype=torch.float64)
    for item in items:
        pair = torch.cat([candidate, item, candidate - item, candidate * item])
        total = total + plain_logit(parameters, "interest.relevance", pair) * item
    return total


def plain(
    parameters: Parameters, candidates: Tensor, history: Tensor, is_item: Tensor, other: Tensor | None = None
) -> Tensor:
    logits = []
    for b, candidate in enumerate(candidates):
        items = [item for item, is_one in zip(history[b], is_item[b], strict=True) if is_one]
        parts = [interest(parameters, candidate, items), candidate]
        parts += [] if other is None else [other[b]]
        logits.append(plain_logit(parameters, "score", torch.cat(parts)))
    return torch.stack(logits)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    size, longest = len(LENGTHS), max(LENGTHS)
    is_item = torch.arange(longest) < torch.tensor(LENGTHS).unsqueeze(1)
    # The values of padding must not matter.
    return vectors(size, DIM, seed=1), vectors(size, longest, DIM, seed=2), is_item


@pytest.mark.parametrize("num_other", [0, OTHER])
def test_model_equals_its_equation(num_other: int) -> None:
    other = [vectors(len(LENGTHS), num_other, seed=3)] if num_other else []
    check_model(DIN(DIM, num_other, attention=(5, 4), hidden=(6,)), plain, *inputs(), *other)


def test_output_is_independent_of_padding() -> None:
    candidates, history, is_item = inputs()
    model = DIN(DIM).double()
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    found = model(candidates, *pad_histories(history[is_item], offsets))
    torch.testing.assert_close(found, model(candidates, history, is_item), rtol=1e-12, atol=1e-12)
    empty = pad_histories(history[:0].flatten(0, 1), torch.zeros(6, dtype=torch.int64))
    model(candidates, *empty).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_values_are_padded_with_zeros() -> None:
    values_LD = vectors(5, 2, seed=1)
    values_BTD, is_item_BT = pad_histories(values_LD, torch.tensor([0, 2, 2, 5]))
    assert is_item_BT.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert torch.equal(values_BTD[is_item_BT], values_LD)
    assert not values_BTD[~is_item_BT].any()
    (gradient,) = torch.autograd.grad((values_BTD * 3).sum(), values_LD)
    assert (gradient == 3).all()
    values_BTD, is_item_BT = pad_histories(vectors(0, 2, seed=1), torch.tensor([0]))
    assert (values_BTD.shape, is_item_BT.shape) == ((0, 0, 2), (0, 0))
