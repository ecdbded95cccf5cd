"""The layout of vectors in the sparse input of a net, and sequences in built-in nets."""

import pytest
import torch
from support.seeded import random
from torch import Tensor, nn

from hybrid.config import ColumnSection, DenseSection, RunConfig
from hybrid.config.sections import HISTORY_NETS, NETS
from hybrid.dense.compilation import compiled
from hybrid.dense.net_builder import build_dense_net, extra_columns
from hybrid.dense.vector_columns import ColumnLayout
from hybrid.errors import ConfigError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.models.dense_net import DenseNet
from hybrid.models.din import InterestAttention
from hybrid.models.hstu import HSTU
from hybrid.models.self_attention import SelfAttention

DIM, MOST = 4, 3
SPEC = InputSpec(
    ("x", "y"), (FeatureSpec("user", 9), FeatureSpec("seen", 9, multi_hot=True), FeatureSpec("item", 9))
)
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
ATTENTIONS: dict[str, type[SelfAttention | HSTU]] = {
    f"self_attention({HISTORY}, blocks = 1, heads = 2)": SelfAttention,
    f"hstu({HISTORY}, blocks = 1)": HSTU,
}
WIDTHS = [DIM, MOST * DIM + 1, DIM]


def make_net(call: str) -> DenseNet:
    return build_dense_net(config(call), SPEC, WIDTHS).double()


@pytest.mark.parametrize("call", [f"din({HISTORY}, attention_mlp = [5])", *ATTENTIONS])
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
    whole = net(dense_BF, pooled_BE)
    inputs = (dense_BF, pooled_BE)
    stage = compiled(net.interaction, "aot_eager", inputs)
    assert torch.equal(net.head(stage(*inputs)), whole)
    assert net(dense_BF[:0], pooled_BE[:0]).shape == (0,)


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
