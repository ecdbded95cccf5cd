"""What is measured of a job's nets before any of them trains."""

from collections.abc import Sequence

import pytest

from hybrid.config import RunConfig
from hybrid.config.loading import load_config
from hybrid.engine import matmul_trial
from hybrid.engine.matmul_trial import MatmulTrial
from hybrid.engine.model_builder import Blueprint
from hybrid.engine.table_setup import table_specs
from hybrid.errors import ConfigError
from hybrid.input_spec import FeatureSpec, InputSpec

SLOWER = 0.9
LARGE = (
    'dense.net="wide_deep"',
    "dense.top_mlp=[512, 256]",
    "train.batch_size=2048",
    "cluster.trainers=2",
    "embedding.dim=64",
)
Measured = list[tuple[list[tuple[int, int]], int]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """The shapes and numbers of samples that are measured; oneDNN's products are found slower."""
    calls: Measured = []

    def gain(shapes: list[tuple[int, int]], num_samples: int) -> float:
        calls.append((shapes, num_samples))
        return SLOWER

    monkeypatch.setattr(matmul_trial, "measured_gain", gain)
    return calls


def gain(*settings: str, index: int = 0, own: Sequence[str] = ()) -> float:
    config: RunConfig = load_config(None, [*LARGE, *settings])
    spec = InputSpec(("x",), (FeatureSpec("ids", 10), FeatureSpec("others", 10)))
    return MatmulTrial(index, Blueprint(config, spec, table_specs(config, spec, 1)), own).gain()


def test_the_layers_of_a_trainer_are_measured_with_its_samples(measured: Measured) -> None:
    assert gain() == SLOWER
    assert measured == [([(129, 512), (512, 256)], 1024)]


def test_the_device_is_that_of_its_own_host(measured: Measured) -> None:
    with pytest.raises(ConfigError, match=r"^dense.device = 'cuda:77': this machine has"):
        gain(own=["dense.device=cuda:77"])


def test_the_samples_are_those_of_one_pass(measured: Measured) -> None:
    assert gain("train.micro_batches=2") == SLOWER
    assert gain('dense.parallel="replicas"', 'dense.devices=["cpu", "cpu"]') == SLOWER
    assert [samples for _, samples in measured] == [512, 512]


def test_the_layers_of_a_remote_net_are_measured_too(measured: Measured) -> None:
    assert gain("dense.remote_mlp=[300, 200]") == SLOWER
    assert measured == [([(130, 300), (300, 200)], 1024)]


@pytest.mark.parametrize("found", [(3.0, 2.0), (2.0, 3.0)])
def test_a_gain_is_measured_again_and_the_smaller_one_counts(
    found: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    gains = iter(found)
    monkeypatch.setattr(matmul_trial, "measured_gain", lambda shapes, num_samples: next(gains))
    assert gain() == 2.0
    assert not [*gains]


@pytest.mark.parametrize(
    "setting",
    [
        'train.dtype="float64"',
        'dense.autocast="bfloat16"',
        'dense.parallel="tensor"',
        "train.batch_size=8",
        "dense.top_mlp=[4]",
    ],
)
def test_where_no_product_can_be_onednns_nothing_is_measured(setting: str, measured: Measured) -> None:
    assert gain(setting) == 1.0
    assert measured == []


def test_nothing_is_measured_for_a_gpu(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert gain() == 1.0
    assert measured == []
