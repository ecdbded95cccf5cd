"""Files and a configuration of a retrieval task."""

import csv
import random
from collections.abc import Mapping
from pathlib import Path

from support.trained import clicks_config

from hybrid.config import RunConfig

NUM_ITEMS = 23


def write_choices(path: Path, num_rows: int = 300, seed: int = 1) -> Path:
    """Write impressions: user, price limit, weighted tags, item, whether the user chose it, and a weight."""
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "limit", "tags", "item", "chosen", "importance"])
        for number in range(num_rows):
            tags = "|".join(f"{tag}:0.5" for tag in draw.sample("abcd", draw.randrange(4)))
            item = min(number % NUM_ITEMS, draw.randrange(2 * NUM_ITEMS))  # the first are more frequent
            row = [f"u{draw.randrange(30)}", f"{draw.gauss(3, 2):.2f}", tags, f"i{item}"]
            writer.writerow([*row, int(draw.random() < 0.7), f"{draw.random():.2f}"])
    return path


def choices_config(folder: Path, **sections: Mapping[str, object]) -> RunConfig:
    """Return the configuration of a run on :func:`write_choices` in ``folder``."""
    data: dict[str, object] = {
        "path": write_choices(folder / "choices.csv"),
        "label": "",
        "dense": ["limit"],
        "sparse": ["user", "tags", "item"],
        **sections.get("data", {}),
    }
    defaults: dict[str, Mapping[str, object]] = {
        "tasks.choice": {
            "label": "chosen",
            "type": "retrieval(item, dim = 3)",
            "metrics": ["recall@5", "ndcg@5"],
        },
        "dense": {"net": "two_towers", "top_mlp": [6]},
    }
    return clicks_config(folder, **{**defaults, **sections, "data": data})
