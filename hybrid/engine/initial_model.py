"""The initial model of a run, from another run and from files: ``train.initial``, ``tables.NAME.initial``.

The source of a table's initial rows is a table of another run, or a file. Each value of the data, such as a
user ID, gets the row of the same value in the source. Only ``positions(FILE)`` copies rows by position. The
master finds the sources, and checks that they fit. Later, workers read the rows, and trainers read the nets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from hybrid.checkpoint.checkpoint_folders import CUSTOM_LOOP, REMOTE_FILE
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig, TableSection
from hybrid.config.data_sections import GROW
from hybrid.config.loading import CONFIG_FILE, load_config
from hybrid.data.encode.feature_encoder import FeatureEncoder, SparseEncoding
from hybrid.embedding.saved_tables import SavedTable, open_tables
from hybrid.embedding.stored_matrix import make_absolute, read_shape
from hybrid.embedding.table_spec import TableSpec
from hybrid.engine.model_builder import table_specs
from hybrid.errors import CheckpointError, ConfigError
from hybrid.input_spec import InputSpec
from hybrid.storage.remote_path import parse_path

MODEL_KEY = "train.initial"


class InitialModel:
    """The tables of a run with the sources of their initial rows, and the source of its dense nets.

    Args:
        encoder_folder: path or URL of the data's encoder; None if the ids of the data are row numbers.
        warn: logs damaged checkpoints, and tables that the run ``train.initial`` lacks.

    Attributes:
        tables: the tables of this run; ``initial`` is set for tables with a source.
        dense: the checkpoint with the dense nets; None for new nets.
        has_dense_state: whether ``dense`` also has optimizer state that fits the dense optimizer of this run.
        notes: lines for the console about the sources.

    Raises:
        ConfigError: a source cannot be used, or does not fit.
        DataError, StorageError: a file cannot be read.
    """

    def __init__(
        self,
        config: RunConfig,
        input_spec: InputSpec,
        encoder_folder: str | None,
        warn: Callable[[str], object],
    ) -> None:
        self.dense: Checkpoint | None = None
        self.has_dense_state = False
        self.notes: list[str] = []
        self._config = config
        self._encoder_folder = encoder_folder or ""
        self._warn = warn
        self._opened: dict[str, tuple[Checkpoint, dict[str, SavedTable]]] = {}
        self._input_spec = input_spec
        # For each table whose rows are found by value, the configuration key that names their source.
        self._config_keys: dict[str, str] = {}
        if config.train.initial:
            self._open_dense(config.train.initial)
        self.tables = tuple(map(self._with_source, table_specs(config, input_spec)))
        if config.train.initial:
            self._warn_of_missing(config.train.initial)

    @cached_property
    def _encoder(self) -> FeatureEncoder:
        if not self._encoder_folder:
            return FeatureEncoder.identity(self._input_spec)
        return FeatureEncoder.load(parse_path(self._encoder_folder), with_values=False)

    def describe_matches(self, matches: Mapping[str, int]) -> list[str]:
        """Return a line per source, such as "values with a row in runs/old: user 900 of 1,000, item 5 of 6".

        Args:
            matches: by table, the number of the table's values that have a row in its source.

        Raises:
            ConfigError: a table has values, and none of them has a row in the table's source.
        """
        texts: dict[str, list[str]] = {}
        for table in self.tables:
            if (key := self._config_keys.get(table.name)) is None:
                continue
            num_values, num_matches = table.num_rows - 1, matches[table.name]
            if num_values and not num_matches:
                of_columns = f"of {', '.join(table.features)}; correct the column, {_remedy(table)}"
                any_value = "any value" if table.growth else f"any of the {num_values:,} values"
                raise ConfigError(key, f"has no row for {any_value} {of_columns}", table.initial)
            of_values = "" if table.growth else f" of {num_values:,}"
            texts.setdefault(table.initial, []).append(f"{table.name} {num_matches:,}{of_values}")
        return [f"values with a row in {source}: {', '.join(each)}" for source, each in texts.items()]

    def _open_dense(self, run: str) -> None:
        """Find the dense nets of ``run``; raise ConfigError if their inputs or tasks do not fit this run."""
        stored, _ = self._open(MODEL_KEY, run)
        if stored.is_exported:
            raise ConfigError(MODEL_KEY, "is an export, which has no optimizer state; name a run", run)
        if CUSTOM_LOOP in stored.manifest.progress:
            rule = "was saved by a custom training loop; name the run of a configuration, or use cluster.load"
            raise ConfigError(MODEL_KEY, rule, run)
        before = load_config(stored.files_folder / CONFIG_FILE, is_stored=True)
        now, columns = self._config, self._input_spec
        columns_before = FeatureEncoder.load(stored.files_folder, with_values=False).input_spec
        names = [each.name for each in columns.sparse_features]
        names_before = [each.name for each in columns_before.sparse_features]
        _check_order("data.dense", run, columns_before.dense_features, columns.dense_features)
        _check_order("data.sparse", run, names_before, names)
        _check_order("tasks", run, [*before.all_tasks], [*now.all_tasks])
        if bool(now.dense.remote_mlp) != (REMOTE_FILE in stored.manifest.files):
            rule = f"must be as in {run}: a remote net exists only there or only here; {_NEW_NETS}"
            raise ConfigError("dense.remote_mlp", rule, now.dense.remote_mlp)
        optimizers = [each.dense.optimizer_call[0] for each in (before, now)]
        self.dense, self.has_dense_state = stored, optimizers[0] == optimizers[1]
        rank = f", {stored.rank_text}" if stored.rank_text else ""
        self.notes.append(f"the initial model comes from {stored.folder}{rank}")
        if not self.has_dense_state:
            self.notes.append(f"dense nets: new optimizer state ({' there, '.join(optimizers)} here)")

    def _with_source(self, table: TableSpec) -> TableSpec:
        section, run = self._section(table), self._config.train.initial
        key, call = f"tables.{table.name}.initial", section.initial_call
        if call.name == "random":
            return table
        if call.name == "positions":
            source = make_absolute(section.initial_path)
            if (shape := read_shape(source)) != (table.num_rows, table.dim):
                size = f"{table.num_rows} rows of {table.dim}, as the table has"
                raise ConfigError(key, f"must have {size}, not {shape[0]} of {shape[1]}", section.initial)
            return replace(table, initial=source)
        if section.initial.endswith(".parquet"):
            if self._encoding(key, table).vocabulary == "buckets":
                raise ConfigError(key, "is for values; the column has buckets of numbers", section.initial)
            self._config_keys[table.name] = key
            return replace(table, initial=make_absolute(section.initial), encoder_folder=self._encoder_folder)
        if section.initial:
            path, _, name = section.initial.partition("#")
            tables = self._open(key, path)[1]
            other = tables.get(name or table.name)
            if other is None:
                known = ", ".join(f"{path}#{each}" for each in sorted(tables))
                rule = f"has no table {name or table.name!r}; choose from {known}"
                raise ConfigError(key, rule, section.initial)
            return self._from_table(key, section.initial, table, other)
        if run and (saved := self._opened[run][1].get(table.name)) is not None:
            return self._from_table(MODEL_KEY, run, table, saved)
        return table

    def _from_table(self, key: str, source: str, table: TableSpec, saved: SavedTable) -> TableSpec:
        """Return ``table`` with ``saved`` as its source; raise ConfigError if the two do not fit."""
        if saved.dim != table.dim:
            rule = f"has rows of {saved.dim} numbers for table {table.name}, which has {table.dim}"
            raise ConfigError(key, f"{rule}; set its dim as there, {_remedy(table)}", source)
        if not saved.encodings:
            rule = f"has no values for the rows of table {saved.name}, since a custom loop saved it"
            raise ConfigError(key, f"{rule}; choose another source, {_remedy(table)}", source)
        here = _describe(self._encoding(key, table))
        there = sorted({_describe(each) for each in saved.encodings})
        if there != [here]:
            rule = f"has rows by {' and '.join(there)} for table {table.name}, which has rows by {here}"
            raise ConfigError(key, f"{rule}; define the column as there, {_remedy(table)}", source)
        has_state = saved.optimizer == table.optimizer.name
        if saved.optimizer and not has_state:
            optimizers = f"{saved.optimizer} there, {table.optimizer.name} here"
            self.notes.append(f"table {table.name}: new optimizer state ({optimizers})")
        self._config_keys[table.name] = key
        return replace(
            table,
            initial=str(saved.checkpoint.folder.absolute()),  # workers have other working directories
            initial_table=saved.name,
            has_initial_state=has_state,
            encoder_folder=self._encoder_folder,
        )

    def _warn_of_missing(self, run: str) -> None:
        """Warn of tables that ``run`` lacks. The warning also names the unused tables of ``run``."""
        missing = [each.name for each in self.tables if not (each.initial or self._section(each).initial)]
        unread = sorted(self._opened[run][1].keys() - {each.initial_table for each in self.tables})
        if missing:
            unread_text = f" No table reads {', '.join(unread)} of that run." if unread else ""
            remedy = f'If a column was renamed, set tables.NAME.initial = "{run}#OLD_NAME".'
            self._warn(f"{run} has no table {', '.join(missing)}: new rows.{unread_text} {remedy}")

    def _section(self, table: TableSpec) -> TableSection:
        return self._config.tables.get(table.name, TableSection())

    def _encoding(self, key: str, table: TableSpec) -> SparseEncoding:
        """Return the encoding of a table's columns; ConfigError if two columns map values differently."""
        first, *others = (each for each in self._encoder.sparse if each.name in table.features)
        if {*map(_describe, others)} - {_describe(first)}:
            rule = f"is not possible: the columns of table {table.name} do not have rows by the same values"
            raise ConfigError(key, f"{rule}; define them alike, {_remedy(table)}")
        return first

    def _open(self, key: str, path: str) -> tuple[Checkpoint, dict[str, SavedTable]]:
        """Open an export, or the best checkpoint of a run; return the checkpoint and its tables by name."""
        if path not in self._opened:
            try:
                stored = Checkpoint.best_valid(parse_path(path), self._warn)
                self._opened[path] = stored, open_tables(stored.folder)
            except CheckpointError as error:
                raise ConfigError(key, f"is neither a run nor an export of tables: {error}", path) from error
        return self._opened[path]


_NEW_NETS = "to start with new dense nets, set tables.NAME.initial instead of train.initial"


def other_net_error(run: str, reason: str) -> ConfigError:
    """Return the error for dense nets of ``run`` that do not fit this run; ``reason`` is the difference."""
    rule = f"has another dense net: {reason}; keep [dense], its columns and tasks; {_NEW_NETS}"
    return ConfigError(MODEL_KEY, rule, run)


def _remedy(table: TableSpec) -> str:
    return f"or set tables.{table.name}.initial = random for new rows"


def _describe(encoding: SparseEncoding) -> str:
    """Describe how a column maps values to rows. A source fits a table only if both have the same text."""
    kinds = {
        "build": "values",
        "hash": f"hashes into {encoding.num_rows:,} rows",
        "identity": "row numbers",
        "buckets": "buckets of numbers",
        GROW: "values",
    }
    return kinds[encoding.vocabulary]


def _check_order(key: str, run: str, before: Sequence[str], now: Sequence[str]) -> None:
    """Raise ConfigError if a name has different positions in ``before`` (in ``run``) and in ``now``."""
    for name in now:
        if name in before and before.index(name) != now.index(name):
            rule = f"has {name} at another position than {run}, whose dense nets depend on the order"
            raise ConfigError(key, f"{rule}; write {', '.join(before)}, and new names at the end", [*now])
