"""The splits of the rows, and the values of data.split and data.validation."""

from __future__ import annotations

from typing import NamedTuple

from hybrid.config.key import CallSignatures, argument

TRAIN, VALIDATION, TEST = SPLITS = "train", "validation", "test"
PATH_KEYS = {TRAIN: "data.path", VALIDATION: "data.validation", TEST: "data.test_path"}
_COLUMN = argument("column", str, None)
_FRACTION = argument("fraction", float, 0.1, above=0, maximum=0.9)
_HOLDOUTS = {"random": (_FRACTION,), "column": (_COLUMN, _FRACTION), "time": (_COLUMN, _FRACTION)}
SPLIT_CALLS = CallSignatures({**_HOLDOUTS, "none": ()})
VALIDATION_CALLS = CallSignatures(
    {"none": (), **_HOLDOUTS, "path": (argument("paths", str, None, is_list=True),)}
)


class Holdout(NamedTuple):
    """Rows of ``data.path`` that are held out from training.

    Attributes:
        split: the split of these rows, "test" or "validation".
        key: the key of the configuration that selects them.
        by: random, column or time.
        column: the column that decides; empty for random rows.
        fraction: the fraction of the rows that earlier splits leave.
    """

    split: str
    key: str
    by: str
    column: str
    fraction: float
