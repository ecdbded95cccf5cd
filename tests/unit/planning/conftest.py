"""Configurations and costs that are easy to reckon with."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hybrid.config import RunConfig
from hybrid.input_spec import FeatureSpec, InputSpec
from workers.planning.costs import TRAINER_MEMORY_TERMS, WORKER_MEMORY_TERMS, Costs
from workers.planning.demand import TRAINER_TERMS, WORKER_TERMS

SPEC = InputSpec(("x", "y"), tuple(FeatureSpec(f"c{k}", 1000) for k in range(4)))


@pytest.fixture
def spec() -> InputSpec:
    return SPEC


@pytest.fixture
def configured() -> Callable[..., RunConfig]:
    """A pipelined run; keyword arguments are keys of their sections."""

    def build(**sections: dict[str, Any]) -> RunConfig:
        config = RunConfig()
        for name, keys in ({"train": {"update": "pipelined"}} | sections).items():
            keys = {"update": "pipelined", **keys} if name == "train" else keys
            config = config.replace(**{name: dataclasses.replace(getattr(config, name), **keys)})
        return config

    return build


@pytest.fixture
def priced() -> Callable[..., Costs]:
    """Costs of nothing but what is given: a trainer's terms, a worker's."""

    def build(trainer: dict[str, float], worker: dict[str, float], busy: float = 1.0) -> Costs:
        return Costs(
            "a test",
            busy,
            dict.fromkeys(TRAINER_TERMS, 0.0) | trainer,
            dict.fromkeys(WORKER_TERMS, 0.0) | worker,
            dict.fromkeys(TRAINER_MEMORY_TERMS, 0.0) | {"step": 100.0},
            dict.fromkeys(WORKER_MEMORY_TERMS, 0.0) | {"step": 1000.0},
        )

    return build
