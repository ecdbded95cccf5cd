"""Replicas of compiled modules: they run compiled code, compiled once, over their own tensors."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.replicas import CPUS
from support.seeded import random, seeded
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.testing import assert_close

from hybrid.dense.data_parallel.replicas import DataParallel, parallel_apply, replicate, shadow

# torch itself hides this warning while it compiles, but not where warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(self.layer(x).relu())
        return output


# torch compiles the call of its own modules, and of others, in different ways.
NETS = [Net, lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU())]


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager")


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("make", NETS)
def test_they_share_code_that_is_compiled_once(make: Callable[[], nn.Module]) -> None:
    module, plain = seeded(make), seeded(make)
    net, plain_net = DataParallel(compiled(module), CPUS), DataParallel(plain, CPUS)
    for step in range(3):
        x = random(4, 3, seed=step)
        output, expected = net(x), plain_net(x)
        assert_close(output, expected)
        output.square().sum().backward()
        expected.square().sum().backward()
        grads = [[p.grad for p in each.parameters()] for each in (module, plain)]
        assert_close(*grads)
        assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))
        assert num_graphs() == 1


def test_one_may_be_a_part_of_the_module() -> None:
    module = nn.Sequential(compiled(Net()), nn.Linear(3, 1))
    zeros: dict[Tensor, Tensor] = {tensor: torch.zeros_like(tensor) for tensor in module.parameters()}
    assert shadow(module, zeros)(random(4, 3)).tolist() == [[0.0]] * 4
    assert num_graphs() == 1


def test_the_module_keeps_its_parameters_and_its_hooks_are_called() -> None:
    module = compiled(Net())
    names = [name for name, _ in module.named_parameters()]
    seen: list[Tensor] = []
    module.register_forward_hook(lambda module, args, output: seen.append(output))
    outputs = [replica(random(4, 3)) for replica in replicate(module, CPUS)]
    assert [name for name, _ in module.named_parameters()] == names
    assert list(map(id, seen)) == list(map(id, outputs))


def test_threads_that_start_together_compile_once() -> None:
    module, x = compiled(Net()), random(4, 3)

    def times(factor: int) -> Tensor:
        output: Tensor = shadow(module, {p: p * factor for p in module.parameters()})(x)
        return output

    with ThreadPoolExecutor(4) as threads:
        outputs = list(threads.map(times, range(4)))
    assert num_graphs() == 1
    assert_close(outputs, [times(factor) for factor in range(4)])
    assert num_graphs() == 1


def test_a_compiled_replica_may_call_another_while_it_runs() -> None:
    inner, x = compiled(Net()), random(4, 3)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def call(self, x: Tensor) -> Tensor:
            output: Tensor = self.inner(x)
            return output

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.call(x + 1)
            return output - 1

    outer = Outer()
    assert_close(parallel_apply(replicate(compiled(outer), CPUS), [x, x]), [outer(x), outer(x)])


def test_a_module_compiled_in_place_is_refused() -> None:
    module = nn.Sequential(Net())
    module[0].compile()
    with pytest.raises(RuntimeError, match=r"^Net\.compile\(\) binds code to one module; replicas need"):
        shadow(module, {})
