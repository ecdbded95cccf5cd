"""Linear layers by oneDNN equal those of torch but for rounding, with every execution backend."""

import copy
import math
from collections.abc import Sequence

import pytest
import torch
import torch._dynamo
from support.seeded import random, seeded
from torch import Tensor, nn

from hybrid.dense import matmul
from hybrid.dense.compilation import compiled
from hybrid.dense.data_parallel import DataParallel
from hybrid.dense.matmul import Linear, use_onednn, use_torch

SIZE, INPUTS, HIDDEN, OUTPUTS = 300, 128, 256, 192  # both layers are large enough


def layers() -> nn.Sequential:
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(INPUTS, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, OUTPUTS, bias=False),
            nn.Linear(OUTPUTS, 1),
        )
    )


def by_onednn(net: nn.Sequential) -> nn.Sequential:
    use_onednn(net)
    return net


def rows(size: int = SIZE) -> Tensor:
    return random(size, INPUTS, seed=size).requires_grad_()


def gradients(module: nn.Module, x: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(module(x).square().mean(), [x, *parameters]))


def assert_rounded(found: object, expected: object) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Samples, inputs and outputs of each product of oneDNN in this process."""
    computed: list[tuple[int, ...]] = []
    onednn = matmul.multiply_by_onednn

    def multiply(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        computed.append((*input.shape, weight.size(0)))
        return onednn(input, weight, bias)

    monkeypatch.setattr(matmul, "multiply_by_onednn", multiply)
    return computed


class TestNumbers:
    @pytest.mark.parametrize(
        "x",
        [
            *(random(size, INPUTS, seed=size) for size in (SIZE, 512, 513, 1300)),
            random(SIZE, 2 * INPUTS)[:, ::2],
            random(1, 2 * INPUTS)[:, ::2].expand(SIZE, INPUTS),
        ],
        ids=["300", "512", "513", "1300", "other strides", "stride 0"],
    )
    def test_products_equal_torch_but_for_rounding(self, x: Tensor, products: list[tuple[int, ...]]) -> None:
        x, plain = x.detach().requires_grad_(), layers()
        expected = [plain(x), *gradients(plain, x, [*plain.parameters()])]
        assert products == []
        net = by_onednn(copy.deepcopy(plain))
        found = [net(x), *gradients(net, x, [*net.parameters()])]
        assert (len(x), INPUTS, HIDDEN) in products  # of a forward pass
        assert any(product[1:] == (HIDDEN, INPUTS) for product in products)  # of a backward pass
        assert_rounded(found, expected)

    def test_second_derivative(self, products: list[tuple[int, ...]]) -> None:
        def penalties(net: nn.Module) -> list[Tensor]:
            x = rows()
            (of_x,) = torch.autograd.grad(net(x).square().mean(), [x], create_graph=True)
            return list(torch.autograd.grad(of_x.square().sum(), [*net.parameters()]))

        plain = layers()
        expected = penalties(plain)
        found = penalties(by_onednn(plain))
        assert products
        assert_rounded(found, expected)

    def test_nan_reaches_the_output(self) -> None:
        net = by_onednn(layers())
        with torch.no_grad():
            net.get_parameter("0.weight").fill_(math.nan)
        assert net(rows()).isnan().all()


class TestTorchsProductsStay:
    @pytest.mark.parametrize("size", [0, 1, 2, 50])
    def test_small_products_use_torch(self, size: int, products: list[tuple[int, ...]]) -> None:
        plain = layers()
        expected = [plain(rows(size)), *gradients(plain, rows(size), [*plain.parameters()])]
        net = by_onednn(plain)
        assert same_bits([net(rows(size)), *gradients(net, rows(size), [*net.parameters()])], expected)
        assert products == []

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_other_types_use_torch(self, dtype: torch.dtype, products: list[tuple[int, ...]]) -> None:
        is_autocast = dtype is torch.bfloat16
        plain, x = (layers(), rows()) if is_autocast else (layers().double(), rows().double())
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            expected = plain(x)
            output = by_onednn(plain)(x)
        assert output.dtype == dtype
        assert torch.equal(output, expected)
        assert products == []

    @pytest.mark.parametrize("sizes", [(4096, 1), (1, 4096)])
    def test_layers_of_one_output_or_input_use_torch(self, sizes: tuple[int, int]) -> None:
        net = by_onednn(nn.Sequential(nn.Linear(*sizes)))
        assert type(net[0]) is nn.Linear


def test_layers_keep_tensors_and_names() -> None:
    net = layers()
    before = dict(net.named_parameters())
    assert any(type(layer) is Linear for layer in by_onednn(net))
    assert repr(net[0]) == repr(nn.Linear(INPUTS, HIDDEN))
    use_torch(net)
    assert not any(isinstance(layer, Linear) for layer in net.modules())
    assert all(net.get_parameter(name) is parameter for name, parameter in before.items())


@pytest.mark.parametrize("how", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_net_computes_the_same_products(how: str, products: list[tuple[int, ...]]) -> None:
    net = by_onednn(layers())
    parameters = [*net.parameters()]
    form = compiled(net, how, [rows(2)])
    for size in (SIZE, 2, 0, 400):
        products.clear()
        expected = [net(rows(size)), *gradients(net, rows(size), parameters)]
        of_net = sorted(products)
        products.clear()
        found = [form(rows(size)), *gradients(form, rows(size), parameters)]
        assert sorted(products) == of_net
        assert bool(of_net) == (size >= SIZE)
        # What is small, or no product, a form computes in its own way.
        assert_rounded(found, expected)
        if size >= SIZE and how != "inductor":
            assert same_bits(found, expected)


def test_replicas_have_the_bits_of_the_net(products: list[tuple[int, ...]]) -> None:
    net = by_onednn(layers())
    halves = torch.cat([net(half) for half in rows(2 * SIZE).chunk(2)])
    products.clear()
    assert torch.equal(DataParallel(net, ["cpu", "cpu"])(rows(2 * SIZE)), halves)
    assert sorted(products) == [(SIZE, INPUTS, HIDDEN)] * 2 + [(SIZE, HIDDEN, OUTPUTS)] * 2
