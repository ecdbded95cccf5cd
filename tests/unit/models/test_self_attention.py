"""Self-attention against its equations: each history by itself, without padding, a position at a time."""

import math

import pytest
import torch
from torch import Tensor, nn
from unit.models.equations import Parameters, check_model, plain_mlp, vectors, within

from hybrid.models.self_attention import AttentionBlock, SelfAttention, last_queries, next_item_loss

DIM, LONGEST, LENGTHS = 4, 6, (5, 1, 0, 3)
IS_ITEM = torch.arange(5) < torch.tensor(LENGTHS).unsqueeze(1)


def normed(parameters: Parameters, name: str, x: Tensor) -> Tensor:
    centered = x - x.mean()
    scaled = centered / torch.sqrt(centered.square().mean() + 1e-5)
    return scaled * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def block(parameters: Parameters, positions: list[Tensor], num_heads: int) -> list[Tensor]:
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


def plain(
    parameters: Parameters, history: Tensor, is_item: Tensor, num_blocks: int, num_heads: int
) -> Tensor:
    samples = []
    for items, length in zip(history, is_item.sum(dim=1).tolist(), strict=True):
        positions = [items[t] + parameters["positions_TD"][t] for t in range(length)]
        for number in range(num_blocks):
            positions = block(within(parameters, f"blocks.{number}"), positions, num_heads)
        wanted = [normed(parameters, "norm", x) for x in positions]
        padding = [torch.zeros(DIM, dtype=torch.float64)] * (history.size(1) - length)
        samples.append(torch.stack(wanted + padding))
    return torch.stack(samples)


@pytest.mark.parametrize(("num_blocks", "num_heads"), [(1, 1), (2, 2)])
def test_model_equals_its_equations(num_blocks: int, num_heads: int) -> None:
    model = SelfAttention(DIM, LONGEST, num_blocks, num_heads)
    check_model(
        model,
        lambda p, history, is_item: plain(p, history, is_item, num_blocks, num_heads),
        *(vectors(4, 5, DIM, seed=1), IS_ITEM),
        run=lambda history, is_item: model(history, is_item) * is_item.unsqueeze(2),
    )


def test_heads_divide_the_vectors() -> None:
    with pytest.raises(ValueError, match="3 heads do not divide vectors of width 4"):
        AttentionBlock(DIM, 3)


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
                score, against = (
                    torch.dot(wanted[b, t], following[b, t]),
                    torch.dot(wanted[b, t], other[b, t]),
                )
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
