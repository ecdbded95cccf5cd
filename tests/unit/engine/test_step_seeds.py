"""Random numbers of a step: a function of seed, trainer and step."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid.engine.step_engine import seed_step

CPU = [torch.device("cpu")]


def drawn(seed: int, trainer: int, step: int) -> Tensor:
    with torch.random.fork_rng():
        seed_step(seed, trainer, step, CPU)
        mask = torch.nn.functional.dropout(torch.ones(1000)) > 0
    of_python = torch.tensor([random.random() < 0.5 for _ in range(1000)])
    return torch.stack([mask, of_python, torch.from_numpy(np.random.random(1000) < 0.5)])


def test_random_numbers_depend_only_on_seed_trainer_and_step() -> None:
    assert torch.equal(drawn(1, 0, 7), drawn(1, 0, 7))
    masks = [drawn(*key) for key in itertools.product((0, 1, 2**40), (0, 1), (0, 1, 2, 10**9))]
    for first, second in itertools.combinations(masks, 2):
        apart = (first != second).float().mean(dim=1)
        # Independent masks of probability 0.5 agree in half of their places.
        assert ((apart > 0.4) & (apart < 0.6)).all()


class Generator:
    """A random generator of a device."""

    seed = 0

    def manual_seed(self, seed: int) -> None:
        self.seed = seed


def test_only_generators_of_the_devices_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    of_cuda = [Generator(), Generator(), Generator()]
    monkeypatch.setattr(torch.cuda, "default_generators", of_cuda)
    monkeypatch.delattr(torch, "manual_seed")
    with torch.random.fork_rng(devices=[]):
        seed_step(1, 0, 7, [*CPU, torch.device("cuda", 2), torch.device("cuda", 0)])
        seed = torch.initial_seed()
    assert [each.seed for each in of_cuda] == [seed, 0, seed]
