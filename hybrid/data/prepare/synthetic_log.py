"""The synthetic click log: Criteo's columns, and labels from a known model, so the best score is known.

The label of a sample is drawn with probability sigmoid(logit), where::

    logit = bias + effects of three numeric columns (two linear, one tanh)
                 + an effect of each id of seven categorical columns
                 + pairwise terms of a factorization machine of rank 1 over four of these columns

The click is the column ``label``. Three other columns can be labels: ``converted`` (0 or 1; 1 only after a
click), ``spent`` (a number), and ``stars`` (a class from 0 to 4). ``data.weight`` may name the column
``weight``, and ``data.group`` any categorical column. Categorical columns beyond the seven have no effect.
Ids are skewed: u is uniform, id = floor(rows * u**3). Seed and number of rows determine a split.
"""

import dataclasses
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybrid.config import RunConfig
from hybrid.data.encode.feature_encoder import EncodedBlock
from hybrid.data.parse.column_layout import CRITEO_DENSE, CRITEO_SPARSE
from hybrid.data.values.model_columns import Targets, TargetSpec
from hybrid.errors import ConfigError
from hybrid.input_spec import FeatureSpec, InputSpec

# fmt: off
TABLE_ROWS = (
    10, 20, 30, 40,                                                       # effects and products
    100, 300, 1_000,                                                      # effects
    50, 60, 80, 100, 150, 200, 200, 300, 300, 400, 500, 600, 800, 1_000,  # no effect
    2_000, 5_000, 10_000, 30_000, 100_000,
)
# fmt: on
INPUT_SPEC = InputSpec(CRITEO_DENSE, tuple(map(FeatureSpec, CRITEO_SPARSE, TABLE_ROWS)))
NUM_PRODUCTS = 4
NUM_EFFECTS = 7
PRODUCT_SCALE = 0.7
EFFECT_SCALE = 0.4
BIAS = -1.6
BLOCK_ROWS = 65_536
CLICKED, CONVERTED, SPENT, STARS, WEIGHT = "label", "converted", "spent", "stars", "weight"
NUM_STARS = 5
_LABELS = {"binary": (CLICKED, CONVERTED), "regression": (SPENT,), "classes": (STARS,)}

_TRUTH_STREAM = 0
_SAMPLE_STREAMS = {"train": 1, "test": 2, "validation": 3}


class SyntheticBlock(NamedTuple):
    """B samples of the click log, with their true logits, and columns for labels, masks and weights."""

    samples: EncodedBlock  # without targets
    rows_B: npt.NDArray[np.int64]  # index of each sample in its split
    logits_B: npt.NDArray[np.float32]  # of the true probabilities of clicks
    columns: dict[str, npt.NDArray[np.float32]]  # the columns that can be labels, masks or weights, by name

    def targets(self, spec: TargetSpec) -> Targets:
        tasks, data = spec.tasks.values(), spec.data
        labels_BT = np.stack([self.columns[task.label] for task in tasks], axis=1)
        weights_BT, groups_B = None, None
        if spec.has_weights:
            counts = [self.columns[task.mask] if task.mask else np.ones_like(self.logits_B) for task in tasks]
            weights_BT = np.stack(counts, axis=1)
            if data.weight:
                weights_BT = weights_BT * self.columns[data.weight][:, None]
        if data.group:
            groups_B = self.samples.ids_BK[:, CRITEO_SPARSE.index(data.group)].astype(np.int64)
        return Targets(labels_BT, weights_BT, groups_B)


def targets(config: RunConfig) -> TargetSpec:
    """Return the label, mask, weight and group columns of a run; ConfigError if the log lacks one of them."""
    spec = TargetSpec.of(config.tasks, dataclasses.replace(config.data, label=CLICKED))
    for name, task in spec.tasks.items():
        _check_column(f"tasks.{name}.label", task.label, _LABELS[task.kind])
        _check_column(f"tasks.{name}.mask", task.mask, ("", *_LABELS["binary"]))
        if task.kind == "classes" and task.classes != NUM_STARS:
            rule = f"must have {NUM_STARS} classes, like the column {STARS} of the synthetic click log"
            raise ConfigError(f"tasks.{name}.type", rule, task.type)
    _check_column("data.weight", spec.data.weight, ("", WEIGHT))
    _check_column("data.group", spec.data.group, ("", *CRITEO_SPARSE))
    return spec


def _check_column(key: str, column: str, allowed: Collection[str]) -> None:
    if column not in allowed:
        rule = f"must be one of the columns {', '.join(filter(None, allowed))} of the synthetic click log"
        raise ConfigError(key, rule, column)


class ClickLog:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        rng = np.random.default_rng((seed, _TRUTH_STREAM))
        self._effects = [_draw_effects(rng, EFFECT_SCALE, rows) for rows in TABLE_ROWS[:NUM_EFFECTS]]
        self._factors = [_draw_effects(rng, PRODUCT_SCALE, rows) for rows in TABLE_ROWS[:NUM_PRODUCTS]]

    def blocks(self, split: str, num_rows: int) -> Iterator[SyntheticBlock]:
        """Yield ``num_rows`` samples of the split "train", "test" or "validation", block by block."""
        for block, start in enumerate(range(0, num_rows, BLOCK_ROWS)):
            rng = np.random.default_rng((self._seed, _SAMPLE_STREAMS[split], block))
            size = min(BLOCK_ROWS, num_rows - start)
            dense_BF = rng.standard_normal((size, len(CRITEO_DENSE)), np.float32)
            ids_KB = np.empty((len(TABLE_ROWS), size), np.int32)
            for k, rows in enumerate(TABLE_ROWS):
                u_B = rng.random(size, np.float32)
                # u < 1, yet rows * u**3 may round up to rows.
                ids_KB[k] = np.minimum((rows * u_B * u_B * u_B).astype(np.int32), rows - 1)
            x = dense_BF.T
            logits_B: npt.NDArray[np.float32] = BIAS + 0.5 * x[0] - 0.4 * x[1] + 0.4 * np.tanh(x[2])
            for effect, ids_B in zip(self._effects, ids_KB, strict=False):
                logits_B += effect[ids_B]
            # The sum of the products of all pairs, as in Rendle's factorization machines (2010, equation 5).
            factors = [factor[ids_B] for factor, ids_B in zip(self._factors, ids_KB, strict=False)]
            factors_KB = np.stack(factors)
            logits_B += 0.5 * (factors_KB.sum(0) ** 2 - (factors_KB**2).sum(0))
            clicked_B = rng.random(size, np.float32) < sigmoid(logits_B)
            rows_B = np.arange(start, start + size)
            # Further columns are drawn last, so that the clicks do not depend on them.
            converts_B = rng.random(size, np.float32) < sigmoid(
                np.float32(0.8) * x[3] + np.float32(0.6) * x[0]
            )
            noise_B = rng.standard_normal(size, np.float32)
            spent_B = 2 + np.float32(0.5) * logits_B + np.float32(0.7) * x[4] + np.float32(0.5) * noise_B
            columns = {
                CLICKED: clicked_B.astype(np.float32),
                CONVERTED: (converts_B & clicked_B).astype(np.float32),
                SPENT: spent_B,
                STARS: np.clip(np.rint(spent_B), 0, NUM_STARS - 1),
                WEIGHT: np.float32(0.5) + rng.random(size, np.float32),
            }
            yield SyntheticBlock(EncodedBlock(dense_BF, ids_KB.T), rows_B, logits_B, columns)


def sigmoid(logits_B: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    odds_B: npt.NDArray[np.float32] = np.exp(logits_B)
    return odds_B / (1 + odds_B)


def _draw_effects(rng: np.random.Generator, scale: float, rows: int) -> npt.NDArray[np.float32]:
    """Draw a value for each id. Over samples, the values have mean 0 and standard deviation ``scale``."""
    fraction = np.diff(np.cbrt(np.arange(rows + 1) / rows))
    values = rng.standard_normal(rows)
    values -= fraction @ values
    return (scale * values / np.sqrt(fraction @ values**2)).astype(np.float32)
