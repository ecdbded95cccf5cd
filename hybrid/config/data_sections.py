"""Keys of [data] and [columns.NAME]: input files, and the columns that a model reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote

from hybrid.config.key import Call, CallSignatures, argument, by_host, fixed, in_files, model, option, setting
from hybrid.errors import ConfigError

FORMATS = ("synthetic", "criteo", "csv", "parquet")
TRANSFORMS = ("none", "log")
_LOG = argument("log", bool, False)
_MOMENTS = argument("mean", float, None), argument("std", float, None, above=0)
SCALING_CALLS = CallSignatures(
    {"standardize": (_LOG,), "min_max": (_LOG,), "given": (*_MOMENTS, _LOG), "none": (_LOG,)}
)
FITTED_SCALINGS = ("standardize", "min_max")  # by the training rows
DEFAULT_HASH_ROWS = 100_000
GROW = "grow"
UNKNOWN_ROWS = ("initial", "zeros")  # choices for the vector of a key without a row
MIN_GROWING_ROWS = 8192  # the smallest limit of rows: 8 in each of 1,024 buckets
VOCABULARY_CALLS = CallSignatures(
    {
        "build": (argument("min_count", int, 1, minimum=1),),
        "hash": (argument("rows", int, DEFAULT_HASH_ROWS, minimum=2, maximum=2_000_000_000),),
        GROW: (
            argument("admit_after", int, 1, minimum=1, maximum=1_000_000),
            argument("max_rows", int, 0, minimum=0),
            argument("evict_after", int, 0, minimum=0),
            argument("half_life", int, 10_000, minimum=1),
            argument("unknown", str, "initial", choices=UNKNOWN_ROWS),
        ),
    }
)
SHUFFLE_CALLS = CallSignatures(
    {"rows": (), "lanes": (argument("lanes", int, 64, minimum=1, maximum=4096),), "none": ()}
)
KAFKA = "kafka"
_TIME = argument("time", str, "")
STREAM_CALLS = CallSignatures(
    {
        "none": (),
        "files": (
            argument("lanes", int, 16, minimum=1, maximum=4096),
            argument("marker", str, ""),
            argument("wait_hours", float, 0.0, minimum=0),
            argument("until", str, ""),
            argument("scaling_momentum", float, 0.0, minimum=0, maximum=1),
            _TIME,
        ),
        KAFKA: (
            argument("brokers", str, None),
            argument("topic", str, None),
            argument("start", str, "earliest", choices=("earliest", "latest")),
            argument("wait_hours", float, 1.0, above=0, maximum=10_000),
            argument("properties", str, ""),
            _TIME,
        ),
    }
)
JOIN_CALLS = CallSignatures(
    {
        "table": (
            argument("path", str, None, is_list=True),
            argument("key", str, None),
            argument("table_key", str, ""),
            argument("columns", str, (), is_list=True),
        )
    }
)
_FORMAT = argument("format", str, "")
KIND_CALLS = CallSignatures(
    {
        "value": (),
        "buckets": (argument("bounds", float, None, is_list=True),),
        "quantiles": (argument("buckets", int, None, minimum=2),),
        "hour": (_FORMAT,),
        "weekday": (_FORMAT,),
        "cross": (),
        "weighted": (argument("separator", str, ":"),),
    }
)
POOLINGS = ("sum", "mean", "max")
UNPOOLED = "none"
SPLITS = TRAIN, VALIDATION, TEST = "train", "validation", "test"
PATH_KEYS = {TRAIN: "data.path", VALIDATION: "data.validation", TEST: "data.test_path"}
JOINS = "data.joins"
_COLUMN = argument("column", str, None)
_FRACTION = argument("fraction", float, 0.1, above=0, maximum=0.9)
_HOLDOUTS = {"random": (_FRACTION,), "column": (_COLUMN, _FRACTION), "time": (_COLUMN, _FRACTION)}
SPLIT_CALLS = CallSignatures({**_HOLDOUTS, "none": ()})
VALIDATION_CALLS = CallSignatures(
    {"none": (), **_HOLDOUTS, "path": (argument("paths", str, None, is_list=True),)}
)


class Holdout(NamedTuple):
    """Rows of ``data.path`` that are held out from training, and how they are selected."""

    split: str  # the split of these rows, "test" or "validation"
    key: str  # the key of the configuration that selects them
    by: str  # random, column or time
    column: str  # the column whose values select the rows; empty for random rows
    fraction: float  # fraction of the rows that are left by earlier splits


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The samples: files, columns, scaling and vocabularies."""

    format: str = model("synthetic", "Format of the input.", choices=FORMATS)
    path: tuple[str, ...] = option(
        (), "Training files (plain or compressed), folders of files, or URLs.", prepares=False
    )
    test_path: tuple[str, ...] = option(
        (), "Test files, folders or URLs; empty holds out rows by split.", prepares=False
    )
    split: str = model(
        "random",
        "The test rows if test_path is empty: random ones; all rows of some values of a column, such as "
        "users; the latest rows by a column; or none, which trains on all rows.",
        signatures=SPLIT_CALLS,
    )
    validation: str = option(
        "none",
        "The rows that select the best checkpoint and end a run (train.patience): held out from the other "
        "rows as in split, or files, folders or URLs. With none, the test rows do both.",
        signatures=VALIDATION_CALLS,
        is_name_fixed=True,
        unsigned=r"(?s:(?!\s*path\b).*)",
    )
    joins: tuple[str, ...] = option(
        (),
        "Side tables in other files, such as properties of items. Their columns become columns of the input: "
        "a row gets those of the row in `path` whose column `table_key` (by default `key`) equals its column "
        "`key`. `columns` names the columns of CSV files without a header.",
        signatures=JOIN_CALLS,
        prepares=False,
    )
    columns: tuple[str, ...] = setting(
        (), "Column names of a CSV file without a header; empty reads the header.", takes_numbers=True
    )
    delimiter: str = setting(",", "Separator of CSV columns.")
    label: str = in_files("label", "Label column of 1 and 0, unless there are sections [tasks.NAME].")
    positive_labels: tuple[str, ...] = in_files(("1",), "Values of binary labels and masks that mean 1.")
    negative_labels: tuple[str, ...] = in_files(("0",), "Values of binary labels and masks that mean 0.")
    weight: str = model("", "Column of sample weights in the loss, at least 0; empty for equal weights.")
    weighted_metrics: bool = setting(
        False,
        "Whether metrics weight samples as the loss does; ranking metrics and custom metrics do not.",
        prepares=False,
    )
    group: str = model("", "Column that groups samples, such as users, for ranking losses and metrics.")
    dense: tuple[str, ...] = in_files((), "Names of the numeric columns.")
    sparse: tuple[str, ...] = in_files((), "Names of the categorical columns.")
    multi_hot_separator: str = model(
        "", "Separator of the ids in a categorical field; empty for one id per field."
    )
    missing: tuple[str, ...] = in_files(("", "?", r"\N", "NULL", "NA", "None"), "Values that mean missing.")
    numeric_scaling: str = model(
        "standardize",
        "Scaling of numeric values by the training rows: to mean 0 and standard deviation 1, to the range "
        "from 0 to 1, or none. `given` scales by your mean and standard deviation instead. With `log`, "
        "sign(x) * log(1 + |x|) is scaled.",
        signatures=SCALING_CALLS,
    )
    vocabulary: str = model(
        "build",
        "`build` numbers the values of the training rows. Values with fewer than `min_count` occurrences "
        "share the row of unknown values. `hash` hashes values into `rows` rows. `grow` needs no training "
        "rows: a value gets a row once `admit_after` steps have read it. It loses the row after "
        "`evict_after` steps without it, or if the table exceeds `max_rows` and others are read more often.",
        signatures=VOCABULARY_CALLS,
    )
    max_invalid_fraction: float = setting(
        0.1, "Largest fraction of invalid rows; 0 stops at the first invalid row.", minimum=0, maximum=1
    )
    cache_folder: str = by_host(
        "",
        "Folder of prepared data, which every trainer can read; empty for runs/.prepared. With a "
        "URL, each host fetches the data once.",
        prepares=False,
    )
    local_cache_folder: str = by_host(
        "",
        "Folder of this host for prepared data, used if cache_folder is a URL; empty for runs/.prepared.",
        prepares=False,
    )
    stream: str = option(
        "none",
        "`files` trains on the files as they are, without preparation, once and in order. Each match of "
        "path is a unit: a file, or a folder, complete once it has a file named `marker`. The run waits "
        "`wait_hours` for the next unit, and ends after the unit `until`. A unit is read in `lanes`. "
        "`scaling_momentum` is the weight of each new unit in the moments that scale numbers; with 0, they "
        "are those of the first unit. `kafka` trains on the messages of a topic, one CSV line each, from "
        "`start` (earliest or latest) on, and ends after `wait_hours` without a step; `properties` is a "
        "file of librdkafka properties, such as those for TLS, on each host. `time` is the column of event "
        "times (checkpoint.deltas); by default, kafka takes the timestamps of messages.",
        signatures=STREAM_CALLS,
        is_name_fixed=True,
        prepares=False,
    )
    shuffle: str = model(
        "rows",
        "`rows` shuffles the training rows in each epoch; of a stream, the rows of each block that is read. "
        "With `lanes`, each of T trainers reads about 1 / T of the data, instead of nearly all data. `none` "
        "keeps the order of the files.",
        signatures=SHUFFLE_CALLS,
        prepares=False,
    )
    synthetic_rows: int = fixed(600_000, "Number of training rows of the synthetic click log.", minimum=1)

    stream_call = STREAM_CALLS.property_of("data.stream")
    vocabulary_call = VOCABULARY_CALLS.property_of("data.vocabulary")

    @property
    def synthetic_splits(self) -> dict[str, int]:
        """The number of rows of each split of the synthetic click log."""
        rows = self.synthetic_rows
        test = max(1, min(50_000, rows // 6))
        held_out = {each.split: max(1, int(rows * each.fraction)) for each in self.holdouts}
        return {TRAIN: rows, **held_out, TEST: test}

    @property
    def holdouts(self) -> tuple[Holdout, ...]:
        """The splits held out from ``path``, in the order in which they select rows; none from a stream."""
        if self.is_stream:
            return ()
        split = "none" if self.test_path else self.split
        return tuple(
            Holdout(name, key, call.name, call.arguments.get("column", ""), call["fraction"])
            for name, key, call in (
                (TEST, "data.split", SPLIT_CALLS.parse("data.split", split)),
                (VALIDATION, "data.validation", VALIDATION_CALLS.parse("data.validation", self.validation)),
            )
            if "fraction" in call.arguments
        )

    @property
    def splits(self) -> tuple[str, ...]:
        return (TRAIN, TEST) if self.validation == "none" else SPLITS

    @property
    def selection_split(self) -> str:
        """The split whose evaluations select the best checkpoint."""
        return VALIDATION if VALIDATION in self.splits else TEST

    @property
    def paths(self) -> dict[str, tuple[str, ...]]:
        """The files, folders and URLs of each split; empty for a split that is held out or absent."""
        validation = VALIDATION_CALLS.parse(PATH_KEYS[VALIDATION], self.validation)
        paths = validation.arguments.get("paths", ())
        return {TRAIN: self.path, VALIDATION: paths, TEST: self.test_path}

    @property
    def join_calls(self) -> tuple[Call, ...]:
        return tuple(JOIN_CALLS.parse(JOINS, each) for each in self.joins)

    @property
    def is_stream(self) -> bool:
        return self.stream_call.name != "none"

    @property
    def is_topic(self) -> bool:
        """Whether the rows are messages of a Kafka topic."""
        return self.stream_call.name == KAFKA

    @property
    def time_column(self) -> str:
        """The column of event times, ``time`` in ``stream``; empty if there is none."""
        return str(self.stream_call.arguments.get("time", ""))

    @property
    def is_shuffled(self) -> bool:
        return self.shuffle != "none"

    @property
    def shuffle_lanes(self) -> int:
        """The number of lanes if ``shuffle`` is ``lanes``, else 0."""
        return int(SHUFFLE_CALLS.parse("data.shuffle", self.shuffle).arguments.get("lanes", 0))


@dataclass(frozen=True, kw_only=True)
class ColumnSection:
    """How a dense or sparse column is computed. If [data] has the same key, its value is the default."""

    kind: str = model(
        "value",
        "`value`: the value of the source. Others are for data.sparse. `buckets`: the range of a number; "
        "ranges begin at `bounds`. `quantiles`: the same, with equally many training rows in each range. "
        "`hour`, `weekday`: of a date; `format`, such as %Y%m%d, is for dates in digits. `cross`: the hash "
        "of several columns. `weighted`: ids with weights, such as a:0.5; `separator` is between them.",
        signatures=KIND_CALLS,
    )
    source: tuple[str, ...] = in_files(
        (), "Column of the files, or columns (cross); empty for the column of this name."
    )
    multi_hot_separator: str | None = model(None, "Separator of ids in a field (value, weighted).")
    pooling: str | None = model(
        None,
        "How a bag becomes one vector; none keeps a sequence of up to max_ids vectors (value, weighted).",
        choices=(*POOLINGS, UNPOOLED),
        prepares=False,
        absent="as its table",
    )
    max_ids: int = model(0, "Largest number of ids per sample; 0 for no limit (value, weighted).", minimum=0)
    too_many_ids: str = model(
        "invalid_row",
        "Whether more than max_ids ids make a row invalid, or the first or the last ids are kept.",
        choices=("invalid_row", "keep_first", "keep_last"),
    )
    numeric_scaling: str | None = model(
        None, "Scaling of numeric values (of data.dense).", signatures=SCALING_CALLS
    )
    vocabulary: str | None = model(
        None, "How values become rows (value, weighted; cross: hash or grow).", signatures=VOCABULARY_CALLS
    )


_OF_IDS = ("multi_hot_separator", "max_ids", "too_many_ids", "pooling", "vocabulary")
# The keys that apply to a column of data.sparse, by its kind, in addition to "kind" and "source".
_KEYS: dict[str, tuple[str, ...]] = {"value": _OF_IDS, "weighted": _OF_IDS, "cross": ("vocabulary",)}
_KEYS_OF_DENSE = ("numeric_scaling",)
_DEFAULTS = ColumnSection()


@dataclass(frozen=True)
class Column:
    """A column of the model, with the keys of its section [columns.NAME], or by default of [data]."""

    name: str
    sources: tuple[str, ...]
    kind: str  # "buckets" for quantiles, too
    arguments: Mapping[str, Any]  # the arguments in the key ``kind``
    separator: str
    has_several: bool  # whether [columns.NAME] sets a separator of ids, or max_ids above 1
    max_ids: int
    too_many_ids: str
    scaling: Call
    vocabulary: Call

    @property
    def has_vocabulary(self) -> bool:
        """For a column of data.sparse: whether its vocabulary is built from the values of training rows."""
        return self.kind in ("value", "weighted") and self.vocabulary.name == "build"

    @property
    def transform(self) -> str:
        return "log" if self.scaling["log"] else "none"

    @property
    def source(self) -> str:
        """The column of the files that this column is computed from; ValueError if there are several."""
        (source,) = self.sources
        return source

    def key(self, list_name: str) -> str:
        """Return the key that names the sources: ``data.LIST_NAME`` or ``columns.NAME.source``."""
        return f"data.{list_name}" if self.sources == (self.name,) else f"columns.{self.name}.source"


def matches_path(pattern: str, path: str) -> bool:
    """Return whether ``path``, a path or URL, equals or matches ``pattern``, an element of data.path."""
    root = PurePosixPath("/-")  # instead of the working directory: match() compares absolute paths whole
    return path == pattern or (root / unquote(path)).match(str(root / unquote(pattern)))


def columns_of(
    data: DataSection, sections: Mapping[str, ColumnSection]
) -> tuple[tuple[Column, ...], tuple[Column, ...]]:
    """Return the columns of data.dense and of data.sparse; ConfigError if [columns.NAME] is invalid."""
    for name, section in sections.items():
        if name in data.dense and name in data.sparse:
            rule = "is in data.dense and in data.sparse; rename one of the two, and set its source"
            raise ConfigError(f"columns.{name}", rule)
        if name not in data.dense and name not in data.sparse:
            raise ConfigError(f"columns.{name}", "is in neither data.dense nor data.sparse")
        _check(name, section, name in data.dense)
    dense = tuple(_column(data, sections, name) for name in data.dense)
    sparse = tuple(_column(data, sections, name) for name in data.sparse)
    for column in sparse:
        if column.kind == "weighted" and column.arguments["separator"] in ("", column.separator):
            rule = "separator must not be empty, nor equal the separator of ids"
            raise ConfigError(f"columns.{column.name}.kind", rule, sections[column.name].kind)
    return dense, sparse


def sequence_length(name: str, section: ColumnSection) -> int:
    """Return max_ids if a column is not pooled, and 0 if it is pooled; ConfigError if max_ids is missing."""
    if section.pooling == UNPOOLED and not section.max_ids:
        rule = f"must be the length of the sequence, since columns.{name}.pooling is {UNPOOLED}"
        raise ConfigError(f"columns.{name}.max_ids", rule, section.max_ids)
    return section.max_ids if section.pooling == UNPOOLED else 0


def column_growth(data: DataSection, sections: Mapping[str, ColumnSection], name: str) -> Call | None:
    """Return a column's vocabulary if it is ``grow``, else None; ConfigError if max_rows is below 8,192."""
    column = _column(data, sections, name)
    call = column.vocabulary
    if call.name != GROW or "vocabulary" not in _KEYS.get(column.kind, ()):
        return None
    if 0 < call["max_rows"] < MIN_GROWING_ROWS:
        own = sections.get(name, _DEFAULTS).vocabulary
        key, text = (f"columns.{name}.vocabulary", own) if own else ("data.vocabulary", data.vocabulary)
        raise ConfigError(key, f"max_rows must be 0, for no limit, or at least {MIN_GROWING_ROWS:,}", text)
    return call


def without_growth(vocabulary: str | None) -> str | None:
    """Return ``vocabulary``, but ``grow`` without its arguments, which do not change prepared data."""
    is_growing = vocabulary is not None and VOCABULARY_CALLS.parse("vocabulary", vocabulary).name == GROW
    return GROW if is_growing else vocabulary


def _column(data: DataSection, sections: Mapping[str, ColumnSection], name: str) -> Column:
    section = sections.get(name, _DEFAULTS)
    key = f"columns.{name}"
    kind = KIND_CALLS.parse(f"{key}.kind", section.kind)
    separator = section.multi_hot_separator
    scaling = section.numeric_scaling or data.numeric_scaling
    vocabulary = section.vocabulary or data.vocabulary
    return Column(
        name=name,
        sources=section.source or (name,),
        kind="buckets" if kind.name == "quantiles" else kind.name,
        arguments=kind.arguments,
        separator=data.multi_hot_separator if separator is None else separator,
        has_several=bool(separator) or section.max_ids > 1,
        max_ids=section.max_ids,
        too_many_ids=section.too_many_ids,
        scaling=SCALING_CALLS.parse(f"{key}.numeric_scaling", scaling),
        vocabulary=VOCABULARY_CALLS.parse(f"{key}.vocabulary", vocabulary),
    )


def _check(name: str, section: ColumnSection, is_dense: bool) -> None:
    call = KIND_CALLS.parse(f"columns.{name}.kind", section.kind)
    kind = call.name
    if is_dense and kind != "value":
        rule = "must be value for a column of data.dense; other kinds belong in data.sparse"
        raise ConfigError(f"columns.{name}.kind", rule, section.kind)
    column = "a column of data.dense" if is_dense else f"a column of data.sparse whose kind is {kind}"
    for key in vars(_DEFAULTS):
        value = getattr(section, key)
        valid = ("kind", "source", *(_KEYS_OF_DENSE if is_dense else _KEYS.get(kind, ())))
        if key not in valid and value != getattr(_DEFAULTS, key):
            raise ConfigError(f"columns.{name}.{key}", f"does not apply to {column}", value)
    if kind == "cross" and len(section.source) < 2:
        raise ConfigError(f"columns.{name}.source", "must name two columns or more (cross)", section.source)
    if kind == "cross" and section.vocabulary and not section.vocabulary.startswith(("hash", GROW)):
        raise ConfigError(f"columns.{name}.vocabulary", "must be hash or grow (cross)", section.vocabulary)
    if kind != "cross" and len(section.source) > 1:
        raise ConfigError(f"columns.{name}.source", f"must be one column, for {column}", section.source)
    if (form := call.arguments.get("format")) and "%" not in form:
        raise ConfigError(f"columns.{name}.kind", "format must be like %Y%m%d (strptime)", section.kind)
    for low, high in pairwise(call.arguments.get("bounds", ())):
        if not low < high:
            rule = f"bounds must be ascending, but {high:g} follows {low:g}"
            raise ConfigError(f"columns.{name}.kind", rule, section.kind)
    sequence_length(name, section)
