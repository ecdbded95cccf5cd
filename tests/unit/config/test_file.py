"""Configuration files: what is read, what is refused and in which words, and what is written back."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
from support.commands import ROOT

from hybrid.config import (
    ClusterSection,
    DataSection,
    DenseGroupSection,
    DenseSection,
    RunConfig,
    RunSection,
    ScheduleSection,
    TableSection,
    TrainSection,
)
from hybrid.config.loading import describe, load_config, read_toml_text, to_toml, validate, with_own
from hybrid.config.sections import NAMED_KEYS, SECTION_KEYS
from hybrid.errors import ConfigError


def _load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8", newline="")
    return load_config(path, overrides)


def test_without_a_file_every_key_has_its_default() -> None:
    assert load_config(None) == RunConfig()


def test_a_file_sets_keys_and_tables(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        """
        [data]
        format = "criteo"
        path = ["day_0.gz", "day_1.gz"]
        numeric_scaling = "none"
        [train]
        batch_size = 4096
        [cluster]
        timeout_seconds = 5
        [tables.user]
        dim = 8
        placement = "auto(workers = [1])"
        features = ["user", "friend"]
        [tables."item.id"]
        """,
    )
    user = TableSection(dim=8, placement="auto(workers = [1])", features=("user", "friend"))
    assert config == RunConfig(
        data=DataSection(format="criteo", path=("day_0.gz", "day_1.gz"), numeric_scaling="none"),
        train=TrainSection(batch_size=4096),
        cluster=ClusterSection(timeout_seconds=5.0),
        tables={"user": user, "item.id": TableSection()},
    )
    assert type(config.cluster.timeout_seconds) is float


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert _load(tmp_path, "\ufeff[train]\r\nepochs = 3\r\n").train.epochs == 3


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.batch_size=512", "train", "batch_size", 512),
        (" train.batch_size = 512 ", "train", "batch_size", 512),
        ("dense.net=dcn_v2", "dense", "net", "dcn_v2"),
        ('dense.net="dcn_v2"', "dense", "net", "dcn_v2"),
        ("dense.net=my.nets:two_towers", "dense", "net", "my.nets:two_towers"),
        ("run.name=7", "run", "name", "7"),
        ("run.folder=2024-01-31", "run", "folder", "2024-01-31"),
        ("run.folder=a=b", "run", "folder", "a=b"),
        ("data.delimiter=\t", "data", "delimiter", "\t"),
        ("data.path=/x/y.csv", "data", "path", ("/x/y.csv",)),
        ('data.path=["/x/y.csv", "/z.csv"]', "data", "path", ("/x/y.csv", "/z.csv")),
        ("data.positive_labels=1.5", "data", "positive_labels", ("1.5",)),
        ("dense.top_mlp=64", "dense", "top_mlp", (64,)),
        ("dense.top_mlp=[]", "dense", "top_mlp", ()),
        ("data.shuffle=none", "data", "shuffle", "none"),
        ("embedding.learning_rate=1", "embedding", "learning_rate", 1.0),
    ],
)
def test_overrides(override: str, section: str, key: str, value: object) -> None:
    found = getattr(getattr(load_config(None, [override]), section), key)
    assert found == value
    assert type(found) is type(value)


def test_overrides_of_tables_may_name_tables_with_dots() -> None:
    config = load_config(None, ["tables.user.dim=8", "tables.item.id.dim=4"])
    assert config.tables == {"user": TableSection(dim=8), "item.id": TableSection(dim=4)}


def test_the_last_override_wins_over_the_file(tmp_path: Path) -> None:
    config = _load(tmp_path, "[train]\nepochs = 2\n", "train.epochs=3", "train.epochs=4")
    assert config.train.epochs == 4


ALL = "hybrid config --describe lists all keys"
NO_KEY = f"is not supported: there is no such key; {ALL}"
NO_SECTION = (
    f"is not supported: there is no such section [metrics], and no such key in another section; {ALL}"
)
ROW_OPTIMIZER = (
    "must be one of sgd, momentum, adagrad, rowwise_adagrad, adam, adamw, ftrl; "
    "dense.optimizer takes classes of torch.optim"
)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch_size=big", "train.batch_size = 'big': must be an integer, at least 1"),
        ("train.batch_size=0", "train.batch_size = 0: must be an integer, at least 1"),
        ("train.batch_size=true", "train.batch_size = True: must be an integer, at least 1"),
        ("train.batch_size=2.0", "train.batch_size = 2.0: must be an integer, at least 1"),
        ("train.batch_size=[2]", "train.batch_size = [2]: must be an integer, at least 1"),
        (
            "cluster.threads=0",
            "cluster.threads = 0: must be an integer, at least 1",
        ),
        ("dense.learning_rate=0", "dense.learning_rate = 0.0: must be a finite number, above 0"),
        ("dense.learning_rate=nan", "dense.learning_rate = nan: must be a finite number, above 0"),
        ("dense.learning_rate=inf", "dense.learning_rate = inf: must be a finite number, above 0"),
        ("dense.learning_rate=true", "dense.learning_rate = True: must be a finite number, above 0"),
        (
            "dense.net=[1]",
            "dense.net = [1]: must be one of dlrm, dcn_v2, deepfm, wide_deep, mmoe, ple, or module:function",
        ),
        ("data.format=tsv", "data.format = 'tsv': must be one of synthetic, criteo, csv, parquet"),
        ("data.path=a,b", "data.path = 'a,b': must be a list of text"),
        ("data.path=[1]", "data.path = (1,): must be a list of text"),
        ("dense.top_mlp=wide", "dense.top_mlp = 'wide': must be a list of integers"),
        ("dense.top_mlp=[1.5]", "dense.top_mlp = (1.5,): must be a list of integers"),
        ("dense.top_mlp=[64, 0]", "dense.top_mlp = (64, 0): must hold integers of at least 1"),
        (
            "dense.net=ple(expert_mlp=[0])",
            "dense.net = 'ple(expert_mlp=[0])': expert_mlp must be a list of integers, at least 1",
        ),
        ("dense.net=ple(expert_mlp=[])", "dense.net = 'ple(expert_mlp=[])': expert_mlp must not be empty"),
        (
            "dense.net=dlmr",
            "dense.net = 'dlmr': must be one of dlrm, dcn_v2, deepfm, wide_deep, mmoe, ple, or "
            "module:function",
        ),
        ("tables.user.dim=0", "tables.user.dim = 0: must be an integer, at least 1"),
        ("embedding.optimizer=RMSprop", f"embedding.optimizer = 'RMSprop': {ROW_OPTIMIZER}"),
        ("tables.user.optimizer=Adam", f"tables.user.optimizer = 'Adam': {ROW_OPTIMIZER}"),
        (
            "embedding.optimizer=adam(eps=0)",
            "embedding.optimizer = 'adam(eps=0)': eps must be a finite number, at least 1e-30",
        ),
        ("train.batch_size=4\nepochs=2", "train.batch_size = '4\\nepochs=2': must be an integer, at least 1"),
        ("train.batch_size", "--set train.batch_size: must be section.key=value"),
        ("train=3", "--set train=3: must be section.key=value"),
        ("data.priority=w", f"data.priority: {NO_KEY}"),
        ("dense.nett=x", "dense.nett: no such key; did you mean dense.net?"),
        ("batch_size=8", "batch_size: no such key; did you mean train.batch_size?"),
        ("tables.dim=x", "tables.dim: no such key; did you mean tables.NAME.dim?"),
    ],
)
def test_an_override_that_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("key", "limit", "beyond"),
    [
        ("data.max_invalid_fraction", 0.0, math.nextafter(0.0, -1.0)),
        ("data.max_invalid_fraction", 1.0, math.nextafter(1.0, 2.0)),
    ],
)
def test_a_limit_may_be_reached_but_not_passed(key: str, limit: float, beyond: float) -> None:
    section, _, name = key.partition(".")
    assert getattr(getattr(load_config(None, [f"{key}={limit}"]), section), name) == limit
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)} = .*: must be "):
        load_config(None, [f"{key}={beyond}"])


def test_a_number_that_must_be_above_zero_may_be_as_small_as_a_number_can_be() -> None:
    assert load_config(None, ["dense.learning_rate=5e-324"]).dense.learning_rate == 5e-324


def test_a_float_key_refuses_an_integer_no_float_can_hold() -> None:
    with pytest.raises(ConfigError, match="must be a finite number, above 0"):
        load_config(None, ["dense.learning_rate=1" + "0" * 400])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nbatchsize = 1", "{path}: train.batchsize: no such key; did you mean train.batch_size?"),
        ("[data]\nbatch_size = 1", "{path}: data.batch_size: no such key; did you mean train.batch_size?"),
        ("[data]\nbatchsize = 1", "{path}: data.batchsize: no such key; did you mean train.batch_size?"),
        ("[cluster]\nnet = 1", "{path}: cluster.net: no such key; did you mean dense.net?"),
        ("[trian]\nepochs = 1", "{path}: trian.epochs: no such key; did you mean train.epochs?"),
        ("[trian]\nepocs = 1", "{path}: trian.epocs: no such key; did you mean train.epochs?"),
        ("batch_size = 1", "{path}: batch_size: no such key; did you mean train.batch_size?"),
        ("[tables.user]\ndims = 1", "{path}: tables.user.dims: no such key; did you mean tables.user.dim?"),
        (
            "[tables]\nfrozen = true",
            "{path}: tables.frozen: no such key; did you mean tables.NAME.frozen?",
        ),
        ("[trian]", "{path}: [trian]: no such section; did you mean [train]?"),
        ("[metrics]", f"{{path}}: [metrics]: no such section; {ALL}"),
        ("[data]\npriority = 'w'", f"{{path}}: data.priority: {NO_KEY}"),
        ("[tables.user]\nweight = 1", f"{{path}}: tables.user.weight: {NO_KEY}"),
        ("[train]\n'' = 1", f"{{path}}: train: {NO_KEY}"),
        ("[metrics]\nrecall_at = 5", f"{{path}}: metrics.recall_at: {NO_SECTION}"),
        ("train = 3", "train = 3: must be a section: a line [train] with its keys below"),
        ("[train]\nepochs = \n", "{path}: is not valid TOML: Invalid value (at line 2, column 10)"),
        (b"# \xe9", "{path}: is not UTF-8 text (byte 2)"),
        (None, "{path}: cannot read the configuration: No such file or directory"),
    ],
)
def test_a_file_that_is_refused(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    path = tmp_path / "run.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == message.format(path=path)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration: Is a directory"):
        load_config(tmp_path)


CSV = DataSection(format="csv", path=("x.csv",), sparse=("user",), dense=("age",))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (RunConfig(dense=DenseSection(net="dlmr")), "dense.net"),
        (RunConfig(dense=DenseSection(net="a b:c")), "dense.net"),
        (RunConfig(dense=DenseSection(device="gpu")), "dense.device"),
        (RunConfig(cluster=ClusterSection(workers=1), tables={"u": TableSection(placement="row(0, 1)")}),
         "tables.u.placement"),
        (RunConfig(tables={"u": TableSection(placement="row(-1)")}), "tables.u.placement"),
        (RunConfig(tables={"u": TableSection(features=("a",)), "a": TableSection()}), "tables.a.features"),
        (RunConfig(tables={"u": TableSection(frozen=True, learning_rate=0.1)}), "tables.u.learning_rate"),
        (RunConfig(tables={"u": TableSection(initial="a.npy", init="zeros")}), "tables.u.initial"),
        (RunConfig(dense_groups={"g": DenseGroupSection()}), "dense_groups.g.parameters"),
        (RunConfig(dense_groups={"g": DenseGroupSection(parameters=("remote.*",))}),
         "dense_groups.g.parameters"),
        (RunConfig(data=DataSection(format="criteo")), "data.path"),
        (RunConfig(data=dataclasses.replace(CSV, path=())), "data.path"),
        (RunConfig(data=dataclasses.replace(CSV, label="")), "data.label"),
        (RunConfig(data=dataclasses.replace(CSV, sparse=())), "data.sparse"),
        (RunConfig(data=dataclasses.replace(CSV, dense=("label",))), "data.dense"),
        (RunConfig(data=dataclasses.replace(CSV, sparse=("u", "u"))), "data.sparse"),
        (RunConfig(data=DataSection(delimiter="")), "data.delimiter"),
        (RunConfig(data=DataSection(positive_labels=("1", "yes"), negative_labels=("yes",))),
         "data.negative_labels"),
        (RunConfig(train=TrainSection(batch_size=0)), "train.batch_size"),
        (RunConfig(schedule=ScheduleSection(kind="one_cycle(warmup_steps = 1)")), "schedule.kind"),
        (RunConfig(schedule=ScheduleSection(kind="cosine(steps = 9, warmup_steps = 9)")), "schedule.kind"),
        (RunConfig(dense_groups={"g": DenseGroupSection(parameters=("*",), optimizer_options=("lr = 0",))}),
         "dense_groups.g.optimizer_options"),
    ],
)  # fmt: skip
def test_rules_hold_for_configurations_built_in_code(config: RunConfig, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


def test_valid_configurations_built_in_code_pass() -> None:
    validate(RunConfig())
    validate(RunConfig(schedule=ScheduleSection(kind="cosine(warmup_steps = 9)")))
    validate(RunConfig(data=CSV, dense=DenseSection(net="pkg.nets:mine", device="cuda:1")))


FULL = RunConfig(
    run=RunSection(name='quoted "π" \\ \x00\x1f\x7f\n𝄞', folder="runs/a b"),
    data=dataclasses.replace(CSV, delimiter="\t", missing=("", "?", "n/a")),
    dense=DenseSection(top_mlp=(), learning_rate=1e-300),
    train=TrainSection(eval_every_steps=7),
    tables={
        "user": TableSection(dim=8, placement="row(workers = [0, 1])", learning_rate=2.5e22),
        'odd "name".x': TableSection(frozen=True),
        "": TableSection(),
    },
)


INTEGER = RunConfig(cluster=ClusterSection(timeout_seconds=5))


@pytest.mark.parametrize("config", [RunConfig(), FULL, INTEGER], ids=["defaults", "full", "5 in a float key"])
def test_toml_is_read_back_equal(tmp_path: Path, config: RunConfig) -> None:
    again = _load(tmp_path, to_toml(config))
    assert again == config
    assert read_toml_text(to_toml(config)) == config


def test_a_role_has_the_masters_values_but_for_those_that_it_was_given() -> None:
    given = {
        "dense.device": "cuda:1",
        "cluster.threads": 3,
        "cluster.interface": "eth0",
        "data.cache_folder": "/scratch",
        "data.local_cache_folder": "/local",
        "data.local_cache_gb": 2.5,
        "data.prepare_memory_gb": 1.5,
        "cluster.secret_file": "of this host",
        "cluster.start_timeout_seconds": 5.0,
    }
    own = back = with_own(FULL, [f"{key}={value}" for key, value in given.items()])
    for key, value in given.items():
        section, _, name = key.partition(".")
        assert getattr(getattr(own, section), name) == value
        masters = {name: getattr(getattr(FULL, section), name)}
        back = back.replace(**{section: dataclasses.replace(getattr(back, section), **masters)})
    assert back == FULL
    keys = [(section, key) for section, keys in SECTION_KEYS.items() for key in keys.values()]
    assert sorted(f"{section}.{key.name}" for section, key in keys if key.is_by_host) == sorted(given)
    assert not any(key.is_by_host for keys in NAMED_KEYS.values() for key in keys.values())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("cluster.trainers=3", "cluster.trainers: is decided by the master; set it there"),
        ("dense.net=own:build", "dense.net: is decided by the master; set it there"),
        ("tables.user.dim=3", "tables.user.dim: is decided by the master; set it there"),
        ("cluster.thread=3", "cluster.thread: no such key; did you mean cluster.threads?"),
        ("cluster.threads=0", "cluster.threads = 0: must be an integer, at least 1"),
        ("cluster.threads", "--set cluster.threads: must be section.key=value"),
        ("dense.device=gpu", "dense.device = 'gpu': must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_what_a_role_is_not_to_be_given(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_own(RunConfig(), [setting])
    assert str(caught.value) == message


def test_the_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    assert page == describe(), "run hybrid config --describe > docs/config.md"


def test_the_reference_names_every_key() -> None:
    page = describe()
    named = {f"{kind}.NAME": keys for kind, keys in NAMED_KEYS.items()}
    for section, keys in (SECTION_KEYS | named).items():
        part = page.partition(f"## [{section}]\n")[2].partition("\n## ")[0]
        assert [line.split("`")[1] for line in part.splitlines() if line.startswith("| `")] == list(keys)


@pytest.mark.parametrize(
    "text",
    [
        "a=" + 100_000 * "[",
        "a=" + 100_000 * "{a=",
        "a" + 100_000 * ".a" + "=1",  # would take 40 GB
        "[" + 100_000 * "a." + "a]",
        "x = {" + 1000 * r"""'a.b' . "\"\\" . c-d .""" + "a = 1}",
    ],
    ids=lambda text: text[:10],
)
def test_deep_nesting_is_an_error_of_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{tmp_path}/run.toml: is nested too deeply for a configuration$"):
        _load(tmp_path, text)


def test_names_with_many_dots_are_no_nesting(tmp_path: Path) -> None:
    name = ".".join("abcdefgh")
    columns = ", ".join(f'"{name}.{i}"' for i in range(500))
    config = _load(tmp_path, f'[data]\nsparse = [{columns}]\n[tables."{name}.3"]\ndim = 4\n')
    assert len(config.data.sparse) == 500


def test_every_key_is_read_somewhere() -> None:
    """A key that nothing reads would be accepted, documented, and change nothing."""
    files = [path for package in ("hybrid", "workers") for path in (ROOT / package).rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    keys = [key for keys in SECTION_KEYS.values() for key in keys]
    assert len(keys) > 50
    assert [key for key in keys if not re.search(rf"\.{key}\b", code)] == []


TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", re.findall(r"^```toml\n(.*?)^```$", TRAINING, re.MULTILINE | re.DOTALL))
def test_configurations_of_the_page_on_training_are_right(tmp_path: Path, text: str) -> None:
    assert _load(tmp_path, text) != RunConfig()
