"""Files of new rows, encoded with a fitted encoder: to evaluate, or to predict."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from hybrid.config import DataSection, RunConfig
from hybrid.config.resolved_columns import columns_of
from hybrid.data.dataset.dataset_manifest import DataManifest
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.encode.unknown_values import UnknownCounter
from hybrid.data.parse.input_files import list_files
from hybrid.data.parse.sources import Source
from hybrid.data.prepare.memory_limit import explain_memory_errors
from hybrid.data.prepare.split_writer import SplitWriter
from hybrid.data.prepare.stages import TEST
from hybrid.errors import ConfigError, DataError
from hybrid.input_spec import InputSpec
from hybrid.primitives.progress import ignore_progress
from hybrid.storage.remote_path import StoragePath


def encode_files(
    config: RunConfig,
    paths: Sequence[str],
    encoder: FeatureEncoder,
    folder: Path,
    *,
    with_labels: bool = True,
    report: Callable[[str], None] = ignore_progress,
) -> PreparedDataset:
    """Encode files with a fitted encoder.

    Args:
        config: defines how the files are written; the columns are those of ``encoder``.
        paths: files or folders, or URLs of such, as in data.path.
        encoder: from :func:`hybrid.data.prepare.preparation.prepare` or from a checkpoint.
        folder: of the samples; it must not hold any.
        with_labels: whether every row must have a label; without, the label column may be absent.
        report: receives progress, one line at a time.

    Returns:
        The samples in the order of the rows; ``source_rows`` has the number of the row of each.

    Raises:
        ConfigError, DataError: as in :func:`hybrid.data.prepare.preparation.prepare`.
    """
    files = list_files(paths, "the paths given")
    data = section_for(config, files, encoder.input_spec)
    source = Source(files, data, with_labels, report=report, tasks=config.tasks, columns=config.columns)
    log, unknown = source.new_log(), UnknownCounter(encoder)
    targets = source.targets if with_labels else None
    with (
        explain_memory_errors(),
        closing(SplitWriter(folder / TEST, encoder.input_spec, targets)) as writer,
    ):
        for block in source.blocks(log):
            encoded = encoder.encode(block)
            unknown.add(block, encoded)
            writer.append(encoded, block.targets, block.source_rows_B)
    result = writer.report(log.finish(), unknown.report())
    if not result.num_rows:
        raise DataError(f"{', '.join(map(str, source.files))}: no rows; check the paths given")
    encoder.save(folder)
    DataManifest.write(folder, encoder.input_spec, {TEST: result})
    return PreparedDataset.open(folder, TEST)


def section_for(config: RunConfig, files: Sequence[StoragePath], spec: InputSpec) -> DataSection:
    """Return how new files are read for a model: as its training files, with its columns.

    Raises:
        ConfigError: no separator of several values in a field is set.
    """
    file_format = config.data.format
    if file_format == "synthetic":  # there were no training files
        file_format = "parquet" if all(path.suffix == ".parquet" for path in files) else "csv"
    data = dataclasses.replace(
        config.data,
        format=file_format,
        dense=spec.dense_features,
        sparse=tuple(f.name for f in spec.sparse_features),
        split="random",
    )
    if data.format == "csv":
        for feature, column in zip(spec.sparse_features, columns_of(data, config.columns)[1], strict=True):
            if feature.multi_hot and column.kind == "value" and not column.separator:
                rule = f"must be set where the model is trained, since {feature.name} holds several ids"
                raise ConfigError("data.multi_hot_separator", rule)
    return data
