"""Apply the deltas of a run to its newest checkpoint, with NumPy: python apply_deltas.py runs/NAME.

Every table becomes a dict from row number, or key, to vector. docs/checkpoints.md describes the files.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from safetensors import deserialize

# NumPy has no bfloat16.
TYPES = {
    "F64": "f8",
    "F32": "f4",
    "BF16": "u2",
    "F16": "f2",
    "I64": "i8",
    "I32": "i4",
    "U8": "u1",
    "BOOL": "?",
}

Tables = dict[str, dict[int, Any]]


def read_folder(folder: Path, identity: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the manifest and the arrays of each file, after comparing them with their checksums."""
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    content = [manifest["step"], manifest["files"], manifest["progress"].get("parent", "")]
    assert hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest() == identity, folder
    arrays = {}
    for name, (_, sha256) in manifest["files"].items():
        file = (folder / name).read_bytes()
        assert hashlib.sha256(file).hexdigest() == sha256, name
        if name.endswith(".safetensors"):
            arrays[name] = {tensor: to_array(**stored) for tensor, stored in deserialize(file)}  # type: ignore[no-untyped-call]
    return manifest, arrays


def to_array(dtype: str, shape: list[int], data: bytes) -> Any:
    """Return a stored tensor as an array, bfloat16 as float32."""
    array = np.frombuffer(data, TYPES[dtype]).reshape(shape)
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array


def read_newest(run: Path) -> tuple[int, Tables, dict[str, Any]]:
    """Return the step of the newest model, its tables, and its dense net."""
    current = json.loads((run / "deltas/current.json").read_text())
    base = current["base"]
    tables: Tables = {}
    dense: dict[str, Any] = {}
    folders = [(run / f"checkpoints/step-{base['step']:08d}", current["base_checkpoint"])]
    for delta in current["deltas"]:
        if delta["sequence"] > base["sequence"]:
            folders.append((run / f"deltas/step-{delta['step']:08d}", delta["identity"]))
    for folder, identity in folders:
        manifest, arrays = read_folder(folder, identity)
        for table, (_, _, count) in manifest["tables"].items():
            rows = tables.setdefault(table, {})
            for index in range(count):
                shard = arrays[f"tables/{quote(table, safe='')}.{index}-of-{count}.safetensors"]
                every = range(index, index + count * len(shard["weight"]), count)
                numbers = shard.get("keys", shard.get("rows", every))
                rows.update(zip(map(int, numbers), shard["weight"], strict=True))
                for key in shard.get("evicted", ()):
                    rows.pop(int(key), None)
        named = arrays["dense.safetensors"].items()
        dense |= {name[len("net.") :]: array for name, array in named if name.startswith("net.")}
    return manifest["step"], tables, dense


if __name__ == "__main__":
    step, tables, dense = read_newest(Path(sys.argv[1]))
    print(f"step {step}: {len(dense)} dense arrays, " + ", ".join(f"{t} {len(r)}" for t, r in tables.items()))
