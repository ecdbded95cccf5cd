"""What a payload may name: data types, by their exact names, and what a role may be asked to construct.

A pickle can name anything that can be imported, and have it called or changed. Here it can name plain data,
and those of the project's classes that only hold data (``payload_classes.py``), and call them. What
enumerations, dataclasses, named tuples and paths hold travels beside their names (:func:`by_value`), and
not in the form that a version of Python gives. Classes to construct, and functions of the user's own,
travel as their names, and are looked up where they arrive: the project's in a list, too, the user's by
their modules (``hybrid/user_code/function_names.py``).
"""

import dataclasses
import importlib
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cache, partial
from pathlib import PurePath
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed import rpc

from hybrid.security.message_signature import UNSIGNED
from hybrid.security.rejected_messages import RefusedPayload
from hybrid.user_code.function_names import load_own, name_of

PLAIN = {
    f"{module}:{name}": getattr(importlib.import_module(module), name)
    for module, names in {
        "builtins": "range slice frozenset complex bytearray",
        "pathlib": "Path",
        "torch": "Size device bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64",
    }.items()
    for name in names.split()
}

# How a pickle makes a value: by calling something with these arguments.
Reduced: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
Reducer: TypeAlias = Callable[[Any], Reduced]


class ClassName(NamedTuple):
    """A class to construct where this travels to: among those to construct there, or of the user's own."""

    name: str


class Allowed:
    """What the payloads of a process may name.

    Args:
        data: classes that only hold data, and functions that may be named.
        created: the project's own classes of which objects may be made here, and functions that make one; a
            ``partial`` of one goes by its name, and makes them with what this process has to add.

    Attributes:
        data: what may be named, by name.
        marks: what pickles name in place of what is not pickled as it is, and what they call there.
    """

    def __init__(self, data: Iterable[Callable[..., Any]], created: Iterable[Callable[..., Any]]) -> None:
        self.data = PLAIN | {name_of(each): each for each in data}
        self._created = {name_of(each.func if isinstance(each, partial) else each): each for each in created}
        self.marks = {
            made.__name__: _Callable(self._made),
            class_named.__name__: _Callable(lambda name: partial(self._to_create, name)),
            reference_to.__name__: _Callable(rpc.PyRRef._deserialize),
            array_of.__name__: _Callable(array_of),
        }

    def listed(self, name: str) -> Any:
        """What is called ``name``; RefusedPayload where it is not on the list."""
        if name not in self.data:
            raise RefusedPayload(f"{name} may not travel; hybrid/security/allow_list.py says what may")
        return self.data[name]

    def _made(self, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """What the listed class ``name`` makes of what it is to hold."""
        return self.listed(name)(*args, **keywords)

    def _to_create(self, name: str) -> Callable[..., Any]:
        """What is to be constructed by this name; ConfigError where there is no such class."""
        found: Callable[..., Any] = self._created.get(name) or load_own(name)
        return found


class Unpickler(pickle.Unpickler):
    """Loads plain data, tensors that came beside it, and references to objects of other processes.

    Args:
        pickled, tensors: of a payload whose signature is good; of the tensors it holds for their bytes alone.
        allowed: what it may name.
    """

    def __init__(self, pickled: bytes, tensors: Sequence[Tensor], allowed: Allowed) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """What ``module`` calls ``name``, if it is on the list, to be called only.

        Raises:
            RefusedPayload: it is not.
        """
        if module == __name__:
            if name == tensor_beside.__name__:
                return _Callable(self._tensor)
            if name in self._allowed.marks:
                return self._allowed.marks[name]
        found = self._allowed.listed(f"{module}:{name}")
        return _Callable(found) if callable(found) else found

    def _tensor(self, index: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensors[index]
        if dtype_name(tensor.dtype) != dtype or tensor.shape != shape:
            raise RefusedPayload(UNSIGNED)
        return tensor


class NothingNamed(pickle.Unpickler):
    """Loads numbers, text, lists and the like."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedPayload(f"it names {module}:{name}")


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
    """How a pickle makes values of a class, of names and what they hold; None for other classes."""
    name = name_of(kind)
    if kind is ClassName:
        return lambda value: (class_named, (value.name,))
    if issubclass(kind, Enum):
        return lambda value: (made, (name, (value.value,), {}))
    if issubclass(kind, PurePath):  # Python 3.13 has the class elsewhere
        return lambda value: (made, ("pathlib:Path", (str(value),), {}))
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return lambda value: (made, (name, tuple(value), {}))
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return lambda value: (made, (name, (), {each: getattr(value, each) for each in names}))
    if issubclass(kind, rpc.PyRRef):
        return lambda reference: (reference_to, (reference._serialize(),))
    if kind is complex:
        return lambda value: (complex, (value.real, value.imag))
    return None


def made(name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """What a pickle names where a value of the listed class ``name`` was."""
    raise NotImplementedError(f"{name} of no message")


def class_named(name: str) -> Callable[[], Callable[..., Any]]:
    """What a pickle names where a :class:`ClassName` was; there will be what gives the class, or an error."""
    raise NotImplementedError(f"{name} of no message")


def tensor_beside(index: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """What a pickle names where a tensor was; :class:`Unpickler` puts the tensor there, if it is the one."""
    raise NotImplementedError(f"tensor {index} of no message")


def array_of(tensor: Tensor) -> npt.NDArray[Any]:
    """What a pickle calls where an array was, which travels as a tensor."""
    return tensor.numpy()


def reference_to(fork: tuple[Any, ...]) -> rpc.RRef[Any]:
    """What a pickle names where an RRef was; :class:`Unpickler` puts one there."""
    raise NotImplementedError(f"reference {fork} of no message")


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """How a pickle calls the type of a tensor's values."""
    return str(dtype)
