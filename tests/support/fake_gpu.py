"""A device in software that behaves as a GPU does, for trainers of tests on machines without one.

Torch knows it as ``npu``, an accelerator registered from Python. Its tensors live in memory of the CPU,
and are computed there, but

- no operation takes tensors of both devices, as on a GPU;
- an asynchronous copy needs pinned memory; a copy to the CPU is NaN until its event is awaited;
- a copy of a matrix that blocks a backward pass is an error;
- only the process group of the device reduces its tensors, as NCCL does.
"""

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "npu"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_set = torch.ops.aten.set_.source_Storage_storage_offset
_as_strided = torch.ops.aten.as_strided.default
# The memory of each storage of the device, by the address of the storage.
_memory: dict[int, torch.UntypedStorage] = {}
_pinned: set[int] = set()  # addresses of pinned memory
_copies: list[Callable[[], object]] = []  # asynchronous copies to the CPU, not yet covered by an event
_libraries: list[torch.library.Library] = []  # torch removes the kernels of a library that is freed


def register() -> None:
    """Make the device known to torch, in this process only."""
    _setup_privateuseone_for_python_backend(NAME, _Module())
    _libraries.extend(torch.library.Library(name, "IMPL") for name in ("_", "aten"))
    _libraries[0].fallback(_compute, "PrivateUse1")
    for operation, kernel in (("_copy_from", _copy_from), ("_to_copy", _to_copy)):
        _libraries[1].impl(operation, kernel, "PrivateUse1")
    _libraries[1].impl("_local_scalar_dense", lambda tensor: _on_cpu(tensor).item(), "PrivateUse1")
    functional = torch.ops._c10d_functional
    _libraries.append(torch.library.Library("_c10d_functional", "IMPL"))
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor"):
        _libraries[-1].impl(name, partial(_compute, getattr(functional, name).default), "PrivateUse1")
    for operation in ("linear", "matmul", "mm", "addmm", "bmm"):
        _libraries[1].impl(operation, _lower_precision(operation), "AutocastPrivateUse1")
    _libraries[0].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    patch("torch.empty", _empty).start()
    patch("torch.Event", _Event).start()
    patch("torch.Tensor.pin_memory", _pin_memory).start()
    patch("torch.Tensor.is_pinned", lambda tensor: tensor.data_ptr() in _pinned).start()
    dist.Backend.register_backend("fakenccl", _make_group, devices=[NAME])


class _Module(_DummyBackendModule):
    """``torch.npu``."""

    default_generators = (torch.default_generator,)

    def get_device_name(self, device: torch.device) -> str:
        return "in software"

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=os.getpid())

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: torch.device) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        torch.set_rng_state(state)


class _Event:
    """``torch.Event``: a copy to the CPU has ended only once its event is awaited."""

    def __init__(self, device: torch.device) -> None:
        self._copies: list[Callable[[], object]] = []

    def record(self) -> None:
        self._copies = _copies[:]
        _copies.clear()

    def synchronize(self) -> None:
        while self._copies:
            self._copies.pop()()


class _Group(dist.ProcessGroup):
    """The trainers. Gloo reduces tensors of the CPU, and here also those of the device.

    A collective that is not overridden here would hold Python's lock while it waits for a lock of Gloo, whose
    threads hold theirs while they free a tensor of Python: a deadlock.
    """

    def __init__(self, gloo: Any) -> None:
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]
        self._gloo = gloo
        for kind in ("cpu", NAME):
            self._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.CUSTOM, gloo)

    def getBackendName(self) -> str:
        return "fakenccl"

    def allreduce(self, *arguments: Any) -> Any:
        return self._gloo.allreduce(*tree_map(_any_on_cpu, arguments))

    def broadcast(self, *arguments: Any) -> Any:
        return self._gloo.broadcast(*tree_map(_any_on_cpu, arguments))

    def allgather(self, *arguments: Any) -> Any:
        return self._gloo.allgather(*tree_map(_any_on_cpu, arguments))

    def all_gather_single(self, *arguments: Any) -> Any:
        return self._gloo._allgather_base(*tree_map(_any_on_cpu, arguments))

    def all_gather_single_coalesced(self, *arguments: Any) -> Any:
        (output,), (input_,), options = arguments
        return self.all_gather_single(output, input_, options)


def _make_group(store: dist.Store, rank: int, size: int, timeout: Any) -> _Group:
    return _Group(dist.ProcessGroupGloo(store, rank, size, timeout))


def _lower_precision(name: str) -> Callable[..., Any]:
    """Return an operation of torch whose float32 arguments are rounded to the type of autocast."""

    def convert(value: Any) -> Any:
        is_rounded = isinstance(value, Tensor) and value.dtype == torch.float32
        return value.to(torch.get_autocast_dtype(NAME)) if is_rounded else value

    def compute(*arguments: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return getattr(torch.ops.aten, name)(*map(convert, arguments))

    return compute


def _is_here(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _on_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU with the same memory."""
    base = _memory[tensor.untyped_storage()._cdata]
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(base, tensor.storage_offset(), tensor.size(), tensor.stride())


def _any_on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return _on_cpu(value) if _is_here(value) else value


def _on_device(tensor: Tensor, target: Tensor | None = None) -> Tensor:
    """Return a tensor of the device with the same memory: ``target``, or else a new one."""
    base = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        base.data_ptr(), torch.device(NAME, 0), base.nbytes()
    )
    _memory[storage._cdata] = base
    if target is None:
        target = torch._C._acc.create_empty_tensor((0,), tensor.dtype)
    moved: Tensor = _set.redispatch(_CPU, target, storage, *_layout(tensor))
    return moved


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.size(), tensor.stride()


def _compute(operation: Any, *arguments: Any, **keywords: Any) -> Any:
    """Run an operation on the CPU; results that share memory with an argument share its storage."""
    owners: dict[int, Tensor] = {}

    def take(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and not _is_here(value):
            raise RuntimeError(f"{operation}: a tensor of the CPU meets one of the device")
        if _is_here(value):
            owners[_memory[value.untyped_storage()._cdata]._cdata] = value
        return _any_on_cpu(value)

    def give(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        owner = owners.get(value.untyped_storage()._cdata)
        if owner is None:
            return _on_device(value)
        if not operation._schema.is_mutable:
            size_and_stride = value.size(), value.stride()
            return _as_strided.redispatch(_CPU, owner, *size_and_stride, value.storage_offset())
        # The result may be an argument whose memory has grown.
        return owner if _layout(value) == _layout(owner) else _on_device(value, owner)

    taken = tree_map(take, list(arguments))
    for number, expected in enumerate(operation._schema.arguments[: len(taken)]):
        if str(expected.type) == "Tensor" and not isinstance(taken[number], Tensor):
            # A number takes part in no choice of precision, nor does a tensor without dimensions.
            kind = torch.float64 if isinstance(taken[number], float) else None
            taken[number] = torch.tensor(taken[number], dtype=kind)
    return tree_map(give, operation(*taken, **tree_map(take, keywords)))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    is_to_cpu, source_on_cpu, target_on_cpu = _is_here(source), _any_on_cpu(source), _any_on_cpu(target)
    if _is_here(source) and _is_here(target):
        target_on_cpu.copy_(source_on_cpu)
        return target
    on_cpu = target if is_to_cpu else source
    _check_copy(on_cpu, non_blocking)
    if non_blocking and is_to_cpu:
        target.fill_(torch.nan)
        _copies.append(lambda: target_on_cpu.copy_(source_on_cpu))
    else:
        target_on_cpu.copy_(source_on_cpu)
    return target


def _to_copy(
    source: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: object = None,
    device: torch.device | None = None,
    pin_memory: object = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    on_cpu = _any_on_cpu(source)
    to_device = _is_here(source) if device is None else device.type == NAME
    if to_device != _is_here(source):
        _check_copy(source, non_blocking and to_device)
    copied = torch.empty_like(on_cpu, dtype=dtype, memory_format=memory_format or torch.preserve_format)
    copied.copy_(on_cpu)
    return _on_device(copied) if to_device else copied


def _check_copy(on_cpu: Tensor, non_blocking: bool) -> None:
    """Raise RuntimeError for a copy between the devices that blocks, or is not pinned, where none may be."""
    if non_blocking and on_cpu.is_floating_point() and not on_cpu.is_pinned():  # DDP's indices are not pinned
        raise RuntimeError("an asynchronous copy needs pinned memory")
    if not non_blocking and on_cpu.dim() > 1 and torch._C._current_autograd_node() is not None:
        raise RuntimeError("a copy of a matrix blocks the backward pass")


_torch_empty = torch.empty


def _empty(*arguments: Any, pin_memory: bool = False, **keywords: Any) -> Tensor:
    created = _torch_empty(*arguments, **keywords)
    if pin_memory:
        _pinned.add(created.data_ptr())
    return created


def _pin_memory(tensor: Tensor) -> Tensor:
    return _empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
