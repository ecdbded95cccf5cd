"""Small synthetic data sets with a known model, for the nets of ``hybrid.models``.

Each function returns samples as a dict of tensors, as ``cluster.batches`` takes it. The seed determines the
known model; seed and split ("train", "test") determine the samples. Labels are drawn from the known model's
probabilities. The samples have its logits, too: no other scores rank the labels better on average.
"""

import hashlib

import torch
from torch import Tensor

NUM_USERS, NUM_ITEMS = 200, 150  # of all but ``interests``
FACTORS = 4

# Of ``interests``: item i is of category (i - 1) % CATEGORIES, and 0 is padding.
CATEGORIES, ITEMS_OF_CATEGORY = 25, 20
LONGEST_HISTORY = 12


def interests(split: str, num_samples: int, seed: int = 0) -> dict[str, Tensor]:
    """Clicks on candidates: the more items of its category the user's history has, the more likely.

    ::

        logit = item's effect - 1.5 + 3.5 tanh(n / 3),  n = items of the candidate's category in the history

    Returns:
        ``candidate`` (B) and ``history`` (B, LONGEST_HISTORY) of ids from 1, padded with 0; their categories,
        ``candidate_category`` and ``history_category``, likewise; ``label`` (B) and
        its ``logit`` (B).
    """
    effects_I = 0.5 * torch.randn(1 + CATEGORIES * ITEMS_OF_CATEGORY, generator=_generator(seed, "interests"))
    draw = _generator(seed, f"interests {split}")
    favourites = torch.randint(CATEGORIES, (num_samples, 3), generator=draw)
    places = LONGEST_HISTORY + 1  # the last is the candidate's
    chosen = favourites.gather(1, torch.randint(3, (num_samples, places), generator=draw))
    anything = torch.randint(CATEGORIES, (num_samples, places), generator=draw)
    is_favourite = torch.rand(num_samples, places, generator=draw) < 0.6
    categories = torch.where(is_favourite, chosen, anything)
    which = torch.randint(ITEMS_OF_CATEGORY, (num_samples, places), generator=draw)
    ids = 1 + categories + CATEGORIES * which
    lengths_B = torch.randint(places, (num_samples,), generator=draw)
    is_item_BT = torch.arange(LONGEST_HISTORY) < lengths_B.unsqueeze(1)
    is_alike_BT = (categories[:, :-1] == categories[:, -1:]) & is_item_BT
    candidate_B = ids[:, -1]
    logit_B = effects_I[candidate_B] - 1.5 + 3.5 * torch.tanh(is_alike_BT.sum(dim=1) / 3)
    return {
        "candidate": candidate_B,
        "history": ids[:, :-1] * is_item_BT,
        "candidate_category": 1 + categories[:, -1],
        "history_category": (1 + categories[:, :-1]) * is_item_BT,
        "label": torch.bernoulli(logit_B.sigmoid(), generator=draw),
        "logit": logit_B,
    }


def sequences(split: str, num_samples: int, seed: int = 0) -> dict[str, Tensor]:
    """Sequences of items: the last and the third last item determine the probabilities of the next one.

    ::

        p(next = j) = softmax over j of  a[last] . c[j]  +  b[third last] . c[j]

    Returns:
        ``history`` (B, LONGEST_HISTORY) of ids from 1, the oldest first, padded with 0; ``next`` and
        ``other`` (B, LONGEST_HISTORY): the item after each item of the history, and a random item;
        ``candidates`` (B, 2): ``next`` and ``other`` after the last item; the logarithms of their
        probabilities, ``logits`` (B, 2).
    """
    draw = _generator(seed, "sequences")
    a_IF, b_IF, c_IF = (torch.randn(NUM_ITEMS, FACTORS, generator=draw) for _ in range(3))
    draw = _generator(seed, f"sequences {split}")
    items_BT = torch.randint(NUM_ITEMS, (num_samples, 1), generator=draw)
    other_BT = torch.randint(NUM_ITEMS, (num_samples, LONGEST_HISTORY), generator=draw)
    lengths_B = torch.randint(1, LONGEST_HISTORY + 1, (num_samples,), generator=draw)
    logits_B2 = torch.zeros(num_samples, 2)
    for length in range(1, LONGEST_HISTORY + 1):
        wanted_BF = a_IF[items_BT[:, -1]]
        if length > 2:
            wanted_BF = wanted_BF + b_IF[items_BT[:, -3]]
        logits_BI = (wanted_BF @ c_IF.mT).log_softmax(dim=1)
        next_B1 = torch.multinomial(logits_BI.softmax(dim=1), 1, generator=draw)
        candidates_B2 = torch.cat([next_B1, other_BT[:, length - 1 : length]], dim=1)
        logits_B2 = torch.where(
            (lengths_B == length).unsqueeze(1), logits_BI.gather(1, candidates_B2), logits_B2
        )
        items_BT = torch.cat([items_BT, next_B1], dim=1)
    is_item_BT = torch.arange(LONGEST_HISTORY) < lengths_B.unsqueeze(1)
    next_BT = 1 + items_BT[:, 1:]
    last_B1 = lengths_B.unsqueeze(1) - 1
    return {
        "history": (1 + items_BT[:, :-1]) * is_item_BT,
        "next": next_BT * is_item_BT,
        "other": (1 + other_BT) * is_item_BT,
        "candidates": torch.cat([next_BT.gather(1, last_B1), 1 + other_BT.gather(1, last_B1)], dim=1),
        "logits": logits_B2,
    }


def two_labels(split: str, num_samples: int, seed: int = 0) -> dict[str, Tensor]:
    """Two labels, such as click and conversion, that agree on two of four factors of users and items.

    ::

        logit_k = effects of user and item on k + u . (g_k * v)      g_1 = (1, 1, 1, 1), g_2 = (1, 1, -1, -1)

    The effects on the two labels have a correlation of 0.6. Given the logits, the labels are independent.

    Returns:
        ``user`` and ``item`` (B), ``labels`` (B, 2) and their ``logits`` (B, 2).
    """
    draw = _generator(seed, "two labels")
    sides = []
    for rows in (NUM_USERS, NUM_ITEMS):
        effects = torch.randn(rows, 2, generator=draw)
        effects[:, 1] = 0.6 * effects[:, 0] + 0.8 * effects[:, 1]
        sides.append((0.5 * effects, torch.randn(rows, FACTORS, generator=draw)))
    (user_effects, user_factors), (item_effects, item_factors) = sides
    signs_2F = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, -1.0, -1.0]])
    draw = _generator(seed, f"two labels {split}")
    user_B = torch.randint(NUM_USERS, (num_samples,), generator=draw)
    item_B = torch.randint(NUM_ITEMS, (num_samples,), generator=draw)
    products_BF = 0.7 * user_factors[user_B] * item_factors[item_B]
    logits_B2 = user_effects[user_B] + item_effects[item_B] + products_BF @ signs_2F.mT - 0.5
    labels_B2 = torch.bernoulli(logits_B2.sigmoid(), generator=draw)
    return {"user": user_B, "item": item_B, "labels": labels_B2, "logits": logits_B2}


def choice_logits(seed: int = 0) -> Tensor:
    """Return the logits by user and item of :func:`choices`, (NUM_USERS, NUM_ITEMS).

    A logit is the popularity of the item plus the product of the factors of user and item.
    """
    draw = _generator(seed, "choices")
    popularity_I = 1.5 * torch.randn(NUM_ITEMS, generator=draw)
    users_UF, items_IF = (torch.randn(rows, FACTORS, generator=draw) for rows in (NUM_USERS, NUM_ITEMS))
    return popularity_I + users_UF @ items_IF.mT


def choices(split: str, num_samples: int, seed: int = 0) -> dict[str, Tensor]:
    """Choices among all items, each by the softmax of the user's row of :func:`choice_logits`.

    Returns:
        ``user`` and ``item`` (B).
    """
    draw = _generator(seed, f"choices {split}")
    user_B = torch.randint(NUM_USERS, (num_samples,), generator=draw)
    chances_UI = choice_logits(seed).softmax(dim=1)
    drawn = [torch.multinomial(chances_UI[block], 1, generator=draw) for block in user_B.split(8192)]
    return {"user": user_B, "item": torch.cat(drawn).squeeze(1)}


def _generator(seed: int, purpose: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
