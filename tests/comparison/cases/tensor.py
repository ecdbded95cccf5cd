"""Functions of trainers that compare nets and stages sharded over a tensor group with unsharded ones.

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
    SharedStage,
    TensorParallel,
    automatic_plan,
    flatten_tensor,
    full_tensor,
    local_shard,
    parse_plan,
    sync_gradient,
    trainer_mesh,
    unflatten_tensor,
)
from hybrid.models.dcn_v2 import CrossInteraction
from hybrid.models.dense_net import DenseNet

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


def _stage(kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Return an unsharded stage and the widths of its inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        if kind == "cross":
            return CrossInteraction(INPUTS + HIDDEN, 2), (INPUTS, HIDDEN)
        first, second = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(3, 1), nn.Flatten(0)), (INPUTS,)


# Numbers of samples of the ranks of a tensor group, and the ranks whose inputs require a gradient.
SLICES = (
    ((3, 2), (True, True)),
    ((0, 4), (True, True)),
    ((0, 0), (True, True)),
    ((3, 2), (False, False)),
    ((0, 4), (False, True)),
)


def shared(kind: str, dtype: torch.dtype, index: int) -> list[Compared]:
    """Compare a shared stage for each of ``SLICES``; each trainer has its own inputs.

    Under autocast where ``dtype`` is bfloat16.
    """
    plain, widths = _stage(kind)
    plain.to(torch.float32 if dtype is torch.bfloat16 else dtype)
    mesh = trainers_mesh()
    split = TensorParallel(copy.deepcopy(plain), mesh["tensor"], automatic_plan(plain))
    stage = SharedStage(split, mesh.get_group("tensor"))
    return [_shared_once(plain, split, stage, widths, sizes, wanted, dtype) for sizes, wanted in SLICES]


def _shared_once(
    plain: nn.Module,
    split: TensorParallel,
    stage: SharedStage,
    widths: tuple[int, ...],
    sizes: tuple[int, int],
    wanted: tuple[bool, bool],
    dtype: torch.dtype,
) -> Compared:
    mesh = trainers_mesh()
    own, data = mesh.get_local_rank("tensor"), mesh.get_local_rank("data")
    like = next(plain.parameters()).detach()
    of_ranks = [
        [random(100 * data + 10 * rank + width, size, width).to(like) for width in widths]
        for rank, size in enumerate(sizes)
    ]
    ours = [x.clone().requires_grad_(wanted[own]) for x in of_ranks[own]]
    theirs = [torch.cat(of_input).requires_grad_() for of_input in zip(*of_ranks, strict=True)]
    split.zero_grad()
    plain.zero_grad()
    recorded: list[bool] = []
    note = split.register_forward_pre_hook(lambda _, inputs: recorded.extend(x.requires_grad for x in inputs))
    precision = torch.autocast(like.device.type, torch.bfloat16, enabled=dtype is torch.bfloat16)
    with precision:
        output, expected = stage(*ours), plain(*theirs)
    note.remove()
    assert recorded == [any(wanted)] * len(ours)
    with precision, torch.no_grad():
        unrecorded = stage(*ours)
    assert type(output) is type(unrecorded) is Tensor
    assert output.untyped_storage().nbytes() == output.nbytes
    output.square().sum().backward()
    expected.square().sum().backward()
    rows = slice(sum(sizes[:own]), sum(sizes[: own + 1]))
    got = {"output": output.detach(), "unrecorded": unrecorded, **gradients_of(split.module)}
    right = {"output": expected.detach()[rows], "unrecorded": expected.detach()[rows]}
    right |= parts_of(split, gradients_of(plain))
    if wanted[own]:
        got |= {f"input {i}": x.grad for i, x in enumerate(ours) if x.grad is not None}
        right |= {f"input {i}": x.grad[rows] for i, x in enumerate(theirs) if x.grad is not None}
    else:
        assert all(x.grad is None for x in ours)
    return _to_send(got), _to_send(right)


def _to_send(tensors: Gradients) -> Gradients:
    """Return copies on the CPU: RPC cannot send GPU tensors here, nor empty views of larger tensors."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def planned(texts: list[str], index: int) -> list[Compared]:
    """Use a stage with a user's sharding plan."""
    plain, (width,) = _stage("logits")
    plain.double()
    plan = parse_plan(texts, DenseNet(nn.Identity(), nn.Identity(), plain))["head"]
    split = TensorParallel(copy.deepcopy(plain), trainers_mesh()["tensor"], plan)
    compared = []
    for net in (split, plain):
        x_BX = random(7, 4, width, dtype=torch.float64).requires_grad_()
        output_B = net(x_BX)
        output_B.square().sum().backward()
        assert x_BX.grad is not None
        compared.append({"output": output_B.detach(), "input": x_BX.grad})
    got, expected = compared
    return [({**got, **gradients_of(split.module)}, {**expected, **parts_of(split, gradients_of(plain))})]


def uneven_inputs(index: int) -> list[Compared]:
    stage = SharedStage(nn.Bilinear(2, 2, 1), trainers_mesh().get_group("tensor"))
    stage(torch.zeros(3, 2), torch.zeros(2, 2))
    return []


def uneven_output(index: int) -> list[Compared]:
    SharedStage(nn.Flatten(0), trainers_mesh().get_group("tensor"))(torch.zeros(3, 2))
    return []
