"""Input files, and reading and preparing them in one call."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import torch

from hybrid.batch import Batch, SparseFeatures
from hybrid.config import ColumnSection, DataSection, RunConfig, TableSection, TaskSection
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.encode.fitting import FittedStatistics, ValueCounts, fit_encoder, group_by_vocabulary, rank
from hybrid.data.parse import delimited_text
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.input_files import list_files
from hybrid.data.parse.sources import RawBlock, read_blocks
from hybrid.data.prepare.preparation import prepare
from hybrid.data.values.invalid_rows import InvalidRowLog, InvalidRowReport
from hybrid.data.values.model_columns import Targets
from hybrid.storage.remote_path import StoragePath


def csv_config(*paths: StoragePath, **keys: Any) -> RunConfig:
    """Return the configuration of a run on CSV files, with some keys of [data]."""
    return RunConfig(data=DataSection(format="csv", path=tuple(map(str, paths)), **keys))


def prepared(config: RunConfig, cache: Path) -> tuple[PreparedDataset, PreparedDataset]:
    """Prepare data; return the training samples and the test samples."""
    folder = prepare(config, cache)
    return PreparedDataset(folder, "train"), PreparedDataset(folder, "test")


def write(path: Path, text: str | bytes) -> Path:
    """Write a file; return its path."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def write_cities(path: Path, num_rows: int) -> Path:
    """Write a CSV whose row i has x = i, city = c(i % 5), and i % 3 tags."""
    rows = [f"{i % 2},{i},c{i % 5},{'|'.join(f't{j}' for j in range(i % 3))}" for i in range(num_rows)]
    return write(path, "label,x,city,tags\n" + "\n".join(rows))


def features_of_bags(
    bags: list[list[list[int]]], weights: list[list[list[float]]] | None = None
) -> SparseFeatures:
    """Return features with the ids ``bags[feature][sample]``, and weights in this form."""
    flat = [bag for feature in bags for bag in feature]
    lengths = torch.tensor([0] + [len(bag) for bag in flat], dtype=torch.int64)
    weights_L = None
    if weights is not None:
        values = [w for feature in weights for bag in feature for w in bag]
        weights_L = torch.tensor(values, dtype=torch.float32)
    ids_L = torch.tensor([i for bag in flat for i in bag], dtype=torch.int64)
    return SparseFeatures(ids_L, lengths.cumsum(0), weights_L, len(bags))


def whole(dataset: PreparedDataset) -> Batch:
    """Return all samples of a split."""
    return dataset.gather(np.arange(dataset.num_samples), 1)


def read(
    data: DataSection,
    *paths: Path,
    with_labels: bool = True,
    block_bytes: int = 1 << 20,
    tasks: Mapping[str, TaskSection] = MappingProxyType({}),
    columns: Mapping[str, ColumnSection] = MappingProxyType({}),
) -> tuple[RawBlock, InvalidRowReport]:
    """Return all rows of some files as one block, and the report of invalid rows."""
    files = list_files(tuple(map(str, paths)), "data.path")
    layout = Layout.of(data, columns, tasks, with_labels=with_labels)
    log = InvalidRowLog(data.max_invalid_fraction)
    with patch.object(delimited_text, "BLOCK_BYTES", block_bytes):
        blocks = list(read_blocks(files, layout, log))
    assert blocks
    targets = [b.targets for b in blocks if b.targets is not None]
    block = RawBlock(
        np.concatenate([b.dense_BF for b in blocks]),
        tuple(pa.concat_arrays(columns) for columns in zip(*(b.sparse for b in blocks), strict=True)),
        _joined(targets) if targets else None,
        np.concatenate([b.source_rows_B for b in blocks]),
        tuple(pa.concat_arrays(lists) for lists in zip(*(b.weights for b in blocks), strict=True)),
    )
    return block, log.finish()


def _joined(parts: Sequence[Targets]) -> Targets:
    columns = zip(*parts, strict=True)
    return Targets(*(None if column[0] is None else np.concatenate(column) for column in columns))  # type: ignore[arg-type]


def fit(
    blocks: Iterable[RawBlock],
    data: DataSection,
    columns: Mapping[str, ColumnSection] = MappingProxyType({}),
    tables: Mapping[str, TableSection] = MappingProxyType({}),
) -> FeatureEncoder:
    """Return an encoder fitted on some blocks."""
    layout, blocks = Layout.of(data, columns, with_labels=False), [*blocks]
    ranked = {
        name: rank([ValueCounts.of(block.sparse[k]) for block in blocks for k in group])
        for name, group in group_by_vocabulary(layout.sparse, tables).items()
    }
    return fit_encoder(layout, tables, FittedStatistics.of_all(blocks, layout), ranked)


def located(report: InvalidRowReport, path: Path) -> list[str]:
    """Return the examples of a report as ``LINE: reason``; all must be of ``path``."""
    assert all(example.startswith(f"{path}:") for example in report.examples)
    return [example.removeprefix(f"{path}:") for example in report.examples]
