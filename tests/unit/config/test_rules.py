"""Rules that tie several keys together: the dense net's parallel forms, and the steps of a profile."""

from typing import Any

import pytest

from hybrid.config import (
    ClusterSection,
    DataSection,
    DenseSection,
    ProfileSection,
    RunConfig,
    TaskSection,
    TrainSection,
)
from hybrid.config.loading import validate
from hybrid.config.validation import recorded_steps
from hybrid.errors import ConfigError


def config(trainers: int = 4, **dense: Any) -> RunConfig:
    return RunConfig(cluster=ClusterSection(trainers=trainers), dense=DenseSection(**dense))


def test_forms_that_go_together_pass() -> None:
    validate(config(parallel="replicas", devices=("cpu", "cpu"), compile="script"))
    validate(config(parallel="replicas", devices=("cuda:0", "cpu"), optimizer="Adafactor"))
    validate(config(parallel="tensor", tensor_size=4))
    validate(config(parallel="tensor", net="mine:net", tensor_plan=("head.0 = colwise_gathered",)))
    validate(config(compile="inductor", optimizer="Muon"))
    validate(config(parallel="replicas", devices=("cpu",), compile="script"))


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        ({"parallel": "tensor", "tensor_size": 3},
         "dense.tensor_size = 3: must divide cluster.trainers, which is 4"),
        ({"parallel": "tensor", "tensor_size": 1}, "dense.tensor_size = 1: must be an integer, at least 2"),
        ({"parallel": "tensor", "net": "mine:net"}, "dense.tensor_plan = (): must say how the layers"),
        ({"parallel": "tensor", "compile": "script"}, "dense.compile = 'script': must be none"),
        ({"parallel": "tensor", "optimizer": "Muon"}, "dense.optimizer = 'Muon': looks at whole matrices"),
        ({"parallel": "tensor", "devices": ("cpu",)},
         "dense.devices = ('cpu',): is read where dense.parallel is \"replicas\" only"),
        ({"devices": ("cpu",)},
         "dense.devices = ('cpu',): is read where dense.parallel is \"replicas\" only"),
        ({"parallel": "replicas", "devices": ("cpu",), "tensor_plan": ("head = rowwise",)},
         "dense.tensor_plan = ('head = rowwise',): is read where dense.parallel is \"tensor\" only"),
        ({"parallel": "replicas"}, "dense.devices = (): must name the devices"),
        ({"parallel": "replicas", "devices": ("cpu", "cuda")},
         "dense.devices = 'cuda': must hold cpu and cuda:N"),
        ({"parallel": "replicas", "devices": ("cpu",), "device": "cpu"},
         "dense.device = 'cpu': leave it out"),
        ({"parallel": "both"}, "dense.parallel = 'both': must be one of none, replicas, tensor"),
        ({"compile": "jit"}, "dense.compile = 'jit': must be one of none, script, trace"),
    ],
)  # fmt: skip
def test_forms_that_do_not_are_refused(dense: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(config(**dense))
    assert str(caught.value).startswith(message)


def test_metrics_are_weighted_by_a_column_only() -> None:
    validate(RunConfig(data=DataSection(weight="weight", weighted_metrics=True)))
    with pytest.raises(ConfigError, match=r"^data\.weighted_metrics = True: needs data\.weight, the column"):
        validate(RunConfig(data=DataSection(weighted_metrics=True)))


def test_lanes_shuffle_rows_and_not_groups() -> None:
    validate(RunConfig(data=DataSection(shuffle="lanes(64)")))
    ranked = {"click": TaskSection(label="label", ranking_loss="pairwise")}
    with pytest.raises(ConfigError, match=r"^data\.shuffle = 'lanes': must not have lanes"):
        validate(RunConfig(data=DataSection(shuffle="lanes", group="C7"), tasks=ranked))


@pytest.mark.parametrize(
    ("first", "steps", "before", "total", "expected"),
    [
        (10, 3, 0, 13, range(10, 13)),
        (0, 1, 0, 1, range(1)),
        (2, 3, 16, 21, range(18, 21)),  # counted from where the run goes on
    ],
)
def test_the_recorded_steps(first: int, steps: int, before: int, total: int, expected: range) -> None:
    assert recorded_steps(ProfileSection(first_step=first, steps=steps), before, total) == expected


def test_without_a_profile_any_run_is_long_enough() -> None:
    assert not recorded_steps(ProfileSection(), 0, 1)
    validate(RunConfig(train=TrainSection(max_steps=1)))


@pytest.mark.parametrize(("before", "total"), [(0, 12), (16, 28)])
def test_a_run_too_short_for_its_profile_is_refused(before: int, total: int) -> None:
    message = r"profile\.first_step = 10: must leave profile\.steps = 3 of the 12 steps that the run takes"
    with pytest.raises(ConfigError, match=message):
        recorded_steps(ProfileSection(steps=3), before, total)


def test_that_is_seen_at_once_where_the_steps_are_limited() -> None:
    validate(RunConfig(train=TrainSection(max_steps=13), profile=ProfileSection(steps=3)))
    with pytest.raises(ConfigError, match=r"^profile\.first_step = 10: "):
        validate(RunConfig(train=TrainSection(max_steps=12), profile=ProfileSection(steps=3)))
