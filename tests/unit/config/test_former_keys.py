"""Keys and values of former versions: one message for users, translated in what runs have stored."""

import tomllib
from pathlib import Path

import pytest

from hybrid.config import RunConfig
from hybrid.config.loading import load_config, to_toml
from hybrid.config.sections import NAMED_KEYS, SECTION_KEYS
from hybrid.errors import ConfigError

STORED = Path(__file__).with_name("stored_in_november.toml")  # as ``hybrid config`` printed it, with all keys


def _stored() -> RunConfig:
    return load_config(STORED, is_stored=True)


def _keys() -> list[tuple[str, str, object]]:
    """Each key of the stored file: its section, its name, and its value."""
    document = tomllib.loads(STORED.read_text(encoding="utf-8"))
    return [
        (section if section in SECTION_KEYS else f"{section}.{name}", key, value)
        for section, content in document.items()
        for name, values in ([("", content)] if section in SECTION_KEYS else content.items())
        for key, value in values.items()
    ]


def test_a_stored_configuration_keeps_its_meaning() -> None:
    config = _stored()
    assert load_config(None).train.batch_size == config.train.batch_size
    assert config.embedding.optimizer == "adagrad(eps = 1e-06, weight_decay = 0.01)"
    assert config.schedule.kind == "cosine(steps = 100, warmup_steps = 5)"
    assert (config.dense.device, config.dense.tensor_size) == ("cpu,cpu", 0)
    assert config.profile.steps == (3, 20)
    assert config.dense.net == "dcn_v2(3)"
    click = config.tasks["click"]
    assert (click.loss, click.ranking_loss) == ("focal(3.0)", "pairwise(0.3)")
    assert config.tasks["stars"].type == "classes(5)"
    assert config.dense.optimizer == "Adam(eps = 1e-3)"
    assert config.dense_groups["head"].optimizer_options == ("lr = 0.1",)
    assert config.cluster.master == "10.0.0.1:29400"
    assert [config.columns[name].pooling for name in ("user", "item", "tags")] == ["mean", "mean", "sum"]
    user = config.tables["user"]
    assert user.optimizer == "adam(betas = [0.8, 0.999], eps = 1e-06, weight_decay = 0.01)"
    assert user.placement == 'row(workers = [0, 1], pooled_by = "workers")'
    assert (user.dim, user.init) == (8, "normal(0.5)")
    assert config.columns["age"].numeric_scaling == "standardize(log = true)"
    tags = config.columns["tags"]
    assert (tags.kind, tags.too_many_ids, tags.vocabulary) == ("weighted", "invalid_row", "hash(1000)")
    assert config.columns["both"].vocabulary == "hash(77)"
    assert (config.data.vocabulary, config.data.split) == ("build(2)", 'time("when")')
    assert (config.data.shuffle, config.data.max_invalid_fraction) == ("rows", 0.0)


def test_a_translated_configuration_has_keys_of_today_only(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(_stored()), encoding="utf-8")
    assert load_config(tmp_path / "config.toml") == _stored()
    assert load_config(tmp_path / "config.toml", is_stored=True) == _stored()


FORMER = [
    (section, name, value)
    for section, name, value in _keys()
    if name not in (SECTION_KEYS.get(section) or NAMED_KEYS[section.partition(".")[0]])
]


@pytest.mark.parametrize(("section", "name", "value"), FORMER)
def test_each_former_key_has_a_message_of_its_own(section: str, name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"{section}.{name}={value}"])
    assert caught.value.key == f"{section}.{name}"
    assert "no such key" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
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
        with pytest.raises(ConfigError, match=advice) as caught:
            load_config(path, settings)
        assert caught.value.key.endswith(dotted)
