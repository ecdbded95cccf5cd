"""Sections [columns.NAME]: what they come to, and what is refused in which words."""

import re

import pytest

from hybrid.config import ColumnSection, DataSection, RunConfig, TaskSection
from hybrid.config.loading import load_config, to_toml, validate
from hybrid.config.resolved_columns import columns_of, sequence_length
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


def refusal(name: str, section: ColumnSection, data: DataSection = DATA) -> str:
    with pytest.raises(ConfigError) as caught:
        columns_of(data, {name: section})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_a_section_leaves_out_is_as_in_data() -> None:
    (price,), (user, age) = columns_of(
        DATA,
        {
            "price": ColumnSection(numeric_scaling="min_max", source=("cents",)),
            "age": ColumnSection(vocabulary="hash(9)", multi_hot_separator=""),
        },
    )
    assert (price.name, price.source, price.transform, price.scaling) == (
        "price",
        "cents",
        "none",
        "min_max",
    )
    assert (user.source, user.kind, user.separator) == ("user", "value", "|")
    assert (user.vocabulary, user.min_count) == ("build", 3)
    assert (age.separator, age.vocabulary, age.hash_rows) == ("", "hash", 9)


def test_sections_are_read_and_written_back_equal() -> None:
    csv = ['data.format="csv"', 'data.path="x"', 'data.sparse=["age", "who.what"]']
    config = load_config(
        None,
        [
            *csv,
            "columns.age.kind=buckets(18, 25.5)",
            "columns.who.what.kind=cross",
            'columns.who.what.source=["a", "b"]',
        ],
    )
    assert config.columns["age"].kind == "buckets(18.0, 25.5)"
    assert config.columns["who.what"].source == ("a", "b")
    text = to_toml(config)
    assert '[columns."who.what"]\n' in text
    assert 'kind = "buckets(18.0, 25.5)"\n' in text


@pytest.mark.parametrize(
    ("tasks", "label"),
    [({}, "label"), ({"buy": TaskSection(label="bought")}, "bought")],
)
def test_a_column_is_not_made_of_a_label(tasks: dict[str, TaskSection], label: str) -> None:
    config = RunConfig(data=DATA, tasks=tasks, columns={"age": ColumnSection(source=(label,))})
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert str(caught.value) == f"columns.age.source = '{label}': must not hold the label column"


@pytest.mark.parametrize(
    ("name", "section", "message"),
    [
        ("city", ColumnSection(), "columns.city: is in neither data.dense nor data.sparse"),
        (
            "price",
            ColumnSection(kind="quantiles(4)"),
            "columns.price.kind = 'quantiles(4)': must be value for a column of data.dense; name it in "
            "data.sparse instead",
        ),
        (
            "price",
            ColumnSection(vocabulary="hash"),
            "columns.price.vocabulary = 'hash': does not apply to a column of data.dense",
        ),
        (
            "age",
            ColumnSection(numeric_scaling="min_max"),
            "columns.age.numeric_scaling = 'min_max': does not apply to a column of data.sparse whose kind "
            "is value",
        ),
        ("age", ColumnSection(kind="hour(1)"), "columns.age.kind = 'hour(1)': takes no arguments"),
        (
            "age",
            ColumnSection(kind="buckets"),
            "columns.age.kind = 'buckets': must name its bounds: buckets(bounds)",
        ),
        (
            "age",
            ColumnSection(kind="buckets(1, 5, 2.5)"),
            "columns.age.kind = 'buckets(1, 5, 2.5)': bounds must rise from each to the next, and 2.5 comes "
            "after 5",
        ),
        (
            "age",
            ColumnSection(kind="buckets(1, nan)"),
            "columns.age.kind = 'buckets(1, nan)': bounds must be a list of finite numbers",
        ),
        (
            "age",
            ColumnSection(kind="quantiles(1)"),
            "columns.age.kind = 'quantiles(1)': buckets must be an integer, at least 2",
        ),
        (
            "age",
            ColumnSection(kind="cross", source=("user", "price"), vocabulary="build"),
            "columns.age.vocabulary = 'build': must be hash (cross)",
        ),
        (
            "age",
            ColumnSection(kind="cross", source=("user",)),
            "columns.age.source = ('user',): must name two columns or more (cross)",
        ),
        (
            "age",
            ColumnSection(kind="cross", source=("user", "user")),
            "columns.age.source = ('user', 'user'): must name each column once",
        ),
        (
            "age",
            ColumnSection(kind="weekday", source=("day", "time")),
            "columns.age.source = ('day', 'time'): must be one column, for a column of data.sparse whose "
            "kind is weekday",
        ),
        (
            "age",
            ColumnSection(kind="weighted(|)"),
            "columns.age.kind = 'weighted(|)': separator must not be empty, nor be what separates ids",
        ),
        (
            "age",
            ColumnSection(pooling="none"),
            "columns.age.max_ids = 0: must be the number of vectors that the net gets, since "
            "columns.age.pooling is none",
        ),
        (
            "age",
            ColumnSection(kind="hour", pooling="none"),
            "columns.age.pooling = 'none': does not apply to a column of data.sparse whose kind is hour",
        ),
    ],
)
def test_a_section_that_is_refused(name: str, section: ColumnSection, message: str) -> None:
    assert refusal(name, section) == message


def test_a_column_of_both_lists_has_no_section() -> None:
    data = DataSection(dense=("age",), sparse=("age",))
    assert "is in data.dense and in data.sparse" in refusal("age", ColumnSection(), data)


def test_only_a_column_that_is_not_pooled_is_a_sequence() -> None:
    for section, length in (
        (ColumnSection(), 0),
        (ColumnSection(pooling="mean", max_ids=5), 0),
        (ColumnSection(pooling="none", max_ids=5), 5),
    ):
        assert sequence_length("seen", section) == length


def test_columns_of_batches_of_ones_own_may_be_sequences() -> None:
    """There, data.format is synthetic, as nobody says otherwise."""
    config = load_config(None, ["columns.tags.pooling=none", "columns.tags.max_ids=5"])
    assert config.columns["tags"] == ColumnSection(pooling="none", max_ids=5)


def test_a_configuration_is_checked_when_it_is_read() -> None:
    csv = ['data.format="csv"', 'data.path="x"', 'data.sparse=["age"]']
    for overrides, message in (
        ([*csv, "columns.age.kind=buckets(x)"], "columns.age.kind = 'buckets(x)': bounds must be a list of"),
        ([*csv, "columns.agee.kind=hour"], "columns.agee: is in neither data.dense nor data.sparse"),
        (["columns.C1.kind=hour"], "columns.C1: is not read where data.format is synthetic, but for pooling"),
        (
            ["columns.C1.pooling=none"],
            "columns.C1.max_ids = 0: must be the number of vectors that the net gets",
        ),
        (
            [*csv, "columns.age.max_id=3"],
            "columns.age.max_id: no such key; did you mean columns.age.max_ids?",
        ),
        ([*csv, "columns.age.kind=bucket"], "columns.age.kind = 'bucket': must be one of value, buckets"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
            load_config(None, overrides)
