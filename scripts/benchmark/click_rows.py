"""Synthetic rows like those of Criteo's display ads, for measurements of preparation.

Each sparse column has at most as many distinct values as in Criteo's Kaggle data set (45,840,617 rows). The
values are drawn by Zipf's law. About the same fraction of values is missing.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pacsv

from hybrid.primitives.key_hashes import splitmix64

# Distinct values of C1 .. C26.
CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
DENSE = tuple(f"I{i}" for i in range(1, 14))
SPARSE = tuple(f"C{i}" for i in range(1, 1 + len(CARDINALITIES)))
COLUMNS = ("label", *DENSE, *SPARSE)
_BLOCK_ROWS = 250_000
_MISSING = 0.12
_OPTIONS = pacsv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")


def write_click_rows(path: Path, num_rows: int, seed: int = 0) -> None:
    """Write rows in the layout of Criteo's TSV, the same for the same seed."""
    draw = np.random.default_rng(seed)
    with path.open("wb") as file:
        for start in range(0, num_rows, _BLOCK_ROWS):
            pacsv.write_csv(_block(draw, min(_BLOCK_ROWS, num_rows - start)), file, _OPTIONS)


def _block(draw: np.random.Generator, size: int) -> pa.Table:
    columns = {"label": pa.array(draw.integers(0, 4, size) == 0).cast(pa.int8())}
    for i, name in enumerate(DENSE):
        numbers_B = np.floor(np.exp(draw.normal(1.5, 1 + i % 4, size))).astype(np.int64) - 1
        columns[name] = pa.array(numbers_B, mask=draw.random(size) < _MISSING)
    for i, (name, cardinality) in enumerate(zip(SPARSE, CARDINALITIES, strict=True)):
        rank_B = np.floor(np.exp(draw.random(size) * np.log(cardinality))).astype(np.uint64)
        hashed_B = splitmix64(rank_B + (np.uint64(i) << np.uint64(40)))
        missing_B = draw.random(size) < (_MISSING if cardinality > 10_000 else 0.0)
        columns[name] = pa.array(_hexadecimal(hashed_B), pa.string(), mask=missing_B)
    return pa.table(columns)


def _hexadecimal(hashed_B: npt.NDArray[np.uint64]) -> npt.NDArray[np.str_]:
    """Return eight hexadecimal digits of each number, as texts."""
    nibbles_B8 = (hashed_B[:, None] >> np.arange(0, 32, 4, dtype=np.uint64)) & np.uint64(15)
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)[nibbles_B8]
    texts: npt.NDArray[np.str_] = digits.view("S8")[:, 0].astype(str)
    return texts
