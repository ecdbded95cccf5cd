"""Predict the rows of a CSV file with a ``dlrm`` from a checkpoint, in plain PyTorch.

``python examples/load_checkpoint.py CHECKPOINT clicks.csv`` prints the predictions of ``hybrid predict`` for
the configuration of the README. The program needs PyTorch, pyarrow and safetensors, but not this project.
"""

import csv
import json
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pyarrow import parquet
from safetensors.torch import load_file
from torch import Tensor, nn

folder, samples = Path(sys.argv[1]), list(csv.DictReader(Path(sys.argv[2]).read_text().splitlines()))
config = tomllib.loads((folder / "config.toml").read_text())
features = json.loads((folder / "features.json").read_text())
tables = json.loads((folder / "manifest.json").read_text())["manifest"]["tables"]
stored = parquet.read_table(folder.parent.parent / f"vocabularies/{features['vocabularies']}.parquet")
texts = iter(stored["value"].to_pylist())
vocabularies = [[next(texts) for _ in range(n)] for n in json.loads(stored.schema.metadata[b"sizes"])]


def pooled(feature: dict[str, Any]) -> Tensor:
    """Return the sum of the vectors of each sample in a sparse column, (samples, width)."""
    name = feature["name"]
    rows, width, files = tables[name]
    weight = torch.empty(rows, width)
    for i in range(files):
        weight[i::files] = load_file(folder / f"tables/{name}.{i}-of-{files}.safetensors")["weight"]
    row_of = {value: i + 1 for i, value in enumerate(vocabularies[feature["values"]])}
    fields = [sample[name] for sample in samples]
    bags = [[v for v in field.split("|") if v] if feature["multi_hot"] else [field] for field in fields]
    return torch.stack([weight[[row_of.get(value, 0) for value in bag]].sum(0) for bag in bags])


def scaled(feature: dict[str, Any]) -> Tensor:
    """Return the scaled values of a dense column, (samples,)."""
    fields = [sample[feature["name"]] for sample in samples]
    shift, scale, missing = feature["shift"], feature["scale"], feature["missing"]
    return torch.tensor([(float(field) - shift) / scale if field else missing for field in fields])


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers of these widths, each followed by ReLU."""
    return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())))


dense = torch.stack([scaled(feature) for feature in features["dense"]], dim=1)
vectors = [pooled(feature) for feature in features["sparse"]]
width, n = vectors[0].shape[1], 1 + len(vectors)
bottom = mlp(dense.shape[1], *config["dense"]["bottom_mlp"], width)
head = mlp(width + n * (n - 1) // 2, *config["dense"]["top_mlp"], 1)[:-1]
parameters = load_file(folder / "dense.safetensors")
net = nn.ModuleDict({"bottom": bottom, "head": head})
net.load_state_dict({key[4:]: tensor for key, tensor in parameters.items() if key.startswith("net.")})
every = torch.stack([bottom(dense), *vectors], dim=1)
i, j = torch.tril_indices(n, n, offset=-1)
logits = head(torch.cat([every[:, 0], (every @ every.mT)[:, i, j]], dim=1))
for row, probability in enumerate(logits.flatten().sigmoid().tolist()):
    print(f"{row},{probability}")
