"""Compiled modules compute the same on the same parameters, or raise an error of one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from support.seeded import random, seeded
from torch import Tensor, nn
from torch._dynamo.utils import counters

from hybrid.dense.compilation import compiled
from hybrid.errors import ConfigError

WIDTH = 4


def layers(*between: nn.Module) -> nn.Sequential:
    net = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, 6), *between, nn.Tanh(), nn.Linear(6, 2)))
    return net.double()


def rows(size: int = 3) -> Tensor:
    return random(size, WIDTH, seed=size, dtype=torch.float64).requires_grad_()


def gradients(module: nn.Module, x: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of all ``parameters`` and of ``x``."""
    return list(torch.autograd.grad(module(x).square().sum(), [*parameters, x]))


def num_graphs() -> int:
    """Return the number of graphs that ``torch.compile`` has captured so far."""
    return int(counters["stats"]["unique_graphs"])


def test_compiled_module_equals_the_module_for_any_batch_size() -> None:
    module = layers()
    form = compiled(module, "aot_eager", [rows()])
    parameters = list(module.parameters())
    assert all(a is b for a, b in zip(form.parameters(), parameters, strict=True))
    assert all(each.training for each in module.modules())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for size in (3, 7, 1, 0, 2):
        torch.testing.assert_close(form(rows(size)), module(rows(size)), rtol=1e-12, atol=1e-13)
        expected = gradients(module, rows(size), parameters)
        found = gradients(form, rows(size), parameters)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
        for parameter, gradient in zip(parameters, expected, strict=False):
            parameter.grad = gradient
        optimizer.step()


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.long)])
def test_running_statistics_are_shared(training: bool) -> None:
    module, plain = layers(nn.BatchNorm1d(6)), layers(nn.BatchNorm1d(6))
    module[2].eval()  # differs from the mode of the net
    form = compiled(module, "aot_eager", [rows()])
    assert [each.training for each in module] == [True, True, False, True]
    torch.testing.assert_close([*module.buffers()], [*plain.buffers()], rtol=0, atol=0)
    assert all(a is b for a, b in zip(form.buffers(), module.buffers(), strict=True))
    form.train(training)
    plain.train(training)
    for size in (3, 5):
        torch.testing.assert_close(form(rows(size)), plain(rows(size)), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close([*module.buffers()], [*plain.buffers()], rtol=1e-12, atol=1e-13)


def test_compilation_leaves_generators_and_gradients_alone() -> None:
    module = layers(nn.Dropout())
    before, x = torch.get_rng_state(), rows()
    compiled(module, "aot_eager", [x])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(tensor.grad is None for tensor in (x, *module.parameters()))


class TestTorchCompile:
    @pytest.fixture(autouse=True)
    def _reset_compiler(self) -> None:
        """Make torch.compile forget which sizes varied in other tests."""
        torch._dynamo.reset()

    def test_other_batch_sizes_do_not_recompile(self) -> None:
        """The example has as many samples as columns, which torch must not take for one size."""
        module = layers()
        form = compiled(module, "aot_eager", [rows(WIDTH)])
        before = num_graphs()
        for size in (7, 2, 100):
            gradients(form, rows(size), list(module.parameters()))
        assert num_graphs() == before

    def test_modules_do_not_share_the_recompilation_limit(self) -> None:
        before = num_graphs()
        with torch._dynamo.config.patch(recompile_limit=1):
            for width in (1, 2, 3):
                compiled(nn.Linear(WIDTH, width).double(), "aot_eager", [rows()])
        assert num_graphs() == before + 3

    def test_inductor_needs_a_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        monkeypatch.setenv("PATH", str(tmp_path))  # a folder that this user must not read is another error
        with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "compile_threads": 1}):
            with pytest.raises(ConfigError) as caught:
                compiled(nn.Tanh(), "inductor", [rows()])
        assert caught.value.key == "dense.compile"
        assert "it needs a C++ compiler" in caught.value.rule


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("mine")


@pytest.mark.parametrize(
    ("module", "reason"),
    [(nn.Linear(WIDTH, 1), "mat1 and mat2 must have the same dtype, .*"), (Raises(), "KeyError: 'mine'")],
)
def test_invalid_module_raises_an_error_of_one_line(module: nn.Module, reason: str) -> None:
    message = rf"^dense\.compile = 'aot_eager': .* {type(module).__name__}: {reason}$"
    with pytest.raises(ConfigError, match=message) as caught:
        compiled(module, "aot_eager", [rows()])
    assert caught.value.key == "dense.compile"
    assert "\n" not in str(caught.value)
