"""Two towers, their losses and the best items, against sums and sorts that are written out."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from unit.models.equations import Parameters, check_model, plain_mlp, vectors

from hybrid.models.two_towers import (
    TwoTowers,
    in_batch_softmax,
    log_popularity,
    recall_and_ndcg,
    sampled_softmax,
    top_items,
)

IDS = torch.tensor([3, 1, 3, 0, 4, 1])
LOG_Q = log_popularity(torch.tensor([0, 3, 3, 1, 3, 1]), 5)[IDS]


def plain_towers(parameters: Parameters, users: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
    sides = []
    for name, inputs in (("user", users), ("item", items)):
        raw = [plain_mlp(parameters, f"{name}.layers", x, ends_linear=True) for x in inputs]
        sides.append(torch.stack([vector / vector.square().sum().sqrt() for vector in raw]))
    return sides[0], sides[1]


def plain_losses(temperature: float, users: Tensor, items: Tensor, log_q: Tensor, *drawn: Tensor) -> Tensor:
    """Return the loss of each sample; ``drawn`` are negatives and their log q, by default other samples'."""
    losses = []
    for b, user in enumerate(users):
        own = torch.exp(torch.dot(user, items[b]) / temperature) / math.exp(log_q[b])
        total = own
        others = [(items[j], log_q[j]) for j in range(len(items)) if j != b]
        for item, q in zip(*drawn, strict=True) if drawn else others:
            total = total + torch.exp(torch.dot(user, item) / temperature) / math.exp(q)
        losses.append(-torch.log(own / total))
    return torch.stack(losses)


def test_tower_outputs_have_unit_length() -> None:
    model = TwoTowers(user_width=4, item_width=3, hidden=(6, 5), dim=2)
    check_model(model, plain_towers, vectors(5, 4, seed=1), vectors(5, 3, seed=2))


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("num_drawn", [0, 4], ids=["in batch", "drawn"])
def test_the_loss_is_the_corrected_softmax(num_drawn: int, temperature: float) -> None:
    drawn = [vectors(num_drawn, 3, seed=3), LOG_Q[:num_drawn]] if num_drawn else []
    check_model(
        torch.nn.Module(),
        lambda _, *tensors: plain_losses(temperature, *tensors),
        *(vectors(6, 3, seed=1), vectors(6, 3, seed=2), LOG_Q, *drawn),
        run=partial(sampled_softmax if drawn else in_batch_softmax, temperature=temperature),
    )


def full_arrays(items: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that gathers items and frequencies, in this order."""
    whole = iter([items, LOG_Q])
    return lambda _: next(whole)


def test_losses_of_two_slices_add_up() -> None:
    """Each trainer's part of the gradients, of its own samples and of all items, adds up to the whole."""
    users, items = vectors(6, 3, seed=1), vectors(6, 3, seed=2)
    whole = in_batch_softmax(users, items, LOG_Q)
    expected = torch.autograd.grad(whole.sum(), [users, items])
    parts, gradients = [], [torch.zeros_like(users), torch.zeros_like(items)]
    for own in (slice(0, 4), slice(4, 6)):
        losses = in_batch_softmax(users[own], items[own], LOG_Q[own], gather=full_arrays(items))
        parts.append(losses)
        for total, part in zip(gradients, torch.autograd.grad(losses.sum(), [users, items]), strict=True):
            total += part
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, list(expected), rtol=1e-12, atol=1e-12)


def test_popularity_is_the_fraction_of_the_data() -> None:
    found = log_popularity(torch.tensor([[2, 0], [2, 2]]), 4)
    assert found.exp().tolist() == pytest.approx([0.25, 0.25, 0.75, 0.25])  # unseen items count once
    for ids in ([0, 4], [-1], []):
        with pytest.raises(ValueError, match="0 to 3"):
            log_popularity(torch.tensor(ids, dtype=torch.int64), 4)


def test_the_gradient_of_many_draws_is_that_of_all_items() -> None:
    """Frequent items, which are often a negative of their own sample, have no other bias than rare ones."""
    users, table = vectors(1, 3, seed=1), vectors(6, 3, seed=2)
    log_q_I = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    for item in (0, 5):
        own = torch.tensor([item])
        full = torch.nn.functional.cross_entropy(users @ table.mT / 0.5, own)
        expected = torch.autograd.grad(full, table)[0]
        errors = []
        for number in (4, 4000):
            total = torch.zeros_like(table)
            for _ in range(50):
                ids = torch.multinomial(log_q_I.exp(), number, replacement=True, generator=generator)
                negatives = table.index_select(0, ids), log_q_I[ids]
                loss = sampled_softmax(users, table[own], log_q_I[own], *negatives, 0.5)
                total += torch.autograd.grad(loss.sum(), table)[0]
            errors.append(((total / 50 - expected).norm() / expected.norm()).item())
        assert errors[1] < 0.01 < 0.1 < errors[0]


@pytest.mark.parametrize("chunk", [3, 7, 100])
@pytest.mark.parametrize("k", [1, 5, 20])
def test_the_best_items_are_those_of_all_scores(k: int, chunk: int) -> None:
    users, table = vectors(8, 4, seed=1), vectors(20, 4, seed=2)
    sizes = []

    def item_vectors(ids: Tensor) -> Tensor:
        sizes.append(len(ids))
        return table[ids]

    found = top_items(users, item_vectors, 20, k, chunk)
    assert found.tolist() == (users @ table.mT).argsort(dim=1, descending=True)[:, :k].tolist()
    assert max(sizes) <= chunk
    assert sum(sizes) == 20  # each item is computed once


def test_more_items_than_there_are_cannot_be_the_best() -> None:
    with pytest.raises(ValueError, match=r"\bk\b.* 20 .* 21"):
        top_items(vectors(8, 4, seed=1), lambda ids: vectors(20, 4, seed=2)[ids], 20, 21)


def test_recall_and_ndcg_depend_on_the_rank_of_the_item() -> None:
    recall, ndcg = recall_and_ndcg(torch.tensor([[4, 2, 9]] * 3), torch.tensor([4, 9, 3]))
    assert recall.tolist() == [1, 1, 0]
    assert ndcg.tolist() == [1, 0.5, 0]
