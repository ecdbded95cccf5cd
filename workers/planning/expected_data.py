"""The columns of a data set as far as the configuration defines them, for plans without data."""

from collections.abc import Mapping
from typing import NamedTuple

from hybrid.config import RunConfig
from hybrid.data.parse.column_layout import Layout
from hybrid.data.prepare.dataset_location import ensure_prepared, open_split
from hybrid.data.prepare.synthetic_log import ClickLog
from hybrid.errors import ConfigError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.storage.remote_path import StoragePath
from workers.console.terminal import passing_status


class Expected(NamedTuple):
    """Columns, and the mean number of ids of each multi-hot feature."""

    input_spec: InputSpec
    ids_per_sample: Mapping[str, float]


def expected_data(config: RunConfig, cache: StoragePath, ids_per_sample: float | None = None) -> Expected:
    """Return the columns of the training samples; prepare the data if nothing else defines them.

    The synthetic click log is known. With hashing, the size of tables is known, and the number of ids if each
    column holds one id or ``ids_per_sample`` is given.

    Args:
        cache: folder of prepared data sets.
        ids_per_sample: mean number of ids of every sparse column, if known.

    Raises:
        ConfigError: ``ids_per_sample`` is given for other columns, or a key does not fit the files.
        DataError: the files are invalid.
    """
    data, is_hashed = config.data, config.data.vocabulary_call.name == "hash"
    if ids_per_sample is not None and (not is_hashed or data.format == "synthetic"):
        rule = 'needs data.vocabulary = "hash": other tables have the rows of their data'
        raise ConfigError("--ids", rule, ids_per_sample)
    if ids_per_sample is not None and config.columns:
        rule = "needs a configuration without sections [columns.NAME], which change the number of ids"
        raise ConfigError("--ids", rule, ids_per_sample)
    if data.format == "synthetic":
        return Expected(ClickLog(config.run.seed).encoder.input_spec, {})
    is_multi_hot = ids_per_sample is not None
    has_one_id = data.format == "criteo" or (data.format == "csv" and not data.multi_hot_separator)
    if is_hashed and not config.columns and (is_multi_hot or has_one_id):
        columns = Layout.of(data, with_labels=False).data
        features = tuple(
            FeatureSpec(name, data.vocabulary_call["rows"], is_multi_hot) for name in columns.sparse
        )
        means = {} if ids_per_sample is None else dict.fromkeys(columns.sparse, ids_per_sample)
        return Expected(InputSpec(columns.dense, features), means)
    with passing_status() as report:
        folder = ensure_prepared(config, cache, report)
    dataset = open_split(folder, "train", data)
    return Expected(dataset.input_spec, dataset.ids_per_sample)
