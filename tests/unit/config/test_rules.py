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
    validate(config(device="cpu,cpu", compile="script"))
    validate(config(device="cuda:0, cpu", optimizer="Adafactor"))
    validate(config(tensor_size=4))
    validate(config(tensor_size=2, net="mine:net", tensor_plan=("head.0 = colwise_gathered",)))
    validate(config(compile="inductor", optimizer="Muon"))


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        ({"tensor_size": 3}, "dense.tensor_size = 3: must divide cluster.trainers, which is 4"),
        ({"tensor_size": 2, "net": "mine:net"}, "dense.tensor_plan = (): must say how the layers"),
        ({"tensor_size": 2, "compile": "script"}, "dense.compile = 'script': must be none"),
        ({"tensor_size": 2, "optimizer": "Muon"}, "dense.optimizer = 'Muon': needs whole matrices"),
        ({"tensor_size": 2, "device": "cpu,cpu"}, "dense.device = 'cpu,cpu': must be one device"),
        ({"tensor_plan": ("head = rowwise",)}, "dense.tensor_plan = ('head = rowwise',): needs dense.tensor"),
        ({"device": "cpu,cuda"}, "dense.device = 'cpu,cuda': must hold cpu and cuda:N"),
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
    ("steps", "before", "total", "expected"),
    [
        ((3,), 0, 13, range(10, 13)),
        ((1, 0), 0, 1, range(1)),
        ((3, 2), 16, 21, range(18, 21)),  # counted from the step that the run resumes at
        ((), 0, 1, range(10, 10)),
    ],
)
def test_the_recorded_steps(steps: tuple[int, ...], before: int, total: int, expected: range) -> None:
    assert recorded_steps(ProfileSection(steps=steps), before, total) == expected


@pytest.mark.parametrize(("before", "total"), [(0, 12), (16, 28)])
def test_a_run_too_short_for_its_profile_is_refused(before: int, total: int) -> None:
    with pytest.raises(ConfigError, match=r"^profile\.steps = \(3,\): must be within the 12 steps"):
        recorded_steps(ProfileSection(steps=(3,)), before, total)


def test_a_profile_is_checked_at_once_if_steps_are_limited() -> None:
    validate(RunConfig(train=TrainSection(max_steps=13), profile=ProfileSection(steps=(3,))))
    with pytest.raises(ConfigError, match=r"^profile\.steps = "):
        validate(RunConfig(train=TrainSection(max_steps=12), profile=ProfileSection(steps=(3,))))
