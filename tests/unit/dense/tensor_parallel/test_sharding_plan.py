"""Plans for splitting a dense net: those chosen for the built-in nets, and those that a user writes."""

import re
from collections.abc import Mapping
from itertools import pairwise

import pytest
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from hybrid.dense.tensor_parallel.sharding_plan import TensorStyle, automatic_plan, parse_plan
from hybrid.errors import ConfigError
from hybrid.models.dcn_v2 import CrossInteraction
from hybrid.models.dense_net import DenseNet
from hybrid.models.dlrm import DotInteraction
from hybrid.models.mmoe import MMoE
from hybrid.models.wide_deep import LinearTerm, WideHead


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def head(*widths: int) -> nn.Sequential:
    return mlp(*widths).append(nn.Linear(widths[-1], 1)).append(nn.Flatten(0))


def named(plan: Mapping[str, ParallelStyle]) -> dict[str, str]:
    """The names of styles, as torch's have no equality; each is of one layer, since torch writes to it."""
    names = {repr(style.parallel_style()): style.value for style in TensorStyle}
    assert len(names) == len(TensorStyle)
    assert len({id(style) for style in plan.values()}) == len(plan)
    return {path: names[repr(style)] for path, style in plan.items()}


class Repeated(nn.Sequential):
    """Calls its layers in an order of its own."""

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
        (mlp(4, 8, 6), PAIR),
        (mlp(4, 8, 6, 5), {**PAIR, "4": GATHERED}),
        (mlp(4, 8, 6, 5, 3), {**PAIR, "4": "colwise", "6": "rowwise"}),
        (mlp(4, 8), {"0": GATHERED}),
        (head(4), {}),
        (head(4, 8), PAIR),
        (head(4, 8, 6), PAIR),
        (mlp(4, 1, 6, 5), {"2": "colwise", "4": "rowwise"}),
        (WideHead(head(4, 8, 6)), {"deep.0": "colwise", "deep.2": "rowwise"}),
        (CrossInteraction(5, 2), {"layers.0": GATHERED, "layers.1": GATHERED}),
        (LinearTerm(3), {}),
        (DotInteraction(3, 4), {}),
        (
            MMoE(4, (3,), num_experts=2, expert=(8, 6), tower=(5,)),
            {
                **{f"experts.experts.{n}.{name}": style for n in range(2) for name, style in PAIR.items()},
                "gates.0.shares": GATHERED,
                **{f"towers.0.{name}": style for name, style in PAIR.items()},
            },
        ),
        (nn.Identity(), {}),
        (nn.Linear(4, 3), {"": GATHERED}),
        (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), {"0": "colwise", "1": "rowwise"}),
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), dict.fromkeys("02", GATHERED)),
        (
            nn.Sequential(nn.Linear(4, 1), shared_dropout, nn.Linear(1, 4), shared_dropout, nn.Linear(4, 2)),
            dict.fromkeys("24", GATHERED),
        ),
        (Repeated(nn.Linear(4, 4), nn.Linear(4, 4)), dict.fromkeys("01", GATHERED)),
        (nn.MultiheadAttention(4, 2), {}),
        (nn.Embedding(5, 4), {}),
    ],
)
def test_pairs_of_layers_communicate_once(stage: nn.Module, expected: dict[str, str]) -> None:
    plan = automatic_plan(stage)
    assert named(plan) == expected


def dense_net() -> DenseNet:
    return DenseNet(nn.Linear(3, 4), CrossInteraction(7, 2), WideHead(head(6, 8, 4)))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], {}),
        (
            ["head.deep.0 = colwise", "head.deep.2=rowwise"],
            {"head": {"deep.0": "colwise", "deep.2": "rowwise"}},
        ),
        (["head.deep.[02] = rowwise"], {"head": {"deep.0": "rowwise", "deep.2": "rowwise"}}),
        (["bottom = colwise_gathered"], {"bottom": {"": GATHERED}}),
        (
            ["*.layers.? = colwise_gathered", " bottom  =  colwise "],
            {
                "interaction": {"layers.0": GATHERED, "layers.1": GATHERED},
                "bottom": {"": "colwise"},
            },
        ),
        (
            ["head.deep.0 = colwise", "head.deep.2 = colwise_gathered"],
            {"head": {"deep.0": "colwise", "deep.2": GATHERED}},
        ),
    ],
)
def test_plan_matches_patterns_of_paths(texts: list[str], expected: dict[str, dict[str, str]]) -> None:
    plan = parse_plan(texts, dense_net())
    assert list(plan) == ["bottom", "interaction", "head"]
    assert {stage: named(styles) for stage, styles in plan.items() if styles} == expected


def test_tables_of_a_dense_net_can_be_split() -> None:
    net = DenseNet(nn.Identity(), nn.Embedding(5, 4), nn.Linear(4, 1))
    assert named(parse_plan(["interaction = rowwise"], net)["interaction"]) == {"": "rowwise"}


LAYERS = "there are bottom, interaction.layers.0, interaction.layers.1, head.deep.0, head.deep.2, head.deep.4"
FORM = 'must hold texts such as "head.0 = colwise"'


@pytest.mark.parametrize(
    ("texts", "rule"),
    [
        (["head.0"], FORM),
        (["= colwise"], FORM),
        (["head.0 ="], FORM),
        (["bottom = colwis"], "'colwis' is not a style; did you mean 'colwise'?"),
        (["bottom = 7"], "'7' is not a style; choose from colwise, rowwise, colwise_gathered"),
        (["tail.* = rowwise"], f"'tail.*' matches nothing in the net; {LAYERS}"),
        (
            ["head.deep.* = rowwise"],
            f"head.deep.1 is a ReLU; only Linear and Embedding can be split; {LAYERS}",
        ),
        (["head = rowwise"], f"head is a WideHead; only Linear and Embedding can be split; {LAYERS}"),
        (["bottom = rowwise", "b* = rowwise"], "bottom is matched by 'bottom = rowwise' too"),
        (
            ["head.deep.0 = colwise"],
            "the output of head.deep.0 stays split; split the layer after it, or take colwise_gathered",
        ),
        (
            ["head.deep.0 = rowwise", "head.deep.4 = colwise"],
            "the output of head.deep.4 stays split; split the layer after it, or take colwise_gathered",
        ),
    ],
)
def test_invalid_plan_raises_an_error(texts: list[str], rule: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(rule)) as caught:
        parse_plan(texts, dense_net())
    assert (caught.value.key, caught.value.rule, caught.value.value) == ("dense.tensor_plan", rule, texts[-1])


@pytest.mark.parametrize(
    ("head", "hint"),
    [
        (mlp(*range(1, 11)), f"there are {', '.join(f'head.{2 * i}' for i in range(8))}, ..."),
        (nn.Identity(), "it has no Linear or Embedding"),
    ],
)
def test_message_lists_the_first_layers(head: nn.Module, hint: str) -> None:
    with pytest.raises(ConfigError, match="matches nothing") as caught:
        parse_plan(["x = rowwise"], DenseNet(nn.Identity(), nn.Identity(), head))
    assert caught.value.rule.endswith(hint)


def test_layers_outside_a_sequential_are_not_checked() -> None:
    """Nothing says there what follows what."""
    net = DenseNet(nn.Identity(), nn.Identity(), nn.ModuleDict({"a": nn.Linear(2, 4), "b": nn.Linear(4, 1)}))
    assert named(parse_plan(["head.a = colwise"], net)["head"]) == {"a": "colwise"}
