"""User code, named in a configuration or on the command line as ``module:function``.

Processes exchange such code by name, together with plain values, and each process looks it up. Only user
modules may be looked up: neither the standard library, nor installed packages, nor this project.
"""

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError
from hybrid.user_code.tracebacks import PROJECT, is_library, user_location


def load_function(key: str, name: str, parameters: Sequence[str] = ()) -> Callable[..., Any]:
    """Import the function ``name``, "module:function".

    Args:
        key: the configuration key that names it, for errors.
        parameters: names of the positional arguments that it must accept.

    Raises:
        ConfigError: there is no such function, it takes other arguments, its module cannot be imported, or an
            installed module has the same name.
    """
    module_name, _, function_name = name.partition(":")
    path = Path(*module_name.split("."))
    local = next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None)
    if local is not None:
        first = Path(local.parts[0]).resolve()
        if not any(each in (first, first / "__init__.py") for each in _module_paths(module_name)):
            rule = f"is in {local}, but an installed module has the same name; rename your module"
            raise ConfigError(key, rule, name)
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:  # user code, which may raise anything
        location = f"{location}: " if (location := user_location(error)) else ""
        reason = f"cannot be imported: {location}{type(error).__name__}: {' '.join(str(error).split())}"
        missing = _missing_module_hint() if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(key, reason + missing, name) from error
    if not parameters:
        return function
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not a function, or one without a signature
        if callable(function):
            return function
        raise ConfigError(key, "is not a function", name) from None
    try:
        signature.bind(*parameters)
    except TypeError as error:
        code = getattr(function, "__code__", None)
        location = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
        arguments = ", ".join(parameters)
        rule = f"is called as {function.__name__}({arguments}), and takes {signature}{location}: {error}"
        raise ConfigError(key, rule, name) from error
    return function


def _missing_module_hint() -> str:
    return f" on host {socket.gethostname()}; install it there, or put it into {os.getcwd()}, where this runs"


@dataclass(frozen=True, slots=True)
class UserFunction:
    """The name of a user function, and its bound arguments."""

    name: str
    args: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UserDataclass:
    """The name of a user dataclass, and the fields of an instance."""

    name: str
    fields: Mapping[str, Any]


def qualified_name(function: Any) -> str:
    """Return the name, "module:function", of a function or class."""
    return f"{function.__module__}:{function.__qualname__}"


def to_reference(value: Any) -> Any:
    """Replace functions, methods, ``functools.partial`` and user dataclasses by their names and arguments.

    Raises:
        ConfigError: a function has no name by which other processes could find it.
    """
    if isinstance(value, functools.partial):
        inner = to_reference(value.func)
        args = (*inner.args, *map(to_reference, value.args))
        keywords = {name: to_reference(each) for name, each in value.keywords.items()}
        return UserFunction(inner.name, args, {**inner.keywords, **keywords})
    if inspect.ismethod(value):
        return UserFunction(_importable_name(value), (to_reference(value.__self__),))
    if inspect.isfunction(value):
        return UserFunction(_importable_name(value))
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if is_instance and _is_user_module(type(value).__module__):
        names = [each.name for each in dataclasses.fields(value) if each.init]
        fields = {name: to_reference(getattr(value, name)) for name in names}
        return UserDataclass(_importable_name(type(value)), fields)
    return value


def from_reference(value: Any) -> Any:
    """Return the value that :func:`to_reference` has replaced.

    Raises:
        ConfigError: it is not user code.
    """
    if isinstance(value, UserFunction):
        keywords = {name: from_reference(each) for name, each in value.keywords.items()}
        return functools.partial(load_user_object(value.name), *map(from_reference, value.args), **keywords)
    if isinstance(value, UserDataclass):
        cls = load_user_object(value.name)
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise ConfigError("FUNCTION", "is not a dataclass, and cannot be sent", value.name)
        return cls(**{name: from_reference(each) for name, each in value.fields.items()})
    return value


def load_user_object(name: str) -> Any:
    """Import the user function or class ``name``: "module:function" or "module:Class.method".

    Raises:
        ConfigError: no user module defines it.
    """
    module, _, qualified = name.partition(":")
    top = module.partition(".")[0]
    if top and top not in sys.modules and importlib.util.find_spec(top) is None:
        raise ConfigError("FUNCTION", f"there is no such module{_missing_module_hint()}", name)
    if not _is_user_module(module):
        raise ConfigError("FUNCTION", "is not in a module of your own", name)
    value: Any = load_function("FUNCTION", f"{module}:{qualified.partition('.')[0]}")
    for attribute in qualified.split(".")[1:]:
        value = getattr(value, attribute, None)
    origin = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not callable(value) or origin != (module, qualified):
        raise ConfigError("FUNCTION", f"is not defined in {module}", name)
    return value


def _importable_name(function: Any) -> str:
    name = qualified_name(function)
    if "<" in name or not _is_user_module(function.__module__):
        raise ConfigError("FUNCTION", "must be defined in a module of your own, under a name", name)
    return name


@functools.cache
def _is_user_module(module: str) -> bool:
    """Return whether a module is neither this project's, nor the standard library's, nor installed.

    Nothing is imported for this.
    """
    top = module.partition(".")[0]
    if not top or top in PROJECT or top == "__main__" or top in sys.stdlib_module_names:
        return False
    paths = _module_paths(module)
    return bool(paths) and not any(map(is_library, paths))


def _module_paths(module: str) -> list[Path]:
    """Return where Python finds the top-level module or package of a module; empty if it is built in."""
    top = module.partition(".")[0]
    loaded = sys.modules.get(top)
    spec = importlib.util.find_spec(top) if loaded is None else loaded.__spec__
    if spec is None:
        return []
    paths = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location else [])]
    return [Path(path).resolve() for path in paths if path]
