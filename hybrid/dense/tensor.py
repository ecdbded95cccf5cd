"""Tensor parallelism of a dense net's stage: several trainers hold its layers together.

The trainers form a mesh of data x tensor. Those of one tensor group each hold a shard of a stage's
weights and compute it together; DDP reduces the gradients of each shard over the data groups. Every
trainer keeps its own share of the batch; only in the stage do the group's shares meet::

    own inputs_bX ── all-gather ── inputs_BX ── TensorParallel ── outputs_BY ── own rows ── outputs_bY

B is the sum of the group's b. torch's own transform for tensor parallelism under DDP
(``torch.distributed.tensor.parallel.ddp``) loses the parameters at the first forward pass and adds a
gradient hook to each of them at every one; this one does neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils._pytree import tree_map


def trainer_mesh(tensor_size: int, device_type: str) -> DeviceMesh:
    """All trainers as a mesh of "data" x "tensor", of which the first tensor group is 0 .. P-1.

    Called by all trainers at once; it creates process groups.

    Args:
        tensor_size: P, how many trainers hold a net together.
        device_type: where they compute, ``cpu`` or ``cuda``.

    Raises:
        ValueError: the trainers cannot be dealt out to groups of this size.
    """
    trainers = dist.get_world_size()
    if tensor_size < 1 or trainers % tensor_size:
        raise ValueError(f"{trainers} trainers do not make groups of {tensor_size}")
    shape = (trainers // tensor_size, tensor_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=("data", "tensor"))


def sync_gradient(grad: Tensor, stream: torch.Stream | None = None) -> Tensor:
    """The gradient once its collective has ended, as a plain tensor; any other gradient as it is.

    Args:
        stream: waits in the place of the current stream.
    """
    if not isinstance(grad, AsyncCollectiveTensor):
        return grad
    with stream or nullcontext():
        return grad.wait()


def flatten_tensor(tensor: Tensor) -> tuple[Tensor, DTensorSpec | None]:
    """A DTensor's shard, in the same memory and requiring a gradient, with its layout.

    Any other tensor comes back as it is, with None.
    """
    if not isinstance(tensor, DTensor):
        return tensor, None
    return tensor.to_local().detach().requires_grad_(), tensor._spec


def unflatten_tensor(shard: Tensor, layout: DTensorSpec, stream: torch.Stream | None = None) -> DTensor:
    """The DTensor that ``shard`` is this rank's part of, in the same memory.

    Gradients reach ``shard`` as plain tensors, waited for as :func:`sync_gradient` says.
    """
    # The hook is an alias's, which ends with the graph; on the shard itself hooks would pile up.
    alias = shard.view_as(shard)
    if alias.requires_grad:
        alias.register_hook(partial(sync_gradient, stream=stream))
    return _dtensor(alias, layout)


def whole(shard: Tensor, layout: DTensorSpec) -> Tensor:
    """The tensor that ``shard`` is this rank's part of. Called by all ranks of the layout's mesh at once."""
    return _dtensor(shard.detach(), layout).full_tensor()


def own_shard(tensor: Tensor, layout: DTensorSpec) -> Tensor:
    """This rank's part of a whole tensor, in memory of its own; without communication."""
    dtensor = distribute_tensor(tensor.detach(), layout.mesh, layout.placements, src_data_rank=None)
    return dtensor.to_local().clone()


def _dtensor(local: Tensor, layout: DTensorSpec) -> DTensor:
    # Without its shape and stride, torch would take uneven shards for equal ones.
    return DTensor.from_local(
        local,
        layout.mesh,
        layout.placements,
        run_check=False,
        shape=layout.shape,
        stride=layout.stride,
    )


class TensorParallel(nn.Module):
    """A module whose parameters are this rank's shards; its forward pass is one with the other ranks'.

    Parameters are plain tensors under the names of the whole module's, so that DDP, optimizers and
    checkpoints see no difference. All ranks must come with the same weights and inputs, and with no
    module that draws random numbers, such as dropout: each rank would draw its own.

    Args:
        module: what to split, in place.
        mesh: the tensor group, of one dimension.
        plan: how to split the submodules at these paths; "" is ``module`` itself.

    Raises:
        ValueError: the plan is empty, names a submodule that there is not, or splits a parameter that
            the module uses in two places.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
        super().__init__()
        if not plan:
            raise ValueError("the plan splits nothing")
        paths = dict(module.named_modules(remove_duplicate=False))
        if missing := [path for path in plan if path not in paths]:
            raise ValueError(
                f"the plan names {', '.join(missing)}, but there are only {', '.join(filter(None, paths))}"
            )
        _refuse_tied(module, plan)
        for path, style in plan.items():
            # Without a source rank, each rank copies its shards from the weights that it has.
            parallelize_module(paths[path], mesh, style, src_data_rank=None)
        self.module = module
        self._layouts = _localize(module)

    @property
    def layouts(self) -> dict[Tensor, DTensorSpec]:
        """How each parameter is split of which this rank holds a shard; all others are whole here."""
        split = {name: layout for name, layout in self._layouts.items() if layout.is_sharded()}
        return {self.module.get_parameter(name): layout for name, layout in split.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the whole module gives, as plain tensors; an output that the plan leaves split is gathered."""
        dtensors: dict[str, Tensor] = {
            name: unflatten_tensor(self.module.get_parameter(name), layout)
            for name, layout in self._layouts.items()
        }
        output = torch.func.functional_call(self.module, dtensors, args, kwargs)
        return tree_map(_plain, output)


def _plain(output: Any) -> Any:
    if isinstance(output, DTensor):
        return output.full_tensor()
    if isinstance(output, AsyncCollectiveTensor):
        # torch's own operations would wait for it by themselves; RPC would send what is there by now.
        return _Arrived.apply(output)  # type: ignore[no-untyped-call]
    return output


class _Arrived(torch.autograd.Function):
    """The result of a collective that is under way, once it has ended."""

    @staticmethod
    def forward(ctx: FunctionCtx, pending: AsyncCollectiveTensor) -> Tensor:
        return pending.wait()

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> Tensor:
        return grads[0]


def _refuse_tied(module: nn.Module, paths: Iterable[str]) -> None:
    """ValueError where a parameter of a submodule at ``paths`` has another name in ``module``, too."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    counts = Counter(parameters.values())
    split = {parameter for path in paths for parameter in module.get_submodule(path).parameters()}
    if tied := [name for name, p in parameters.items() if p in split and counts[p] > 1]:
        raise ValueError(f"a parameter used in several places cannot be split: {', '.join(tied)}")


def _localize(module: nn.Module) -> dict[str, DTensorSpec]:
    """Replace parameters that are DTensors by this rank's part of them; their layouts by name."""
    layouts = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        shard, layout = flatten_tensor(parameter)
        if layout is None:
            continue
        path, _, own_name = name.rpartition(".")
        local = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        module.get_submodule(path).register_parameter(own_name, local)
        layouts[name] = layout
    return layouts


class SharedStage(nn.Module):
    """A stage computed by a tensor group together, on the samples of all its ranks.

    Args:
        stage: takes tensors with a row for each sample and returns one; the same on all ranks, such as
            a :class:`TensorParallel`.
        group: the ranks that call it, at the same time; each with its own samples, perhaps none.
    """

    def __init__(self, stage: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.stage = stage
        self._group = group
        self._anchor = torch.zeros(0, requires_grad=True)

    def forward(self, *inputs: Tensor) -> Tensor:
        """The stage's output for this rank's rows of ``inputs``.

        Raises:
            ValueError: inputs or output differ in their number of rows.
        """
        if self._group.size() == 1:
            whole_B: Tensor = self.stage(*inputs)
            return whole_B
        rows, is_differentiable = _agree(inputs, self._group)
        # The backward passes meet in the collectives of the stage's graph. Autograd runs those in the
        # opposite order of the forward pass, the same on all ranks if their graphs are the same. An input
        # that requires a gradient on some ranks only would make them differ: a share without samples has
        # looked up nothing, say. So with one rank, all record it.
        gathered = [
            _Gather.apply(x, self._anchor if record else None, rows, self._group)  # type: ignore[no-untyped-call]
            for x, record in zip(inputs, is_differentiable, strict=True)
        ]
        output = self.stage(*gathered)
        if output.size(0) != sum(rows):
            raise ValueError(f"the stage gives {output.size(0)} rows for {sum(rows)} samples")
        own_rows: Tensor = _OwnRows.apply(output, rows, self._group)  # type: ignore[no-untyped-call]
        return own_rows


def _agree(inputs: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[list[int], list[bool]]:
    """How many rows each rank has, and of which inputs any rank wants a gradient."""
    sizes = {len(x) for x in inputs}
    if len(sizes) != 1:
        raise ValueError(f"inputs of a stage must have as many rows as each other, not {sorted(sizes)}")
    own = torch.tensor([*sizes, *(int(x.requires_grad) for x in inputs)], device=inputs[0].device)
    of_ranks = own.new_empty(group.size() * len(own))
    dist.all_gather_single(of_ranks, own, group=group)
    rows, *flags = of_ranks.view(-1, len(own)).t().tolist()
    return rows, [any(of_input) for of_input in flags]


def _all_rows(own_bX: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, in the order of ranks."""
    longest = max(rows)
    padded_bX = own_bX.contiguous()  # as NCCL must have it
    if len(own_bX) < longest:  # process groups gather tensors of one size only
        padded_bX = own_bX.new_zeros(longest, *own_bX.shape[1:])
        padded_bX[: len(own_bX)] = own_bX
    all_BX = own_bX.new_empty(len(rows) * longest, *own_bX.shape[1:])
    dist.all_gather_single(all_BX, padded_bX, group=group)
    if min(rows) == longest:
        return all_BX
    return torch.cat([part_bX[:size] for part_bX, size in zip(all_BX.split(longest), rows, strict=True)])


def _own_rows(all_BX: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """This rank's rows; a copy, since RPC would send all the memory of a view."""
    start = sum(rows[: group.rank()])
    return all_BX[start : start + rows[group.rank()]].clone()


class _Gather(torch.autograd.Function):
    """The group's rows. Each rank has the whole gradient of them, so its own part needs no communication."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, own_bX: Tensor, anchor: Tensor | None, rows: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.arguments = rows, group  # type: ignore[attr-defined]
        return _all_rows(own_bX, rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BX: Tensor) -> tuple[Tensor | None, None, None, None]:
        own_bX = _own_rows(grad_BX, *ctx.arguments) if ctx.needs_input_grad[0] else None
        return own_bX, None, None, None


class _OwnRows(torch.autograd.Function):
    """This rank's rows of what the group has computed; their gradients come from the rank that has them."""

    @staticmethod
    def forward(ctx: FunctionCtx, all_BY: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = rows, group  # type: ignore[attr-defined]
        return _own_rows(all_BY, rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_bY: Tensor) -> tuple[Tensor, None, None]:
        return _all_rows(grad_bY, *ctx.arguments), None, None
