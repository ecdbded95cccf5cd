"""Models of a history against their equations: a sample, a position and an item at a time."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from unit.models.equations import Parameters, check_model, plain_logit, plain_mlp, vectors, within

from hybrid.models.din import DIN
from hybrid.models.final_mlp import BilinearFusion
from hybrid.models.hstu import HSTU, HSTUBlock
from hybrid.models.layers import pad_histories
from hybrid.models.self_attention import AttentionBlock, SelfAttention, last_queries, next_item_loss

DIM = 4


def normed(parameters: Parameters, name: str, x_TD: Tensor, eps: float = 1e-5) -> Tensor:
    centered_TD = x_TD - x_TD.mean(-1, keepdim=True)
    scaled_TD = centered_TD / torch.sqrt(centered_TD.square().mean(-1, keepdim=True) + eps)
    return scaled_TD * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def block(parameters: Parameters, x_TD: Tensor, is_item_T: Tensor, num_heads: int) -> Tensor:
    positions = torch.arange(len(x_TD))
    distances_TT = positions.unsqueeze(1) - positions
    mask_TT = (distances_TT >= 0) & is_item_T
    biases_TT = parameters["biases_T"][distances_TT.clamp(min=0)]
    projected = silu(normed(parameters, "norm", x_TD) @ parameters["projection.weight"].mT)
    gate, value, query, key = projected.split(DIM, dim=1)
    heads = []
    for h in range(num_heads):
        part = slice(h * DIM // num_heads, (h + 1) * DIM // num_heads)
        scores_TT = silu(query[:, part] @ key[:, part].mT + biases_TT)
        heads.append(torch.where(mask_TT, scores_TT, 0.0) @ value[:, part] / len(parameters["biases_T"]))
    gated = normed(parameters, "attention_norm", torch.cat(heads, dim=1), eps=1e-6) * gate
    output_TD: Tensor = x_TD + gated @ parameters["output.weight"].mT + parameters["output.bias"]
    return output_TD


@pytest.mark.parametrize(
    ("longest", "lengths", "num_blocks", "num_heads"),
    [
        (6, (5, 1, 0, 3), 1, 1),
        (100, (32, 100, 0, 33, 64, 7, 65, 100), 2, 2),
        (100, (0, 0), 2, 2),
        pytest.param(4096, (70, 4096, 0), 1, 1, marks=pytest.mark.long),
    ],
)
def test_model_equals_its_equations(
    longest: int, lengths: tuple[int, ...], num_blocks: int, num_heads: int
) -> None:
    model = HSTU(DIM, longest, num_blocks, num_heads)
    is_item = torch.arange(max(*lengths, 1)) < torch.tensor(lengths).unsqueeze(1)
    is_item[0, :2] = False  # padding may also precede the items

    def plain(parameters: Parameters, history: Tensor, is_item: Tensor) -> Tensor:
        samples = []
        for x, is_item_T in zip(history, is_item, strict=True):
            for number in range(num_blocks):
                x = block(within(parameters, f"blocks.{number}"), x, is_item_T, num_heads)
            samples.append(normed(parameters, "norm", x) * is_item_T.unsqueeze(1))
        return torch.stack(samples)

    check_model(
        model,
        plain,
        *(vectors(*is_item.shape, DIM, seed=1), is_item),
        run=lambda history, is_item: model(history, is_item) * is_item.unsqueeze(2),
    )


def test_work_depends_on_the_lengths_and_not_on_the_longest() -> None:
    def flops(*lengths: int) -> int:
        is_item = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(*is_item.shape, DIM), is_item)
        total: int = counter.get_total_flops()
        return total

    model = HSTU(DIM, 512)
    assert flops(*[32] * 50, 512) == 50 * flops(32) + flops(512)


def test_a_history_beyond_the_longest_is_refused() -> None:
    model, history_BTD = HSTU(DIM, 40), torch.zeros(2, 50, DIM)
    is_item_BT = torch.ones(2, 50, dtype=torch.bool)
    with pytest.raises(ValueError, match="40"):
        model(history_BTD, is_item_BT)
    is_item_BT[:, 40:] = False  # padding does not count
    for length in (50, 0):
        assert model(history_BTD[:, :length], is_item_BT[:, :length]).shape == (2, length, DIM)


LONGEST, LENGTHS = 6, (5, 1, 0, 3)
IS_ITEM = torch.arange(5) < torch.tensor(LENGTHS).unsqueeze(1)


def attention_block(parameters: Parameters, positions: list[Tensor], num_heads: int) -> list[Tensor]:
    inputs = [normed(parameters, "attention_norm", x) for x in positions]
    query, key, value = (
        [torch.stack([torch.dot(row, x) for row in parameters[f"{name}.weight"]]) for x in inputs]
        for name in ("query", "key", "value")
    )
    outputs = []
    for t, x in enumerate(positions):
        heads = []
        for h in range(num_heads):
            part = slice(h * DIM // num_heads, (h + 1) * DIM // num_heads)
            powers = [
                torch.exp(torch.dot(query[t][part], key[s][part]) / math.sqrt(DIM // num_heads))
                for s in range(t + 1)
            ]
            total = torch.stack(powers).sum()
            heads.append(torch.stack([powers[s] / total * value[s][part] for s in range(t + 1)]).sum(dim=0))
        seen = x + torch.cat(heads)
        outputs.append(
            seen + plain_mlp(parameters, "net", normed(parameters, "net_norm", seen), ends_linear=True)
        )
    return outputs


def plain_self_attention(
    parameters: Parameters, history: Tensor, is_item: Tensor, num_blocks: int, num_heads: int
) -> Tensor:
    samples = []
    for items, length in zip(history, is_item.sum(dim=1).tolist(), strict=True):
        positions = [items[t] + parameters["positions_TD"][t] for t in range(length)]
        for number in range(num_blocks):
            positions = attention_block(within(parameters, f"blocks.{number}"), positions, num_heads)
        wanted = [normed(parameters, "norm", x) for x in positions]
        padding = [torch.zeros(DIM, dtype=torch.float64)] * (history.size(1) - length)
        samples.append(torch.stack(wanted + padding))
    return torch.stack(samples)


@pytest.mark.parametrize(("num_blocks", "num_heads"), [(1, 1), (2, 2)])
def test_self_attention_equals_its_equations(num_blocks: int, num_heads: int) -> None:
    model = SelfAttention(DIM, LONGEST, num_blocks, num_heads)
    check_model(
        model,
        lambda p, history, is_item: plain_self_attention(p, history, is_item, num_blocks, num_heads),
        *(vectors(4, 5, DIM, seed=1), IS_ITEM),
        run=lambda history, is_item: model(history, is_item) * is_item.unsqueeze(2),
    )


@pytest.mark.parametrize(
    "make", [lambda: AttentionBlock(4, 3), lambda: HSTUBlock(4, 6, 3), lambda: BilinearFusion(6, 4, 3)]
)
def test_heads_divide_the_vectors(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"3 .*4"):
        make()


def test_last_output_follows_the_last_item() -> None:
    wanted = vectors(4, 5, DIM, seed=1)
    expected = torch.stack([wanted[0, 4], wanted[1, 0], torch.zeros(DIM).double(), wanted[3, 2]])
    torch.testing.assert_close(last_queries(wanted, IS_ITEM), expected, rtol=0, atol=0)


def test_next_item_loss_is_the_mean_over_positions() -> None:
    given = [vectors(4, 5, DIM, seed=seed) for seed in (1, 2, 3)]

    def plain_losses(
        _: Parameters, wanted: Tensor, following: Tensor, other: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses = []
        for b, length in enumerate(LENGTHS):
            each = [torch.zeros((), dtype=torch.float64)]
            for t in range(length):
                score = torch.dot(wanted[b, t], following[b, t])
                against = torch.dot(wanted[b, t], other[b, t])
                each.append(-torch.log(1 / (1 + torch.exp(-score))) - torch.log(1 / (1 + torch.exp(against))))
            losses.append(torch.stack(each).sum() / max(length, 1))
        return torch.stack(losses), torch.tensor(LENGTHS).double()

    check_model(
        nn.Module(),
        plain_losses,
        *given,
        run=lambda wanted, following, other: next_item_loss(wanted, following, other, IS_ITEM[: len(wanted)]),
    )


def test_empty_history_gives_finite_outputs() -> None:
    """Padding looks at itself; a softmax over nothing would have no value."""
    model, history = SelfAttention(DIM, LONGEST).double(), vectors(2, 1, DIM, seed=1)
    found, expected = (model(history, torch.full((2, 1), is_item)) for is_item in (False, True))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


ITEM_DIM, OTHER, DIN_LENGTHS = 3, 2, (4, 0, 1, 3, 2)


def interest(parameters: Parameters, candidate: Tensor, items: list[Tensor]) -> Tensor:
    total = torch.zeros(ITEM_DIM, dtype=torch.float64)
    for item in items:
        pair = torch.cat([candidate, item, candidate - item, candidate * item])
        total = total + plain_logit(parameters, "interest.relevance", pair) * item
    return total


def plain_din(
    parameters: Parameters, candidates: Tensor, history: Tensor, is_item: Tensor, other: Tensor | None = None
) -> Tensor:
    logits = []
    for b, candidate in enumerate(candidates):
        items = [item for item, is_one in zip(history[b], is_item[b], strict=True) if is_one]
        parts = [interest(parameters, candidate, items), candidate]
        parts += [] if other is None else [other[b]]
        logits.append(plain_logit(parameters, "score", torch.cat(parts)))
    return torch.stack(logits)


def din_inputs() -> tuple[Tensor, Tensor, Tensor]:
    size, longest = len(DIN_LENGTHS), max(DIN_LENGTHS)
    is_item = torch.arange(longest) < torch.tensor(DIN_LENGTHS).unsqueeze(1)
    # The values of padding must not matter.
    return vectors(size, ITEM_DIM, seed=1), vectors(size, longest, ITEM_DIM, seed=2), is_item


@pytest.mark.parametrize("num_other", [0, OTHER])
def test_din_equals_its_equation(num_other: int) -> None:
    other = [vectors(len(DIN_LENGTHS), num_other, seed=3)] if num_other else []
    check_model(DIN(ITEM_DIM, num_other, attention=(5, 4), hidden=(6,)), plain_din, *din_inputs(), *other)


def test_output_is_independent_of_padding() -> None:
    candidates, history, is_item = din_inputs()
    model = DIN(ITEM_DIM).double()
    offsets = torch.tensor([0, *DIN_LENGTHS]).cumsum(0)
    found = model(candidates, *pad_histories(history[is_item], offsets))
    torch.testing.assert_close(found, model(candidates, history, is_item), rtol=1e-12, atol=1e-12)
    empty = pad_histories(history[:0].flatten(0, 1), torch.zeros(6, dtype=torch.int64))
    model(candidates, *empty).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_values_are_padded_with_zeros() -> None:
    values_LD = vectors(5, 2, seed=1)
    values_BTD, is_item_BT = pad_histories(values_LD, torch.tensor([0, 2, 2, 5]))
    assert is_item_BT.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert torch.equal(values_BTD[is_item_BT], values_LD)
    assert not values_BTD[~is_item_BT].any()
    (gradient,) = torch.autograd.grad((values_BTD * 3).sum(), values_LD)
    assert (gradient == 3).all()
    values_BTD, is_item_BT = pad_histories(vectors(0, 2, seed=1), torch.tensor([0]))
    assert (values_BTD.shape, is_item_BT.shape) == ((0, 0, 2), (0, 0))
