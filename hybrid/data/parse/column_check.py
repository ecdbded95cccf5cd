"""A check of the columns that a configuration names, before any process of a cluster starts."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from hybrid.config import RunConfig
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.delimited_text import PEEK_BYTES, column_names
from hybrid.data.parse.input_files import list_files
from hybrid.data.parse.parquet_blocks import open_parquet
from hybrid.data.parse.text_lines import open_text
from hybrid.errors import DataError, StorageError


def check_columns(config: RunConfig) -> None:
    """Check that the first training file and the first test file have the columns of the configuration.

    Raises:
        ConfigError: a file lacks a column, or a key does not fit the files.
        DataError, StorageError: a file cannot be read.
    """
    data = config.data
    if data.format == "synthetic":
        return
    layout = Layout.of(data, config.columns, config.tasks)
    first = list_files(data.path, "data.path")[:1]
    if data.test_path:
        first += list_files(data.test_path, "data.test_path")[:1]
    for path in first:
        if data.format != "parquet":
            with open_text(path) as file:
                names, _ = column_names(path, file.read(PEEK_BYTES), layout)
            layout.require(names, path)
            continue
        try:
            with open_parquet(path) as source:
                layout.require(pq.read_schema(source).names, path)
        except StorageError:
            raise
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path}: is not a readable Parquet file ({error}); check data.format") from error
