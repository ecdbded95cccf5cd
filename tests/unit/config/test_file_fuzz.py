"""Hostile configuration files and overrides give a configuration, or an error of one line."""

from pathlib import Path

from hypothesis import HealthCheck, given, settings, strategies as st
from support.hostile import check_line

from hybrid.config.loading import load_config, to_toml
from hybrid.config.sections import SECTION_KEYS
from hybrid.errors import ConfigError

KEYS = [f"{section}.{key}" for section, keys in SECTION_KEYS.items() for key in keys]
HOSTILE = [
    "",
    "-1",
    "1e999",
    "nan",
    "true",
    "[1, 'a']",
    "{a = 1}",
    '"',
    "9" * 400,
    "1979-05-27",
    "a.b:c",
    "\x00",
]
VALUES = st.one_of(
    st.sampled_from(HOSTILE), st.text(max_size=8), st.integers().map(str), st.floats().map(str)
)
OTHER_KEYS = ("tables.C1.dim", "tables..dim", "columns.C1.bounds", "dense_groups.g.parameters", "run", "")
OTHER_SECTIONS = ("tables.C1", "columns.C1", "dense_groups.g", "nothing", "tables")
OVERRIDES = st.builds("{}={}".format, st.sampled_from([*KEYS, *OTHER_KEYS]), VALUES)
LINES = st.one_of(
    st.sampled_from([*SECTION_KEYS, *OTHER_SECTIONS]).map("[{}]".format),
    st.builds("{} = {}".format, st.sampled_from([key.partition(".")[2] for key in KEYS]), VALUES),
    st.text(max_size=20),
)


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.one_of(
        st.tuples(st.lists(LINES, max_size=8), st.just([])),
        st.tuples(st.just([]), st.lists(OVERRIDES, max_size=4)),
    )
)
def test_file_and_overrides_are_read_or_refused_in_one_line(
    tmp_path: Path, given: tuple[list[str], list[str]]
) -> None:
    lines, overrides = given
    path = tmp_path / "config.toml"
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        check_line(error)
    else:
        path.write_text(to_toml(config), encoding="utf-8")
        assert load_config(path) == config
