"""Keys and values of former versions: advice for users; stored configurations are refused."""

from pathlib import Path

import pytest

from hybrid.config.loading import load_config
from hybrid.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ("cluster.combine=auto", "remove it"),
        ("tables.user.init_scale=0.5", 'init = "uniform(scale = 0.01)"'),
        ("schedule.warmup_steps=5", "warmup_steps = 100"),
        ("dense_groups.head.learning_rate=0.1", "lr = 0.001"),
        ("columns.age.hash_rows=77", "hash(rows = 100000)"),
        ("data.numeric_scaling=standardise", "standardize"),
        ("columns.tags.too_many_ids=bad_row", "invalid_row"),
        ("data.shuffle=false", "none"),
    ],
)
def test_a_former_key_or_value_names_its_successor(setting: str, advice: str, tmp_path: Path) -> None:
    dotted, _, value = setting.partition("=")
    section, _, name = dotted.rpartition(".")
    (tmp_path / "old.toml").write_text(f"[{section}]\n{name} = '{value}'\n")
    for path, settings in ((None, [setting]), (tmp_path / "old.toml", [])):
        with pytest.raises(ConfigError) as caught:
            load_config(path, settings)
        assert caught.value.key.endswith(dotted)
        assert advice in caught.value.rule


def test_a_former_value_that_is_no_text_names_its_successor(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text("[data]\nshuffle = true\n")
    with pytest.raises(ConfigError, match="'rows'"):
        load_config(tmp_path / "old.toml")


@pytest.mark.parametrize("text", ["[dense]\nmatmul = 'auto'\n", "[former]\nkey = 1\n"])
def test_a_stored_configuration_with_a_former_key_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="earlier version") as caught:
        load_config(path, is_stored=True)
    assert caught.value.key == str(path)
    assert "\n" not in str(caught.value)
