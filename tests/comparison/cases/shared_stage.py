"""Functions of trainers that compare a stage shared by a tensor group with an unsharded stage."""

import copy

import torch
from comparison.cases.peers import Compared, Gradients
from comparison.cases.tensor import HIDDEN, INPUTS, OUTPUTS, gradients_of, parts_of, random, trainers_mesh
from torch import Tensor, nn

from hybrid.dense.tensor_parallel import SharedStage, TensorParallel, automatic_plan, parse_plan
from hybrid.models.dcn_v2 import CrossInteraction
from hybrid.models.dense_net import DenseNet


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
