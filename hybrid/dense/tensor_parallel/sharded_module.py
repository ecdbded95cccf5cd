"""Tensor parallelism of a stage: several trainers each hold shards of its layers.

The trainers form a mesh of data x tensor. The trainers of a tensor group each hold a shard of the weights and
compute the stage together (``shared_stage.py`` gathers their samples). DDP reduces the gradients of each
shard over the data groups. torch's transform for tensor parallelism under DDP
(``torch.distributed.tensor.parallel.ddp``) loses the parameters at the first forward pass and adds a hook to
each of them at every pass. This module does neither.
"""

import ctypes
import threading
from collections import Counter
from collections.abc import Mapping
from functools import cache
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
    """Return the mesh "data" x "tensor" of all trainers; the first tensor group is 0 .. P-1.

    All trainers must call it. It creates process groups once, and returns the same mesh every time.

    Args:
        tensor_size: P, the number of trainers that hold a net together.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        ValueError: the number of trainers is not a multiple of P.
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
    """Wait for the collective of a gradient; return it as a plain tensor."""
    return grad.wait() if isinstance(grad, AsyncCollectiveTensor) else grad


def flatten_tensor(tensor: Tensor) -> tuple[Tensor, Layout | None]:
    """Return the local shard of a DTensor, which requires a gradient, and its layout.

    For any other tensor, return the tensor and None.
    """
    if not isinstance(tensor, DTensor):
        return tensor, None
    return tensor.to_local().detach().requires_grad_(), tensor._spec


def unflatten_tensor(shard: Tensor, layout: Layout) -> DTensor:
    """Return the DTensor of which ``shard`` is the local part, in the same memory.

    Gradients of ``shard`` are plain tensors; see :func:`sync_gradient`.
    """
    # The hook is on an alias, which lives as long as the graph. Hooks on the shard would accumulate.
    alias = shard.view_as(shard)
    if alias.requires_grad:
        alias.register_hook(sync_gradient)
    return _dtensor(alias, layout)


def full_tensor(shard: Tensor, layout: Layout) -> Tensor:
    """Return the full tensor of a shard; all ranks of the mesh must call it."""
    return _dtensor(shard.detach(), layout).full_tensor()


def local_shard(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a copy of the local part of a full tensor, without communication."""
    dtensor = distribute_tensor(tensor.detach(), layout.mesh, layout.placements, src_data_rank=None)
    return dtensor.to_local().clone()


def _dtensor(local: Tensor, layout: Layout) -> DTensor:
    # Without shape and stride, torch would assume shards of equal size.
    return DTensor.from_local(
        local, layout.mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride
    )


class TensorParallel(nn.Module):
    """A module with the local shards as parameters; all ranks run its forward pass together.

    Parameters are plain tensors with their names in the full module, so that DDP, optimizers and checkpoints
    work as usual. All ranks must have the same initial weights and inputs. Modules that draw random numbers,
    such as dropout, are not supported, since each rank would draw different ones.

    Args:
        module: the module to split, in place.
        mesh: the tensor group, of one dimension.
        plan: how to split submodules, by path; "" is ``module`` itself.

    Raises:
        ValueError: the plan is empty, names a missing submodule, or splits a parameter with two names.
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
        parameters = dict(module.named_parameters(remove_duplicate=False))
        counts = Counter(parameters.values())
        split = {parameter for path in plan for parameter in paths[path].parameters()}
        if tied := [name for name, p in parameters.items() if p in split and counts[p] > 1]:
            raise ValueError(f"a parameter used in several places cannot be split: {', '.join(tied)}")
        for path, style in plan.items():
            # Without a source rank, each rank copies its shards from the weights that it has.
            parallelize_module(paths[path], mesh, style, src_data_rank=None)
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
        """The layouts of the parameters of which this rank holds a shard."""
        split = {name: layout for name, layout in self._layouts.items() if layout.is_sharded()}
        return {self.module.get_parameter(name): layout for name, layout in split.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the full module, as plain tensors; gather outputs that are split."""
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
    """Waits for the collective of an output; runs first in the backward pass."""

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

    RPC and distributed autograd run Python in C++ threads, which lose their thread state, and thread-local
    data with it, whenever they return to C++. DTensor keeps its sharding decisions there, which take
    milliseconds to repeat. The thread pools have a fixed size, so only a few states are kept.
    """
    if not hasattr(_kept, "is_kept"):
        # Without a release, so that the reference count of the state never reaches zero.
        ctypes.pythonapi.PyGILState_Ensure()
        _kept.is_kept = True
