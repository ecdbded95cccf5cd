"""TOML text of configurations: parsed within bounds, and written."""

import json
import re
import tomllib
from typing import Any

# A key of many segments. The memory of the parser grows with the square of their number.
_DEEP_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}""")


def parse_toml(text: str) -> dict[str, Any]:
    """The document of a TOML text.

    Raises:
        ValueError: it is not valid.
        RecursionError: it is nested too deeply.
    """
    if _DEEP_KEY.search(text):
        raise RecursionError
    return tomllib.loads(text)


def toml_value(value: Any) -> str:
    """The TOML text of a value."""
    if isinstance(value, tuple):
        return f"[{', '.join(toml_value(element) for element in value)}]"
    # JSON's strings, numbers and booleans are TOML's, except DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
