"""Keys of [data] and [columns.NAME]: which files are read, and what their columns become."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.config.key import by_host, fixed, option

FORMATS = ("synthetic", "criteo", "csv", "parquet")
TRANSFORMS = ("none", "log")
SCALINGS = ("standardize", "min_max", "none")
VOCABULARIES = ("build", "hash")
COLUMN_KINDS = ("value", "buckets", "hour", "weekday", "cross", "weighted")
POOLINGS = ("sum", "mean", "max")
UNPOOLED = "none"


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The samples: files, columns, and how values become numbers."""

    format: str = fixed("synthetic", "kind of the input", choices=FORMATS)
    path: tuple[str, ...] = option(
        (), "training files (plain or gzip), or their URLs; a folder means its files"
    )
    test_path: tuple[str, ...] = option(
        (), "test files, or their URLs; empty holds out test_fraction of the rows"
    )
    test_fraction: float = fixed(
        0.1,
        "share of rows held out where test_path is empty; 0 trains on all of them and evaluates nothing",
        minimum=0.0,
        maximum=0.9,
    )
    split: str = fixed(
        "random",
        "which rows are held out where test_path is empty: random ones; column: all rows of some values of "
        "split_column, such as users; time: the latest by split_column",
        choices=("random", "column", "time"),
    )
    split_column: str = fixed("", "column by which rows are held out (split = column, time)")
    columns: tuple[str, ...] = option((), "column names of a CSV without a header; empty reads the header")
    delimiter: str = option(",", "separator of CSV columns")
    label: str = fixed(
        "label", "name of the label column, of 1 and 0, where there is no section [tasks.NAME]"
    )
    positive_labels: tuple[str, ...] = fixed(("1",), "values of binary labels and masks that mean 1")
    negative_labels: tuple[str, ...] = fixed(("0",), "values of binary labels and masks that mean 0")
    weight: str = fixed("", "column of the weights of samples in the loss, 0 or more; empty for all the same")
    weighted_metrics: bool = option(
        False,
        "samples count in metrics by their weights, as in the loss; once in those of groups, and in your own",
        prepares=False,
    )
    group: str = fixed(
        "",
        "column whose values make groups of samples, such as users, for metrics of the order within each",
    )
    dense: tuple[str, ...] = fixed((), "names of the numeric columns")
    sparse: tuple[str, ...] = fixed((), "names of the categorical columns")
    multi_hot_separator: str = fixed(
        "", "splits a categorical field into several ids; empty means one id a field"
    )
    missing: tuple[str, ...] = fixed(("", "?"), "field values that mean missing")
    numeric_transform: str = fixed(
        "none", "log takes sign(x) * log(1 + |x|) of numeric values", choices=TRANSFORMS
    )
    numeric_scaling: str = fixed(
        "standardize",
        "over the training rows: standardize to mean 0 and deviation 1, min_max to 0 and 1, or none",
        choices=SCALINGS,
    )
    vocabulary: str = fixed(
        "build", "build numbers the values seen; hash uses the hashing trick", choices=VOCABULARIES
    )
    vocabulary_min_count: int = fixed(
        1, "values seen less often share the row of unknown values (vocabulary = build)", minimum=1
    )
    hash_rows: int = fixed(
        100_000, "rows of each table (vocabulary = hash); ids are 32-bit", minimum=2, maximum=2_000_000_000
    )
    bad_rows: str = option("skip", "skip and count bad rows, or fail at the first", choices=("skip", "fail"))
    max_bad_fraction: float = option(
        0.1, "more bad rows than this share is an error even where they are skipped", minimum=0, maximum=1
    )
    cache_folder: str = by_host(
        "",
        "where the prepared data set is kept: a folder that every trainer sees, empty for runs/.prepared; or "
        "a URL, from which each trainer fetches the rows that its steps need",
        prepares=False,
    )
    local_cache_folder: str = by_host(
        "",
        "folder of this host, where cache_folder is a URL: for rows that a trainer fetches, empty for that "
        "of temporary files; for what the master prepares before it sends it, empty for runs/.prepared",
        prepares=False,
    )
    local_cache_gb: float = by_host(
        4.0, "GiB of disk that each trainer takes for rows that it fetches", above=0, prepares=False
    )
    prepare_memory_gb: float = by_host(
        0.0,
        "GiB of memory that preparing takes at most, beyond what is taken before it; "
        "0 for half of what is free",
        minimum=0,
        prepares=False,
    )
    checksum: str = option(
        "sampled",
        "how a changed input file is known, besides size and time: by parts of it, or in a store by its "
        "ETag; or by the whole, which is read once more",
        choices=("sampled", "whole"),
        prepares=False,
    )
    shuffle: bool = fixed(True, "shuffle the training rows anew each epoch", prepares=False)
    shuffle_lanes: int = fixed(
        0,
        "lanes by which rows are shuffled, such as 64, so that of T trainers each reads about 1/T of the "
        "data, and not nearly all; 0 for none",
        minimum=0,
        maximum=4096,
        prepares=False,
    )
    prefetch_batches: int = option(2, "batches read ahead in the background", minimum=1, prepares=False)
    synthetic_rows: int = fixed(600_000, "training rows of the synthetic click log", minimum=1)
    synthetic_test_rows: int = fixed(50_000, "test rows of the synthetic click log", minimum=1)


@dataclass(frozen=True, kw_only=True)
class ColumnSection:
    """How one column of data.dense or data.sparse is made; a key left out takes the value of [data]."""

    kind: str = fixed(
        "value",
        "value: as it is; in data.sparse also buckets: a number in one of several ranges; hour, weekday: of "
        "a date; cross: several columns as one, by the hashing trick; weighted: ids with weights",
        choices=COLUMN_KINDS,
    )
    source: tuple[str, ...] = fixed((), "column of the files (cross: columns); empty for that of its name")
    bounds: tuple[float, ...] = fixed((), "where each bucket but the lowest begins, rising (buckets)")
    quantiles: int = fixed(
        0, "buckets of equally many training rows instead of bounds; 0 for none (buckets)", minimum=0
    )
    weight_separator: str = fixed(":", "stands between an id and its weight in text (weighted)")
    multi_hot_separator: str | None = fixed(None, "splits a field into several ids (value, weighted)")
    pooling: str | None = fixed(
        None,
        "how its bags become one vector; none: each is a sequence of up to max_ids vectors (value, weighted)",
        choices=(*POOLINGS, UNPOOLED),
        prepares=False,
        absent="as its table",
    )
    max_ids: int = fixed(0, "ids that a row may hold; 0 for any number (value, weighted)", minimum=0)
    too_many_ids: str = fixed(
        "invalid_row",
        "what becomes of more than max_ids: an invalid row, or the first or the last of them are kept",
        choices=("invalid_row", "keep_first", "keep_last"),
    )
    numeric_transform: str | None = fixed(None, "log, or none (of data.dense)", choices=TRANSFORMS)
    numeric_scaling: str | None = fixed(None, "as of [data] (of data.dense)", choices=SCALINGS)
    vocabulary: str | None = fixed(None, "build or hash (value, weighted)", choices=VOCABULARIES)
    vocabulary_min_count: int | None = fixed(
        None, "values seen less often share a row (value, weighted)", minimum=1
    )
    hash_rows: int | None = fixed(
        None, "rows of the table (value and weighted if hashed, cross)", minimum=2, maximum=2_000_000_000
    )
