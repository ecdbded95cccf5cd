"""Small click logs as files."""

import gzip
from pathlib import Path

import numpy as np

from hybrid.data.parse.column_layout import CRITEO_DENSE, CRITEO_SPARSE


def clicks(num_rows: int) -> list[tuple[int, float, str, str]]:
    """Return rows of label, x, user and item; the label depends on x and the user."""
    random = np.random.default_rng(1)
    x, user = random.normal(size=num_rows), random.integers(9, size=num_rows)
    item = random.integers(50, size=num_rows)
    label = (x + (user % 3) + random.normal(size=num_rows) > 1).astype(int)
    return [
        (int(y), round(float(v), 3), f"u{u}", f"i{i}")
        for y, v, u, i in zip(label, x, user, item, strict=True)
    ]


def write_csv(path: Path, num_rows: int) -> Path:
    """Write a CSV with a header; line 4 has an invalid label."""
    lines = [",".join(map(str, row)) for row in clicks(num_rows)]
    path.write_text("\n".join(["label,x,user,item", *lines[:2], "maybe,0.5,u1,i1", *lines[2:]]) + "\n")
    return path


def write_criteo(path: Path, num_rows: int) -> Path:
    """Write a gzip file in Criteo's layout, with missing values."""
    with gzip.open(path, "wt") as file:
        for label, x, user, item in clicks(num_rows):
            dense = [str(round(10 * x)), *[""] * (len(CRITEO_DENSE) - 1)]
            sparse = [user, item, *["same"] * (len(CRITEO_SPARSE) - 2)]
            file.write("\t".join([str(label), *dense, *sparse]) + "\n")
    return path
