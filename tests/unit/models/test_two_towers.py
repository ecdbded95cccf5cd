"""Two towers, and the corrected softmax over the items of a batch, against sums that are written out."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from unit.models.equations import Parameters, check_model, plain_mlp, vectors

from hybrid.models.two_towers import TwoTowers, in_batch_softmax, log_popularity

IDS = torch.tensor([3, 1, 3, 0, 4, 1])
LOG_Q = log_popularity(torch.tensor([0, 3, 3, 1, 3, 1]), 5)[IDS]


def plain_towers(parameters: Parameters, users: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
    sides = []
    for name, inputs in (("user", users), ("item", items)):
        raw = [plain_mlp(parameters, f"{name}.layers", x, ends_linear=True) for x in inputs]
        sides.append(torch.stack([vector / vector.square().sum().sqrt() for vector in raw]))
    return sides[0], sides[1]


def plain_losses(users: Tensor, items: Tensor, ids: Tensor, log_q: Tensor, temperature: float) -> Tensor:
    losses = []
    for b, user in enumerate(users):
        own = torch.exp(torch.dot(user, items[b]) / temperature) / math.exp(log_q[b])
        total = own
        for j, item in enumerate(items):
            if ids[j] != ids[b]:
                total = total + torch.exp(torch.dot(user, item) / temperature) / math.exp(log_q[j])
        losses.append(-torch.log(own / total))
    return torch.stack(losses)


def test_tower_outputs_have_unit_length() -> None:
    model = TwoTowers(user_width=4, item_width=3, hidden=(6, 5), dim=2)
    check_model(model, plain_towers, vectors(5, 4, seed=1), vectors(5, 3, seed=2))


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_the_loss_is_the_corrected_softmax(temperature: float) -> None:
    users, items = vectors(6, 3, seed=1), vectors(6, 3, seed=2)
    check_model(
        torch.nn.Module(),
        lambda _, users, items, ids, log_q: plain_losses(users, items, ids, log_q, temperature),
        *(users, items, IDS, LOG_Q),
        run=lambda users, items, ids, log_q: in_batch_softmax(users, items, ids, log_q, temperature),
    )


def full_arrays(items: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that gathers items, ids and frequencies, in this order."""
    whole = iter([items, IDS, LOG_Q])
    return lambda _: next(whole)


def test_losses_of_two_slices_add_up() -> None:
    """Each trainer's part of the gradients, of its own samples and of all items, adds up to the whole."""
    users, items = vectors(6, 3, seed=1), vectors(6, 3, seed=2)
    whole = in_batch_softmax(users, items, IDS, LOG_Q)
    expected = torch.autograd.grad(whole.sum(), [users, items])
    parts, gradients = [], [torch.zeros_like(users), torch.zeros_like(items)]
    for own in (slice(0, 4), slice(4, 6)):
        losses = in_batch_softmax(users[own], items[own], IDS[own], LOG_Q[own], gather=full_arrays(items))
        parts.append(losses)
        for total, part in zip(gradients, torch.autograd.grad(losses.sum(), [users, items]), strict=True):
            total += part
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, list(expected), rtol=1e-12, atol=1e-12)


def test_a_batch_of_one_item_has_no_loss() -> None:
    users, items = vectors(3, 2, seed=1), vectors(3, 2, seed=2)
    losses = in_batch_softmax(users, items, torch.tensor([7, 7, 7]), torch.zeros(3))
    assert losses.tolist() == [0.0] * 3
    losses.sum().backward()
    assert users.grad is not None
    assert not users.grad.any()


def test_popularity_is_the_fraction_of_the_data() -> None:
    found = log_popularity(torch.tensor([[2, 0], [2, 2]]), 4)
    assert found.exp().tolist() == pytest.approx([0.25, 0.25, 0.75, 0.25])  # unseen items count once
