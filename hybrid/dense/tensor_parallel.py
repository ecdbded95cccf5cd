"""Tensor parallelism of a stage of a dense net: several trainers each hold shards of the layers.

The trainers form a mesh with the dimensions "data" and "tensor". Each trainer of a tensor group holds one
shard of the weights, and the group computes the stage together. A data group consists of the trainers with
the same shard. DDP reduces the gradients of the shard over this group.

:class:`TensorParallel` holds the shards and computes with DTensors. A plan defines how layers are split.
:class:`SharedStage` gathers the samples of a tensor group for a stage::

    local inputs_bX ── all-gather ── inputs_BX ── stage ── outputs_BY ── local rows ── outputs_bY

b is the number of samples of one trainer, and B the sum of b over the tensor group. The engine wraps the
stages of a net in both classes; users may do the same.
"""

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_map

from hybrid.errors import ConfigError
from hybrid.primitives.row_collectives import ExchangeRows, gather_rows
from hybrid.security.closed_listeners import close_listeners_after

# How a tensor is split over a mesh.
Layout: TypeAlias = DTensorSpec

_kept = threading.local()

# How to split the submodules at these paths.
Plan = dict[str, ParallelStyle]

# Makes the style of one layer, by name. All styles also take full inputs.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    # By outputs, which stay split for a following rowwise layer.
    "colwise": lambda: ColwiseParallel(use_local_output=False),
    # By inputs; the group sums the partial outputs. "Replicate" applies to plain tensors; a split input stays
    # split.
    "rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    # By outputs, which the group gathers.
    "colwise_gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
}

_KEY = "dense.tensor_plan"
# Elementwise layers also work on a part of the columns.
_ELEMENTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Identity)


def trainer_mesh(tensor_size: int, device_type: str) -> DeviceMesh:
    """Return the mesh "data" x "tensor" of all trainers. Trainers of successive ranks form a tensor group.

    All trainers must call this. The first call creates process groups; equal calls return the same mesh.

    Args:
        tensor_size: the number of trainers in a tensor group.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        ValueError: ``tensor_size`` is below 1, or does not divide the number of trainers.
    """
    trainers = dist.get_world_size()
    if tensor_size < 1 or trainers % tensor_size:
        raise ValueError(f"{trainers} trainers do not make groups of {tensor_size}")
    return _mesh(dist.group.WORLD, (trainers // tensor_size, tensor_size), device_type)


@cache
def _mesh(world: dist.ProcessGroup | None, shape: tuple[int, int], device_type: str) -> DeviceMesh:
    # DTensor caches its decisions by the shape of a mesh. Ranks with different meshes of one shape would use
    # different groups and wait for each other forever.
    names = dist.PrefixStore(f"mesh {shape} {device_type}", distributed_c10d._get_default_store())
    with close_listeners_after(names, dist.get_rank(), dist.get_world_size()):
        return init_device_mesh(device_type, shape, mesh_dim_names=("data", "tensor"))


def sync_gradient(grad: Tensor) -> Tensor:
    """Wait for the collective operation that computes a gradient; return the gradient as a plain tensor."""
    return grad.wait() if isinstance(grad, AsyncCollectiveTensor) else grad


def flatten_tensor(tensor: Tensor) -> tuple[Tensor, Layout | None]:
    """Return the local shard and the layout of a DTensor; for any other tensor, return the tensor and None.

    The shard shares the memory of the DTensor, is detached from its graph, and requires a gradient.
    """
    if not isinstance(tensor, DTensor):
        return tensor, None
    return tensor.to_local().detach().requires_grad_(), tensor._spec


def unflatten_tensor(shard: Tensor, layout: Layout) -> DTensor:
    """Return a DTensor whose local shard is ``shard``, in the same memory.

    The backward pass computes the gradient of ``shard`` as a plain tensor, and waits for its communication.
    """
    # The hook is on an alias, which lives as long as the graph. Hooks on the shard would accumulate.
    alias = shard.view_as(shard)
    if alias.requires_grad:
        alias.register_hook(sync_gradient)
    return _dtensor(alias, layout)


def full_tensor(shard: Tensor, layout: Layout) -> Tensor:
    """Return the full tensor of a shard; all ranks of the mesh must call this together."""
    return _dtensor(shard.detach(), layout).full_tensor()


def local_shard(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a copy of this rank's shard of a full tensor, without communication."""
    dtensor = distribute_tensor(tensor.detach(), layout.mesh, layout.placements, src_data_rank=None)
    return dtensor.to_local().clone()


def _dtensor(local: Tensor, layout: Layout) -> DTensor:
    # Without shape and stride, torch would assume shards of equal size.
    return DTensor.from_local(
        local, layout.mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride
    )


class TensorParallel(nn.Module):
    """A module whose parameters are this rank's shards. All ranks of the tensor group call it together.

    Parameters are plain tensors and keep their names in ``module``, so that DDP, optimizers and checkpoints
    work as usual. All ranks must have the same initial weights and inputs. Modules that draw random numbers,
    such as dropout, are not supported, since each rank would draw different numbers.

    Args:
        module: the module to split, in place.
        mesh: the one-dimensional mesh of the tensor group.
        plan: how to split submodules, by path; "" is ``module`` itself.

    Raises:
        ValueError: the plan splits a parameter that has two names in ``module``.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
        super().__init__()
        parameters = dict(module.named_parameters(remove_duplicate=False))
        counts = Counter(parameters.values())
        split = {parameter for path in plan for parameter in module.get_submodule(path).parameters()}
        tied = [name for name, p in parameters.items() if p in split and counts[p] > 1]
        if tied:
            raise ValueError(f"a parameter used in several places cannot be split: {', '.join(tied)}")
        for path, style in plan.items():
            # Without a source rank, each rank copies its shards from the weights that it has.
            parallelize_module(module.get_submodule(path), mesh, style, src_data_rank=None)
        self.module = module
        self._layouts: dict[str, Layout] = {}
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            shard, layout = flatten_tensor(parameter)
            if layout is not None:
                path, _, own_name = name.rpartition(".")
                local = nn.Parameter(shard, requires_grad=parameter.requires_grad)
                module.get_submodule(path).register_parameter(own_name, local)
                self._layouts[name] = layout

    @property
    def layouts(self) -> dict[Tensor, Layout]:
        """The layout of each split parameter, by parameter."""
        split = {name: layout for name, layout in self._layouts.items() if layout.is_sharded()}
        return {self.module.get_parameter(name): layout for name, layout in split.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the full module, as full plain tensors."""
        _keep_thread_state()
        dtensors: dict[str, Tensor] = {
            name: unflatten_tensor(self.module.get_parameter(name), layout)
            for name, layout in self._layouts.items()
        }
        output = torch.func.functional_call(self.module, dtensors, args, kwargs)
        return tree_map(_plain, output)


def _plain(output: Any) -> Any:
    if not isinstance(output, Tensor):
        return output
    return _Leave.apply(output.full_tensor() if isinstance(output, DTensor) else output)  # type: ignore[no-untyped-call]


class _Leave(torch.autograd.Function):
    """Waits until the output of the module is computed; backward calls :func:`_keep_thread_state`."""

    @staticmethod
    def forward(ctx: FunctionCtx, output: Tensor) -> Tensor:
        # torch's operators wait for collectives by themselves, but RPC does not.
        return sync_gradient(output)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> Tensor:
        _keep_thread_state()
        return grads[0]


def _keep_thread_state() -> None:
    """Keep the Python thread state of the calling thread until it ends.

    RPC and distributed autograd run Python in C++ threads. When such a thread returns to C++, Python deletes
    the thread state with all thread-local data, such as the sharding decisions of DTensor, which take
    milliseconds to repeat. The thread pools have a fixed size, so only a few states are kept.
    """
    if not hasattr(_kept, "is_kept"):
        # Without a release, so that the reference count of the state never reaches zero.
        ctypes.pythonapi.PyGILState_Ensure()
        _kept.is_kept = True


def automatic_plan(stage: nn.Module) -> Plan:
    """Return a plan for one stage of a net; it is empty if no layer can be split.

    Two successive linear layers of an ``nn.Sequential``, with only activations between them, form a pair. A
    pair communicates once, after the second layer (Shoeybi et al. 2019). Other linear layers with several
    outputs are split, and their outputs are gathered. All other modules stay whole.
    """
    styles: dict[str, str] = {}
    for path, module in stage.named_modules():
        if type(module) is nn.Sequential:
            first = None  # a linear layer that only activations have followed so far
            for name, layer in module._modules.items():
                layer_path = f"{path}.{name}" if path else name
                if _is_plain_linear(layer) and first is not None:
                    styles |= {first: "colwise", layer_path: "rowwise"}
                    first = None
                elif _is_plain_linear(layer):
                    first = layer_path if layer.out_features > 1 else None
                elif not isinstance(layer, _ELEMENTWISE):
                    first = None
        elif _is_plain_linear(module) and module.out_features > 1:
            styles.setdefault(path, "colwise_gathered")
    return {path: STYLES[style]() for path, style in styles.items()}


def _is_plain_linear(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    # Subclasses may have other parameters, or be used without a call.
    return type(module) is nn.Linear


def parse_plan(texts: Sequence[str], net: nn.Module) -> dict[str, Plan]:
    """Parse ``dense.tensor_plan``, and return a plan for each stage, by the stage's name.

    Paths in a plan are relative to the stage; "" is the stage itself.

    Args:
        texts: such as "head.[02] = colwise": an fnmatch pattern for paths of layers in ``net``, and a key of
            ``STYLES``.
        net: the full net; its children are the stages.

    Raises:
        ConfigError: a text is malformed, its style does not exist, its pattern matches no module, or matches
            a module other than Linear and Embedding, or two texts match the same layer.
    """
    modules = {path: module for path, module in net.named_modules() if path}
    layers = [path for path, module in modules.items() if isinstance(module, nn.Linear | nn.Embedding)]
    patterns: dict[str, str] = {}
    plan: dict[str, Plan] = {stage: {} for stage, _ in net.named_children()}
    for text in texts:
        pattern, _, style = (side.strip() for side in text.partition("="))
        if not pattern or style not in STYLES:
            rule = f'must be like "head.0 = colwise", with one of the styles {", ".join(STYLES)}'
            raise ConfigError(_KEY, rule, text)
        paths = [path for path in modules if fnmatchcase(path, pattern)]
        if not paths or not {*paths} <= {*layers}:
            rule = "must match layers of the kinds Linear and Embedding, and only these; the net has "
            raise ConfigError(_KEY, rule + (", ".join(layers) or "none"), text)
        for path in paths:
            if patterns.setdefault(path, text) != text:
                raise ConfigError(_KEY, f"{path} is matched by {patterns[path]!r} too", text)
            stage, _, relative = path.partition(".")
            plan[stage][relative] = STYLES[style]()
    return plan


class SharedStage(nn.Module):
    """A stage that a tensor group computes together, on the samples of all its ranks.

    Args:
        stage: maps tensors with one row per sample to one tensor, in the same way on all ranks, such as a
            :class:`TensorParallel`.
        group: the tensor group. All its ranks call the stage, each with its own samples, possibly none.
    """

    def __init__(self, stage: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.stage = stage
        self._group = group
        self._anchor = torch.zeros(0, requires_grad=True)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the output for this trainer's samples. Each input must have one row per sample."""
        rows, is_differentiable = _agree(inputs, self._group)
        # Autograd runs the collectives of the stage's graph in the reverse order of the forward pass, so all
        # ranks need the same graph. A slice without samples has no lookup, and its input requires no
        # gradient. So all ranks record an input if one rank does. Each rank then has the full gradient of the
        # inputs, so it selects its rows without communication.
        gather = partial(gather_rows, rows=rows, group=self._group)
        select = partial(_local_rows, rows=rows, group=self._group)
        gathered = [
            ExchangeRows.apply(x, self._anchor if record else None, gather, select)  # type: ignore[no-untyped-call]
            for x, record in zip(inputs, is_differentiable, strict=True)
        ]
        output = self.stage(*gathered)
        if output.size(0) != sum(rows):
            raise ValueError(f"the stage gives {output.size(0)} rows for {sum(rows)} samples")
        local_rows: Tensor = ExchangeRows.apply(output, None, select, gather)  # type: ignore[no-untyped-call]
        return local_rows


def _agree(inputs: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[list[int], list[bool]]:
    """Return the number of rows of each rank, and for each input, whether any rank needs its gradient."""
    sizes = {len(x) for x in inputs}
    if len(sizes) != 1:
        raise ValueError(f"inputs of a stage must have as many rows as each other, not {sorted(sizes)}")
    local = torch.tensor([*sizes, *(int(x.requires_grad) for x in inputs)], device=inputs[0].device)
    of_ranks = local.new_empty(group.size() * len(local))
    dist.all_gather_single(of_ranks, local, group=group)
    rows, *flags = of_ranks.view(-1, len(local)).t().tolist()
    return rows, [any(of_input) for of_input in flags]


def _local_rows(all_BX: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return a copy of this rank's rows; ``rows`` has the number of rows of each rank."""
    start = sum(rows[: group.rank()])
    return all_BX[start : start + rows[group.rank()]].clone()  # RPC sends the whole storage of a view
