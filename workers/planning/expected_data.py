"""The columns of a data set as far as a configuration alone tells them, for plans without data."""

from collections.abc import Mapping
from typing import NamedTuple

from hybrid.config import DataSection, RunConfig
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
    """What the training samples of ``config`` hold; they are prepared where only they tell.

    The built-in click log is known. Hashing makes tables of a size that is known, but how many ids a column
    holds is known only where each holds one, or is said to.

    Args:
        cache: where prepared data sets are kept.
        ids_per_sample: what every sparse column holds in the mean; None where nobody says.

    Raises:
        ConfigError: it is said of columns that are not hashed, or a key does not fit the files.
        DataError: the files cannot be used.
    """
    data = config.data
    if ids_per_sample is not None and (data.vocabulary != "hash" or data.format == "synthetic"):
        rule = 'is read where data.vocabulary is "hash" only: other tables have the rows of their data'
        raise ConfigError("--ids", rule, ids_per_sample)
    if ids_per_sample is not None and config.columns:
        rule = "is read where there are no sections [columns.NAME] only: they make columns of other numbers"
        raise ConfigError("--ids", rule, ids_per_sample)
    if data.format == "synthetic":
        return Expected(ClickLog(config.run.seed).encoder.input_spec, {})
    is_plain = not config.columns  # what sections say of columns, the data tell
    if data.vocabulary == "hash" and is_plain and (ids_per_sample is not None or _holds_one_id(data)):
        return _hashed(data, ids_per_sample)
    with passing_status() as say:
        folder = ensure_prepared(config, cache, say)
    dataset = open_split(folder, "train", data)
    return Expected(dataset.input_spec, dataset.ids_per_sample)


def _holds_one_id(data: DataSection) -> bool:
    """Whether each sparse column holds one id a sample, whatever is in the files."""
    return data.format == "criteo" or (data.format == "csv" and not data.multi_hot_separator)


def _hashed(data: DataSection, ids_per_sample: float | None) -> Expected:
    named = Layout.of(data, with_labels=False).data
    is_multi_hot = ids_per_sample is not None
    features = tuple(FeatureSpec(name, data.hash_rows, is_multi_hot) for name in named.sparse)
    means = {} if ids_per_sample is None else dict.fromkeys(named.sparse, ids_per_sample)
    return Expected(InputSpec(named.dense, features), means)
