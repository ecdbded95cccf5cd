"""Code of the user's own, named in a configuration or on the command line as ``module:function``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from hybrid.errors import ConfigError


def load_function(key: str, name: str) -> Callable[..., Any]:
    """The function that ``name``, "module:function", is.

    Args:
        key: what named it, for errors.

    Raises:
        ConfigError: there is no such function, or its module cannot be imported.
    """
    module_name, _, function_name = name.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        reason = f"cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(key, reason, name) from error
    return function
