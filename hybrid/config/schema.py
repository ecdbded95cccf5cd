"""The JSON schema of configuration files, for editors."""

import json
import re
from typing import Any

from hybrid.config.key import Key
from hybrid.config.sections import NAMED_KEYS, NAMED_TYPES, SECTION_KEYS, SECTION_TYPES

_TYPES: dict[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
_LIMITS = {"minimum": "minimum", "maximum": "maximum", "above": "exclusiveMinimum"}


def json_schema() -> str:
    """Return the schema as JSON. Editors check keys, types and limits; rules between keys are not in it."""
    sections = {name: _section(SECTION_TYPES[name], keys) for name, keys in SECTION_KEYS.items()}
    named = {
        kind: {"type": "object", "additionalProperties": _section(NAMED_TYPES[kind], keys)}
        for kind, keys in NAMED_KEYS.items()
    }
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **_object(sections | named)}
    return json.dumps(schema, indent=1) + "\n"


def _section(section: Any, keys: dict[str, Key]) -> dict[str, Any]:
    return {"description": section.__doc__, **_object({name: _value(key) for name, key in keys.items()})}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _value(key: Key) -> dict[str, Any]:
    types = [_TYPES[key.kind], *(["number", "boolean"] if key.takes_numbers else [])]
    value: dict[str, Any] = {"type": types if key.takes_numbers else types[0]}
    limits = {name: getattr(key, field) for field, name in _LIMITS.items()}
    value |= {name: limit for name, limit in limits.items() if limit is not None}
    if key.choices:
        value["enum"] = list(key.choices)
    if key.signatures is not None:
        names = "|".join(map(re.escape, key.signatures.names))
        value["pattern"] = rf"^\s*({names})\s*(\(.*\))?\s*$|:"
    if key.is_list:
        value = {"anyOf": [{"type": "array", "items": value}, value]}
    default = {} if key.default is None else {"default": key.default}
    return value | default | {"description": f"{key.meaning} Must be {key.rule}."}
