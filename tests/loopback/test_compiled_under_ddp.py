"""Compiled nets under DDP under distributed autograd: the gradients of the eager net."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.seeded import random, seeded
from support.vectors import micro_batch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed import autograd as dist_autograd, rpc
from torch.nn.parallel import DistributedDataParallel

from hybrid.batch import Batch
from hybrid.dense.compilation import compiled
from hybrid.engine.ddp import DdpMode, DdpModel
from hybrid.engine.dense_placement import DensePlacement
from hybrid.engine.hybrid_model import HybridModel, MicroBatch
from hybrid.models.dense_net import DenseNet
from hybrid.models.dlrm import DotInteraction
from hybrid.primitives.step_timings import StepClock
from hybrid.topology import MASTER

pytestmark = [
    pytest.mark.usefixtures("loopback"),
    # torch.compile makes an instance of DotInteraction's autograd function, against torch's own rules; and
    # it looks at the gradient of every tensor, and takes no notice of the warning.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

FORMS = ["script", "trace", "aot_eager"]
NUM_DENSE, DIM, NUM_SPARSE, STEPS, RATE = 2, 4, 2, 3, 0.1
SIZES = (4, 3, 0)  # of micro-batches
HIDDEN = DIM + 3  # the bottom's vector, and the pairs of three vectors


def dense_net() -> DenseNet:
    bottom = seeded(lambda: nn.Sequential(nn.Linear(NUM_DENSE, DIM), nn.ReLU()))
    head = seeded(lambda: nn.Sequential(nn.Linear(HIDDEN, 5), nn.Tanh(), nn.Linear(5, 1)))
    return DenseNet(bottom, DotInteraction(1 + NUM_SPARSE, DIM), head).double()


def rows(size: int, width: int, step: int = 0) -> Tensor:
    return random(size, width, seed=100 * step + size, dtype=torch.float64).requires_grad_()


def num_graphs() -> int:
    """How many graphs ``torch.compile`` has captured so far."""
    return int(counters["stats"]["unique_graphs"])


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def head_gradients(module: Callable[[Tensor], Tensor], net: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients of the parameters of ``net`` and of ``x``, which comes to ``module`` across RPC."""
    with dist_autograd.context() as context:
        hidden_BH = rpc.rpc_sync(MASTER.rpc_name, torch.mul, args=(x, 2.0))
        dist_autograd.backward(context, [module(hidden_BH).square().sum()])
        found = dist_autograd.get_gradients(context)
        return [found[tensor].clone() for tensor in (*net.parameters(), x)]


@pytest.mark.parametrize("how", FORMS)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_a_compiled_net_under_ddp_has_the_gradients_of_the_eager_one(
    how: str, options: dict[str, bool]
) -> None:
    net, plain = dense_net().head, dense_net().head
    form = compiled(net, how, [rows(3, HIDDEN)])
    ddp = DistributedDataParallel(form, **options)  # type: ignore[arg-type]
    graphs = num_graphs()
    for step in range(STEPS):
        x, copy = (rows(5 + step, HIDDEN) for _ in range(2))
        found = head_gradients(ddp, net, x)
        plain(2 * copy).square().sum().backward()
        expected = [tensor.grad for tensor in (*plain.parameters(), copy)]
        with torch.no_grad():
            for parameters in (net.parameters(), plain.parameters()):
                for parameter, gradient in zip(parameters, found, strict=False):
                    parameter.sub_(gradient, alpha=RATE)
        assert_close(found, expected)
        plain.zero_grad()
    assert num_graphs() == graphs  # nothing is compiled again


def test_ddp_around_the_compiled_net_is_compiled_and_compiled_ddp_is_not() -> None:
    net = dense_net().head
    x = rows(3, HIDDEN)
    ddp = DistributedDataParallel(net)
    graphs = num_graphs()
    found = head_gradients(torch.compile(ddp, backend="aot_eager"), net, x)
    assert num_graphs() == graphs
    compiled(net, "aot_eager", [x])
    assert num_graphs() == graphs + 1
    assert_close(found, head_gradients(ddp, net, x))


def test_ddp_refuses_a_frozen_net() -> None:
    """Why freezing is not among the forms: its parameters are constants."""
    frozen = torch.jit.freeze(torch.jit.script(dense_net().head.eval()))
    with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
        DistributedDataParallel(frozen)


def micro_batches(step: int) -> Iterator[tuple[MicroBatch[Batch], Tensor]]:
    """The parts of a step's batch, each with its vectors; the last is empty."""
    for part, size in enumerate(SIZES):
        dense_BF, pooled_BE = rows(size, NUM_DENSE, step).detach(), rows(size, NUM_SPARSE * DIM, step)
        yield micro_batch(dense_BF, pooled_BE, step, part), pooled_BE


@pytest.mark.parametrize(
    ("how", "mode"),
    [*itertools.product(["script", "trace"], DdpMode), ("aot_eager", DdpMode.OUTSIDE)],
)
def test_a_model_of_compiled_stages_has_the_gradients_of_the_eager_one(how: str, mode: DdpMode) -> None:
    hybrid, plain = (HybridModel(dense_net(), dtype=torch.float64) for _ in range(2))
    examples = {
        "bottom": [rows(3, NUM_DENSE).detach()],
        "interaction": [rows(3, DIM), rows(3, NUM_SPARSE * DIM)],
        "head": [rows(3, HIDDEN)],
    }
    for name, stage in hybrid.net.named_children():
        setattr(hybrid.stages, name, compiled(stage, how, examples[name]))
    assert dist.group.WORLD is not None
    model = DdpModel(hybrid, mode, DensePlacement(dist.group.WORLD))
    for step in range(STEPS):
        for part, (micro, pooled_BE) in enumerate(micro_batches(step)):
            is_last = part == len(SIZES) - 1
            with model.reducing(is_last), dist_autograd.context() as context:
                dist_autograd.backward(context, [model.module(micro, StepClock()).square().sum()])
                gradients = dist_autograd.get_gradients(context)
                model.collect(gradients, is_last)
            plain(micro, StepClock()).square().sum().backward()
            assert_close(gradients[pooled_BE], pooled_BE.grad)
        found = [model.gradients[parameter] for parameter in model.net.parameters()]
        assert_close(found, [parameter.grad for parameter in plain.net.parameters()])
        plain.zero_grad()
