"""Hostile configuration files and overrides give a configuration, or an error of one line."""

from pathlib import Path

from hypothesis import HealthCheck, given, settings, strategies as st
from support.hostile import check_line

from hybrid.config import RunConfig
from hybrid.config.loading import load_config, to_toml
from hybrid.config.sections import SECTION_KEYS
from hybrid.errors import ConfigError

MANY = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
KEYS = [f"{section}.{key}" for section, keys in SECTION_KEYS.items() for key in keys]
VALUES = st.one_of(
    st.sampled_from(
        (
            *("", "0", "-1", "1e999", "nan", "-inf", "true", "[]", "[1, 'a']", "{a = 1}", "''", '"', "2**3"),
            *("9" * 400, "0x1p3", "1979-05-27", "a.b:c", "../../etc/passwd", "\x00", "[[1]]", "é", "async"),
        )
    ),
    st.text(max_size=8),
    st.integers().map(str),
    st.floats().map(str),
)
OTHER_KEYS = ("tables.C1.dim", "tables..dim", "columns.C1.bounds", "dense_groups.g.parameters", "run", "")
OTHER_SECTIONS = ("tables.C1", "columns.C1", "dense_groups.g", "nothing", "tables")
OVERRIDES = st.lists(
    st.one_of(st.builds("{}={}".format, st.sampled_from([*KEYS, *OTHER_KEYS]), VALUES), st.text(max_size=20)),
    max_size=4,
)
LINES = st.one_of(
    st.sampled_from([*SECTION_KEYS, *OTHER_SECTIONS]).map("[{}]".format),
    st.builds("{} = {}".format, st.sampled_from([key.partition(".")[2] for key in KEYS]), VALUES),
    st.text(max_size=20),
)


def loaded(path: Path | None, overrides: list[str]) -> RunConfig | None:
    """Return the configuration, or None if it is refused in one line."""
    try:
        return load_config(path, overrides)
    except ConfigError as error:
        check_line(error)
        return None


@MANY
@given(overrides=OVERRIDES)
def test_overrides_are_read_or_refused_in_one_line(overrides: list[str]) -> None:
    loaded(None, overrides)


@MANY
@given(lines=st.lists(LINES, max_size=8))
def test_file_is_read_or_refused_in_one_line(lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    config = loaded(path, [])
    if config is not None:
        path.write_text(to_toml(config), encoding="utf-8")
        assert loaded(path, []) == config


@MANY
@given(raw=st.binary(max_size=40))
def test_bytes_are_refused_in_one_line(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(raw)
    loaded(path, [])
