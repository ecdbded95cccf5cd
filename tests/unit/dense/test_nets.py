"""Dense nets against plain formulas, at the edges of their inputs, and as functions of the seed alone."""

import dataclasses
import io
from collections.abc import Sequence
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from support.seeded import random
from torch import Tensor, nn
from torch._dynamo.utils import counters

from hybrid.config import DenseSection, RunConfig, RunSection, TaskSection
from hybrid.config.sections import NETS
from hybrid.dense.compiled import compiled
from hybrid.dense.configured import build_dense_net, build_remote_net, extra_columns
from hybrid.dense.matmul import Linear
from hybrid.dense.nets import (
    CrossInteraction,
    DenseNet,
    DotInteraction,
    FactorizationMachine,
    WideAndDeepInputs,
)
from hybrid.dense.own_net import check_own_net
from hybrid.errors import ConfigError
from hybrid.input_spec import FeatureSpec, InputSpec

DIM, NUM_SPARSE = 4, 3
# Of what the interaction gives, for two dense features.
HIDDEN_WIDTHS = {
    "dlrm": DIM + 4 * 3 // 2,
    "dcn_v2": 2 + NUM_SPARSE * DIM,
    "deepfm": 1 + 2 + NUM_SPARSE * DIM,
    "wide_deep": 1 + 2 + NUM_SPARSE * DIM,
}


def _config(net: str, *, seed: int = 1, **dense: Any) -> RunConfig:
    section = dataclasses.replace(DenseSection(bottom_mlp=(8,), top_mlp=(16, 12)), net=net, **dense)
    return RunConfig(dense=section, run=RunSection(seed=seed))


def _input_spec(num_dense: int, num_sparse: int = NUM_SPARSE) -> InputSpec:
    sparse = tuple(FeatureSpec(f"C{k}", num_rows=10) for k in range(num_sparse))
    return InputSpec(tuple(f"I{f}" for f in range(num_dense)), sparse)


def _widths(net: str, num_sparse: int = NUM_SPARSE) -> tuple[int, ...]:
    return (DIM + extra_columns(net),) * num_sparse


def _inputs(batch_size: int, num_dense: int, width: int) -> tuple[Tensor, Tensor]:
    dense_BF = random(batch_size, num_dense, seed=3, dtype=torch.float64)
    pooled_BE = random(batch_size, width, seed=4, dtype=torch.float64)
    return dense_BF.requires_grad_(), pooled_BE.requires_grad_()


def _split(row_E: Tensor, widths: Sequence[int]) -> list[Tensor]:
    ends = list(accumulate(widths))
    return [row_E[end - width : end] for end, width in zip(ends, widths, strict=True)]


def _mlp_shapes(module: nn.Module) -> list[tuple[int, int]]:
    return [
        (layer.in_features, layer.out_features) for layer in module.modules() if isinstance(layer, nn.Linear)
    ]


def test_dlrm_has_the_shape_of_the_kaggle_benchmark() -> None:
    config = RunConfig(dense=DenseSection(net="dlrm", bottom_mlp=(512, 256, 64), top_mlp=(512, 256)))
    net = build_dense_net(config, _input_spec(13, 26), [16] * 26)
    assert _mlp_shapes(net.bottom) == [(13, 512), (512, 256), (256, 64), (64, 16)]
    assert [type(layer) for layer in net.bottom.children()] == [nn.Linear, nn.ReLU] * 4
    assert _mlp_shapes(net.head) == [(367, 512), (512, 256), (256, 1)]
    in_head = [*[nn.Linear, nn.ReLU] * 2, nn.Linear, nn.Flatten]
    assert [type(layer) for layer in net.head.children()] == in_head
    assert list(net.interaction.parameters()) == []
    assert all("interaction" not in name for name in net.state_dict())


@pytest.mark.parametrize(("choice", "kind"), [("auto", nn.Linear), ("torch", nn.Linear), ("onednn", Linear)])
def test_a_net_takes_the_products_that_the_configuration_says(choice: str, kind: type[nn.Module]) -> None:
    config = _config("dlrm", matmul=choice, remote_mlp=(8, 8))
    for net in (f(config, _input_spec(2), _widths("dlrm")) for f in (build_dense_net, build_remote_net)):
        kinds = {type(m) for m in net.modules() if isinstance(m, nn.Linear) and m.out_features > 1}
        assert kinds == {kind}


@pytest.mark.parametrize("num_dense", [0, 2])
def test_dot_interaction_is_the_dot_product_of_every_pair(num_dense: int) -> None:
    bottom_BD, pooled_BE = _inputs(5, DIM if num_dense else 0, NUM_SPARSE * DIM)
    num_vectors = NUM_SPARSE + bool(num_dense)
    hidden_BH = DotInteraction(num_vectors, DIM)(bottom_BD, pooled_BE)
    for b in range(5):
        vectors = [*([bottom_BD[b]] if num_dense else []), *_split(pooled_BE[b], [DIM] * NUM_SPARSE)]
        dots = [torch.dot(vectors[i], vectors[j]) for i in range(num_vectors) for j in range(i)]
        torch.testing.assert_close(hidden_BH[b], torch.cat([bottom_BD[b], torch.stack(dots)]))


def test_dot_interaction_has_first_and_second_derivatives() -> None:
    inputs = _inputs(2, DIM, NUM_SPARSE * DIM)
    interaction = DotInteraction(NUM_SPARSE + 1, DIM)
    assert torch.autograd.gradcheck(interaction, inputs)
    assert torch.autograd.gradgradcheck(interaction, inputs)


def test_dot_interaction_works_under_autocast() -> None:
    net = build_dense_net(_config("dlrm"), _input_spec(2), _widths("dlrm"))
    dense_BF, pooled_BE = (tensor.detach().float().requires_grad_() for tensor in _inputs(3, 2, 3 * DIM))
    net(dense_BF, pooled_BE).sum().backward()
    assert pooled_BE.grad is not None
    expected, pooled_BE.grad = pooled_BE.grad, None
    with torch.autocast("cpu", torch.bfloat16):
        logits_B = net(dense_BF, pooled_BE)
    logits_B.sum().backward()
    torch.testing.assert_close(pooled_BE.grad, expected, rtol=0.1, atol=0.02)


def test_cross_layers_follow_the_formula() -> None:
    dense_BF, pooled_BE = _inputs(5, 2, 3)
    cross = CrossInteraction(5, num_layers=2).double()
    x0_BH = x_BH = torch.cat([dense_BF, pooled_BE], 1)
    for weight, bias in zip(*[iter(cross.parameters())] * 2, strict=True):
        x_BH = x0_BH * (torch.einsum("bi,oi->bo", x_BH, weight) + bias) + x_BH
    torch.testing.assert_close(cross(dense_BF, pooled_BE), x_BH)


@pytest.mark.parametrize("num_dense", [0, 2])
@pytest.mark.parametrize(
    ("interaction", "widths"),
    [("factorization machine", [DIM + 1] * NUM_SPARSE), ("wide and deep", [3, 1 + 1, 5])],
)
def test_a_score_is_a_linear_term_and_of_the_machine_a_double_loop_over_pairs(
    interaction: str, widths: list[int], num_dense: int
) -> None:
    is_machine = interaction == "factorization machine"
    dense_BF, pooled_BE = _inputs(5, num_dense, sum(widths))
    machine, wide = FactorizationMachine(NUM_SPARSE, DIM + 1, num_dense), WideAndDeepInputs(widths, num_dense)
    module = (machine if is_machine else wide).double()
    hidden_BH = module(dense_BF, pooled_BE)
    weights_F = module.linear.dense_weights.weight[0] if num_dense else torch.zeros(0, dtype=torch.float64)  # type: ignore[union-attr]
    for b in range(5):
        vectors = _split(pooled_BE[b], widths)
        score = torch.dot(weights_F, dense_BF[b]) + sum(vector[-1] for vector in vectors)
        if is_machine:
            score += sum(torch.dot(v[:-1], w[:-1]) for v, w in combinations(vectors, 2))
        deep = torch.cat([dense_BF[b], *(vector[:-1] for vector in vectors)])
        torch.testing.assert_close(hidden_BH[b], torch.cat([score.unsqueeze(0), deep]))


@pytest.mark.parametrize("net_name", ["deepfm", "wide_deep"])
def test_the_logit_is_the_score_plus_the_deep_net(net_name: str) -> None:
    net = build_dense_net(_config(net_name), _input_spec(2), _widths(net_name)).double()
    dense_BF, pooled_BE = _inputs(5, 2, NUM_SPARSE * (DIM + 1))
    x_BH = net.interaction(net.bottom(dense_BF), pooled_BE)
    score_B, x_BH = x_BH[:, 0], x_BH[:, 1:]
    *hidden, last = [layer for layer in net.head.modules() if isinstance(layer, nn.Linear)]
    assert [layer.out_features for layer in hidden] == [16, 12]
    for layer in hidden:
        x_BH = (x_BH @ layer.weight.T + layer.bias).relu()
    torch.testing.assert_close(
        net(dense_BF, pooled_BE), score_B + (x_BH @ last.weight.T + last.bias).squeeze(1)
    )


@pytest.mark.parametrize("net_name", NETS)
@pytest.mark.parametrize("num_dense", [0, 2])
@pytest.mark.parametrize("batch_size", [0, 1, 5])
def test_every_net_takes_every_batch_forward_and_backward(
    net_name: str, num_dense: int, batch_size: int
) -> None:
    widths = _widths(net_name)
    net = build_dense_net(_config(net_name), _input_spec(num_dense), widths).double()
    dense_BF, pooled_BE = _inputs(batch_size, num_dense, sum(widths))
    logits_B = net(dense_BF, pooled_BE)
    assert logits_B.shape == (batch_size,)
    assert logits_B.dtype == torch.float64
    logits_B.sum().backward()
    assert pooled_BE.grad is not None
    assert pooled_BE.grad.shape == pooled_BE.shape
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert batch_size or not parameter.grad.any(), name


def _assert_same(
    form: nn.Module, plain: nn.Module, parameters: list[nn.Parameter], inputs: list[Tensor]
) -> None:
    """Outputs and all gradients; TorchScript rounds some of them differently."""
    output, expected = form(*inputs), plain(*inputs)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-13)
    if not isinstance(plain, nn.Identity):
        sources = [*parameters, *inputs]
        found = torch.autograd.grad(output.square().sum(), sources)
        wanted = torch.autograd.grad(expected.square().sum(), sources)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("net_name", NETS)
@pytest.mark.parametrize("num_dense", [0, 2])
def test_every_stage_has_a_torchscript_form(how: str, net_name: str, num_dense: int) -> None:
    widths = _widths(net_name)
    net = build_dense_net(_config(net_name), _input_spec(num_dense), widths).double()

    def inputs(batch_size: int) -> dict[str, list[Tensor]]:
        dense_BF, pooled_BE = _inputs(batch_size, num_dense, sum(widths))
        bottom_BH = net.bottom(dense_BF).detach().requires_grad_()
        hidden_BH = net.interaction(bottom_BH, pooled_BE).detach().requires_grad_()
        return {"bottom": [dense_BF], "interaction": [bottom_BH, pooled_BE], "head": [hidden_BH]}

    for name, stage in net.named_children():
        form = compiled(stage, how, inputs(3)[name])
        torch.jit.save(form, io.BytesIO())  # not with functions of Python's in it
        for batch_size in (5, 0, 1):
            _assert_same(form, stage, list(stage.parameters()), inputs(batch_size)[name])


# torch.compile makes an instance of DotInteraction's autograd function, against torch's own rules.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("net_name", NETS)
def test_every_net_has_a_compiled_form_in_one_piece(net_name: str) -> None:
    widths = _widths(net_name)
    net = build_dense_net(_config(net_name), _input_spec(2), widths).double()
    before = sum(counters["graph_break"].values())
    form = compiled(net, "aot_eager", _inputs(5, 2, sum(widths)))
    for batch_size in (7, 0):
        _assert_same(form, net, list(net.parameters()), list(_inputs(batch_size, 2, sum(widths))))
    assert sum(counters["graph_break"].values()) == before


@pytest.mark.parametrize("net_name", NETS)
def test_gradients_of_every_net(net_name: str) -> None:
    widths = _widths(net_name)
    net = build_dense_net(_config(net_name), _input_spec(2), widths).double()
    assert torch.autograd.gradcheck(net, _inputs(2, 2, sum(widths)))


@pytest.mark.parametrize("net_name", NETS)
def test_weights_are_a_function_of_the_seed_alone(net_name: str) -> None:
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


HIDDEN_WIDTHS = {
    "dlrm": DIM + 4 * 3 // 2,
    "dcn_v2": 2 + NUM_SPARSE * DIM,
    "deepfm": 1 + 2 + NUM_SPARSE * DIM,
    "wide_deep": 1 + 2 + NUM_SPARSE * DIM,
}


@pytest.mark.parametrize("net_name", NETS)
def test_a_remote_net_fits_between_interaction_and_head(net_name: str) -> None:
    config = _config(net_name, remote_mlp=(7, 9))
    widths = _widths(net_name)
    net = build_dense_net(config, _input_spec(2), widths).double()
    remote = build_remote_net(config, _input_spec(2), widths).double()
    assert _mlp_shapes(remote) == [(HIDDEN_WIDTHS[net_name], 7), (7, 9)]
    assert [type(layer) for layer in remote.children()] == [nn.Linear, nn.ReLU] * 2
    assert _mlp_shapes(net.head) == [(9, 1)]
    for batch_size in (0, 4):
        dense_BF, pooled_BE = _inputs(batch_size, 2, sum(widths))
        hidden_BH = net.interaction(net.bottom(dense_BF), pooled_BE)
        assert net.head(remote(hidden_BH)).shape == (batch_size,)


@pytest.mark.parametrize(("net_name", "dims"), [("dlrm", "[4, 8]"), ("deepfm", "[3, 7]")])
def test_nets_of_pairs_need_equal_widths(net_name: str, dims: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_dense_net(_config(net_name), _input_spec(2), (4, 8, 4))
    assert str(caught.value) == (
        f"tables.*.dim = {dims}: must be the same for all tables, since dense.net is {net_name}"
    )


def test_dlrm_of_one_vector_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^data.dense: must name a column"):
        build_dense_net(_config("dlrm"), _input_spec(0, 1), (DIM,))
    assert build_dense_net(_config("dlrm"), _input_spec(1, 1), (DIM,)) is not None


OWN = """
import torch
from torch import nn
from hybrid.dense.nets import DenseNet

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

def lazy_statistics(config, input_spec, widths):
    return DenseNet(nn.Identity(), Join(), nn.LazyBatchNorm1d(affine=False))

def elsewhere(config, input_spec, widths):
    return DenseNet(nn.Identity(), Join(), nn.Linear(14, 1, device="meta"))

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

def short(config, input_spec):
    return None

flat = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_nets_of_a_test.py").write_text(OWN)
    (tmp_path / "broken_nets_of_a_test.py").write_text("def broken(:\n")
    monkeypatch.syspath_prepend(tmp_path)


def _own(name: str, **dense: Any) -> tuple[RunConfig, InputSpec, Sequence[int]]:
    return _config(name, **dense), _input_spec(2), (3, 4, 5)


@pytest.mark.usefixtures("own_module")
def test_a_net_of_the_users_own() -> None:
    arguments = _own("own_nets_of_a_test:linear")
    assert extra_columns("own_nets_of_a_test:linear") == 0
    net = build_dense_net(*arguments)
    assert isinstance(net, DenseNet)
    weight = next(net.parameters())
    assert weight.shape == (1, 14)
    torch.rand(1)
    assert torch.equal(next(build_dense_net(*arguments).parameters()), weight)
    assert _mlp_shapes(build_remote_net(*_own("own_nets_of_a_test:linear", remote_mlp=(7,)))) == [(14, 7)]


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent_nets_of_a_test:f", "cannot be imported: ModuleNotFoundError: No module named"),
        ("own_nets_of_a_test:absent", "cannot be imported: AttributeError: module .* has no attribute"),
        ("broken_nets_of_a_test:broken", "cannot be imported: \\S*broken_nets_of_a_test.py:1: SyntaxError"),
        ("own_nets_of_a_test:wrong", "must return a hybrid.dense.nets.DenseNet, not a Linear"),
        ("own_nets_of_a_test:lazy", r"has head\.0\.weight of no size yet; give its lazy layer all sizes"),
        ("own_nets_of_a_test:lazy_statistics", r"has head\.running_mean of no size yet"),
        ("own_nets_of_a_test:elsewhere", r"has head\.weight on the device meta, without values"),
        (
            "own_nets_of_a_test:two_logits",
            r"the head gives \[2, 2\] for 2 samples, not \[2\] or \[2, 1\]: one logit a sample",
        ),
        (
            "own_nets_of_a_test:misfit",
            r"the head fails where it is given \[2, 14\]: RuntimeError: mat1 and mat2 shapes cannot be "
            r"multiplied \(2x8 and 9x1\); in head.1 of the net, Linear\(in_features=9, out_features=1, ",
        ),
        ("own_nets_of_a_test:pair", "the bottom gives a tuple, not a tensor"),
        (
            "own_nets_of_a_test:no_empty",
            r"the interaction fails where it is given \[0, 2\] and \[0, 12\]: \S*own_nets_of_a_test.py:\d+, "
            r"in forward: RuntimeError: .*; in interaction of the net, NoEmpty",
        ),
        (
            "own_nets_of_a_test:short",
            r"is called as short\(config, input_spec, widths\), and takes \(config, input_spec\) "
            r"\(own_nets_of_a_test.py:\d+\): too many positional arguments",
        ),
        ("own_nets_of_a_test:flat", "is not a function"),
    ],
)
def test_a_net_of_the_users_own_that_cannot_be_had(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        build_dense_net(*_own(name))
    assert caught.value.key == "dense.net"


TASKS = {"click": TaskSection(), "stars": TaskSection(kind="classes", classes=3)}


@pytest.mark.parametrize("net_name", NETS)
@pytest.mark.parametrize("batch_size", [0, 5])
def test_every_net_gives_the_outputs_of_all_tasks(net_name: str, batch_size: int) -> None:
    config, widths = _config(net_name).replace(tasks=TASKS), _widths(net_name)
    net = build_dense_net(config, _input_spec(2), widths).double()
    dense_BF, pooled_BE = _inputs(batch_size, 2, sum(widths))
    outputs_BO = net(dense_BF, pooled_BE)
    assert outputs_BO.shape == (batch_size, 4)
    hidden_BH = net.interaction(net.bottom(dense_BF), pooled_BE)
    if extra_columns(net_name):  # the wide part is a part of each
        deep_BO = net.head.deep(hidden_BH[:, 1:])  # type: ignore[operator]
        torch.testing.assert_close(outputs_BO, hidden_BH[:, :1] + deep_BO)
    local = build_dense_net(
        config.replace(dense=dataclasses.replace(config.dense, remote_mlp=(7,))), _input_spec(2), widths
    )
    assert local.head(torch.zeros(batch_size, 7)).shape == (batch_size, 4)


def test_a_net_of_the_users_own_must_give_the_outputs_of_all_tasks() -> None:
    net = DenseNet(nn.Identity(), CrossInteraction(4, 1), nn.Linear(4, 1))
    check_own_net(net, "m:net", [2, 2], torch.float32, num_outputs=1)
    with pytest.raises(
        ConfigError, match=r"the head gives \[2, 1\] for 2 samples, not \[2, 4\]: 4 outputs a"
    ):
        check_own_net(net, "m:net", [2, 2], torch.float32, num_outputs=4)
