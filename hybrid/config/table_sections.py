"""Keys of [embedding] and [tables.NAME]: the tables, their initial rows, and their optimizers."""

from dataclasses import dataclass

from hybrid.config.data_sections import POOLINGS
from hybrid.config.key import Call, CallSignatures, argument, fixed, in_files, model, setting

# torch.optim and custom loops (hybrid.Adagrad and others) have the same defaults.
_ADAGRAD_EPS = argument("eps", float, 1e-10, minimum=1e-30)
_ADAM_EPS = argument("eps", float, 1e-8, minimum=1e-30)
_DECAY = argument("weight_decay", float, 0.0, minimum=0)
_ALL_ROWS = argument("all_rows", bool, False)
_BETAS = argument("betas", float, (0.9, 0.999), is_list=True, size=2, minimum=0, maximum=0.999999)
TABLE_OPTIMIZERS = CallSignatures(
    {
        "sgd": (_DECAY, _ALL_ROWS),
        "momentum": (argument("momentum", float, 0.9, minimum=0, maximum=0.999999), _DECAY, _ALL_ROWS),
        "adagrad": (_ADAGRAD_EPS, _DECAY, _ALL_ROWS),
        "rowwise_adagrad": (_ADAGRAD_EPS, _DECAY),
        "adam": (_BETAS, _ADAM_EPS, _DECAY, _ALL_ROWS),
        "adamw": (_BETAS, _ADAM_EPS, argument("weight_decay", float, 0.01, minimum=0), _ALL_ROWS),
        "ftrl": (argument("beta", float, 1.0, above=0), argument("l1", float, 0.0, minimum=0), _DECAY),
    }
)
_SCALE = argument("scale", float, 0.0, minimum=0)
INITIALIZERS = CallSignatures({"uniform": (_SCALE,), "normal": (_SCALE,), "zeros": ()})
INITIAL_CALLS = CallSignatures(
    {"random": (), "positions": (argument("file", str, None),)},
    others=r"(?s:.*)",
    others_rule="a path or URL",
)
POOLERS = ("workers", "trainers")
ROW_DTYPES = ("train", "bfloat16")
_PLACEMENT = (
    argument("workers", int, (), is_list=True, minimum=0),
    argument("pooled_by", str, "auto", choices=("auto", *POOLERS)),
)
PLACEMENT_CALLS = CallSignatures(dict.fromkeys(("auto", "table", "row"), _PLACEMENT))


@dataclass(frozen=True, kw_only=True)
class EmbeddingSection:
    """Settings of all tables. A section [tables.NAME] overrides most of them for one table."""

    dim: int = model(16, "Width of a row.", minimum=1)
    pooling: str = model("sum", "How the vectors of a bag become one vector.", choices=POOLINGS)
    optimizer: str = setting(
        "adagrad",
        "The optimizer of the rows. `weight_decay` and momentum apply to the rows that a step reads. With "
        "`all_rows`, a step updates all rows, as torch does with dense gradients, and reads and writes whole "
        "tables. hybrid/embedding/worker/row_optimizers.py has the equations.",
        signatures=TABLE_OPTIMIZERS,
        is_name_fixed=True,
    )
    learning_rate: float = setting(0.05, "Learning rate of the rows.", above=0)
    dtype: str = model(
        "train",
        "Type of stored rows: that of train.dtype, or bfloat16 with half the bytes of float32. Updates are "
        "computed in train.dtype and rounded up or down at random, so that on average no change is lost.",
        choices=ROW_DTYPES,
    )
    wire_dtype: str = setting(
        "rows",
        "Type of vectors and gradients in messages of training. With rows, nothing is rounded. With "
        "bfloat16, they have eight bits of precision and half the bytes of float32.",
        choices=("rows", "bfloat16"),
    )
    placement: str = setting(
        "auto",
        "`table` keeps a table on one worker, `row` splits its rows over workers; `workers` lists the "
        "workers that may hold rows. `pooled_by` selects the side that pools bags: the workers, or the "
        "trainers, which then fetch each distinct row once. With `auto`, trainers pool if that moves less "
        "than half of the bytes; hybrid plan shows the side.",
        signatures=PLACEMENT_CALLS,
    )


@dataclass(frozen=True, kw_only=True)
class TableSection:
    """Settings of one table. If [embedding] has the same key, its value is the default."""

    dim: int | None = model(None, "Width of a row.", minimum=1)
    optimizer: str | None = setting(
        None, "The optimizer of the rows.", signatures=TABLE_OPTIMIZERS, is_name_fixed=True
    )
    learning_rate: float | None = setting(None, "Learning rate of the rows.", above=0)
    dtype: str | None = model(None, "Type of stored rows.", choices=ROW_DTYPES)
    placement: str | None = setting(None, "The workers that hold the rows.", signatures=PLACEMENT_CALLS)
    features: tuple[str, ...] = in_files(
        (), "Columns that share this table; empty for the column of the table's name."
    )
    initial: str = fixed(
        "",
        "The initial rows, by value: a run, a checkpoint or an exported folder, from which optimizer state "
        "comes, too, with #NAME for a table of another name; or a Parquet file with a column of values and a "
        "column of vectors. `positions(FILE)` reads the rows of a .npy or safetensors file in order; "
        "FILE#NAME selects one of several tensors. `random` ignores train.initial. All workers read the path "
        "or URL.",
    )
    frozen: bool = model(False, "Whether the rows keep their initial values.")
    init: str = model(
        "uniform",
        "The distribution of random initial rows. `scale` is the largest absolute value (uniform) or the "
        "standard deviation (normal); 0 means 1 / sqrt(rows), where the rows of a growing table are its "
        "`max_rows`, or 1,000,000 without a limit.",
        signatures=INITIALIZERS,
    )

    initializer = INITIALIZERS.property_of("init")
    # Its name is "random", "positions" (a file of rows), a path or URL, or "" by default.
    initial_call = INITIAL_CALLS.property_of("initial")

    @property
    def initial_path(self) -> str:
        """The path or URL in ``initial``; empty if ``initial`` is empty or random."""
        call = self.initial_call
        return "" if call.name == "random" else str(call.arguments.get("file", call.name))


def table_optimizer(embedding: EmbeddingSection, table: TableSection) -> Call:
    """Return the optimizer in the section of a table, or if it is missing there, in [embedding]."""
    return TABLE_OPTIMIZERS.parse("optimizer", table.optimizer or embedding.optimizer)


def table_placement(embedding: EmbeddingSection, table: TableSection) -> Call:
    """Return the placement in the section of a table, or if it is missing there, in [embedding]."""
    return PLACEMENT_CALLS.parse("placement", table.placement or embedding.placement)
