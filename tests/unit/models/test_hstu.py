"""HSTU against its equations, with a dense mask, for one history at a time."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm
from torch.utils.flop_counter import FlopCounterMode
from unit.models.equations import Parameters, check_model, vectors, within

from hybrid.models.hstu import HSTU, HSTUBlock

DIM = 4


def normed(parameters: Parameters, name: str, x_TD: Tensor, eps: float = 1e-5) -> Tensor:
    normed_TD: Tensor = layer_norm(x_TD, [DIM], parameters[f"{name}.weight"], parameters[f"{name}.bias"], eps)
    return normed_TD


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


def test_heads_divide_the_vectors() -> None:
    with pytest.raises(ValueError, match=r"3 .*4"):
        HSTUBlock(DIM, 6, 3)


def test_a_history_beyond_the_longest_is_refused() -> None:
    model, history_BTD = HSTU(DIM, 40), torch.zeros(2, 50, DIM)
    is_item_BT = torch.ones(2, 50, dtype=torch.bool)
    with pytest.raises(ValueError, match="longer than 40"):
        model(history_BTD, is_item_BT)
    is_item_BT[:, 40:] = False  # padding does not count
    for length in (50, 0):
        assert model(history_BTD[:, :length], is_item_BT[:, :length]).shape == (2, length, DIM)
