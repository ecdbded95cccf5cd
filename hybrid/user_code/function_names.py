"""Code of the user's own, named in a configuration or on the command line as ``module:function``.

Between processes such code travels by name, with plain values beside it, and is looked up where it runs. What
may be looked up is what the user's own modules define: not the standard library, not what is installed.
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
    """The function that ``name``, "module:function", is.

    Args:
        key: what named it, for errors.
        parameters: names of what it will be called with, one after another, to see that it takes that.

    Raises:
        ConfigError: there is no such function, it takes something else, its module cannot be imported, or
            another has its name.
    """
    module_name, _, function_name = name.partition(":")
    if (file := _file_here(module_name)) is not None and not _is_found(module_name, file):
        rule = f"is in {file}, whose name an installed module has, which comes first; give yours another"
        raise ConfigError(key, rule, name)
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code, which may raise anything
        place = f"{place}: " if (place := user_location(error)) else ""
        reason = f"cannot be imported: {place}{type(error).__name__}: {' '.join(str(error).split())}"
        missing = _where_it_is_missing() if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(key, reason + missing, name) from error
    if parameters:
        _check_parameters(key, name, function, parameters)
    return function


def _where_it_is_missing() -> str:
    """What to add where a module is not found: on which host, and where it would be."""
    return f" on host {socket.gethostname()}; install it there, or put it into {os.getcwd()}, where this runs"


def _check_parameters(key: str, name: str, function: Any, parameters: Sequence[str]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # no function, or one that does not tell
        if callable(function):
            return
        raise ConfigError(key, "is not a function", name) from None
    try:
        signature.bind(*parameters)
    except TypeError as error:
        code = getattr(function, "__code__", None)
        place = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
        wanted = ", ".join(parameters)
        rule = f"is called as {function.__name__}({wanted}), and takes {signature}{place}: {error}"
        raise ConfigError(key, rule, name) from error


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function of the user's own by its name, and the first of its arguments."""

    name: str
    args: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UserDataclass:
    """A dataclass of the user's own by its name, and its fields."""

    name: str
    fields: Mapping[str, Any]


def qualified_name(function: Any) -> str:
    """The name, "module:function", of a function or class."""
    return f"{function.__module__}:{function.__qualname__}"


def to_reference(value: Any) -> Any:
    """``value`` as it travels: functions, methods, ``functools.partial``, and the user's dataclasses by name.

    Raises:
        ConfigError: it is a function without a name that others could find.
    """
    if isinstance(value, functools.partial):
        inner = to_reference(value.func)
        args = (*inner.args, *map(to_reference, value.args))
        keywords = {name: to_reference(each) for name, each in value.keywords.items()}
        return UserFunction(inner.name, args, {**inner.keywords, **keywords})
    if inspect.ismethod(value):
        return UserFunction(_findable(value), (to_reference(value.__self__),))
    if inspect.isfunction(value):
        return UserFunction(_findable(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and _is_own(type(value).__module__):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return UserDataclass(
            _findable(type(value)), {name: to_reference(each) for name, each in fields.items()}
        )
    return value


def from_reference(value: Any) -> Any:
    """What :func:`described` has described.

    Raises:
        ConfigError: it is not of the user's own code.
    """
    if isinstance(value, UserFunction):
        keywords = {name: from_reference(each) for name, each in value.keywords.items()}
        return functools.partial(load_user_object(value.name), *map(from_reference, value.args), **keywords)
    if isinstance(value, UserDataclass):
        cls = load_user_object(value.name)
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise ConfigError("FUNCTION", "is no dataclass, and no other value travels", value.name)
        return cls(**{name: from_reference(each) for name, each in value.fields.items()})
    return value


def load_user_object(name: str) -> Any:
    """The function or class that ``name``, "module:function" or "module:Class.method", is.

    Raises:
        ConfigError: the user's own modules define no such thing.
    """
    module, _, qualified = name.partition(":")
    top = module.partition(".")[0]
    if top and top not in sys.modules and importlib.util.find_spec(top) is None:
        raise ConfigError("FUNCTION", f"there is no such module{_where_it_is_missing()}", name)
    if not _is_own(module):
        raise ConfigError("FUNCTION", "is not in a module of your own", name)
    found = load_function("FUNCTION", f"{module}:{qualified.partition('.')[0]}")
    for part in qualified.split(".")[1:]:
        found = getattr(found, part, None)  # type: ignore[assignment]
    where = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if not callable(found) or where != (module, qualified):
        raise ConfigError("FUNCTION", f"is nothing that {module} defines", name)
    return found


def _file_here(module: str) -> Path | None:
    """The file of a module in the current folder, if it is there."""
    path = Path(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def _is_found(module: str, file: Path) -> bool:
    """Whether a module that ``file`` of the current folder holds is the one that Python finds."""
    first = Path(file.parts[0]).resolve()
    return any(place in (first, first / "__init__.py") for place in _places(module))


def _findable(function: Any) -> str:
    name = qualified_name(function)
    if "<" in name or not _is_own(function.__module__):
        raise ConfigError("FUNCTION", "must be defined in a module of your own, under a name", name)
    return name


@functools.cache
def _is_own(module: str) -> bool:
    """Whether a module is neither this project's, nor the standard library's, nor installed.

    Nothing is imported to know that.
    """
    top = module.partition(".")[0]
    if not top or top in PROJECT or top == "__main__" or top in sys.stdlib_module_names:
        return False
    places = _places(module)
    return bool(places) and not any(map(is_library, places))


def _places(module: str) -> list[Path]:
    """Where Python finds the module or package that a module is or is in; nowhere, where it is built in."""
    top = module.partition(".")[0]
    loaded = sys.modules.get(top)
    spec = importlib.util.find_spec(top) if loaded is None else loaded.__spec__
    if spec is None:
        return []
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location else [])]
    return [Path(place).resolve() for place in places if place]
