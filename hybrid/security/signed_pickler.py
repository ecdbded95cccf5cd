"""A pickler for RPC that signs payloads.

Torch has one pickler for all calls and responses; :func:`install` replaces it. Messages for built-in
operators, TorchScript functions, reference counts and gradients of distributed autograd bypass the pickler,
so they are not signed.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.nn.api import remote_module
from torch.distributed.rpc import api, internal
from torch.futures import Future

from hybrid.errors import ClusterError, describe_exception
from hybrid.security.message_signature import UNSIGNED, PayloadKind, Signatures, is_contiguous
from hybrid.security.rejections import PlainUnpickler, RejectionError, RejectionLog, describe_rejection
from hybrid.user_code.user_modules import qualified_name

# Torch calls these when RPC starts and stops, with one payload for all processes.
_GATHER = (api._gather_to_leader, api._broadcast_to_followers)
# The result of this function stays on the process that runs it, so no response is signed.
_CREATE_MODULE = remote_module._create_module
_DEFAULT_PICKLER = internal._internal_rpc_pickler
# In a pickle, it stands for the next tensor of the payload, as an out-of-band buffer (PEP 574).
_TENSOR = pickle.PickleBuffer(bytearray())

_thread = threading.local()


class addressed_to:  # contextlib.contextmanager would cost twice as much
    """A context in which RPC calls of this thread are signed for the role with the given RPC name."""

    __slots__ = ("_name",)

    def __init__(self, rpc_name: str) -> None:
        self._name = rpc_name

    def __enter__(self) -> None:
        _thread.receiver = self._name

    def __exit__(self, *_: object) -> None:
        _thread.receiver = None


class _Response(NamedTuple):
    """The value that a call returned, and the random bytes that identify the calling process."""

    receiver: bytes
    value: Any


class _RaisedError(internal.RemoteException):
    """The exception of a call, or the rejection of a payload, in torch's format.

    ``receiver`` identifies the process that receives the exception. If torch expects a call, torch executes
    ``func(*args, **kwargs)``, which returns this object.
    """

    # By this name, torch recognizes an exception that an asynchronous function raised before it returned.
    __module__ = internal.RemoteException.__module__
    __qualname__ = internal.RemoteException.__qualname__
    receiver: bytes | None = None  # None for an unauthenticated peer
    args = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})

    def func(self) -> _RaisedError:  # torch calls this if it loads the object as a call
        return self


class _CalledFunction:
    """A function called by RPC. The result or exception is signed for the calling process."""

    __slots__ = ("_caller", "_function")

    def __init__(self, function: Callable[..., Any], caller: bytes) -> None:
        self._function = function
        self._caller = caller

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        try:
            result = self._function(*args, **keywords)
        except Exception as error:  # reported to the caller
            return _raised_error(describe_exception(error), self._caller)
        return result.then(self.respond) if isinstance(result, Future) else _Response(self._caller, result)

    def respond(self, completed: Future[Any]) -> _Response | _RaisedError:
        try:
            return _Response(self._caller, completed.value())
        except Exception as error:  # reported to the caller
            return _raised_error(describe_exception(error), self._caller)


def _raised_error(message: str, receiver: bytes | None) -> _RaisedError:
    # Torch unescapes the text on the receiver.
    raised = _RaisedError(message.encode("unicode_escape").decode(), RuntimeError)
    raised.receiver = receiver
    return raised


class SignedPickler(internal._InternalRPCPickler):
    """Creates signed payloads, and loads only signed payloads.

    Args:
        calls: the functions that other roles may call.
        rejections: the log of rejected messages.
    """

    def __init__(
        self, signatures: Signatures, calls: Iterable[Callable[..., Any]], rejections: RejectionLog
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._signatures = signatures
        self.rejections = rejections
        functions: tuple[Callable[..., Any], ...] = (*calls, _CREATE_MODULE, *_GATHER)
        self._calls = {qualified_name(function): function for function in functions}

    def serialize(self, obj: Any) -> tuple[bytes, list[Tensor]]:
        """Return the signed payload of a call or a response ``obj``, and the tensors in ``obj``.

        A response to an unauthenticated peer is empty. Raise ClusterError if ``calls`` lacks the called
        function, if the call has no receiver, or if ``obj`` is no call or response.
        """
        if isinstance(obj, internal.PythonUDF):
            name = qualified_name(obj.func)
            if name not in self._calls:
                raise ClusterError(f"{name} cannot be called by RPC; use the functions of hybrid.transport")
            content = name, obj.args, obj.kwargs
            if obj.func in _GATHER:
                return self._sign(PayloadKind.GATHER, b"", content)
            receiver: str | None = getattr(_thread, "receiver", None)
            if receiver is None:
                raise ClusterError(f"{name} is called by RPC without hybrid.transport, so it has no receiver")
            return self._sign(PayloadKind.CALL, receiver.encode(), content)
        if isinstance(obj, _Response):
            return self._sign(PayloadKind.RESPONSE, obj.receiver, obj.value)
        if isinstance(obj, internal.RemoteException):
            if not isinstance(obj, _RaisedError) or obj.receiver is None:
                return b"", []  # an unauthenticated peer learns nothing
            return self._sign(PayloadKind.ERROR, obj.receiver, obj.msg)
        raise ClusterError(f"{type(obj).__name__} is no response to a call of hybrid.transport")

    def _sign(self, kind: PayloadKind, receiver: bytes, content: Any) -> tuple[bytes, list[Tensor]]:
        tensors: list[Tensor] = []

        def reduce_tensor(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
            # Only contiguous tensors are signed. In an autograd context, the copy is part of the graph.
            tensors.append(tensor if is_contiguous(tensor) else tensor.contiguous())
            return received_tensor, (_TENSOR, tensor.dtype, tuple(tensor.shape))

        file = io.BytesIO()
        pickler = pickle.Pickler(
            file, pickle.HIGHEST_PROTOCOL, buffer_callback=lambda buffer: buffer is not _TENSOR
        )
        pickler.dispatch_table = copyreg.dispatch_table | {Tensor: reduce_tensor}
        pickler.dump(content)
        return self._signatures.sign(kind, receiver, file.getvalue(), tensors), tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[Tensor]) -> Any:
        """Return the call or the value in a payload; for a rejected payload, return an exception object."""
        sender: bytes | None = None
        try:
            kind, sender, pickled = self._signatures.verify(binary_data, tensor_table)
            return self._load(kind, sender, pickled, tensor_table)
        except ClusterError:  # an interrupt, which can arrive anywhere in the main thread
            raise
        except Exception as error:  # unpickling can raise anything, out of memory included
            is_rejected = isinstance(error, RejectionError)
            reason = str(error) if is_rejected else f"it holds no call or response ({type(error).__name__})"
            self.rejections.add(reason)
            return _raised_error(describe_rejection(reason), sender)

    def _load(self, kind: PayloadKind, sender: bytes, pickled: bytes, tensors: Sequence[Tensor]) -> Any:
        content = pickle.loads(pickled, buffers=tensors)  # signed by a role of this run
        if kind is PayloadKind.RESPONSE:
            return content
        if kind is PayloadKind.ERROR:
            return internal.RemoteException(content, RuntimeError)
        name, args, keywords = content
        function = self._calls[name]
        if (function in _GATHER) != (kind is PayloadKind.GATHER):
            raise RejectionError(f"{name} cannot be signed for all roles")
        served = function if function is _CREATE_MODULE else _CalledFunction(function, sender)
        return internal.PythonUDF(served, args, keywords)


def received_tensor(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return ``tensor``. Raise RejectionError if it does not have the signed dtype and shape."""
    if tensor.dtype != dtype or tensor.shape != shape:
        raise RejectionError(UNSIGNED)
    return tensor


def install(pickler: internal._InternalRPCPickler | None) -> None:
    """Make torch's RPC use ``pickler``; None restores the default pickler."""
    # C++ uses the first variable for received messages and responses. Calls use the second.
    internal._internal_rpc_pickler = api._default_pickler = pickler or _DEFAULT_PICKLER


@contextmanager
def reject_pickled_classes() -> Iterator[None]:
    """A context that raises ClusterError if torch's collectives receive a pickle that names a class."""
    before = distributed_c10d._unpickler
    distributed_c10d._unpickler = PlainUnpickler
    try:
        yield
    except RejectionError as error:
        raise ClusterError(f"a message at the start of RPC was rejected: {error}") from error
    finally:
        distributed_c10d._unpickler = before
