"""Dense nets of a configuration, built-in and custom: sizes, empty batches, compilation, errors."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison.cases.matrix import call_text
from torch import Tensor, nn
from torch._dynamo.utils import counters
from unit.models.equations import check_model, vectors

from hybrid.config import DenseSection, RunConfig, RunSection, TaskSection
from hybrid.config.sections import NET_CALLS
from hybrid.dense.compilation import compiled
from hybrid.dense.matmul import Linear
from hybrid.dense.net_builder import build_dense_net, build_remote_net, extra_columns
from hybrid.errors import ConfigError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.models.dcn_v2 import DCNv2
from hybrid.models.deepfm import DeepFM
from hybrid.models.dense_net import DenseNet
from hybrid.models.dlrm import DLRM
from hybrid.models.mmoe import MMoE
from hybrid.models.ple import PLE
from hybrid.models.wide_deep import WideAndDeep

DIM, NUM_SPARSE = 4, 3
# Calls of a custom loop, for two dense features.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "dlrm": lambda: DLRM(2, NUM_SPARSE, DIM, bottom=(8,), top=(16, 12)),
    "dcn_v2": lambda: DCNv2(2 + NUM_SPARSE * DIM, num_layers=3, deep=(16, 12)),
    "deepfm": lambda: DeepFM(2, NUM_SPARSE, DIM, deep=(16, 12)),
    "wide_deep": lambda: WideAndDeep(2, [DIM] * NUM_SPARSE, deep=(16, 12)),
    "mmoe": lambda: MMoE(2 + NUM_SPARSE * DIM, [1], 5, expert=(7, 6), tower=(16, 12)),
    "ple": lambda: PLE(2 + NUM_SPARSE * DIM, [1], 5, layers=(7, 6), tower=(16, 12)),
}


def _config(net: str, *, seed: int = 1, **dense: Any) -> RunConfig:
    section = dataclasses.replace(DenseSection(bottom_mlp=(8,), top_mlp=(16, 12)), net=net, **dense)
    return RunConfig(dense=section, run=RunSection(seed=seed))


def _input_spec(num_dense: int, num_sparse: int = NUM_SPARSE) -> InputSpec:
    sparse = tuple(FeatureSpec(f"C{k}", num_rows=10) for k in range(num_sparse))
    return InputSpec(tuple(f"I{f}" for f in range(num_dense)), sparse)


def _widths(net: str, num_sparse: int = NUM_SPARSE) -> tuple[int, ...]:
    return (DIM + extra_columns(net),) * num_sparse


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("net_name", MODELS)
def test_net_has_the_configured_class_and_sizes(net_name: str) -> None:
    arguments = {"cross_layers": 3, "experts": 5, "expert_mlp": [7, 6]}
    config, model = _config(call_text(NET_CALLS, net_name, arguments)), MODELS[net_name]()
    net = build_dense_net(config, _input_spec(2), _widths(net_name))
    found = net if isinstance(model, DenseNet) else net.head
    assert type(found) is type(model)
    assert _shapes(found) == _shapes(model)


@pytest.mark.parametrize(
    ("is_preferred", "precision", "kind"),
    [(True, "none", Linear), (False, "none", nn.Linear), (True, "bfloat16", nn.Linear)],
)
def test_net_uses_onednn_where_preferred(
    is_preferred: bool, precision: str, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid.dense.net_builder.prefers_onednn", lambda: is_preferred)
    config = _config("dlrm", autocast=precision, remote_mlp=(8, 8))
    for net in (f(config, _input_spec(2), _widths("dlrm")) for f in (build_dense_net, build_remote_net)):
        kinds = {type(m) for m in net.modules() if isinstance(m, nn.Linear) and m.out_features > 1}
        assert kinds == {kind}


# torch.compile makes an instance of DotInteraction's autograd function, against torch's own rules.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "net_name", [pytest.param(n, marks=() if n == "dlrm" else pytest.mark.long) for n in MODELS]
)
def test_every_net_compiles_without_graph_breaks(net_name: str) -> None:
    widths = _widths(net_name)
    net = build_dense_net(_config(net_name), _input_spec(2), widths).double()
    before = sum(counters["graph_break"].values())
    example, inputs = ((vectors(size, 2, seed=3), vectors(size, sum(widths), seed=4)) for size in (5, 7))
    form = compiled(net, "aot_eager", example)
    check_model(net, lambda _, *given: net(*given), *inputs, run=form)
    assert sum(counters["graph_break"].values()) == before


@pytest.mark.parametrize("net_name", MODELS)
def test_initial_weights_depend_only_on_the_seed(net_name: str) -> None:
    def weights(seed: int) -> Tensor:
        config = _config(net_name, seed=seed, remote_mlp=(7,))
        local = build_dense_net(config, _input_spec(2), _widths(net_name))
        remote = build_remote_net(config, _input_spec(2), _widths(net_name))
        return nn.utils.parameters_to_vector([*local.parameters(), *remote.parameters()])

    torch.manual_seed(11)
    first = weights(seed=1)
    state = torch.get_rng_state()
    torch.testing.assert_close(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(11)))
    torch.manual_seed(12)
    assert torch.equal(weights(seed=1), first)
    assert not torch.equal(weights(seed=2), first)
    torch.set_rng_state(state)


@pytest.mark.parametrize(("net_name", "dims"), [("dlrm", "[4, 8]"), ("deepfm", "[3, 7]")])
def test_nets_of_pairs_need_equal_widths(net_name: str, dims: str) -> None:
    with pytest.raises(ConfigError, match=rf"^tables\.\*\.dim = {re.escape(dims)}: "):
        build_dense_net(_config(net_name), _input_spec(2), (4, 8, 4))


def test_dlrm_of_one_vector_raises_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^data\.dense: "):
        build_dense_net(_config("dlrm"), _input_spec(0, 1), (DIM,))
    assert build_dense_net(_config("dlrm"), _input_spec(1, 1), (DIM,)) is not None


CUSTOM_NETS = """
import torch
from torch import nn
from hybrid.models.dense_net import DenseNet

class Join(nn.Module):
    def forward(self, bottom, pooled):
        return torch.cat([bottom, pooled], 1)

def linear(config, input_spec, widths):
    width = len(input_spec.dense_features) + sum(widths)
    last = config.dense.remote_mlp[-1] if config.dense.remote_mlp else width
    head = nn.Sequential(nn.Linear(last, 1), nn.Flatten(0))
    return DenseNet(nn.Identity(), Join(), head)

def wrong(config, input_spec, widths):
    return nn.Linear(1, 1)

def lazy(config, input_spec, widths):
    return DenseNet(nn.Identity(), Join(), nn.Sequential(nn.LazyLinear(1), nn.Flatten(0)))

def two_logits(config, input_spec, widths):
    return DenseNet(nn.Identity(), Join(), nn.Linear(14, 2))

def misfit(config, input_spec, widths):
    return DenseNet(nn.Identity(), Join(), nn.Sequential(nn.Linear(14, 8), nn.Linear(9, 1)))

class Pair(nn.Module):
    def forward(self, bottom):
        return bottom, bottom

def pair(config, input_spec, widths):
    return DenseNet(Pair(), Join(), nn.Linear(14, 1))

class NoEmpty(nn.Module):
    def forward(self, bottom, pooled):
        return torch.cat([bottom / bottom.max(), pooled], 1)

def no_empty(config, input_spec, widths):
    return DenseNet(nn.Identity(), NoEmpty(), nn.Linear(14, 1))
"""


@pytest.fixture
def custom_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "custom_nets_of_a_test.py").write_text(CUSTOM_NETS)
    monkeypatch.syspath_prepend(tmp_path)


def _custom(name: str, **dense: Any) -> tuple[RunConfig, InputSpec, Sequence[int]]:
    """Return the arguments of a function that builds a net."""
    return _config(name, **dense), _input_spec(2), (3, 4, 5)


@pytest.mark.usefixtures("custom_module")
def test_custom_net_is_built_by_its_function() -> None:
    arguments = _custom("custom_nets_of_a_test:linear")
    assert extra_columns("custom_nets_of_a_test:linear") == 0
    net = build_dense_net(*arguments)
    assert isinstance(net, DenseNet)
    weight = next(net.parameters())
    assert weight.shape == (1, 14)
    torch.rand(1)
    assert torch.equal(next(build_dense_net(*arguments).parameters()), weight)
    remote_weight, _ = build_remote_net(
        *_custom("custom_nets_of_a_test:linear", remote_mlp=(7,))
    ).parameters()
    assert remote_weight.shape == (7, 14)


@pytest.mark.usefixtures("custom_module")
def test_custom_net_has_the_outputs_of_all_tasks() -> None:
    config, spec, widths = _custom("custom_nets_of_a_test:two_logits")
    pair = {"a": TaskSection(), "b": TaskSection()}
    assert isinstance(build_dense_net(config.replace(tasks=pair), spec, widths), DenseNet)
    with pytest.raises(ConfigError, match=r"the head .* \[2, 3\]"):
        build_dense_net(config.replace(tasks={**pair, "c": TaskSection()}), spec, widths)


@pytest.mark.usefixtures("custom_module")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent_nets_of_a_test:f", "ModuleNotFoundError"),
        ("custom_nets_of_a_test:wrong", "DenseNet.* Linear"),
        ("custom_nets_of_a_test:lazy", r"head\.0\.weight"),
        ("custom_nets_of_a_test:two_logits", r"the head .* \[2, 2\]"),
        ("custom_nets_of_a_test:misfit", r"head .* \[2, 14\]: .*2x8 .*head\.1"),
        ("custom_nets_of_a_test:pair", "bottom .*tuple"),
        ("custom_nets_of_a_test:no_empty", r"the interaction .* \[0, 2\] and .*custom_nets_of_a_test.py:\d+"),
    ],
)
def test_invalid_custom_net_raises_an_error(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        build_dense_net(*_custom(name))
    assert caught.value.key == "dense.net"
