"""What nets draw: a function of seed, trainer and step."""

from __future__ import annotations

import itertools
import time

import torch
from torch import Tensor

from hybrid.training.generators import seed_step

CPU = [torch.device("cpu")]


def drawn(seed: int, trainer: int, step: int) -> Tensor:
    with torch.random.fork_rng():
        seed_step(seed, trainer, step, CPU)
        return torch.nn.functional.dropout(torch.ones(1000))


def test_a_step_draws_the_same_again() -> None:
    assert torch.equal(drawn(1, 0, 7), drawn(1, 0, 7))


def test_other_seeds_trainers_and_steps_draw_other_numbers() -> None:
    masks = [drawn(*key) for key in itertools.product((0, 1, 2**40), (0, 1), (0, 1, 2, 10**9))]
    for first, second in itertools.combinations(masks, 2):
        apart = (first != second).float().mean()
        assert 0.4 < apart < 0.6  # independent masks of probability 0.5 agree in half of their places


def test_seeding_takes_far_less_than_a_step() -> None:
    with torch.random.fork_rng():
        fastest = float("inf")
        for step in range(200):
            start = time.perf_counter()
            seed_step(1, 0, step, CPU)
            fastest = min(fastest, time.perf_counter() - start)
    assert fastest < 20e-6
