"""Rules that tie several keys together: the dense net's parallel forms, and the steps of a profile."""

import pytest

from hybrid.config import DataSection, ProfileSection, RunConfig, TaskSection, TrainSection
from hybrid.config.loading import load_config, validate
from hybrid.config.validation import recorded_steps
from hybrid.errors import ConfigError


def test_weighted_metrics_need_weight_column() -> None:
    validate(RunConfig(data=DataSection(weight="weight", weighted_metrics=True)))
    with pytest.raises(ConfigError, match=r"^data\.weighted_metrics = True: "):
        validate(RunConfig(data=DataSection(weighted_metrics=True)))


def test_a_net_of_many_layers_is_refused() -> None:
    load_config(None, ["dense.top_mlp=[8, 4]", "dense.net=dcn_v2(1000)"])
    for setting in (f"dense.top_mlp={[1] * 1001}", "dense.net=dcn_v2(1001)", "dense.net=ple(1001)"):
        with pytest.raises(ConfigError, match=r"^dense\..* at most 1000"):
            load_config(None, [setting])


def test_lanes_are_refused_with_ranking_loss() -> None:
    validate(RunConfig(data=DataSection(shuffle="lanes(64)")))
    ranked = {"click": TaskSection(label="label", ranking_loss="pairwise")}
    with pytest.raises(ConfigError, match=r"^data\.shuffle = 'lanes': "):
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
def test_recorded_steps(steps: tuple[int, ...], before: int, total: int, expected: range) -> None:
    assert recorded_steps(ProfileSection(steps=steps), before, total) == expected


@pytest.mark.parametrize(("before", "total"), [(0, 12), (16, 28)])
def test_profile_beyond_end_of_run_is_refused(before: int, total: int) -> None:
    with pytest.raises(ConfigError, match=r"^profile\.steps = \(3,\): "):
        recorded_steps(ProfileSection(steps=(3,)), before, total)


def test_profile_is_checked_early_if_steps_are_limited() -> None:
    validate(RunConfig(train=TrainSection(max_steps=13), profile=ProfileSection(steps=(3,))))
    with pytest.raises(ConfigError, match=r"^profile\.steps = "):
        validate(RunConfig(train=TrainSection(max_steps=12), profile=ProfileSection(steps=(3,))))
