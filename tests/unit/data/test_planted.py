"""Data sets of hidden models: the same in every call, and as they say of themselves."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybrid.data.prepare import planted


@pytest.mark.parametrize(
    "make",
    [planted.interests, planted.sequences, planted.two_labels, planted.choices],
    ids=lambda f: f.__name__,
)
def test_samples_follow_from_the_seed_and_the_split(make: Callable[..., dict[str, Tensor]]) -> None:
    first, again = make("train", 50), make("train", 50)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for other in (make("test", 50), make("train", 50, seed=1)):
        assert any(not torch.equal(first[name], other[name]) for name in first)
    assert all(len(each) == 50 for each in first.values())


def test_a_candidate_is_liked_as_often_as_the_history_has_its_category() -> None:
    data = planted.interests("train", 20_000)
    effects: dict[int, set[float]] = {}
    for b in range(300):
        item = int(data["candidate"][b])
        items = [i for i in data["history"][b].tolist() if i]
        alike = sum((i - 1) % planted.CATEGORIES == (item - 1) % planted.CATEGORIES for i in items)
        effect = data["logit"][b] + 1.5 - 3.5 * torch.tanh(torch.tensor(alike / 3))
        effects.setdefault(item, set()).add(round(effect.item(), 4))
    assert all(len(of_item) == 1 for of_item in effects.values())
    check_calibration(data["logit"], data["label"])


def test_what_comes_next_follows_from_the_last_and_the_third_last() -> None:
    draw = planted._generator(0, "sequences")
    a, b, c = (torch.randn(planted.NUM_ITEMS, planted.FACTORS, generator=draw) for _ in range(3))
    data = planted.sequences("train", 500)
    for k in range(500):
        items = [item - 1 for item in data["history"][k].tolist() if item]
        wanted = a[items[-1]] + (b[items[-3]] if len(items) > 2 else 0)
        expected = [torch.dot(wanted, c[item - 1]) for item in data["candidates"][k].tolist()]
        torch.testing.assert_close(data["logits"][k], torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_sequences_agree_on_what_comes_next() -> None:
    data = planted.sequences("train", 20_000)
    lengths = (data["history"] > 0).sum(dim=1)
    assert lengths.unique().tolist() == list(range(1, planted.LONGEST_HISTORY + 1))
    rows = torch.arange(len(lengths))
    assert torch.equal(data["candidates"][:, 0], data["next"][rows, lengths - 1])
    assert torch.equal(data["candidates"][:, 1], data["other"][rows, lengths - 1])
    is_between = lengths > 1
    following = data["history"][rows, (lengths - 1).clamp(min=1)][is_between]
    assert torch.equal(following, data["next"][rows, lengths - 2][is_between])
    margins = data["logits"][:, 0] - data["logits"][:, 1]
    assert (margins > 0).double().mean() > 0.8


def test_two_labels_are_drawn_from_their_logits() -> None:
    data = planted.two_labels("train", 50_000)
    for k in range(2):
        check_calibration(data["logits"][:, k], data["labels"][:, k])


def test_choices_are_drawn_from_what_users_think() -> None:
    data = planted.choices("train", 50_000)
    chances = planted.choice_logits().softmax(dim=1)
    expected = chances[data["user"]].sum(dim=0)
    found = torch.bincount(data["item"], minlength=planted.NUM_ITEMS)
    assert ((found - expected).abs() < 6 * expected.sqrt() + 3).all()
    of_user = data["item"][data["user"] == 7]
    assert chances[7, of_user].mean() > 2 * chances[8, of_user].mean()


def check_calibration(logits: Tensor, labels: Tensor) -> None:
    """Of samples with about the same logit, that many have the label."""
    for chosen in logits.argsort().chunk(10):
        expected = logits[chosen].sigmoid()
        spread = (expected * (1 - expected)).sum().sqrt()
        assert abs(labels[chosen].sum() - expected.sum()) < 5 * spread
