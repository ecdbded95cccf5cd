"""Keys of [data] and [columns.NAME]: the input files, and how values become numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.config.key import Call, CallSignatures, argument, by_host, fixed, option

FORMATS = ("synthetic", "criteo", "csv", "parquet")
TRANSFORMS = ("none", "log")
_LOG = argument("log", bool, False)
SCALING_CALLS = CallSignatures({"standardize": (_LOG,), "min_max": (_LOG,), "none": (_LOG,)})
DEFAULT_HASH_ROWS = 100_000
VOCABULARY_CALLS = CallSignatures(
    {
        "build": (argument("min_count", int, 1, minimum=1),),
        "hash": (argument("rows", int, DEFAULT_HASH_ROWS, minimum=2, maximum=2_000_000_000),),
    }
)
_COLUMN = argument("column", str, None)
SPLIT_CALLS = CallSignatures({"random": (), "column": (_COLUMN,), "time": (_COLUMN,)})
SHUFFLE_CALLS = CallSignatures(
    {"rows": (), "lanes": (argument("lanes", int, 64, minimum=1, maximum=4096),), "none": ()}
)
KIND_CALLS = CallSignatures(
    {
        "value": (),
        "buckets": (argument("bounds", float, None, is_list=True),),
        "quantiles": (argument("buckets", int, None, minimum=2),),
        "hour": (),
        "weekday": (),
        "cross": (),
        "weighted": (argument("separator", str, ":"),),
    }
)
POOLINGS = ("sum", "mean", "max")
UNPOOLED = "none"


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The samples: files, columns, and how values become numbers."""

    format: str = fixed("synthetic", "Format of the input.", choices=FORMATS)
    path: tuple[str, ...] = option((), "Training files (plain or gzip), folders of files, or URLs.")
    test_path: tuple[str, ...] = option(
        (), "Test files, folders or URLs; empty holds out test_fraction of the rows."
    )
    test_fraction: float = fixed(
        0.1,
        "Fraction of rows that is held out if test_path is empty; 0 trains on all rows and "
        "evaluates nothing.",
        minimum=0.0,
        maximum=0.9,
    )
    split: str = fixed(
        "random",
        "Which rows are held out if test_path is empty: random ones; all rows of some values of a column, "
        "such as users; or the latest rows by a column.",
        signatures=SPLIT_CALLS,
    )
    columns: tuple[str, ...] = option(
        (), "Column names of a CSV file without a header; empty reads the header."
    )
    delimiter: str = option(",", "Separator of CSV columns.")
    label: str = fixed("label", "Label column of 1 and 0, unless there are sections [tasks.NAME].")
    positive_labels: tuple[str, ...] = fixed(("1",), "Values of binary labels and masks that mean 1.")
    negative_labels: tuple[str, ...] = fixed(("0",), "Values of binary labels and masks that mean 0.")
    weight: str = fixed("", "Column of sample weights in the loss, at least 0; empty for equal weights.")
    weighted_metrics: bool = option(
        False,
        "Weight samples in metrics as in the loss; not in ranking metrics and custom metrics.",
        prepares=False,
    )
    group: str = fixed(
        "",
        "Column whose values group samples, such as users, for ranking losses and metrics.",
    )
    dense: tuple[str, ...] = fixed((), "Names of the numeric columns.")
    sparse: tuple[str, ...] = fixed((), "Names of the categorical columns.")
    multi_hot_separator: str = fixed(
        "", "Separator of the ids in a categorical field; empty for one id per field."
    )
    missing: tuple[str, ...] = fixed(("", "?"), "Field values that mean missing.")
    numeric_scaling: str = fixed(
        "standardize",
        "Scaling of numeric values over the training rows: to mean 0 and deviation 1, to between 0 and 1, or "
        "none. With `log`, it follows sign(x) * log(1 + |x|).",
        signatures=SCALING_CALLS,
    )
    vocabulary: str = fixed(
        "build",
        "`build` numbers the values of the training rows; rarer ones than `min_count` share the row of "
        "unknown values. `hash` hashes values into `rows` rows.",
        signatures=VOCABULARY_CALLS,
    )
    max_invalid_fraction: float = option(
        0.1,
        "More invalid rows than this fraction are an error; 0 stops at the first invalid row.",
        minimum=0,
        maximum=1,
    )
    cache_folder: str = by_host(
        "",
        "Folder of prepared data, which every trainer can read; empty for runs/.prepared. With a "
        "URL, each trainer fetches the rows of its steps.",
        prepares=False,
    )
    local_cache_folder: str = by_host(
        "",
        "Folder of this host if cache_folder is a URL: for fetched rows of a trainer, by default "
        "the folder of temporary files; for data that the master prepares, by default "
        "runs/.prepared.",
        prepares=False,
    )
    local_cache_gb: float = by_host(
        4.0, "GiB of disk for the rows that each trainer fetches.", above=0, prepares=False
    )
    prepare_memory_gb: float = by_host(
        0.0,
        "GiB of memory that preparation may take; 0 for half of the free memory.",
        minimum=0,
        prepares=False,
    )
    shuffle: str = fixed(
        "rows",
        "`rows` shuffles the training rows anew each epoch. With `lanes`, each of T trainers reads about "
        "1 / T of the data, instead of nearly all. `none` keeps the order of the files.",
        signatures=SHUFFLE_CALLS,
        prepares=False,
    )
    synthetic_rows: int = fixed(600_000, "Number of training rows of the synthetic click log.", minimum=1)

    @property
    def synthetic_test_rows(self) -> int:
        """Test rows of the synthetic click log."""
        return max(1, min(50_000, self.synthetic_rows // 6))

    @property
    def split_call(self) -> Call:
        """How rows are held out, and by which column."""
        return SPLIT_CALLS.parse("data.split", self.split)

    @property
    def split_column(self) -> str:
        """The column by which rows are held out; empty for random rows."""
        return str(self.split_call.arguments.get("column", ""))

    @property
    def is_shuffled(self) -> bool:
        """Whether each epoch has an order of its own."""
        return self.shuffle != "none"

    @property
    def shuffle_lanes(self) -> int:
        """The number of lanes of the shuffle; 0 for none."""
        return int(SHUFFLE_CALLS.parse("data.shuffle", self.shuffle).arguments.get("lanes", 0))

    @property
    def vocabulary_call(self) -> Call:
        """How values become rows."""
        return VOCABULARY_CALLS.parse("data.vocabulary", self.vocabulary)


@dataclass(frozen=True, kw_only=True)
class ColumnSection:
    """How one column of data.dense or data.sparse is made; a missing key has the value of [data]."""

    kind: str = fixed(
        "value",
        "`value`: as it is. In data.sparse also `buckets` and `quantiles`: a number in one of several "
        "ranges, which begin at `bounds`, or hold equally many training rows; `hour` and `weekday` of a "
        "date; `cross`: several columns as one, hashed; `weighted`: ids with weights, with `separator` "
        "between the two.",
        signatures=KIND_CALLS,
    )
    source: tuple[str, ...] = fixed(
        (), "Column of the files (cross: columns); empty for the column of this name."
    )
    multi_hot_separator: str | None = fixed(None, "Separator of ids in a field (value, weighted).")
    pooling: str | None = fixed(
        None,
        "How a bag becomes one vector; none keeps a sequence of up to max_ids vectors (value, weighted).",
        choices=(*POOLINGS, UNPOOLED),
        prepares=False,
        absent="as its table",
    )
    max_ids: int = fixed(0, "Largest number of ids per sample; 0 for no limit (value, weighted).", minimum=0)
    too_many_ids: str = fixed(
        "invalid_row",
        "With more than max_ids ids: an invalid row, or keep the first or the last ids.",
        choices=("invalid_row", "keep_first", "keep_last"),
    )
    numeric_scaling: str | None = fixed(
        None, "Scaling of numeric values (of data.dense).", signatures=SCALING_CALLS
    )
    vocabulary: str | None = fixed(
        None, "How values become rows (value, weighted; cross: hash).", signatures=VOCABULARY_CALLS
    )
