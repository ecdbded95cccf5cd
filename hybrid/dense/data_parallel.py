"""Data parallelism on several devices of one process, as in ``torch.nn.parallel``, but also on CPUs.

A call of :class:`DataParallel`::

    inputs ── scatter ───► a slice for each device ───┐
                                                       parallel_apply ── gather ──► outputs
    module ── replicate ─► a replica for each device ─┘

``torch.nn.parallel`` supports accelerators only. Here a list of devices may mix CUDA devices and CPUs, and
contain a device twice. Results can be differentiated twice. Named tuples and subclasses of dict keep their
types. The engine wraps the stages of a net in :class:`DataParallel`; users may do the same.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial, reduce
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._utils import ExceptionWrapper
from torch.autograd.function import FunctionCtx
from torch.nn.parameter import is_lazy

from hybrid.primitives.thread_counts import use_configured_threads

Device: TypeAlias = int | str | torch.device
M = TypeVar("M", bound=nn.Module)


def resolve_device(device: Device) -> torch.device:
    """Return a device as a ``torch.device``. A CUDA device has an index in the result.

    Args:
        device: "cuda" means the current CUDA device, an integer a CUDA device by its index, and -1 the CPU.

    Raises:
        ValueError: this machine does not have this CUDA device.
        RuntimeError: torch knows no such device.
    """
    if isinstance(device, int):
        device = "cpu" if device == -1 else f"cuda:{device}"
    resolved = torch.device(device)
    if resolved.type != "cuda":
        return resolved
    num_devices = torch.cuda.device_count()
    if (resolved.index or 0) >= num_devices:
        raise ValueError(f"there is no device {resolved}: this machine has {num_devices} CUDA device(s)")
    return torch.device("cuda", torch.cuda.current_device()) if resolved.index is None else resolved


def scatter(inputs: Any, devices: Sequence[Device], dim: int = 0) -> list[Any]:
    """Split each tensor of ``inputs`` along ``dim`` into chunks of almost equal size, one per device.

    A small tensor may have fewer chunks than there are devices, as with ``torch.chunk``. An empty tensor is
    one chunk. Each device gets all other values, and empty containers, unchanged.

    Returns:
        The inputs of each device that gets a chunk, or of all devices if ``inputs`` has no tensors. Do not
        change chunks in place: a chunk is a view of its tensor if both are on the same device.

    Raises:
        ValueError: the tensors have different numbers of chunks, or this machine does not have a device.
        IndexError: a tensor does not have the dimension ``dim``.
    """
    targets = [resolve_device(device) for device in devices]
    tensors = list(_tensors(inputs))
    counts = {len(x.chunk(len(targets), dim)) if x.size(dim) else 1 for x in tensors}
    if len(counts) > 1:
        sizes = sorted({x.size(dim) for x in tensors})
        raise ValueError(f"tensors of {sizes} samples have different numbers of chunks for {len(targets)}")
    return _scatter(inputs, targets[: max(counts, default=None)], dim)


def _scatter(inputs: Any, devices: Sequence[torch.device], dim: int) -> list[Any]:
    if isinstance(inputs, Tensor):
        chunks = inputs.chunk(len(devices), dim)
        return [chunk.to(device) for chunk, device in zip(chunks, devices, strict=True)]
    if isinstance(inputs, (dict, list, tuple)) and len(inputs):
        values = inputs.values() if isinstance(inputs, dict) else inputs
        columns = zip(*(_scatter(value, devices, dim) for value in values), strict=True)
        return [_rebuild(inputs, column) for column in columns]
    return [inputs] * len(devices)


def gather(outputs: Sequence[Any], device: Device, dim: int = 0) -> Any:
    """Concatenate the outputs of several devices along ``dim``, on ``device``.

    With ``dim`` 0, scalars become a vector. None stays None.

    Args:
        outputs: one per device: tensors, None, or containers of these. All have the same structure.

    Raises:
        ValueError, KeyError: outputs differ in their structure, or this machine does not have ``device``.
        TypeError: an output has another type.
    """
    first = outputs[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        target = resolve_device(device)
        tensors = [output.to(target) for output in outputs]
        is_scalar = dim == 0 and all(tensor.dim() == 0 for tensor in tensors)
        return torch.stack(tensors) if is_scalar else torch.cat(tensors, dim)
    if isinstance(first, dict):
        if any(len(output) != len(first) for output in outputs):
            raise ValueError("All dicts must have the same number of keys")
        return _rebuild(first, [gather([output[key] for output in outputs], device, dim) for key in first])
    if isinstance(first, (list, tuple)):
        return _rebuild(first, [gather(column, device, dim) for column in zip(*outputs, strict=True)])
    raise TypeError(f"cannot gather a {type(first).__name__}; replicas must return tensors")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for element in value.values() if isinstance(value, dict) else value:
            yield from _tensors(element)


def _rebuild(container: Any, values: Sequence[Any]) -> Any:
    if isinstance(container, dict):
        rebuilt = copy.copy(container)  # a defaultdict cannot be created from pairs
        rebuilt.update(zip(container, values, strict=True))
        return rebuilt
    return getattr(container, "_make", type(container))(values)


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[Device] | None = None,
) -> list[Any]:
    """Call each module with its inputs, in one thread per module; return the output of each.

    These threads use grad mode, inference mode, autocast and the current CUDA streams of the calling thread.
    A single module is called in the calling thread.

    Args:
        inputs: for each module, a list or tuple of positional arguments, or a single argument.
        kwargs_tup: for each module, its keyword arguments.
        devices: the device of each module. By default, it is the device of the first tensor in the module's
            inputs. For inputs without tensors, it is the current CUDA device, or the CPU if there is none.

    Raises:
        ValueError: the sequences differ in length, or this machine does not have a device.
        Exception: the error of the first failed module in ``modules``, after all calls have ended. The
            message has the traceback. An error whose class takes no single message becomes a RuntimeError.
    """
    if kwargs_tup is None:
        kwargs_tup = [{} for _ in modules]
    if devices is None:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        first_tensors = [next(_tensors(each), None) for each in inputs]
        devices = [default if tensor is None else tensor.device for tensor in first_tensors]
    arguments = zip(map(resolve_device, devices), modules, inputs, kwargs_tup, strict=True)
    calls = [
        partial(_call, _thread_settings(device), index, device, module, args, kwargs)
        for index, (device, module, args, kwargs) in enumerate(arguments)
    ]
    if len(calls) == 1:
        return [calls[0]()]
    with ThreadPoolExecutor(max(1, len(calls)), "replica", use_configured_threads) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def _thread_settings(device: torch.device) -> list[AbstractContextManager[object]]:
    settings: list[AbstractContextManager[object]] = [
        torch.inference_mode(torch.is_inference_mode_enabled()),
        torch.set_grad_enabled(torch.is_grad_enabled()),
    ]
    if device.type == "cuda":
        settings += [torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device))]
    settings += [
        torch.autocast(
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for kind in (("cpu", "cuda") if torch.cuda.is_available() else ("cpu",))
    ]
    return settings


def _call(
    settings: Sequence[AbstractContextManager[object]],
    index: int,
    device: torch.device,
    module: nn.Module,
    inputs: Any,
    kwargs: dict[str, Any],
) -> Any:
    try:
        with ExitStack() as stack:
            for setting in settings:
                stack.enter_context(setting)
            return module(*(inputs if isinstance(inputs, (list, tuple)) else (inputs,)), **kwargs)
    except Exception:
        name = device.type if device.index is None else device.index
        ExceptionWrapper(where=f"in replica {index} on device {name}").reraise()


def replicate(module: M, devices: Sequence[Device], detach: bool = False) -> list[M]:
    """Create a replica of ``module`` for each device by :func:`shadow`.

    Replica 0 shares parameters and buffers that are on the first device, so its in-place changes reach
    ``module``. All other parameters and buffers are copies. The backward pass adds up the gradients of the
    replicas in the order of ``devices``, and gives zero gradients to unused parameters.

    Args:
        devices: may be empty, and may contain a device twice.
        detach: whether no gradients flow from the replicas to ``module``.

    Raises:
        RuntimeError: a parameter has no shape yet, or :func:`shadow` does not support the module.
        ValueError: this machine does not have a device.
    """
    tensors = list(chain(module.parameters(), module.buffers()))
    if any(is_lazy(tensor) for tensor in tensors):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        )
    targets = [resolve_device(device) for device in devices]
    tracked = [tensor for tensor in tensors if tensor.requires_grad and not detach]
    constant = [tensor for tensor in tensors if detach or not tensor.requires_grad]
    # One function for all tensors, so that unused parameters get a gradient too.
    copies = _Broadcast.apply(targets, *tracked) if tracked else ()  # type: ignore[no-untyped-call]
    copies += _copies(constant, targets)
    originals = [*tracked, *constant]
    return [
        shadow(module, dict(zip(originals, copies[index :: len(targets)], strict=True)))
        for index in range(len(targets))
    ]


def shadow(module: M, tensors: Mapping[Tensor, Tensor]) -> M:
    """Return a replica of ``module`` in which ``tensors`` replace parameters and buffers.

    The replica has the structure, code, settings and hooks of ``module``. A new tensor may be the result of a
    computation, so an eager replica stores it as a plain attribute, which ``parameters()`` does not return.
    Several threads may call this function at once, since it does not change ``module``.

    Args:
        module: an eager module or a TorchScript module.
        tensors: new tensors, by the parameter or buffer that each replaces. The replica shares all other
            parameters and buffers with ``module``.

    Raises:
        RuntimeError: a parameter has no shape yet, a TorchScript module contains Python modules, or
            ``torch.compile`` has compiled ``module`` or a submodule.
    """
    replicas: dict[nn.Module, Any] = {}  # by original
    for original in module.modules():
        if original.__dict__.get("_compiled_call_impl") is not None or "_orig_mod" in original._modules:
            name = type(original._modules.get("_orig_mod", original)).__name__
            raise RuntimeError(
                f"{name} is compiled, which binds its code to one module; replicas need it eager"
            )
        replicas[original] = original._replicate_for_data_parallel()
    for original, replica in replicas.items():
        is_script = isinstance(original, torch.jit.ScriptModule)
        if not is_script:
            replica._parameters = {}  # which torch.fx modules would keep
        for name, child in original._modules.items():
            if is_script and not isinstance(child, torch.jit.ScriptModule):
                raise RuntimeError(
                    "Cannot replicate network where python modules are children of ScriptModule"
                )
            if child is not None:
                replica._modules[name] = replicas[child]
        for name, tensor in (*original._parameters.items(), *original._buffers.items()):
            if tensor is not None and tensor in tensors:
                setattr(replica, name, tensors[tensor])
            elif not is_script and name in original._parameters:
                replica._parameters[name] = tensor
    replicated: M = replicas[module]
    return replicated


def _copies(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> tuple[Tensor, ...]:
    """Return tensor 0 on each device, then tensor 1, and so on; on the first device, copy only if needed."""
    return tuple(
        tensor.detach().to(device, copy=index > 0)
        for tensor in tensors
        for index, device in enumerate(devices)
    )


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, devices: Sequence[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # dense zeros would make a sparse gradient dense
        # Only for the shapes of gradients, since values may change before the backward pass.
        ctx.originals = [tensor.detach() for tensor in tensors]  # type: ignore[attr-defined]
        return _copies(tensors, devices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        num_copies = len(grads) // len(ctx.originals)
        sums = []
        for index, original in enumerate(ctx.originals):
            of_copies = grads[index * num_copies : (index + 1) * num_copies]
            received = [grad.to(original.device) for grad in of_copies if grad is not None]
            sums.append(reduce(_add, received) if received else torch.zeros_like(original))
        return None, *sums


def _add(total: Tensor, grad: Tensor) -> Tensor:
    # torch can add a sparse tensor to a dense one, but not the other way round.
    return grad + total if total.is_sparse and not grad.is_sparse else total + grad


class DataParallel(nn.Module):
    """A module that calls ``module`` on several devices of one process, each with a slice of the batch.

    Tensors in the arguments are split along ``dim``, also in containers. Other arguments go to every device.
    A small batch may use fewer devices (:func:`scatter`). An empty batch, or a call without arguments, uses
    one device.

    With several devices, each call runs replicas of ``module`` in threads, so ``module`` must make no remote
    calls. Attributes that the forward pass assigns are lost. In-place changes of buffers are kept only on the
    first device. On CPUs, replicas draw random numbers from one generator in an unspecified order.

    Args:
        module: has its parameters and buffers on ``devices[0]``.
        devices: one or more; None means all CUDA devices, or the CPU if there are none.
        output_device: the device of the outputs; None means ``devices[0]``.
        dim: the dimension of samples in inputs and outputs.

    Raises:
        ValueError: this machine does not have one of the devices.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        self.module = module
        if devices is None:
            devices = range(torch.cuda.device_count()) or ["cpu"]
        self.devices = [resolve_device(device) for device in devices]
        self.output_device = self.devices[0] if output_device is None else resolve_device(output_device)
        self.dim = dim

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the output for the whole batch; scalar outputs of several devices become a vector.

        Raises:
            RuntimeError: a parameter or buffer is not on ``devices[0]``.
        """
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            if tensor.device != self.devices[0]:
                raise RuntimeError(
                    f"module must have its parameters and buffers on device {self.devices[0]} (devices[0]) "
                    f"but found one of them on device: {tensor.device}"
                )
        devices = self.devices if inputs or kwargs else self.devices[:1]
        args, keywords = zip(*scatter((inputs, kwargs), devices, self.dim), strict=True)
        if len(self.devices) == 1:
            outputs = [self.module(*args[0], **keywords[0])]
            if self.output_device == self.devices[0]:
                return outputs[0]
        else:
            used = self.devices[: len(args)]
            outputs = parallel_apply(replicate(self.module, used), args, keywords, used)
        return gather(outputs, self.output_device, self.dim)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    devices: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call ``module`` once as :class:`DataParallel` does; see there for other arguments and errors.

    Args:
        inputs: a tuple of positional arguments, or a single argument; None means no positional arguments.
    """
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    return DataParallel(module, devices, output_device, dim)(*inputs, **(module_kwargs or {}))
