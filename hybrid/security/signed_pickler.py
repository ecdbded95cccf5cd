"""torch's way of RPC payloads, in and out, with signatures and a list of what may be loaded.

torch pickles with one object, which it keeps in two places (:func:`install`). Built-in operators and
TorchScript functions do not pass here, nor does what keeps references and distributed autograd together.
"""

from __future__ import annotations

import io
import pickle
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.nn.api import remote_module
from torch.distributed.rpc import api, internal

from hybrid.errors import ClusterError
from hybrid.primitives.deferred_response import Answer, serving
from hybrid.security.allow_list import (
    Allowed,
    NothingNamed,
    Reduced,
    Reducer,
    Unpickler,
    array_of,
    by_value,
    dtype_name,
    tensor_beside,
)
from hybrid.security.failure_text import raised_later, refused
from hybrid.security.message_signature import Kind, Signatures, is_in_one_piece
from hybrid.security.rejected_messages import Refusals, RefusedPayload
from hybrid.user_code.function_names import name_of

# What torch's processes tell each other when they start and stop: the same for all of them.
_GATHER = (api._gather_to_leader, api._broadcast_to_followers)
# Its result stays where it runs.
_CREATE_MODULE = remote_module._create_module
# The exceptions whose types torch keeps.
_KEPT = {kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError)}

_TORCHS_OWN = internal._internal_rpc_pickler

_target = threading.local()


class addressed_to:  # as a generator it would cost twice as much
    """While it is entered, calls of this thread are signed for the role of this RPC name."""

    __slots__ = ("_name",)

    def __init__(self, rpc_name: str) -> None:
        self._name = rpc_name

    def __enter__(self) -> None:
        _target.name = self._name

    def __exit__(self, *_: object) -> None:
        _target.name = None


class _Answered(NamedTuple):
    """What a call has returned, and the sender number of its caller."""

    to: bytes
    value: Any


class _Raised(internal.RemoteException):
    """An exception that a call has raised, as torch knows it, for the caller of this sender number.

    Also a call that raises it: torch does not tell whether it loads a call or an answer.
    """

    # By its name torch knows what a function that answers later has raised at once.
    __module__ = internal.RemoteException.__module__
    __qualname__ = internal.RemoteException.__qualname__
    to: bytes | None = None  # nobody that is known
    args = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})

    def func(self) -> _Raised:
        return self


class _Served:
    """A function that was called by RPC; what it returns is signed for the caller."""

    __slots__ = ("_function", "_to")

    def __init__(self, function: Callable[..., Any], to: bytes) -> None:
        self._function = function
        self._to = to

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        try:
            with serving(self):
                result = self._function(*args, **keywords)
        except Exception as error:  # the caller's to know
            kind = next((kept for kept in _KEPT.values() if isinstance(error, kept)), RuntimeError)
            return _raised(f"{error!r}\n{traceback.format_exc()}", kind, self._to)
        return result if isinstance(result, Answer) else self.answered(result)

    def answered(self, value: Any) -> _Answered:
        """See :class:`Caller`."""
        return _Answered(self._to, value)

    def failed(self, error: Exception) -> _Raised:
        """See :class:`Caller`."""
        return _raised(raised_later(error), RuntimeError, self._to)


def _raised(message: str, kind: type[Exception], to: bytes | None) -> _Raised:
    # Where it arrives, torch takes it for escaped text.
    raised = _Raised(message.encode("unicode_escape").decode(), kind)
    raised.to = to
    return raised


class SignedPickler(internal._InternalRPCPickler):
    """Makes payloads that are signed, and loads only such.

    Args:
        calls: the functions that may be called.
        allowed: what payloads may name.
        refusals: counts what is refused; nothing of that is loaded, and the caller, if any, gets an error.
    """

    def __init__(
        self,
        signatures: Signatures,
        calls: Iterable[Callable[..., Any]],
        allowed: Allowed,
        refusals: Refusals,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._signatures = signatures
        self._allowed = allowed
        self._refusals = refusals
        functions: tuple[Callable[..., Any], ...] = (*calls, _CREATE_MODULE, *_GATHER)
        self._calls = {name_of(function): function for function in functions}

    def serialize(self, obj: Any) -> tuple[bytes, list[Tensor]]:
        """The payload of a call or of its answer, and the tensors beside it.

        Raises:
            ClusterError: it is neither.
        """
        if isinstance(obj, internal.PythonUDF):
            return self._seal(*self._call(obj))
        if isinstance(obj, _Answered):
            return self._seal(Kind.ANSWER, obj.to, obj.value)
        if isinstance(obj, internal.RemoteException):
            if not isinstance(obj, _Raised) or obj.to is None:
                return b"", []  # says that it was refused, to whoever it was
            return self._seal(Kind.ERROR, obj.to, (obj.msg, obj.exception_type.__name__))
        raise ClusterError(f"{type(obj).__name__} is no answer to a call of hybrid.transport")

    def _call(self, udf: internal.PythonUDF) -> tuple[Kind, bytes, Any]:
        name = name_of(udf.func)
        if name not in self._calls:
            raise ClusterError(f"{name} cannot be called by RPC; hybrid.transport has what can")
        if udf.func in _GATHER:
            return Kind.GATHER, b"", (name, udf.args, udf.kwargs)
        target: str | None = getattr(_target, "name", None)
        if target is None:
            raise ClusterError(f"{name} is called by RPC without hybrid.transport: nobody is to receive it")
        return Kind.CALL, target.encode(), (name, udf.args, udf.kwargs)

    def _seal(self, kind: Kind, to: bytes, content: Any) -> tuple[bytes, list[Tensor]]:
        pickled, tensors = _dump(content)
        return self._signatures.seal(kind, to, pickled, tensors), tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[Tensor]) -> Any:
        """What a payload holds: a function to call, a value, or, where it is refused, an error."""
        to: bytes | None = None
        try:
            kind, to, pickled = self._signatures.open(binary_data, tensor_table)
            return self._load(kind, to, Unpickler(pickled, tensor_table, self._allowed).load())
        except ClusterError:  # the alarm's, which rings in whatever the main thread is at
            raise
        except Exception as error:  # a pickle may have anything raised, for want of memory too
            is_known = isinstance(error, RefusedPayload)
            reason = str(error) if is_known else f"it holds no call or answer ({type(error).__name__})"
            self._refusals.add(reason)
            return _raised(refused(reason), RuntimeError, to)

    def _load(self, kind: Kind, sender: bytes, content: Any) -> Any:
        if kind is Kind.ANSWER:
            return content
        if kind is Kind.ERROR:
            message, name = content
            return internal.RemoteException(message, _KEPT[name])
        name, args, keywords = content
        function = self._calls[name]
        if (function in _GATHER) != (kind is Kind.GATHER):
            raise RefusedPayload(f"{name} is called in another way")
        served = function if function is _CREATE_MODULE else _Served(function, sender)
        return internal.PythonUDF(served, args, keywords)


def _dump(content: Any) -> tuple[bytes, list[Tensor]]:
    """The pickle of ``content``, and the tensors in it, of which it has dtypes and shapes."""
    tensors: list[Tensor] = []

    def reduce_tensor(tensor: Tensor) -> Reduced:
        # In one piece, as it is signed; within a context this is part of the graph.
        tensors.append(tensor if is_in_one_piece(tensor) else tensor.contiguous())
        return tensor_beside, (len(tensors) - 1, dtype_name(tensor.dtype), tuple(tensor.shape))

    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = reducers = _Reducers()
    reducers[Tensor] = reduce_tensor
    reducers[np.ndarray] = _reduce_array
    pickler.dump(content)
    return file.getvalue(), tensors


def _reduce_array(array: npt.NDArray[Any]) -> Reduced:
    return array_of, (torch.from_numpy(np.require(array, requirements=["C", "W"])),)


class _Reducers(dict[type[Any], Reducer]):
    """How a pickle makes values, by their class; see :func:`by_value` for those that are not named."""

    def __missing__(self, kind: type[Any]) -> Reducer:
        if (reducer := by_value(kind)) is None:  # type: ignore[arg-type]  # a class can be hashed
            raise KeyError(kind)  # the pickler knows by itself
        return reducer


def install(pickler: internal._InternalRPCPickler | None) -> None:
    """Have torch pickle with ``pickler``, or with its own again."""
    # The first for what comes in and for answers that go out, from C++; the second for calls that go out.
    internal._internal_rpc_pickler = api._default_pickler = pickler or _TORCHS_OWN


@contextmanager
def plain_collectives() -> Iterator[None]:
    """While torch joins an RPC group: it unpickles what it finds in a process group, which nobody signs."""
    before = distributed_c10d._unpickler
    distributed_c10d._unpickler = NothingNamed
    try:
        yield
    except RefusedPayload as error:
        raise ClusterError(f"a message at the start of RPC was refused: {error}") from error
    finally:
        distributed_c10d._unpickler = before
