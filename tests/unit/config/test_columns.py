"""Sections [columns.NAME]: the resulting columns, and refused sections."""

import pytest

from hybrid.config import ColumnSection, DataSection, RunConfig, TaskSection
from hybrid.config.data_sections import columns_of, sequence_length
from hybrid.config.loading import load_config, to_toml, validate
from hybrid.errors import ConfigError

DATA = DataSection(
    format="csv",
    path=("x.csv",),
    dense=("price",),
    sparse=("user", "age"),
    multi_hot_separator="|",
    numeric_scaling="standardize(log = true)",
    vocabulary="build(3)",
)
MOMENTS = ("", "2", "std = 2", "2, std = 0", "2, std = -1", "nan, std = 1", "x, std = 1")  # all invalid


def test_missing_keys_are_those_of_data() -> None:
    (price,), (user, age) = columns_of(
        DATA,
        {
            "price": ColumnSection(numeric_scaling="min_max", source=("cents",)),
            "age": ColumnSection(vocabulary="hash(9)", multi_hot_separator=""),
        },
    )
    assert (price.name, price.source, price.transform, price.scaling) == ("price", "cents", "none", "min_max")
    assert (user.source, user.kind, user.separator) == ("user", "value", "|")
    assert (user.vocabulary, user.min_count) == ("build", 3)
    assert (age.separator, age.vocabulary, age.hash_rows) == ("", "hash", 9)


def test_sections_are_read_and_written_equal() -> None:
    config = load_config(
        None,
        [
            *('data.format="csv"', 'data.path="x"', 'data.sparse=["age", "who.what"]'),
            *("columns.age.kind=buckets(18, 25.5)", "columns.who.what.kind=cross"),
            'columns.who.what.source=["a", "b"]',
        ],
    )
    assert config.columns["age"].kind == "buckets(18.0, 25.5)"
    assert config.columns["who.what"].source == ("a", "b")
    text = to_toml(config)
    assert '[columns."who.what"]\n' in text
    assert 'kind = "buckets(18.0, 25.5)"\n' in text


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("city", ColumnSection()),
        ("price.kind", ColumnSection(kind="quantiles(4)")),
        ("price.vocabulary", ColumnSection(vocabulary="hash")),
        *(
            ("price.numeric_scaling", ColumnSection(numeric_scaling=f"given({moments})"))
            for moments in MOMENTS
        ),
        ("age.numeric_scaling", ColumnSection(numeric_scaling="min_max")),
        ("age.kind", ColumnSection(kind="bucket")),
        ("age.kind", ColumnSection(kind="hour(1)")),
        ("age.kind", ColumnSection(kind="buckets")),
        ("age.kind", ColumnSection(kind="buckets(x)")),
        ("age.kind", ColumnSection(kind="buckets(1, 5, 2.5)")),
        ("age.kind", ColumnSection(kind="buckets(1, 1)")),
        ("age.kind", ColumnSection(kind="buckets(1, nan)")),
        ("age.kind", ColumnSection(kind="quantiles(1)")),
        ("age.kind", ColumnSection(kind="weighted(|)")),
        ("age.vocabulary", ColumnSection(kind="cross", source=("user", "price"), vocabulary="build")),
        ("age.source", ColumnSection(kind="cross", source=("user",))),
        ("age.source", ColumnSection(kind="cross", source=("user", "user"))),
        ("age.source", ColumnSection(kind="weekday", source=("day", "time"))),
        ("age.source", ColumnSection(source=("label",))),
        ("age.max_ids", ColumnSection(pooling="none")),
        ("age.pooling", ColumnSection(kind="hour", pooling="none")),
    ],
)
def test_invalid_section_is_refused(key: str, section: ColumnSection) -> None:
    config = RunConfig(data=DATA, columns={key.partition(".")[0]: section})
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert caught.value.key == f"columns.{key}"
    assert "\n" not in str(caught.value)


def test_label_of_a_task_is_no_source() -> None:
    section, tasks = ColumnSection(source=("bought",)), {"buy": TaskSection(label="bought")}
    validate(RunConfig(data=DATA, columns={"age": section}))
    with pytest.raises(ConfigError, match=r"^columns\.age\.source = 'bought'"):
        validate(RunConfig(data=DATA, tasks=tasks, columns={"age": section}))


def test_column_of_both_lists_has_no_section() -> None:
    with pytest.raises(ConfigError, match=r"^columns\.age: "):
        columns_of(DataSection(dense=("age",), sparse=("age",)), {"age": ColumnSection()})


def test_only_unpooled_columns_are_sequences() -> None:
    for section, length in (
        (ColumnSection(), 0),
        (ColumnSection(pooling="mean", max_ids=5), 0),
        (ColumnSection(pooling="none", max_ids=5), 5),
    ):
        assert sequence_length("seen", section) == length


def test_columns_of_custom_batches_may_be_sequences() -> None:
    """The format of such a run is synthetic, the default."""
    config = load_config(None, ["columns.tags.pooling=none", "columns.tags.max_ids=5"])
    assert config.columns["tags"] == ColumnSection(pooling="none", max_ids=5)
    for key in ("columns.C1.kind=hour", "columns.C1.pooling=none"):
        with pytest.raises(ConfigError, match=r"^columns\.C1"):
            load_config(None, [key])
