"""Tensor parallelism of a dense net's stage: several trainers hold its layers together.

The trainers form a mesh of data x tensor. Those of one tensor group each hold a shard of a stage's
weights and compute it together (``shared_stage.py`` brings their samples together); DDP reduces the
gradients of each shard over the data groups. torch's own transform for tensor parallelism under DDP
(``torch.distributed.tensor.parallel.ddp``) loses the parameters at the first forward pass and adds a
gradient hook to each of them at every one; this one does neither.
"""

import ctypes
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils._pytree import tree_map

from hybrid.security.closed_listeners import close_listeners_after

# How a tensor is split over a mesh.
Layout: TypeAlias = DTensorSpec

_kept = threading.local()


def trainer_mesh(tensor_size: int, device_type: str) -> DeviceMesh:
    """All trainers as a mesh of "data" x "tensor", of which the first tensor group is 0 .. P-1.

    Called by all trainers at once; it creates process groups, and gives the same mesh every time.

    Args:
        tensor_size: P, how many trainers hold a net together.
        device_type: where they compute, ``cpu`` or ``cuda``.

    Raises:
        ValueError: the trainers cannot be dealt out to groups of this size.
    """
    trainers = dist.get_world_size()
    if tensor_size < 1 or trainers % tensor_size:
        raise ValueError(f"{trainers} trainers do not make groups of {tensor_size}")
    return _mesh(dist.group.WORLD, (trainers // tensor_size, tensor_size), device_type)


@cache
def _mesh(world: dist.ProcessGroup | None, shape: tuple[int, int], device_type: str) -> DeviceMesh:
    # DTensor takes meshes of the same shape for the same: what it has found out for one it does on the
    # groups of that one, and two ranks that remember different ones would wait for each other for ever.
    names = dist.PrefixStore(f"mesh {shape} {device_type}", distributed_c10d._get_default_store())
    with close_listeners_after(names, dist.get_rank(), dist.get_world_size()):
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


def flatten_tensor(tensor: Tensor) -> tuple[Tensor, Layout | None]:
    """A DTensor's shard, in the same memory and requiring a gradient, with its layout.

    Any other tensor comes back as it is, with None.
    """
    if not isinstance(tensor, DTensor):
        return tensor, None
    return tensor.to_local().detach().requires_grad_(), tensor._spec


def unflatten_tensor(shard: Tensor, layout: Layout, stream: torch.Stream | None = None) -> DTensor:
    """The DTensor that ``shard`` is this rank's part of, in the same memory.

    Gradients reach ``shard`` as plain tensors, waited for as :func:`sync_gradient` says.
    """
    # The hook is an alias's, which ends with the graph; on the shard itself hooks would pile up.
    alias = shard.view_as(shard)
    if alias.requires_grad:
        alias.register_hook(partial(sync_gradient, stream=stream))
    return _dtensor(alias, layout)


def full_tensor(shard: Tensor, layout: Layout) -> Tensor:
    """The tensor that ``shard`` is this rank's part of. Called by all ranks of the layout's mesh at once."""
    return _dtensor(shard.detach(), layout).full_tensor()


def local_shard(tensor: Tensor, layout: Layout) -> Tensor:
    """This rank's part of a whole tensor, in memory of its own; without communication."""
    dtensor = distribute_tensor(tensor.detach(), layout.mesh, layout.placements, src_data_rank=None)
    return dtensor.to_local().clone()


def _dtensor(local: Tensor, layout: Layout) -> DTensor:
    # Without its shape and stride, torch would take uneven shards for equal ones.
    return DTensor.from_local(
        local, layout.mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride
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
    def layouts(self) -> dict[Tensor, Layout]:
        """How each parameter is split of which this rank holds a shard; all others are whole here."""
        split = {name: layout for name, layout in self._layouts.items() if layout.is_sharded()}
        return {self.module.get_parameter(name): layout for name, layout in split.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the whole module gives, as plain tensors; an output that the plan leaves split is gathered."""
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
    """An output, once the collective that makes it has ended; the first to run in the backward pass."""

    @staticmethod
    def forward(ctx: FunctionCtx, output: Tensor) -> Tensor:
        # torch's own operations would wait for it by themselves; RPC would send what is there by now.
        return sync_gradient(output)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> Tensor:
        _keep_thread_state()
        return grads[0]


def _keep_thread_state() -> None:
    """Let the calling thread keep its Python state until it ends.

    RPC and distributed autograd run Python in threads of torch's own. These get a state when they come
    and lose it when they go, and with it all that is thread-local in Python. DTensor keeps there how it
    shards each operation, which takes it milliseconds to find out anew. Their pools are of fixed size, so
    that no more than a few states are kept.
    """
    if not hasattr(_kept, "is_kept"):
        # Never released: the count of who needs the state does not come back to zero.
        ctypes.pythonapi.PyGILState_Ensure()
        _kept.is_kept = True


def _refuse_tied(module: nn.Module, paths: Iterable[str]) -> None:
    """ValueError where a parameter of a submodule at ``paths`` has another name in ``module``, too."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    counts = Counter(parameters.values())
    split = {parameter for path in paths for parameter in module.get_submodule(path).parameters()}
    if tied := [name for name, p in parameters.items() if p in split and counts[p] > 1]:
        raise ValueError(f"a parameter used in several places cannot be split: {', '.join(tied)}")


def _localize(module: nn.Module) -> dict[str, Layout]:
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
