"""Dense nets of a configuration, built-in and custom, and the layout of vectors in their input."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison.cases.matrix import call_text
from support.seeded import random
from torch import Tensor, nn
from torch._dynamo.utils import counters
from unit.models.equations import check_model, vectors

from hybrid.config import ColumnSection, DenseSection, RunConfig, RunSection, TaskSection
from hybrid.config.sections import HISTORY_NETS, NET_CALLS, NETS
from hybrid.dense.compilation import compiled
from hybrid.dense.matmul import Linear
from hybrid.dense.net_builder import build_dense_net, build_remote_net, extra_columns
from hybrid.dense.vector_columns import ColumnLayout
from hybrid.errors import ConfigError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.models.dcn_v2 import DCNv2
from hybrid.models.deepfm import DeepFM
from hybrid.models.dense_net import DenseNet
from hybrid.models.din import InterestAttention
from hybrid.models.dlrm import DLRM
from hybrid.models.hstu import HSTU
from hybrid.models.mmoe import MMoE
from hybrid.models.ple import PLE
from hybrid.models.self_attention import SelfAttention
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

def counted(config, input_spec, widths):
    layer = type("Counted", (nn.Flatten,), {"get_extra_state": lambda _: {"count": 1}})
    return DenseNet(nn.Identity(), Join(), nn.Sequential(nn.Linear(14, 1), layer(0)))

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
    remote_net = build_remote_net(*_custom("custom_nets_of_a_test:linear", remote_mlp=(7,)))
    assert next(remote_net.parameters()).shape == (7, 14)


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
        ("custom_nets_of_a_test:counted", r"head\.1\._extra_state .*dict; .* tensor"),
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


MOST = 3
SPARSE = (FeatureSpec("user", 9), FeatureSpec("seen", 9, multi_hot=True), FeatureSpec("item", 9))
SPEC = InputSpec(("x", "y"), SPARSE)
COLUMNS = {"seen": ColumnSection(pooling="none", max_ids=MOST), "item": ColumnSection(pooling="mean")}
LENGTHS = (2, 0, 3, 1)


def config(net: str = "dcn_v2") -> RunConfig:
    return RunConfig(dense=DenseSection(net=net, bottom_mlp=(8,), top_mlp=(6,)), columns=COLUMNS)


def samples(dim: int = DIM) -> tuple[Tensor, Tensor, Tensor]:
    """Return the vectors of a user, of MOST items seen, padded, and of an item."""
    size = len(LENGTHS)
    seen_BND = random(size, MOST, dim, seed=1, dtype=torch.float64)
    seen_BND *= (torch.arange(MOST) < torch.tensor(LENGTHS).unsqueeze(1)).unsqueeze(2)
    user_BD, item_BD = (random(size, dim, seed=seed, dtype=torch.float64) for seed in (2, 3))
    return user_BD, seen_BND, item_BD


def side_by_side(user_BD: Tensor, seen_BND: Tensor, item_BD: Tensor) -> Tensor:
    lengths_B1 = torch.tensor(LENGTHS, dtype=torch.float64).unsqueeze(1)
    return torch.cat([user_BD, seen_BND.flatten(1), lengths_B1, item_BD], dim=1)


def test_layout_selects_each_column() -> None:
    user_BD, seen_BND, item_BD = samples(5)
    pooled_BE = side_by_side(user_BD, seen_BND, item_BD)
    layout = ColumnLayout(config(), SPEC, [5, MOST * 5 + 1, 5])
    assert layout.widths == [5] * (2 + MOST)
    assert torch.equal(layout.vector("user")(pooled_BE), user_BD)
    assert torch.equal(layout.vector("item")(pooled_BE), item_BD)
    vectors_BND, is_item_BN = layout.sequence("seen")(pooled_BE)
    assert torch.equal(vectors_BND, seen_BND)
    assert is_item_BN.sum(1).tolist() == list(LENGTHS)
    assert torch.equal(is_item_BN, seen_BND.any(dim=2))
    empty_BND, is_item_BN = layout.sequence("seen")(pooled_BE[:0])
    assert (empty_BND.shape, is_item_BN.shape) == ((0, MOST, 5), (0, MOST))


@pytest.mark.parametrize(
    ("name", "is_sequence", "key"),
    [
        ("item", True, "columns.item.pooling"),
        ("seen", False, "columns.seen.pooling"),
        ("shop", True, "data.sparse"),
    ],
)
def test_column_of_another_kind_raises_an_error(name: str, is_sequence: bool, key: str) -> None:
    layout = ColumnLayout(config(), SPEC, [DIM, MOST * DIM + 1, DIM])
    with pytest.raises(ConfigError) as caught:
        layout.sequence(name) if is_sequence else layout.vector(name)
    assert caught.value.key == key


@pytest.mark.parametrize("net_name", [name for name in NETS if name not in (*HISTORY_NETS, "two_towers")])
def test_built_in_nets_take_sequences_as_columns(net_name: str) -> None:
    dim = DIM + extra_columns(net_name)
    user_BD, seen_BND, item_BD = samples(dim)
    dense_BF = random(len(LENGTHS), 2, seed=4, dtype=torch.float64)
    separate = tuple(FeatureSpec(f"seen{n}", 9) for n in range(MOST))
    columns = InputSpec(SPEC.dense_features, (SPEC.sparse_features[0], *separate, SPEC.sparse_features[2]))
    net = build_dense_net(config(net_name), SPEC, [dim, MOST * dim + 1, dim]).double()
    plain = build_dense_net(config(net_name).replace(columns={}), columns, [dim] * (2 + MOST)).double()
    output = net(dense_BF, side_by_side(user_BD, seen_BND, item_BD))
    expected = plain(dense_BF, torch.cat([user_BD, seen_BND.flatten(1), item_BD], dim=1))
    assert torch.equal(output, expected)


HISTORY = "history = 'seen', candidate = 'item'"
DIN = f"din({HISTORY}, attention_mlp = [5])"
ATTENTIONS: dict[str, type[SelfAttention | HSTU]] = {
    f"self_attention({HISTORY}, blocks = 1, heads = 2)": SelfAttention,
    f"hstu({HISTORY}, blocks = 1)": HSTU,
}
WIDTHS = [DIM, MOST * DIM + 1, DIM]


def make_net(call: str) -> DenseNet:
    return build_dense_net(config(call), SPEC, WIDTHS).double()


@pytest.mark.parametrize("call", [DIN, *ATTENTIONS])
def test_net_of_a_history_has_a_vector_of_the_user(call: str) -> None:
    user_BD, seen_BND, item_BD = samples()
    pooled_BE = side_by_side(user_BD, seen_BND, item_BD)
    dense_BF = random(len(LENGTHS), 2, seed=4, dtype=torch.float64)
    net = make_net(call)
    parameters = dict(net.interaction.named_parameters(prefix="user"))
    if call in ATTENTIONS:
        reader: nn.Module = ATTENTIONS[call](DIM, MOST, num_blocks=1, num_heads=2)
    else:
        reader = InterestAttention(DIM, hidden=(5,))
    parts = reader.double().state_dict().keys()
    reader.load_state_dict(
        {part: parameters[f"user.user.{'attention.' * (call in ATTENTIONS)}{part}"] for part in parts}
    )
    with torch.no_grad():
        for b, length in enumerate(LENGTHS):
            history, is_item = seen_BND[b : b + 1, :length], torch.ones(1, length, dtype=torch.bool)
            if call not in ATTENTIONS:
                vector = reader(item_BD[b : b + 1], history, is_item)
            else:
                vector = reader(history, is_item)[:, -1] * item_BD[b] if length else torch.zeros(1, DIM)
            hidden = torch.cat([dense_BF[b : b + 1], vector, user_BD[b : b + 1], item_BD[b : b + 1]], dim=1)
            score = net(dense_BF[b : b + 1], pooled_BE[b : b + 1])
            torch.testing.assert_close(score, net.head(hidden))
    assert net(dense_BF[:0], pooled_BE[:0]).shape == (0,)


@pytest.mark.long
@pytest.mark.parametrize("call", [DIN, *ATTENTIONS])
def test_net_of_a_history_compiles(call: str) -> None:
    net, dense_BF = make_net(call), random(len(LENGTHS), 2, seed=4, dtype=torch.float64)
    inputs = (dense_BF, side_by_side(*samples()))
    stage = compiled(net.interaction, "aot_eager", inputs)
    assert torch.equal(net.head(stage(*inputs)), net(*inputs))


@pytest.mark.parametrize(
    ("call", "key"),
    [
        ("din(history = 'user', candidate = 'item')", "columns.user.pooling"),
        ("din(history = 'seen', candidate = 'seen')", "columns.seen.pooling"),
        ("din(history = 'shop', candidate = 'item')", "data.sparse"),
        (f"self_attention({HISTORY}, heads = 3)", "dense.net"),
        (f"hstu({HISTORY}, heads = 3)", "dense.net"),
        (f"hstu({HISTORY}, blocks = 0)", "dense.net"),
        ("din(history = 'seen')", "dense.net"),
    ],
)
def test_net_of_another_history_raises_an_error(call: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}"):
        make_net(call)


def test_candidate_of_another_width_raises_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^tables\.\*\.dim"):
        build_dense_net(config(f"din({HISTORY})"), SPEC, [DIM, MOST * DIM + 1, DIM + 1])
