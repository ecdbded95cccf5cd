"""Models without a history, their losses and the best items, against equations that are written out."""

import math
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from unit.models.equations import Parameters, check_model, plain_logit, plain_mlp, vectors

from hybrid.models import two_towers
from hybrid.models.dcn_v2 import DCNv2
from hybrid.models.deepfm import DeepFM
from hybrid.models.dense_net import DenseNet
from hybrid.models.dlrm import DLRM, DotInteraction
from hybrid.models.esmm import ESMM, both_log_probabilities, entire_space_loss
from hybrid.models.final_mlp import FinalMLP
from hybrid.models.mmoe import MMoE
from hybrid.models.ple import PLE
from hybrid.models.two_towers import in_batch_softmax, log_popularity, sampled_softmax, top_items
from hybrid.models.wide_deep import WideAndDeep

NUM_LAYERS, NUM_SPARSE, DIM, DIMS = 3, 3, 4, (3, 1, 4)


def plain_dlrm(parameters: Parameters, x: Tensor, pooled: Tensor) -> Tensor:
    first = plain_mlp(parameters, "bottom", x) if len(x) else x
    z = [*([first] if len(x) else []), *pooled.split(DIM)]
    dots = [(z[i] * z[j]).sum() for i in range(len(z)) for j in range(i)]
    return plain_logit(parameters, "head", torch.cat([first, torch.stack(dots)]))


def plain_dcn(parameters: Parameters, x: Tensor, pooled: Tensor) -> Tensor:
    x0 = x_l = torch.cat([x, pooled])
    for number in range(NUM_LAYERS):
        weight, bias = (parameters[f"interaction.layers.{number}.{kind}"] for kind in ("weight", "bias"))
        x_l = x0 * ((weight * x_l).sum(dim=1) + bias) + x_l
    return plain_logit(parameters, "head", x_l)


def plain_wide(parameters: Parameters, x: Tensor, features: list[Tensor]) -> Tensor:
    """Return the linear term and the deep net of vectors whose last values are their weights."""
    logit = torch.stack([feature[-1] for feature in features]).sum()
    if len(x):
        logit = logit + (parameters["interaction.linear.dense_weights.weight"][0] * x).sum()
    deep = torch.cat([x, *(feature[:-1] for feature in features)])
    return logit + plain_logit(parameters, "head.deep", deep)


def plain_deepfm(parameters: Parameters, x: Tensor, pooled: Tensor) -> Tensor:
    features = list(pooled.split(DIM + 1))
    logit = plain_wide(parameters, x, features)
    for first, second in combinations(features, 2):
        logit = logit + torch.dot(first[:-1], second[:-1])
    return logit


def plain_wide_deep(parameters: Parameters, x: Tensor, pooled: Tensor) -> Tensor:
    return plain_wide(parameters, x, list(pooled.split([dim + 1 for dim in DIMS])))


NETS: list[tuple[Callable[..., DenseNet], Callable[..., Tensor], int]] = [
    (lambda f, **o: DLRM(f, NUM_SPARSE, DIM, bottom=(5,), top=(6, 3), **o), plain_dlrm, NUM_SPARSE * DIM),
    (lambda f, **o: DCNv2(f + 4, NUM_LAYERS, deep=(5, 3), **o), plain_dcn, 4),
    (lambda f, **o: DeepFM(f, NUM_SPARSE, DIM, deep=(6, 3), **o), plain_deepfm, NUM_SPARSE * (DIM + 1)),
    (lambda f, **o: WideAndDeep(f, DIMS, deep=(6, 3), **o), plain_wide_deep, sum(DIMS) + len(DIMS)),
]


@pytest.mark.parametrize(("num_dense", "num_outputs"), [(2, 1), (0, 1), (2, 3)])
@pytest.mark.parametrize(("build", "plain", "width"), NETS, ids=["dlrm", "dcn_v2", "deepfm", "wide_deep"])
def test_net_equals_its_equation(
    build: Any, plain: Callable[..., Tensor], width: int, num_dense: int, num_outputs: int
) -> None:
    def of_batch(parameters: Parameters, dense: Tensor, pooled: Tensor) -> Tensor:
        pairs = zip(dense, pooled, strict=True)
        return torch.stack([plain(parameters, x, row) for x, row in pairs])

    net = build(num_dense, num_outputs=num_outputs)
    inputs = vectors(5, num_dense, seed=1), vectors(5, width, seed=2)
    check_model(net, of_batch, *inputs)
    assert net(*inputs).numel() == 5 * num_outputs


def test_dot_interaction_has_first_and_second_derivatives() -> None:
    inputs = vectors(2, DIM, seed=1), vectors(2, NUM_SPARSE * DIM, seed=2)
    interaction = DotInteraction(NUM_SPARSE + 1, DIM)
    assert torch.autograd.gradcheck(interaction, inputs)
    assert torch.autograd.gradgradcheck(interaction, inputs)


NUM_HEADS = 2


def plain_stream(parameters: Parameters, k: int, x: Tensor, context: Tensor) -> Tensor:
    raised = plain_mlp(parameters, f"gates.{k}.layers", context, ends_linear=True)
    return plain_mlp(parameters, f"streams.{k}", x * 2 / (1 + torch.exp(-raised)))


def plain_final_mlp(parameters: Parameters, inputs: Tensor, first: Tensor, second: Tensor) -> Tensor:
    logits = []
    for b, x in enumerate(inputs):
        o, p = (plain_stream(parameters, k, x, context[b]) for k, context in enumerate((first, second)))
        logit = (parameters["fusion.first.weight"][0] * o).sum() + parameters["fusion.first.bias"][0]
        logit = logit + (parameters["fusion.second.weight"][0] * p).sum()
        for head, (o_h, p_h) in enumerate(zip(o.chunk(NUM_HEADS), p.chunk(NUM_HEADS), strict=True)):
            products = parameters["fusion.products_NHG"][head]
            for i in range(len(o_h)):
                for j in range(len(p_h)):
                    logit = logit + products[i, j] * o_h[i] * p_h[j]
        logits.append(logit)
    return torch.stack(logits)


def test_final_mlp_equals_its_equations() -> None:
    model = FinalMLP(5, contexts=(3, 2), first=(7, 6), second=(4,), gate=3, num_heads=NUM_HEADS)
    check_model(model, plain_final_mlp, vectors(6, 5, seed=1), vectors(6, 3, seed=2), vectors(6, 2, seed=3))


NUM_EXPERTS = 3


def mixture(weight: Tensor, x: Tensor, experts: list[Tensor]) -> Tensor:
    powers = torch.stack([torch.exp((row * x).sum()) for row in weight])
    assert len(powers) == len(experts)
    total = torch.zeros_like(experts[0])
    for power, expert in zip(powers, experts, strict=True):
        total = total + power / powers.sum() * expert
    return total


def experts(parameters: Parameters, prefix: str, x: Tensor) -> list[Tensor]:
    return [plain_mlp(parameters, f"{prefix}.experts.{n}", x) for n in range(NUM_EXPERTS)]


def towers(parameters: Parameters, of_task: list[Tensor]) -> Tensor:
    return torch.cat(
        [plain_mlp(parameters, f"towers.{k}", x, ends_linear=True) for k, x in enumerate(of_task)]
    )


def plain_mmoe(parameters: Parameters, x: Tensor, num_tasks: int) -> Tensor:
    shared = experts(parameters, "experts", x)
    gates = [parameters[f"gates.{k}.weights.weight"] for k in range(num_tasks)]
    return towers(parameters, [mixture(gate, x, shared) for gate in gates])


def plain_ple(parameters: Parameters, x: Tensor, num_tasks: int, num_layers: int) -> Tensor:
    of_task, shared = [x] * num_tasks, x
    for number in range(num_layers):
        layer = f"layers.{number}"
        of_shared = experts(parameters, f"{layer}.shared", shared)
        own = [experts(parameters, f"{layer}.own.{k}", of_task[k]) for k in range(num_tasks)]
        of_task = [
            mixture(parameters[f"{layer}.gates.{k}.weights.weight"], of_task[k], own[k] + of_shared)
            for k in range(num_tasks)
        ]
        if number < num_layers - 1:
            shared_gate = parameters[f"{layer}.shared_gate.weights.weight"]
            shared = mixture(shared_gate, shared, [*own[0], *own[1], *of_shared])
    return towers(parameters, of_task)


def test_mmoe_equals_its_equations() -> None:
    model = MMoE(5, (1, 3, 1), NUM_EXPERTS, expert=(6, 3), tower=(4,))
    check_model(model, lambda p, x_B: torch.stack([plain_mmoe(p, x, 3) for x in x_B]), vectors(7, 5, seed=1))


@pytest.mark.parametrize("layers", [(4,), (4, 6, 3)])
def test_ple_equals_its_equations(layers: tuple[int, ...]) -> None:
    model = PLE(5, (1, 3), NUM_EXPERTS, layers=layers, tower=(4,))
    check_model(
        model,
        lambda p, x_B: torch.stack([plain_ple(p, x, 2, len(layers)) for x in x_B]),
        vectors(6, 5, seed=1),
    )


CLICKED = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]).double()
CONVERTED = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0]).double()


def plain_esmm(parameters: Parameters, inputs: Tensor) -> tuple[Tensor, Tensor]:
    click, conversion = (
        torch.stack([plain_logit(parameters, name, x) for x in inputs]) for name in ("click", "conversion")
    )
    return click, conversion


def plain_loss(click: Tensor, conversion: Tensor, clicked: Tensor, converted: Tensor) -> Tensor:
    losses = []
    for b in range(len(click)):
        p, q = 1 / (1 + torch.exp(-click[b])), 1 / (1 + torch.exp(-conversion[b]))
        of_click = -torch.log(p if clicked[b] else 1 - p)
        losses.append(of_click - torch.log(p * q if converted[b] else 1 - p * q))
    return torch.stack(losses)


def test_esmm_towers_take_the_same_inputs() -> None:
    check_model(ESMM(4, hidden=(5, 3)), plain_esmm, vectors(6, 4, seed=1))


def test_esmm_loss_covers_clicks_and_conversions() -> None:
    check_model(
        torch.nn.Module(),
        lambda _, *given: plain_loss(*given),
        *(vectors(6, seed=1), vectors(6, seed=2), CLICKED, CONVERTED),
        run=entire_space_loss,
    )


@pytest.mark.parametrize(
    ("click", "conversion", "log_both", "log_not_both"),
    [
        (50.0, 50.0, -2 * math.exp(-50), math.log(2) - 50),
        (-800.0, 3.0, -800 - math.log1p(math.exp(-3)), 0.0),
        (800.0, -800.0, -800.0, 0.0),
        (800.0, 900.0, 0.0, -800.0),
    ],
)
def test_probabilities_that_are_nearly_0_and_1_keep_their_logarithms(
    click: float, conversion: float, log_both: float, log_not_both: float
) -> None:
    logits = torch.tensor([click, conversion], dtype=torch.float64, requires_grad=True)
    found = both_log_probabilities(logits[0], logits[1])
    assert [each.item() for each in found] == pytest.approx([log_both, log_not_both], rel=1e-14, abs=1e-300)
    sum(found).backward()  # type: ignore[union-attr]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


IDS = torch.tensor([3, 1, 3, 0, 4, 1])
LOG_Q = log_popularity(torch.tensor([0, 3, 3, 1, 3, 1]), 5)[IDS]


def plain_towers(parameters: Parameters, users: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
    sides = []
    for name, inputs in (("user", users), ("item", items)):
        raw = [plain_mlp(parameters, f"{name}.layers", x, ends_linear=True) for x in inputs]
        sides.append(torch.stack([vector / vector.square().sum().sqrt() for vector in raw]))
    return sides[0], sides[1]


def plain_losses(temperature: float, users: Tensor, items: Tensor, log_q: Tensor, *drawn: Tensor) -> Tensor:
    """Return the loss of each sample; ``drawn`` are negatives and their log q, by default other samples'."""
    losses = []
    for b, user in enumerate(users):
        own = torch.exp(torch.dot(user, items[b]) / temperature) / math.exp(log_q[b])
        total = own
        others = [(items[j], log_q[j]) for j in range(len(items)) if j != b]
        for item, q in zip(*drawn, strict=True) if drawn else others:
            total = total + torch.exp(torch.dot(user, item) / temperature) / math.exp(q)
        losses.append(-torch.log(own / total))
    return torch.stack(losses)


def test_tower_outputs_have_unit_length() -> None:
    model = two_towers.TwoTowers(user_width=4, item_width=3, hidden=(6, 5), dim=2)
    check_model(model, plain_towers, vectors(5, 4, seed=1), vectors(5, 3, seed=2))


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("num_drawn", [0, 4], ids=["in batch", "drawn"])
def test_the_loss_is_the_corrected_softmax(num_drawn: int, temperature: float) -> None:
    drawn = [vectors(num_drawn, 3, seed=3), LOG_Q[:num_drawn]] if num_drawn else []
    check_model(
        torch.nn.Module(),
        lambda _, *tensors: plain_losses(temperature, *tensors),
        *(vectors(6, 3, seed=1), vectors(6, 3, seed=2), LOG_Q, *drawn),
        run=partial(sampled_softmax if drawn else in_batch_softmax, temperature=temperature),
    )


def full_arrays(items: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that gathers items and frequencies, in this order."""
    whole = iter([items, LOG_Q])
    return lambda _: next(whole)


def test_losses_of_two_slices_add_up() -> None:
    """Each trainer's part of the gradients, of its own samples and of all items, adds up to the whole."""
    users, items = vectors(6, 3, seed=1), vectors(6, 3, seed=2)
    whole = in_batch_softmax(users, items, LOG_Q)
    expected = torch.autograd.grad(whole.sum(), [users, items])
    parts, gradients = [], [torch.zeros_like(users), torch.zeros_like(items)]
    for own in (slice(0, 4), slice(4, 6)):
        losses = in_batch_softmax(users[own], items[own], LOG_Q[own], gather=full_arrays(items))
        parts.append(losses)
        for total, part in zip(gradients, torch.autograd.grad(losses.sum(), [users, items]), strict=True):
            total += part
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, list(expected), rtol=1e-12, atol=1e-12)


def test_popularity_is_the_fraction_of_the_data() -> None:
    found = log_popularity(torch.tensor([[2, 0], [2, 2]]), 4)
    assert found.exp().tolist() == pytest.approx([0.25, 0.25, 0.75, 0.25])  # unseen items count once
    for ids in ([0, 4], [-1], []):
        with pytest.raises(ValueError, match="0 to 3"):
            log_popularity(torch.tensor(ids, dtype=torch.int64), 4)


def test_the_gradient_of_many_draws_is_that_of_all_items() -> None:
    """Frequent items, which are often a negative of their own sample, have no other bias than rare ones."""
    users, table = vectors(1, 3, seed=1), vectors(6, 3, seed=2)
    log_q_I = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    for item in (0, 5):
        own = torch.tensor([item])
        full = torch.nn.functional.cross_entropy(users @ table.mT / 0.5, own)
        expected = torch.autograd.grad(full, table)[0]
        errors = []
        for number in (4, 4000):
            total = torch.zeros_like(table)
            for _ in range(50):
                ids = torch.multinomial(log_q_I.exp(), number, replacement=True, generator=generator)
                negatives = table.index_select(0, ids), log_q_I[ids]
                loss = sampled_softmax(users, table[own], log_q_I[own], *negatives, 0.5)
                total += torch.autograd.grad(loss.sum(), table)[0]
            errors.append(((total / 50 - expected).norm() / expected.norm()).item())
        assert errors[1] < 0.01 < 0.1 < errors[0]


@pytest.mark.parametrize("chunk", [3, 7, 100])
@pytest.mark.parametrize("k", [1, 5, 20])
def test_the_best_items_are_those_of_all_scores(k: int, chunk: int) -> None:
    users, table = vectors(8, 4, seed=1), vectors(20, 4, seed=2)
    sizes = []

    def item_vectors(ids: Tensor) -> Tensor:
        sizes.append(len(ids))
        return table[ids]

    found = top_items(users, item_vectors, 20, k, chunk)
    assert found.tolist() == (users @ table.mT).argsort(dim=1, descending=True)[:, :k].tolist()
    assert max(sizes) <= chunk
    assert sum(sizes) == 20  # each item is computed once


def test_more_items_than_there_are_cannot_be_the_best() -> None:
    with pytest.raises(ValueError, match=r"\bk\b.* 20 .* 21"):
        top_items(vectors(8, 4, seed=1), lambda ids: vectors(20, 4, seed=2)[ids], 20, 21)


def test_recall_and_ndcg_depend_on_the_rank_of_the_item() -> None:
    recall, ndcg = two_towers.recall_and_ndcg(torch.tensor([[4, 2, 9]] * 3), torch.tensor([4, 9, 3]))
    assert recall.tolist() == [1, 1, 0]
    assert ndcg.tolist() == [1, 0.5, 0]
