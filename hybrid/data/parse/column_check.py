"""A check before a run starts: whether the input has the columns that the configuration names."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

from hybrid.config import RunConfig
from hybrid.config.data_sections import JOINS, PATH_KEYS, TRAIN
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.input_files import expand_pattern, find_side_files, list_files
from hybrid.data.parse.side_tables import read_side_tables
from hybrid.data.parse.sources import read_names
from hybrid.errors import ConfigError
from hybrid.storage import files as storage


def check_input_columns(config: RunConfig) -> None:
    """Check the columns of the first non-empty file of each side table, and of each split such as ``test``.

    For a Kafka topic, which has no files, check the names in ``data.columns``. For a stream of files, files
    that do not exist yet are no error. Raise ConfigError if the configuration is invalid, or a column is
    missing or not allowed. Raise DataError or StorageError if a file is missing, unreadable or unsuitable.
    """
    data = config.data
    if data.format == "synthetic":
        return
    layout = Layout.of(data, config.columns, config.tasks)
    tables = read_side_tables(data, layout.required, find_side_files(data), with_rows=False)
    for table in tables:
        if config.retrieval is not None and table.key == config.retrieval.item and table.columns.column_names:
            rule = f"gives the user tower columns of the chosen item, the answer ({table.path}); remove them"
            raise ConfigError(JOINS, rule, table.columns.column_names)
    layout = replace(layout, side_tables=tables)
    if data.is_topic:
        layout.require(layout.data.columns, Path(data.stream_call["topic"]))
        return
    for split, paths in data.paths.items():
        if data.is_stream:  # the first unit may come later
            found = (path for text in paths for path in expand_pattern(text) if storage.exists(path))
            paths = tuple(map(str, islice(found, 1)))
            if not paths:
                continue
        files = list_files(paths, PATH_KEYS[split]) if paths or split == TRAIN else ()
        path = next((each for each in files if storage.require_file(each).size), None)
        if path is not None:
            read_names(path, layout if split == TRAIN else layout.without_holdouts)
