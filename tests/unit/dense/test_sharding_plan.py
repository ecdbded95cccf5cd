"""Sharding plans: automatic ones, and those of the configuration."""

from collections.abc import Mapping

import pytest
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from hybrid.dense.tensor_parallel import STYLES, automatic_plan, parse_plan
from hybrid.errors import ConfigError
from hybrid.models.dcn_v2 import CrossInteraction
from hybrid.models.dense_net import DenseNet
from hybrid.models.dlrm import DotInteraction
from hybrid.models.layers import mlp, output_mlp
from hybrid.models.mmoe import MMoE
from hybrid.models.wide_deep import WideHead


def named(plan: Mapping[str, ParallelStyle]) -> dict[str, str]:
    """Return the names of styles, as torch's have no equality; torch writes to each, so none is shared."""
    names = {repr(make()): name for name, make in STYLES.items()}
    assert len(names) == len(STYLES)
    assert len({id(style) for style in plan.values()}) == len(plan)
    return {path: names[repr(style)] for path, style in plan.items()}


class Repeated(nn.Sequential):
    """Calls its layers in reverse order."""

    def forward(self, x_BH: Tensor) -> Tensor:
        for layer in reversed(self):
            x_BH = layer(x_BH)
        return x_BH


shared_dropout = nn.Dropout()

GATHERED = "colwise_gathered"
PAIR = {"0": "colwise", "2": "rowwise"}


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (mlp((4, 8, 6, 5)), {**PAIR, "4": GATHERED}),
        (mlp((4, 8, 6, 5, 3)), {**PAIR, "4": "colwise", "6": "rowwise"}),
        (output_mlp((4, 8)), PAIR),
        (mlp((4, 1, 6, 5)), {"2": "colwise", "4": "rowwise"}),
        (WideHead(output_mlp((4, 8, 6))), {"deep.0": "colwise", "deep.2": "rowwise"}),
        (CrossInteraction(5, 2), {"layers.0": GATHERED, "layers.1": GATHERED}),
        (DotInteraction(3, 4), {}),
        (
            MMoE(4, (3,), num_experts=2, expert=(8, 6), tower=(5,)),
            {
                **{f"experts.experts.{n}.{name}": style for n in range(2) for name, style in PAIR.items()},
                "gates.0.weights": GATHERED,
                **{f"towers.0.{name}": style for name, style in PAIR.items()},
            },
        ),
        (nn.Linear(4, 3), {"": GATHERED}),
        (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), {"0": "colwise", "1": "rowwise"}),
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), dict.fromkeys("02", GATHERED)),
        (
            nn.Sequential(nn.Linear(4, 1), shared_dropout, nn.Linear(1, 4), shared_dropout, nn.Linear(4, 2)),
            dict.fromkeys("24", GATHERED),
        ),
        (Repeated(nn.Linear(4, 4), nn.Linear(4, 4)), dict.fromkeys("01", GATHERED)),
        (nn.MultiheadAttention(4, 2), {}),
    ],
)
def test_pairs_of_layers_communicate_once(stage: nn.Module, expected: dict[str, str]) -> None:
    plan = automatic_plan(stage)
    assert named(plan) == expected


def dense_net() -> DenseNet:
    return DenseNet(nn.Linear(3, 4), CrossInteraction(7, 2), WideHead(output_mlp((6, 8, 4))))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], {}),
        (
            ["head.deep.0 = colwise", "head.deep.2=rowwise"],
            {"head": {"deep.0": "colwise", "deep.2": "rowwise"}},
        ),
        (["head.deep.[02] = rowwise"], {"head": {"deep.0": "rowwise", "deep.2": "rowwise"}}),
        (
            ["*.layers.? = colwise_gathered", " bottom  =  colwise "],
            {"interaction": {"layers.0": GATHERED, "layers.1": GATHERED}, "bottom": {"": "colwise"}},
        ),
    ],
)
def test_plan_matches_patterns_of_paths(texts: list[str], expected: dict[str, dict[str, str]]) -> None:
    plan = parse_plan(texts, dense_net())
    assert list(plan) == ["bottom", "interaction", "head"]
    assert {stage: named(styles) for stage, styles in plan.items() if styles} == expected


@pytest.mark.parametrize(
    "texts",
    [
        *(["head.0"], ["= colwise"], ["head.0 ="], ["bottom = colwis"], ["tail.* = rowwise"]),
        *(["head.deep.* = rowwise"], ["head = rowwise"], ["bottom = rowwise", "b* = rowwise"]),
    ],
)
def test_invalid_plan_raises_an_error(texts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_plan(texts, dense_net())
    assert (caught.value.key, caught.value.value) == ("dense.tensor_plan", texts[-1])
