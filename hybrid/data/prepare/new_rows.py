"""Files of new rows, encoded as a model has learnt to: to evaluate, or to predict."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from hybrid.config import DataSection, RunConfig
from hybrid.config.resolved_columns import columns_of
from hybrid.data.dataset.dataset_manifest import NO_BAD_ROWS, DataManifest, DatasetReport
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.encode.unknown_values import UnknownCounter
from hybrid.data.parse.input_files import list_files
from hybrid.data.parse.sources import RawBlock, Source
from hybrid.data.prepare.memory_limit import memory_at_hand
from hybrid.data.prepare.split_writer import SplitWriter
from hybrid.data.prepare.stages import TEST
from hybrid.data.values.invalid_rows import BadRowReport
from hybrid.data.values.targets import TargetSpec
from hybrid.errors import ConfigError, DataError
from hybrid.input_spec import InputSpec
from hybrid.primitives.meter import tell_nobody
from hybrid.storage.remote_path import Place


def encode_files(
    config: RunConfig,
    paths: Sequence[str],
    encoder: FeatureEncoder,
    folder: Path,
    *,
    with_labels: bool = True,
    tell: Callable[[str], None] = tell_nobody,
) -> PreparedDataset:
    """Encode files with a fitted encoder, to evaluate or to predict.

    Args:
        config: says how the files are written; the columns are those of ``encoder``.
        paths: files or folders, or URLs of such, as in data.path.
        encoder: from :func:`hybrid.data.prepare.preparation.prepare` or from a checkpoint.
        folder: where the samples are written; must not hold any yet.
        with_labels: whether every row must have a label; without, the label column may be absent.
        tell: told what is going on, a line at a time.

    Returns:
        The samples in the order of the rows; ``source_rows`` tells which of the rows were usable.

    Raises:
        ConfigError, DataError: as in :func:`hybrid.data.prepare.preparation.prepare`.
    """
    files = list_files(paths, "the paths given")
    data = section_for(config, files, encoder.input_spec)
    source = Source(files, data, with_labels, tell=tell, tasks=config.tasks, columns=config.columns)
    with memory_at_hand():
        report = _write_split(source, encoder, folder / TEST)
    if not report.num_rows:
        raise DataError(f"{', '.join(map(str, source.files))}: no rows; check the paths given")
    encoder.save(folder)
    DataManifest.write(folder, encoder.input_spec, {TEST: report})
    return PreparedDataset.open(folder, TEST)


def section_for(config: RunConfig, files: Sequence[Place], spec: InputSpec) -> DataSection:
    """How new files are read for a model: as those that it was trained on, with its columns.

    Raises:
        ConfigError: nothing says how several values stand in a field.
    """
    data = dataclasses.replace(
        config.data,
        format=_format_of(config.data, files),
        dense=spec.dense_features,
        sparse=tuple(f.name for f in spec.sparse_features),
        split="random",
        split_column="",
    )
    if data.format == "csv":
        for feature, column in zip(spec.sparse_features, columns_of(data, config.columns)[1], strict=True):
            if feature.multi_hot and column.kind == "value" and not column.separator:
                rule = f"must be set where the model is trained, since {feature.name} holds several ids"
                raise ConfigError("data.multi_hot_separator", rule)
    return data


def _format_of(data: DataSection, files: Sequence[Place]) -> str:
    """How new files are written: as those of the training, or by their names where it had none."""
    if data.format != "synthetic":
        return data.format
    return "parquet" if all(path.suffix == ".parquet" for path in files) else "csv"


def _write_split(source: Source, encoder: FeatureEncoder, folder: Path) -> DatasetReport:
    log = source.new_log()
    targets = source.targets if source.with_labels else None
    with closing(_EncodingWriter(folder, encoder, targets)) as writer:
        for block in source.blocks(log):
            writer.append(block)
    return writer.report(log.finish())


class _EncodingWriter:
    """Encodes the rows of a split and writes them; to be closed."""

    def __init__(self, folder: Path, encoder: FeatureEncoder, targets: TargetSpec | None) -> None:
        self._encoder = encoder
        self._unknown = UnknownCounter(encoder)
        self._writer = SplitWriter(folder, encoder.input_spec, targets)

    def close(self) -> None:
        self._writer.close()

    def append(self, block: RawBlock) -> None:
        encoded = self._encoder.encode(block)
        self._unknown.add(block, encoded)
        self._writer.append(encoded, block.targets, block.source_rows_B)

    def report(self, bad_rows: BadRowReport = NO_BAD_ROWS) -> DatasetReport:
        return self._writer.report(bad_rows, self._unknown.report())
