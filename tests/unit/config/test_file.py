"""Configuration files, sections and overrides: accepted, refused and hostile ones, and the written TOML."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from support.commands import ROOT
from support.hostile import check_line

from hybrid.config import (
    ColumnSection,
    DataSection,
    DenseSection,
    RunConfig,
    RunSection,
    TableSection,
    TaskSection,
    TrainSection,
)
from hybrid.config.loading import (
    apply_settings,
    describe,
    fixed_values,
    json_schema,
    load_config,
    read_toml_text,
    to_toml,
    validate,
)
from hybrid.config.sections import NAMED_KEYS, SECTION_KEYS
from hybrid.config.task_sections import main_metric, metric_name, shown_metrics
from hybrid.errors import ConfigError


def _load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8", newline="")
    return load_config(path, overrides)


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert _load(tmp_path, "\ufeff[train]\r\nepochs = 3\r\n").train.epochs == 3


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.batch_size=512", "train", "batch_size", 512),
        ("dense.net=dcn_v2", "dense", "net", "dcn_v2"),
        ("dense.net=my.nets:two_towers", "dense", "net", "my.nets:two_towers"),
        ("run.name=7", "run", "name", "7"),
        ("run.folder=a=b", "run", "folder", "a=b"),
        ("data.delimiter=\t", "data", "delimiter", "\t"),
        ("data.path=/x/y.csv", "data", "path", ("/x/y.csv",)),
        ('data.path=["/x/y.csv", "/z.csv"]', "data", "path", ("/x/y.csv", "/z.csv")),
        ("data.positive_labels=[1, true]", "data", "positive_labels", ("1", "true")),
        ("data.missing=[-1, -99.0, '']", "data", "missing", ("-1", "-99.0", "")),
        ("dense.top_mlp=[]", "dense", "top_mlp", ()),
        ("data.shuffle=none", "data", "shuffle", "none"),
        ("embedding.learning_rate=1", "embedding", "learning_rate", 1.0),
        ("data.max_invalid_fraction=1", "data", "max_invalid_fraction", 1.0),
    ],
)
def test_overrides(override: str, section: str, key: str, value: object) -> None:
    found = getattr(getattr(load_config(None, [override]), section), key)
    assert found == value
    assert type(found) is type(value)


def test_overrides_of_tables_with_dots() -> None:
    """The last override of a key wins."""
    config = load_config(None, ["tables.user.dim=7", "tables.user.dim=8", "tables.item.id.dim=4"])
    assert config.tables == {"user": TableSection(dim=8), "item.id": TableSection(dim=4)}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("dense.nett", "dense.net"),
        ("batch_size", "train.batch_size"),
        ("tables.dim", "tables.NAME.dim"),
        ("data.batchsize", "train.batch_size"),
        ("trian.epocs", "train.epochs"),
        ("Train.EPOCHS", "train.epochs"),
        ("tables.user.dims", "tables.user.dim"),
    ],
)
def test_unknown_key_has_nearest_key(name: str, nearest: str, tmp_path: Path) -> None:
    section, _, key = name.rpartition(".")
    for text, overrides, place in (
        ("", [f"{name}=1"], name),
        (f"[{section}]\n{key} = 1" if section else f"{key} = 1", [], f"run.toml:{1 + bool(section)}: {name}"),
    ):
        with pytest.raises(ConfigError, match=rf" {nearest}\?$") as caught:
            _load(tmp_path, text, *overrides)
        assert caught.value.key.removeprefix(f"{tmp_path}/") == place


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trian]", "{path}:1: [trian]: no such section; did you mean [train]?"),
        ("[tables.user]\nweight = 1", "{path}:2: tables.user.weight: "),
        ("[train]\n'' = 1", "{path}:1: train: "),
        ("[metrics]\nrecall_at = 5", "{path}:2: metrics.recall_at: "),
        ("train = 3", "{path}:1: train = 3: "),
        ("[data]\nsparse = [\n  'a',\n]\n# none\n[train]\nepochs = 0", "{path}:7: train.epochs = 0: "),
        ('[run]\nname = """\n[train]\nepochs = 1\n"""\n[train]\nepochs = 0', "{path}:7: train.epochs"),
        ("train = {batch_size = 2, epochs = 0}", "{path}:1: train.epochs = 0: "),
        ("[tables.'a.b']\ndim = 2\nplacement = 'row(9)'", "{path}:3: tables.a.b.placement = 9: "),
        ("[data]\nformat = 'csv'", "{path}:1: data.path: "),
        ("[columns.x]\nkind = 'hour'\n[data]\nformat = 'csv'", "{path}:3: data.path: "),
        ("[train]\nepochs = \n", "{path}: is not valid TOML: Invalid value (at line 2, column 10)"),
        (b"# \xe9", "{path}: is not UTF-8 text (byte 2)"),
        (None, "{path}: cannot read the configuration: Is a directory"),
    ],
)
def test_invalid_file_is_refused(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    path = tmp_path / "run.toml"
    if text is None:
        path.mkdir()
    else:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(message.format(path=path))


@pytest.mark.parametrize("text", ["[dense]\nmatmul = 'auto'\n", "[former]\nkey = 1\n"])
def test_a_stored_configuration_with_an_unknown_key_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, is_stored=True)
    assert caught.value.key == str(path)
    assert "\n" not in str(caught.value)


FULL = RunConfig(
    run=RunSection(name='quoted "π" \\ \x00\x1f\x7f\n𝄞', folder="runs/a b"),
    data=DataSection(
        format="csv", path=("x",), sparse=("age", "who.what"), delimiter="\t", missing=("", "?", "n/a")
    ),
    columns={
        "age": ColumnSection(kind="buckets(18.0, 25.5)"),
        "who.what": ColumnSection(kind="cross", source=("a", "b")),
    },
    dense=DenseSection(top_mlp=(), learning_rate=1e-300),
    train=TrainSection(eval_every_steps=7),
    tables={
        "user": TableSection(dim=8, placement="row(workers = [0, 1])", learning_rate=2.5e22),
        'odd "name".x': TableSection(frozen=True),
        "": TableSection(),
    },
)


@pytest.mark.parametrize("config", [RunConfig(), FULL], ids=["defaults", "full"])
def test_written_toml_is_read_equal(tmp_path: Path, config: RunConfig) -> None:
    again = _load(tmp_path, to_toml(config))
    assert again == config
    assert read_toml_text(to_toml(config)) == config


def test_error_of_an_override_names_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^train\.epochs = 0: "):
        _load(tmp_path, "[train]\nepochs = 3", "train.epochs=0")


def test_schema_has_every_key_with_its_type_and_default() -> None:
    schema = json.loads(json_schema())["properties"]
    assert schema.keys() == {*SECTION_KEYS, *NAMED_KEYS}
    for section, keys in SECTION_KEYS.items():
        assert schema[section]["properties"].keys() == keys.keys()
    epochs = schema["train"]["properties"]["epochs"]
    assert (epochs["type"], epochs["minimum"], epochs["default"]) == ("integer", 1, 1)
    assert schema["tables"]["additionalProperties"]["properties"].keys() == NAMED_KEYS["tables"].keys()


def test_role_overrides_keys_by_host_only() -> None:
    given = {
        "dense.device": "cuda:1",
        "cluster.threads": 3,
        "cluster.interface": "eth0",
        "data.cache_folder": "/scratch",
        "data.local_cache_folder": "/local",
        "cluster.secret_file": "of this host",
        "cluster.start_timeout_seconds": 5.0,
    }
    own = back = apply_settings(FULL, [f"{key}={value}" for key, value in given.items()])
    for key, value in given.items():
        section, _, name = key.partition(".")
        assert getattr(getattr(own, section), name) == value
        masters = {name: getattr(getattr(FULL, section), name)}
        back = back.replace(**{section: dataclasses.replace(getattr(back, section), **masters)})
    assert back == FULL


@pytest.mark.parametrize(
    "setting",
    [
        "cluster.trainers=3",  # the master decides these two
        "tables.user.dim=3",
        "cluster.thread=3",
        "cluster.threads=0",
        "dense.device=gpu",
    ],
)
def test_invalid_setting_of_role_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_settings(RunConfig(), [setting])
    assert caught.value.key == setting.partition("=")[0]


def test_reference_page_is_current() -> None:
    page = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    assert page == describe(), "run hybrid config --describe > docs/config.md"


@pytest.mark.parametrize(
    "text",
    [
        "a=" + 100_000 * "{a=",
        "a" + 100_000 * ".a" + "=1",  # would take 40 GB
        "[" + 100_000 * "a." + "a]",
        "x = {" + 1000 * r"""'a.b' . "\"\\" . c-d .""" + "a = 1}",
    ],
    ids=lambda text: text[:10],
)
def test_deep_nesting_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{tmp_path}/run.toml: .*nested"):
        _load(tmp_path, text)


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
    max_examples=150,
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
def test_file_and_overrides_are_read_or_refused(tmp_path: Path, given: tuple[list[str], list[str]]) -> None:
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


CLICK = TaskSection()
SPENT = TaskSection(type="regression")


def test_columns_of_custom_batches_may_be_sequences() -> None:
    """The format of such a run is synthetic, the default."""
    config = load_config(None, ["columns.tags.pooling=none", "columns.tags.max_ids=5"])
    assert config.columns["tags"] == ColumnSection(pooling="none", max_ids=5)


def test_label_column_is_only_task_without_sections() -> None:
    config = RunConfig(data=DataSection(label="clicked"))
    assert config.all_tasks == {"label": TaskSection(label="clicked")}
    assert (config.num_outputs, config.best_by) == (1, "auc")


def test_tasks_are_in_file_order(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[tasks.spent]\ntype = "regression"\n[tasks.click]\nlabel = "clicked"\nweight = 2\n')
    config = load_config(path, ["tasks.spent.loss=huber"])
    assert list(config.all_tasks) == ["spent", "click"]
    spent, click = config.all_tasks.values()
    assert (spent.label, spent.loss_call.name) == ("spent", "huber")
    assert (click.label, click.loss_call.name) == ("clicked", "log_loss")
    path.write_text(to_toml(config))
    assert load_config(path) == config


def test_metric_names_begin_with_task_if_several() -> None:
    one, several = {"spent": SPENT}, {"spent": SPENT, "click": TaskSection(metrics=("ndcg@5", "my.mod:lift"))}
    assert (main_metric(one), main_metric(several)) == ("rmse", "spent.rmse")
    assert metric_name(several, "click", "auc") == "click.auc"
    assert shown_metrics(one) == ["rmse", "mae"]
    assert shown_metrics(several)[-2:] == ["click.ndcg@5", "click.lift"]


def test_ranking_loss_is_known_and_fixed() -> None:
    ranked = TaskSection(type="regression", ranking_loss="listwise")
    assert not RunConfig(tasks={"a": CLICK, "b": SPENT}).has_ranking_loss
    assert RunConfig(tasks={"a": CLICK, "b": ranked}).has_ranking_loss
    config = RunConfig(data=DataSection(group="user"), tasks={"b": ranked})
    validate(config)
    kept = fixed_values(config)
    assert kept["tasks.b.ranking_loss"] == "listwise"  # since it decides which rows a step has
    assert "tasks.b.ranking_share" not in kept
