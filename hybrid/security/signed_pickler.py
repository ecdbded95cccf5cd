"""RPC payloads with signatures.

Torch pickles every call and response with one object, which it keeps in two places (:func:`install`).
Built-in operators, TorchScript functions, reference counts and gradients of distributed autograd do not pass
here.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import distributed_c10d, rpc
from torch.distributed.nn.api import remote_module
from torch.distributed.rpc import api, internal

from hybrid.errors import ClusterError
from hybrid.primitives.deferred_response import DeferredResponse, serve_caller
from hybrid.security.message_signature import UNSIGNED, PayloadKind, Signatures, is_contiguous
from hybrid.security.rejected_messages import (
    PlainUnpickler,
    RejectedMessage,
    RejectionLog,
    describe_exception,
    describe_rejection,
)
from hybrid.user_code.function_names import qualified_name

# Torch's own messages when RPC starts and stops, the same for all processes.
_GATHER = (api._gather_to_leader, api._broadcast_to_followers)
# Its result stays on the process that runs it.
_CREATE_MODULE = remote_module._create_module
# The exceptions whose types torch keeps.
_KEPT = {kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError)}

_TORCHS_OWN = internal._internal_rpc_pickler

_thread = threading.local()


class addressed_to:  # a generator would cost twice as much
    """While it is entered, calls of this thread are signed for the role of this RPC name."""

    __slots__ = ("_name",)

    def __init__(self, rpc_name: str) -> None:
        self._name = rpc_name

    def __enter__(self) -> None:
        _thread.receiver = self._name

    def __exit__(self, *_: object) -> None:
        _thread.receiver = None


class _Response(NamedTuple):
    """The value that a call returned, and the sender number of its caller."""

    receiver: bytes
    value: Any


class _Raised(internal.RemoteException):
    """An exception that a call raised, in torch's form, for the caller of this sender number.

    It is also a call that raises it: torch does not report whether it loads a call or a response.
    """

    # Torch recognizes by this name the exception that an asynchronous function raised at once.
    __module__ = internal.RemoteException.__module__
    __qualname__ = internal.RemoteException.__qualname__
    receiver: bytes | None = None  # None for an unauthenticated peer
    args = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})

    def func(self) -> _Raised:
        return self


class _Served:
    """A function that was called by RPC; its result is signed for the caller."""

    __slots__ = ("_caller", "_function")

    def __init__(self, function: Callable[..., Any], caller: bytes) -> None:
        self._function = function
        self._caller = caller

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        try:
            with serve_caller(self):
                result = self._function(*args, **keywords)
        except Exception as error:  # reported to the caller
            kind = next((kept for kept in _KEPT.values() if isinstance(error, kept)), RuntimeError)
            return _raised(f"{error!r}\n{traceback.format_exc()}", kind, self._caller)
        return result if isinstance(result, DeferredResponse) else self.wrap_result(result)

    def wrap_result(self, value: Any) -> _Response:
        """See :class:`Caller`."""
        return _Response(self._caller, value)

    def wrap_exception(self, error: Exception) -> _Raised:
        """See :class:`Caller`."""
        return _raised(describe_exception(error), RuntimeError, self._caller)


def _raised(message: str, kind: type[Exception], receiver: bytes | None) -> _Raised:
    # The receiving torch unescapes it.
    raised = _Raised(message.encode("unicode_escape").decode(), kind)
    raised.receiver = receiver
    return raised


class SignedPickler(internal._InternalRPCPickler):
    """Creates signed payloads, and loads only such.

    Args:
        calls: the functions that may be called.
        rejections: records what is rejected. The caller, if it is a role of the run, gets an error.
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
        """Return the payload of a call or a response, and the tensors beside it.

        Raises:
            ClusterError: ``obj`` is neither.
        """
        if isinstance(obj, internal.PythonUDF):
            name = qualified_name(obj.func)
            if name not in self._calls:
                raise ClusterError(f"{name} cannot be called by RPC; hybrid.transport has what can")
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
            if not isinstance(obj, _Raised) or obj.receiver is None:
                return b"", []  # an unauthenticated peer learns nothing
            return self._sign(PayloadKind.ERROR, obj.receiver, (obj.msg, obj.exception_type.__name__))
        raise ClusterError(f"{type(obj).__name__} is no response to a call of hybrid.transport")

    def _sign(self, kind: PayloadKind, receiver: bytes, content: Any) -> tuple[bytes, list[Tensor]]:
        tensors: list[Tensor] = []

        def reduce_tensor(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
            # Contiguous, as it is signed; within an autograd context the copy is part of the graph.
            tensors.append(tensor if is_contiguous(tensor) else tensor.contiguous())
            return received_tensor, (len(tensors) - 1, tensor.dtype, tuple(tensor.shape))

        def reduce_reference(reference: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return received_reference, (reference._serialize(),)

        file = io.BytesIO()
        pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
        references = dict.fromkeys((rpc.PyRRef, rpc.RRef), reduce_reference)
        pickler.dispatch_table = copyreg.dispatch_table | references | {Tensor: reduce_tensor}
        pickler.dump(content)
        return self._signatures.sign(kind, receiver, file.getvalue(), tensors), tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[Tensor]) -> Any:
        """Return the function call or value of a payload, or an error if it is rejected."""
        sender: bytes | None = None
        try:
            kind, sender, pickled = self._signatures.verify(binary_data, tensor_table)
            return self._load(kind, sender, pickled, tensor_table)
        except ClusterError:  # an interrupt can arrive anywhere in the main thread
            raise
        except Exception as error:  # unpickling can raise anything, out of memory included
            is_rejected = isinstance(error, RejectedMessage)
            reason = str(error) if is_rejected else f"it holds no call or response ({type(error).__name__})"
            self.rejections.add(reason)
            return _raised(describe_rejection(reason), RuntimeError, sender)

    def _load(self, kind: PayloadKind, sender: bytes, pickled: bytes, tensors: Sequence[Tensor]) -> Any:
        outer, _thread.tensors = getattr(_thread, "tensors", None), tensors
        try:
            content = pickle.loads(pickled)  # of a role of this run
        finally:
            _thread.tensors = outer
        if kind is PayloadKind.RESPONSE:
            return content
        if kind is PayloadKind.ERROR:
            message, name = content
            return internal.RemoteException(message, _KEPT[name])
        name, args, keywords = content
        function = self._calls[name]
        if (function in _GATHER) != (kind is PayloadKind.GATHER):
            raise RejectedMessage(f"{name} cannot be signed for all roles")
        served = function if function is _CREATE_MODULE else _Served(function, sender)
        return internal.PythonUDF(served, args, keywords)


def received_tensor(index: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor that came beside the pickle that names this function."""
    tensor: Tensor = _thread.tensors[index]
    if tensor.dtype != dtype or tensor.shape != shape:
        raise RejectedMessage(UNSIGNED)
    return tensor


def received_reference(fork: tuple[Any, ...]) -> rpc.PyRRef[Any]:
    """Return a reference to an object of another process, within the pickle that names this function."""
    return rpc.PyRRef._deserialize(fork)


def install(pickler: internal._InternalRPCPickler | None) -> None:
    """Make torch pickle with ``pickler``, or with its own for None."""
    # The first place is for what comes in and for responses, from C++; the second is for calls.
    internal._internal_rpc_pickler = api._default_pickler = pickler or _TORCHS_OWN


@contextmanager
def plain_collectives() -> Iterator[None]:
    """While torch joins an RPC group, reject classes in what it unpickles, which nobody signs."""
    before = distributed_c10d._unpickler
    distributed_c10d._unpickler = PlainUnpickler
    try:
        yield
    except RejectedMessage as error:
        raise ClusterError(f"a message at the start of RPC was rejected: {error}") from error
    finally:
        distributed_c10d._unpickler = before
