"""Functions and classes of user modules, and their exceptions.

A configuration or a command line names user code as ``module:function``, and each process imports the module.
"""

import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import logging
import os
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from hybrid.errors import ConfigError, HybridError, first_line

# Packages whose code is not user code.
PROJECT = ("hybrid", "workers")
_PROJECT_FOLDER = Path(__file__).resolve().parents[2]
_LOG = logging.getLogger(__name__)
# Names of folders for installed packages. PYTHONPATH or .pth files may add folders of another Python.
_PACKAGES = {"site-packages", "dist-packages"}
_STANDARD = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))


class FolderFinder(importlib.abc.MetaPathFinder):
    """An import hook that finds modules in a folder if the user, or code in the folder, names them.

    The folder is not added to ``sys.path``. Otherwise torch and other packages would find optional modules in
    it, which somebody else may have written.
    """

    _named: ClassVar[set[str]] = set()  # top-level names, for all folders

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def search(cls, folder: Path, module: str = "") -> None:
        """Let imports search ``folder`` last; allow the import of ``module``, which the user has named."""
        cls._named.add(module.partition(".")[0])
        searched = [each._folder for each in sys.meta_path if isinstance(each, cls)]
        resolved = folder.resolve()
        if resolved not in searched:
            sys.meta_path.append(cls(resolved))

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return the spec of a top-level module in the folder, or None if the hook may not import it."""
        if path is not None or not (fullname in self._named or self._is_importer(sys._getframe(1))):
            return None
        return PathFinder.find_spec(fullname, [str(self._folder)])

    def _is_importer(self, frame: FrameType | None) -> bool:
        """Return whether the code that runs an import, outside of importlib, is user code in the folder."""
        while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "importlib":
            frame = frame.f_back
        file = None if frame is None else frame.f_globals.get("__file__")
        return file is not None and is_user_file(file) and Path(file).resolve().is_relative_to(self._folder)


def load_function(
    key: str, name: str, parameters: Sequence[str] = (), folder: Path | None = None
) -> Callable[..., Any]:
    """Import and return the function "module:function".

    Args:
        key: the configuration key that has the name, for errors.
        parameters: names of the positional arguments that the function must accept; no check if empty.
        folder: where the module may be, besides the working directory and installed packages.

    Raises:
        ConfigError: there is no such function, it takes other arguments, its module cannot be imported, or
            another module has the same name.
    """
    module_name, _, function_name = name.partition(":")
    path = Path(*module_name.split("."))
    base = folder or Path()
    for each in (base, Path()):
        FolderFinder.search(each, module_name)
    local = next((f for f in (path.with_suffix(".py"), path / "__init__.py") if (base / f).is_file()), None)
    if local is not None:
        first = (base / local.parts[0]).resolve()
        paths = _module_paths(module_name)
        if not any(each in (first, first / "__init__.py") for each in paths):
            other = paths[0] if paths else "built in"
            rule = f"is in {base / local}, but the module of this name is {other}"
            rule += "; correct the path, or rename the file"
            raise ConfigError(key, rule, name)
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:  # user code, which may raise anything
        reason = f"cannot be imported: {describe_error(error)}"
        if isinstance(error, ModuleNotFoundError):
            rule = f"install it there, or put it into the working directory {os.getcwd()}"
            reason += f" on host {socket.gethostname()}; {rule}"
        raise ConfigError(key, reason, name) from error
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


def qualified_name(function: Any) -> str:
    """Return the name, "module:function", of a function or class."""
    return f"{function.__module__}:{function.__qualname__}"


def _module_paths(module: str) -> list[Path]:
    """Return the folders and the file of the top-level package of ``module``; [] if there are none."""
    top = module.partition(".")[0]
    loaded = sys.modules.get(top)
    spec = importlib.util.find_spec(top) if loaded is None else loaded.__spec__
    if spec is None:
        return []
    paths = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location else [])]
    return [Path(path).resolve() for path in paths if path]


def is_library(path: Path) -> bool:
    """Return whether a file belongs to the standard library or to an installed package."""
    return not _PACKAGES.isdisjoint(path.parts) or any(map(path.is_relative_to, _STANDARD))


@functools.cache
def is_user_file(filename: str) -> bool:
    """Return whether a file is user code: not generated, not a library, and not part of this project."""
    if filename.startswith("<"):  # generated code
        return False
    path = Path(filename).resolve()
    return not is_library(path) and not any(path.is_relative_to(_PROJECT_FOLDER / name) for name in PROJECT)


def user_location(error: BaseException | None) -> str:
    """Return the innermost frame of user code, such as ``my_net.py:17, in forward``; "" if there is none.

    Causes of the exception are searched before the exception, the original cause first.
    """
    for each in _causes(error):
        if isinstance(each, SyntaxError) and each.filename and is_user_file(each.filename):
            return f"{_short(each.filename)}:{each.lineno}"
        frames = traceback.extract_tb(each.__traceback__)
        user_frames = [frame for frame in frames if is_user_file(frame.filename)]
        if user_frames:
            last = user_frames[-1]
            return f"{_short(last.filename)}:{last.lineno}, in {last.name}"
    return ""


def describe_error(error: BaseException) -> str:
    """Describe an exception in one line: its location in user code, class, text and notes."""
    location = user_location(error)
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return f"{location}: {kind_and_text(error)}{notes}" if location else f"{kind_and_text(error)}{notes}"


def kind_and_text(error: BaseException) -> str:
    """Return the class and text of an exception, such as ``KeyError: 'user'``."""
    kind, text = type(error).__name__, first_line(error)
    return kind if text == kind else f"{kind}: {text}"


def needs_traceback(error: BaseException) -> bool:
    """Return whether to log the traceback: always, except for a HybridError that user code did not cause."""
    return not isinstance(error, HybridError) or bool(user_location(error.__cause__))


def log_traceback(error: BaseException) -> None:
    """Log the traceback of an exception: first the frames in the user's code, then all frames."""
    lines = traceback.format_exception(error)
    for each in _causes(error):
        frames = traceback.extract_tb(each.__traceback__)
        first = next((i for i, frame in enumerate(frames) if is_user_file(frame.filename)), 0)
        if first > 0:
            lines = [
                "Traceback of your code (most recent call last):\n",
                *traceback.StackSummary.from_list(frames[first:]).format(),
                *traceback.format_exception_only(each),
                "\nAll frames:\n",
                *lines,
            ]
            break
    _LOG.error("%s\n%s", kind_and_text(error), "".join(lines).rstrip("\n"))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__
    yield from reversed(seen)


def _short(filename: str) -> str:
    path = Path(os.path.abspath(filename))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
