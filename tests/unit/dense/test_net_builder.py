"""Dense nets that a configuration names: at the edges of their inputs, in every form, by the seed alone."""

import dataclasses
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.seeded import random
from torch import Tensor, nn
from torch._dynamo.utils import counters

from hybrid.config import DenseSection, RunConfig, RunSection, TaskSection
from hybrid.config.sections import NET_CALLS, NETS
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
# What a loop of one's own would call, for two dense features.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "dlrm": lambda: DLRM(2, NUM_SPARSE, DIM, bottom=(8,), top=(16, 12)),
    "dcn_v2": lambda: DCNv2(2 + NUM_SPARSE * DIM, num_layers=3, deep=(16, 12)),
    "deepfm": lambda: DeepFM(2, NUM_SPARSE, DIM, deep=(16, 12)),
    "wide_deep": lambda: WideAndDeep(2, [DIM] * NUM_SPARSE, deep=(16, 12)),
    "mmoe": lambda: MMoE(2 + NUM_SPARSE * DIM, [1], 5, expert=(7, 6), tower=(16, 12)),
    "ple": lambda: PLE(2 + NUM_SPARSE * DIM, [1], 5, layers=(7, 6), tower=(16, 12)),
}
# Of what the interaction gives, for two dense features.
HIDDEN_WIDTHS = {
    "dlrm": DIM + 4 * 3 // 2,
    "dcn_v2": 2 + NUM_SPARSE * DIM,
    "deepfm": 1 + 2 + NUM_SPARSE * DIM,
    "wide_deep": 1 + 2 + NUM_SPARSE * DIM,
    "mmoe": 2 + NUM_SPARSE * DIM,
    "ple": 2 + NUM_SPARSE * DIM,
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


def _mlp_shapes(module: nn.Module) -> list[tuple[int, int]]:
    return [
        (layer.in_features, layer.out_features) for layer in module.modules() if isinstance(layer, nn.Linear)
    ]


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("net_name", NETS)
def test_net_has_the_configured_class_and_sizes(net_name: str) -> None:
    arguments = {"cross_layers": 3, "experts": 5, "expert_mlp": [7, 6]}
    config, model = _config(NET_CALLS.text(net_name, arguments)), MODELS[net_name]()
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


@pytest.mark.parametrize("net_name", NETS)
@pytest.mark.parametrize("num_dense", [0, 2])
@pytest.mark.parametrize("batch_size", [0, 1, 5])
def test_every_net_takes_every_batch_forward_and_backward(
    net_name: str, num_dense: int, batch_size: int
) -> None:
    widths = _widths(net_name)
    net = build_dense_net(_config(net_name), _input_spec(num_dense), widths).double()
    dense_BF, pooled_BE = _inputs(batch_size, num_dense, sum(widths))
    logits_B = net(dense_BF, pooled_BE).view(-1)
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
def test_every_stage_compiles_to_torchscript(how: str, net_name: str, num_dense: int) -> None:
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
@pytest.mark.parametrize(
    "net_name", [pytest.param(n, marks=() if n in ("dlrm", "ple") else pytest.mark.long) for n in NETS]
)
def test_every_net_compiles_without_graph_breaks(net_name: str) -> None:
    widths = _widths(net_name)
    net = build_dense_net(_config(net_name), _input_spec(2), widths).double()
    before = sum(counters["graph_break"].values())
    form = compiled(net, "aot_eager", _inputs(5, 2, sum(widths)))
    for batch_size in (7, 0):
        _assert_same(form, net, list(net.parameters()), list(_inputs(batch_size, 2, sum(widths))))
    assert sum(counters["graph_break"].values()) == before


@pytest.mark.parametrize("net_name", NETS)
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


@pytest.mark.parametrize("net_name", NETS)
def test_remote_net_fits_between_interaction_and_head(net_name: str) -> None:
    config = _config(net_name, remote_mlp=(7, 9))
    widths = _widths(net_name)
    net = build_dense_net(config, _input_spec(2), widths).double()
    remote = build_remote_net(config, _input_spec(2), widths).double()
    assert _mlp_shapes(remote) == [(HIDDEN_WIDTHS[net_name], 7), (7, 9)]
    assert [isinstance(layer, nn.ReLU) for layer in remote.children()] == [False, True] * 2
    assert _mlp_shapes(net.head)[0][0] == 9
    assert isinstance(net.head, MMoE | PLE) or _mlp_shapes(net.head) == [(9, 1)]
    for batch_size in (0, 4):
        dense_BF, pooled_BE = _inputs(batch_size, 2, sum(widths))
        hidden_BH = net.interaction(net.bottom(dense_BF), pooled_BE)
        assert net.head(remote(hidden_BH)).view(-1).shape == (batch_size,)


@pytest.mark.parametrize(("net_name", "dims"), [("dlrm", "[4, 8]"), ("deepfm", "[3, 7]")])
def test_nets_of_pairs_need_equal_widths(net_name: str, dims: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_dense_net(_config(net_name), _input_spec(2), (4, 8, 4))
    assert str(caught.value) == (
        f"tables.*.dim = {dims}: must be the same for all tables, since dense.net is {net_name}"
    )


def test_dlrm_of_one_vector_raises_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^data.dense: must name a column"):
        build_dense_net(_config("dlrm"), _input_spec(0, 1), (DIM,))
    assert build_dense_net(_config("dlrm"), _input_spec(1, 1), (DIM,)) is not None


TASKS = {"click": TaskSection(), "stars": TaskSection(type="classes(3)")}


@pytest.mark.parametrize("net_name", NETS)
@pytest.mark.parametrize("batch_size", [0, 5])
def test_every_net_has_the_outputs_of_all_tasks(net_name: str, batch_size: int) -> None:
    config, widths = _config(net_name).replace(tasks=TASKS), _widths(net_name)
    net = build_dense_net(config, _input_spec(2), widths).double()
    dense_BF, pooled_BE = _inputs(batch_size, 2, sum(widths))
    assert net(dense_BF, pooled_BE).shape == (batch_size, 4)
    local = build_dense_net(
        config.replace(dense=dataclasses.replace(config.dense, remote_mlp=(7,))), _input_spec(2), widths
    )
    assert local.head(torch.zeros(batch_size, 7)).shape == (batch_size, 4)
