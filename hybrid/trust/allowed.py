"""What a payload may name: data types, by their exact names, and what a role may be asked to construct.

A pickle can name anything that can be imported, and have it called or changed. Here it can name what is
listed below, all of which only holds data, and call it. What enumerations, dataclasses, named tuples and
paths hold travels beside their names (:func:`by_value`), and not in the form that a version of Python gives.
Classes to construct, and functions of the user's own, travel as their names, and are looked up where they are
used: the project's in the list below, the user's by their modules (``hybrid/own_code/names.py``).
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import pickle
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from pathlib import PurePath
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.distributed import rpc

from hybrid.own_code.names import load_own, name_of
from hybrid.trust.refusals import RefusedPayload
from hybrid.trust.signature import UNSIGNED

DATA = frozenset(
    f"{module}:{name}"
    for module, names in {
        "builtins": "range slice frozenset complex bytearray",
        "pathlib": "Path",
        "torch": "Size device bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64",
        "hybrid.batch": "Batch SparseFeatures",
        "hybrid.clock": "Span",
        "hybrid.config.sections": (
            "RunConfig RunSection ClusterSection DataSection EmbeddingSection TableSection DenseSection "
            "TrainSection CheckpointSection ScheduleSection ProfileSection"
        ),
        "hybrid.embedding.bags": "Bags",
        "hybrid.embedding.placement": "Placement Shard",
        "hybrid.embedding.spec": "OptimizerSpec Pooling TableSpec",
        "hybrid.input_spec": "FeatureSpec InputSpec",
        "hybrid.metrics": "Predictions",
        "hybrid.own_code.names": "OwnFunction OwnValue",
        "hybrid.steps.rules": "Staleness UpdateMode UpdateRules",
        "hybrid.steps.schedule": "Schedule",
        "hybrid.steps.ticket": "Purpose Ticket",
        "hybrid.topology": "Role RoleKind Topology",
        "hybrid.wire.calls": "Vitals construct_module",
        "hybrid.wire.failure": "Failure",
        "hybrid.wire.stubs": "ModuleRef RemoteNet RemoteTables",
        "workers.session.job": "Job Report",
    }.items()
    for name in names.split()
)
HOSTED = frozenset(
    {
        "hybrid.embedding.worker.shards:TableShards",
        "workers.session.session:RemoteMlp",
        "workers.session.trainer:Trainer",
    }
)

# How a pickle makes a value: by calling something with these arguments.
Reduced: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
Reducer: TypeAlias = Callable[[Any], Reduced]


class Unpickler(pickle.Unpickler):
    """Loads plain data, tensors that came beside it, and references to objects of other processes.

    Args:
        pickled, tensors: of a payload whose signature is good; of the tensors it holds for their bytes alone.
    """

    def __init__(self, pickled: bytes, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        """What ``module`` calls ``name``, if it is on the list, to be called only.

        Raises:
            RefusedPayload: it is not.
        """
        if module == __name__:
            if name == tensor_beside.__name__:
                return _Callable(self._tensor)
            if name in _MARKS:
                return _MARKS[name]
        found = _listed(f"{module}:{name}")
        return _Callable(found) if callable(found) else found

    def _tensor(self, index: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensors[index]
        if dtype_name(tensor.dtype) != dtype or tensor.shape != shape:
            raise RefusedPayload(UNSIGNED)
        return tensor


class _Callable:
    """What a pickle names, in a form that it can call and not change: neither attributes nor state."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._function(*args, **keywords)

    def __setstate__(self, state: object) -> NoReturn:
        raise RefusedPayload("it would change what it names")


@cache
def by_value(kind: type[Any]) -> Reducer | None:
    """How a pickle makes values of a class, of its name and what they hold; None for other classes."""
    name = name_of(kind)
    if issubclass(kind, Enum):
        return lambda value: (made, (name, (value.value,), {}))
    if issubclass(kind, PurePath):  # Python 3.13 has the class elsewhere
        return lambda value: (made, ("pathlib:Path", (str(value),), {}))
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return lambda value: (made, (name, tuple(value), {}))
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return lambda value: (made, (name, (), {each: getattr(value, each) for each in names}))
    if kind is complex:
        return lambda value: (complex, (value.real, value.imag))
    return None


def made(name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """What the listed class ``name`` makes of what it is to hold."""
    return _listed(name)(*args, **keywords)


def tensor_beside(index: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """What a pickle names where a tensor was; :class:`Unpickler` puts the tensor there, if it is the one."""
    raise NotImplementedError(f"tensor {index} of no message")


def reference_to(fork: tuple[Any, ...]) -> rpc.RRef[Any]:
    """What a pickle names where an RRef was; :class:`Unpickler` puts one there."""
    raise NotImplementedError(f"reference {fork} of no message")


_MARKS = {made.__name__: _Callable(made), reference_to.__name__: _Callable(rpc.PyRRef._deserialize)}


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """How a pickle calls the type of a tensor's values."""
    return str(dtype)


def hosted(name: str) -> type[Any]:
    """The class to construct that is called ``name``: the project's that are listed, and the user's own.

    Raises:
        ConfigError: there is no such class.
    """
    found: type[Any] = _found(name) if name in HOSTED else load_own(name)
    return found


def _listed(name: str) -> Any:
    if name not in DATA:
        raise RefusedPayload(f"{name} may not travel; hybrid/trust/allowed.py lists what may")
    return _found(name)


@cache
def _found(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
