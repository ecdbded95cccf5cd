"""DIN against its equation, a sample and an item at a time."""

import torch
from support.models import Parameters, check_model, plain_logit, vectors
from torch import Tensor

from hybrid.models.din import DIN
from hybrid.models.padding import padded

DIM, OTHER, LENGTHS = 3, 2, (4, 0, 1, 3, 2)


def interest(parameters: Parameters, candidate: Tensor, items: list[Tensor]) -> Tensor:
    total = torch.zeros(DIM, dtype=torch.float64)
    for item in items:
        pair = torch.cat([candidate, item, candidate - item, candidate * item])
        total = total + plain_logit(parameters, "interest.bearing", pair) * item
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
    # What lies where a history is padded must not matter.
    return vectors(size, DIM, seed=1), vectors(size, longest, DIM, seed=2), is_item


def test_model_equals_its_equation() -> None:
    check_model(DIN(DIM, attention=(5, 4), hidden=(6,)), plain, *inputs())


def test_other_inputs() -> None:
    other = vectors(len(LENGTHS), OTHER, seed=3)
    check_model(DIN(DIM, OTHER, attention=(5,), hidden=(6, 4)), plain, *inputs(), other)


def test_output_is_independent_of_padding() -> None:
    candidates, history, is_item = inputs()
    model = DIN(DIM).double()
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    found = model(candidates, *padded(history[is_item], offsets))
    torch.testing.assert_close(found, model(candidates, history, is_item), rtol=1e-12, atol=1e-12)
    model(candidates, *padded(history[:0].flatten(0, 1), torch.zeros(6, dtype=torch.int64))).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
