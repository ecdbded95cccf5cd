"""Functions of trainers that compare nets sharded over a tensor group with unsharded ones.

4 trainers make a mesh of data x tensor, 2 x 2. What is expected comes from a whole net on each trainer,
which sees the inputs of all without communication: they are functions of the places in the mesh.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from itertools import product

import torch
from comparison.cases.peers import Compared, Gradients
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel

from hybrid.dense.tensor_parallel import (
    TensorParallel,
    flatten_tensor,
    full_tensor,
    local_shard,
    sync_gradient,
    trainer_mesh,
    unflatten_tensor,
)

TENSOR, DATA = 2, 2
INPUTS, HIDDEN, OUTPUTS = 5, 7, 3  # over two ranks, none of them is even
RATE = 0.02


@functools.cache
def trainers_mesh() -> DeviceMesh:
    return trainer_mesh(TENSOR, "cpu")


class Mlp(nn.Module):
    """Return the net of the upstream test, with the same weights on all trainers."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net1, self.net2 = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x_BX: Tensor) -> Tensor:
        outputs_BY: Tensor = self.net2(torch.relu(self.net1(x_BX)))
        return outputs_BY


def _split_mlp(mlp: Mlp) -> TensorParallel:
    plan: dict[str, ParallelStyle] = {
        "net1": ColwiseParallel(use_local_output=False),
        "net2": RowwiseParallel(),
    }
    split = TensorParallel(copy.deepcopy(mlp), trainers_mesh()["tensor"], plan)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in split.parameters())
    return split


def _under_ddp(net: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(net, process_group=trainers_mesh().get_group("data"))


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def parts_of(split: TensorParallel, tensors: Mapping[str, Tensor]) -> Gradients:
    """Return the shards of ``tensors``, by parameter name, that this trainer should hold."""
    named = {name: split.layouts.get(p) for name, p in split.module.named_parameters()}
    return {n: t if (layout := named[n]) is None else local_shard(t, layout) for n, t in tensors.items()}


def gradients_of(net: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def _parameters(net: nn.Module) -> Gradients:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def _loss(net: nn.Module, x_BX: Tensor) -> Tensor:
    return net(x_BX).square().sum()  # type: ignore[no-any-return]


def _mean_loss(net: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    """Return the loss whose gradients DDP computes; a data rank without input also counts."""
    return torch.stack([_loss(net, x_BX) for x_BX in inputs]).sum() / DATA


def trained(index: int) -> list[Compared]:
    """Return outputs and gradients of two steps, then the parameters; the second input has another size."""
    mlp = Mlp().double()
    split = _split_mlp(mlp)
    ddp, own = _under_ddp(split), trainers_mesh().get_local_rank("data")
    nets: tuple[nn.Module, ...] = (mlp, ddp)
    optimizers = [torch.optim.Adam(net.parameters(), lr=RATE) for net in nets]
    compared = []
    for step, size in enumerate((4, 16)):
        inputs = [random(10 * step + rank, size, INPUTS, dtype=torch.float64) for rank in range(DATA)]
        output, expected = ddp(inputs[own]), mlp(inputs[own])
        output.square().sum().backward()
        _mean_loss(mlp, inputs).backward()
        got = {"output": output.detach(), **gradients_of(split.module)}
        compared.append((got, {"output": expected.detach(), **parts_of(split, gradients_of(mlp))}))
        for each in optimizers:
            each.step()
            each.zero_grad()
    return [*compared, (_parameters(split.module), parts_of(split, _parameters(mlp)))]


def shards(index: int) -> list[Compared]:
    """Check that ``full_tensor`` and ``local_shard`` are inverse, for even, uneven and too few rows."""
    mesh, compared = trainers_mesh()["tensor"], []
    own = mesh.get_local_rank()
    for shape, placement in product([(4, 2), (7, 3), (1, 5)], [Shard(0), Shard(1), Replicate()]):
        values = random(2, *shape)
        dtensor = distribute_tensor(values, mesh, [placement], src_data_rank=None)
        _, layout = flatten_tensor(dtensor)
        assert layout is not None
        shard = local_shard(values, layout)
        assert shard.untyped_storage().nbytes() == shard.nbytes
        pieces = [values] * TENSOR
        if isinstance(placement, Shard):
            empty = values.narrow(placement.dim, 0, 0)
            pieces = [*values.chunk(TENSOR, placement.dim), empty][:TENSOR]
        # Also for other values and another dtype, as of optimizer state.
        state = full_tensor((2 * shard).double(), layout)
        got = {"shard": shard, "whole": full_tensor(shard, layout), "state": state}
        compared.append((got, {"shard": pieces[own], "whole": values, "state": 2 * values.double()}))
    return compared


def own_weights(index: int) -> list[Compared]:
    """Return the shards of a net whose weights differ between trainers."""
    mlp = Mlp()
    for parameter in mlp.parameters():
        nn.init.constant_(parameter, index + 1)
    split = _split_mlp(mlp)
    return [(_parameters(split.module), parts_of(split, _parameters(mlp)))]


def gradient_of_squares(index: int) -> list[Compared]:
    """Return a shard's gradient through its DTensor and an all-reduce in progress."""
    mesh = trainers_mesh()["tensor"]
    values = random(5, 7, 3)
    shard, layout = flatten_tensor(distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None))
    assert layout is not None
    unflatten_tensor(shard, layout).full_tensor().square().sum().backward()
    assert type(shard.grad) is Tensor
    under_way = all_reduce(torch.ones(2), "sum", (mesh, 0))
    assert isinstance(under_way, AsyncCollectiveTensor)
    reduced = sync_gradient(under_way)
    assert type(reduced) is Tensor
    expected = {"gradient": 2 * shard.detach(), "all-reduce": torch.full((2,), 2.0)}
    return [({"gradient": shard.grad, "all-reduce": reduced}, expected)]


def uneven_mesh(index: int) -> list[Compared]:
    trainer_mesh(3, "cpu")
    return []
