"""Values and combinations of keys that are refused, and the accepted ones beside them."""

import math

import pytest

from hybrid.config import ProfileSection
from hybrid.config.loading import load_config
from hybrid.config.validation import recorded_steps
from hybrid.errors import ConfigError

DATA = ["data.format=csv", "data.path=x.csv", "data.dense=price", 'data.sparse=["user", "age"]']
DATA += ["data.multi_hot_separator=|", "data.vocabulary=build(3)"]
ALL_ROWS = "adam(all_rows = true)"
VALUES = {
    "checkpoint.deltas": (
        *("every(rows = 3)", "every(steps = 0, seconds = 0)", "every(-1)", "all"),
        "every(event_seconds = 60)",
    ),
    "cluster.loggers": ("tensorbord", '["mlflow", "my_module"]', "mlflow(1)", "1"),
    "columns.age.kind": (
        *("bucket", "hour(1)", "buckets", "buckets(x)", "buckets(1, 5, 2.5)", "buckets(1, 1)"),
        *("buckets(1, nan)", "quantiles(1)", "weighted(|)"),
    ),
    "columns.age.numeric_scaling": ("min_max",),
    "columns.age.source": ("label",),
    "columns.price.kind": ("quantiles(4)",),
    "columns.price.numeric_scaling": tuple(
        f"given({moments})"
        for moments in ("", "2", "std = 2", "2, std = 0", "2, std = -1", "nan, std = 1", "x, std = 1")
    ),
    "columns.price.vocabulary": ("hash",),
    "data.delimiter": ("", '"', "§", "\0", ":\0"),
    "data.dense": ("label",),
    "data.format": ("tsv",),
    "data.label": ("",),
    "data.max_invalid_fraction": ("-5e-324", str(math.nextafter(1.0, 2.0))),
    "data.missing": ('[" NA"]', '["", " "]'),
    "data.negative_labels": ('["<=50K "]',),
    "data.path": ("a,b", "[1]", "[]"),
    "data.positive_labels": ('[" >50K"]',),
    "data.priority": ("w",),
    "data.sparse": ('["u", "u"]', "[]"),
    "data.split": ("time", "random(user)", 'time(w, column = "v")'),
    "data.validation": ("path()",),
    "data.vocabulary": ("build(min_count = )",),
    "data.weight": ("label",),
    "data.weighted_metrics": ("true",),
    "dense.compile": ("script",),
    "dense.device": ("gpu", "cpu,", "cuda:01"),
    "dense.learning_rate": ("0", "nan", "1" + "0" * 400),
    "dense.net": (
        *("[1]", "dlmr", "a b:c", "ple(expert_mlp=[0])", "ple(expert_mlp=[])", "dcn_v2(1001)", "ple(1001)"),
    ),
    "dense.tensor_plan": ("head = rowwise",),
    "dense.tensor_size": ("3",),
    "dense.top_mlp": ("wide", "[1.5]", "[64, 0]", str([1] * 1001)),
    "dense_groups.g.parameters": ("[]", "remote.*"),
    "embedding.optimizer": ("ftrl(all_rows = true)", "adam(betas = [0.9])", "adam(eps=0)"),
    "schedule.kind": ("one_cycle(warmup_steps = 1)", "cosine(steps = 9, warmup_steps = 9)"),
    "tables.u.dim": ("0",),
    "tables.u.init": ("zeros(1)",),
    "tables.u.initial": ("a.npy", "s3://b/a.safetensors#u", "positions()"),
    "tables.u.optimizer": ("Adam", "rowwise_adagrad(all_rows = true)"),
    "tables.u.placement": ("row(-1)",),
    "tasks.s.loss": ("huber",),
    "tasks.s.mask": ("s",),
    "tasks.s.metrics": ("gauc", "m:auc"),
    "tasks.s.ranking_loss": ("pairwise",),
    "tasks.s.type": ("classes", "ordinal"),
    "tasks.s.weight": ("-1.0",),
    "train.batch_size": ("big", "0", "true", "4\nepochs=2"),
}  # fmt: skip
COMBINATIONS = [
    ("train=3", "--set train=3"),
    ("columns.city.kind=value", "columns.city"),
    ('columns.age.kind=cross + columns.age.source=["user", "price"] + columns.age.vocabulary=build',
     "columns.age.vocabulary"),
    ("data.dense=age + columns.age.kind=value", "columns.age"),
    ("columns.age.kind=cross + columns.age.source=user", "columns.age.source"),
    ('columns.age.kind=cross + columns.age.source=["user", "user"]', "columns.age.source"),
    ('columns.age.kind=weekday + columns.age.source=["day", "time"]', "columns.age.source"),
    ("tasks.buy.label=bought + columns.age.source=bought", "columns.age.source"),
    ("columns.age.pooling=none", "columns.age.max_ids"),
    ("columns.age.pooling=none + columns.age.kind=hour", "columns.age.pooling"),
    ('data.positive_labels=["1", "yes"] + data.negative_labels=yes', "data.negative_labels"),
    ("data.split=time(w) + data.test_path=b.csv", "data.split"),
    ("dense.tensor_size=2 + dense.net=mine:net", "dense.tensor_plan"),
    ("dense.compile=aot_eager + dense.device=cpu,cpu", "dense.compile"),
    ("dense.tensor_size=2 + dense.compile=inductor", "dense.compile"),
    ("dense.tensor_size=2 + dense.optimizer=Muon", "dense.optimizer"),
    ("dense.tensor_size=2 + dense.device=cpu,cpu", "dense.device"),
    ("dense.optimizer=SGD(", "dense.optimizer"),
    ("dense.optimizer=Adam(eps = 2020-01-01)", "dense.optimizer"),
    ("dense.optimizer=Adam(eps = inf)", "dense.optimizer"),
    ("dense.optimizer=Adam(eps = {a = 1})", "dense.optimizer"),
    ("dense_groups.g.parameters=* + dense_groups.g.optimizer_options=lr = 0",
     "dense_groups.g.optimizer_options"),
    (f"train.update=async + embedding.optimizer={ALL_ROWS}", "embedding.optimizer"),
    (f"train.update=async + tables.u.optimizer={ALL_ROWS}", "tables.u.optimizer"),
    ("train.update=async + train.clip_norm=1", "train.clip_norm"),
    ("train.update=async + train.non_finite=skip", "train.non_finite"),
    (f"tables.u.frozen=true + tables.u.optimizer={ALL_ROWS}", "tables.u.optimizer"),
    ("tables.u.frozen=true + tables.u.learning_rate=0.1", "tables.u.learning_rate"),
    ("tables.u.init=zeros + tables.u.initial=positions(a.npy)", "tables.u.initial"),
    ("cluster.workers=1 + tables.u.placement=row(0, 1)", "tables.u.placement"),
    ("tables.u.features=a + tables.a.dim=4", "tables.a.features"),
    ("tasks.a b.type=binary", "tasks.a b"),
    ("tasks.price.type=regression", "data.dense"),
    ("data.group=user + tasks.s.type=regression + tasks.s.metrics=mrr", "tasks.s.metrics"),
    ("data.group=user + tasks.s.metrics=ndcg@0", "tasks.s.metrics"),
    ("data.group=user + tasks.s.ranking_loss=lambda", "tasks.s.ranking_loss"),
    ("data.group=user + tasks.s.ranking_loss=pairwise(0)", "tasks.s.ranking_loss"),
    ("data.group=user + tasks.s.ranking_loss=listwise + tasks.s.type=classes(3)", "tasks.s.ranking_loss"),
    ("data.group=user + tasks.s.ranking_loss=pairwise + data.shuffle=lanes", "data.shuffle"),
    ("tasks.s.type=regression + checkpoint.keep_best=auc", "checkpoint.keep_best"),
    ("train.patience=2 + checkpoint.keep_best=none", "checkpoint.keep_best"),
    ("train.patience=2 + data.split=none", "train.patience"),
    ("train.max_steps=12 + profile.steps=3", "profile.steps"),
]  # fmt: skip
SYNTHETIC = [
    ("columns.C1.kind=hour", "columns.C1"),
    ("columns.C1.pooling=none", "columns.C1.max_ids"),
    ("data.validation=path(a.csv)", "data.validation"),
    ("data.validation=time(day)", "data.validation"),
    ("data.joins=table(a.csv, key = 'item')", "data.joins"),
    ("data.stream=files()", "data.format"),
]
GROWING = [*DATA, "data.vocabulary=grow", 'data.sparse=["user", "item", "seen", "tags", "age", "day"]']
GROWING += ["columns.tags.kind=weighted", "columns.age.kind=buckets(18, 45)", "columns.day.vocabulary=build"]
OF_GROWING = [
    *(
        (f"data.vocabulary=grow({arguments})", "data.vocabulary")
        for arguments in ("max_rows = 8191", "0", "unknown = 'ones'", "rows = 9")
    ),
    ("data.format=synthetic", "data.vocabulary"),
    ("columns.tags.vocabulary=grow(max_rows = 8191)", "columns.tags.vocabulary"),
    ("columns.age.vocabulary=grow", "columns.age.vocabulary"),
    ('tables.shared.features=["user", "day"]', "tables.shared.features"),
    ('tables.shared.features=["user", "age"]', "tables.shared.features"),
    ('tables.items.features=["item", "seen"] + columns.item.vocabulary=grow(3)', "tables.items.features"),
    ("tables.user.initial=positions(rows.npy)", "tables.user.initial"),
    ("tables.user.frozen=true", "tables.user.frozen"),
    (f"tables.user.optimizer={ALL_ROWS}", "tables.user.optimizer"),
    (f"embedding.optimizer={ALL_ROWS}", "embedding.optimizer"),
    ("tables.user.placement=row(pooled_by = 'workers')", "tables.user.placement"),
    ("embedding.placement=auto(pooled_by = 'workers')", "embedding.placement"),
]
STREAM = [*GROWING[:-1], "columns.day.vocabulary=hash(9)", "data.stream=files(lanes = 5)"]
OF_STREAMS = [
    ("data.vocabulary=build", "data.vocabulary"),
    ("data.split=time(day)", "data.split"),
    ("data.test_path=x", "data.test_path"),
    ("data.validation=random", "data.validation"),
    ("train.epochs=2", "train.epochs"),
    ("train.patience=1", "train.patience"),
    ("train.eval_every_steps=5", "train.eval_every_steps"),
    ("cluster.trainers=6", "cluster.trainers"),
    ("schedule.kind=cosine", "schedule.kind"),
    ("data.shuffle=lanes", "data.shuffle"),
    ("data.group=user + tasks.s.ranking_loss=pairwise", "tasks.s.ranking_loss"),
    ("data.format=criteo + data.sparse=[] + data.dense=[] + data.vocabulary=build", "data.vocabulary"),
    ("columns.user.vocabulary=build", "columns.user.vocabulary"),
    ("checkpoint.deltas=every(event_seconds = 60)", "checkpoint.deltas"),
    ("data.stream=files(time = 'at') + checkpoint.deltas=every(event_seconds = 0)", "checkpoint.deltas"),
    ("data.path=log/day=* + data.stream=files(until = '/log/day=2')", "data.stream"),
]
KAFKA = [*STREAM, 'data.columns=["label", "price", "user"]', "data.path=[]", "data.shuffle=none"]
KAFKA += ["data.stream=kafka(brokers = 'a:1', topic = 'b')"]
OF_KAFKA = [
    ("data.format=parquet", "data.format"),
    ("data.path=log", "data.path"),
    ("data.columns=[]", "data.columns"),
    ("train.epochs=2", "train.epochs"),
    ("data.stream=kafka(brokers = 'a:1', topic = 'b', wait_hours = 0)", "data.stream"),
    ("data.stream=kafka(brokers = 'a:1')", "data.stream"),
]
CHOICES = [*DATA, "data.dense=[]", "tasks.s.type=retrieval(user)", "dense.net=two_towers"]
OF_CHOICES = [
    *((f"tasks.s.loss={loss}", "tasks.s.loss") for loss in ("log_loss", "m:loss")),
    *((f"tasks.s.metrics={name}", "tasks.s.metrics") for name in ("gauc", "m:auc")),
    ("tasks.s.ranking_loss=listwise", "tasks.s.ranking_loss"),
    *((f"tasks.s.type={kind}", "tasks.s.type") for kind in ("retrieval(other)", "retrieval")),
    ("tasks.t.type=binary", "tasks"),
    ("tasks.s.type=binary", "dense.net"),
    ("dense.net=dlrm", "dense.net"),
    ("dense.remote_mlp=4", "dense.remote_mlp"),
    ("dense.ddp=none", "dense.ddp"),
    ("train.micro_batches=2", "train.micro_batches"),
    ("data.format=synthetic", "data.format"),
    ("data.stream=files() + data.split=none + data.vocabulary=hash(9)", "data.stream"),
]


@pytest.mark.parametrize(
    ("base", "settings", "key"),
    [
        *((DATA, f"{key}={value}", key) for key, values in VALUES.items() for value in values),
        *((DATA, *row) for row in COMBINATIONS),
        *(([], *row) for row in SYNTHETIC),
        *((GROWING, *row) for row in OF_GROWING),
        *((STREAM, *row) for row in OF_STREAMS),
        *((KAFKA, *row) for row in OF_KAFKA),
        *((CHOICES, *row) for row in OF_CHOICES),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_refused_settings(base: list[str], settings: str, key: str) -> None:
    load_config(None, base)
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*base, *settings.split(" + ")])
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        "checkpoint.deltas=every(60)",
        "checkpoint.deltas=every(event_seconds = 9) + data.stream=files(time = 'day') + data.vocabulary=hash",
        "columns.age.source=bought",
        'columns.age.kind=cross + columns.age.source=["user", "price"] + columns.age.vocabulary=hash(9)',
        'columns.age.kind=cross + columns.age.source=["user", "price"] + columns.user.pooling=sum',
        "columns.age.kind=hour(%H) + columns.user.pooling=none + columns.user.max_ids=3",
        "tasks.s.mask=clicked + tasks.s.loss=m:loss",
        "tasks.s.metrics=gauc + data.group=user",
        "data.joins=table(a.csv, key = 'item') + data.validation=path(b.csv)",
        "data.weighted_metrics=true + data.weight=weight",
        "data.shuffle=lanes(64)",
        "dense.net=pkg.nets:mine + dense.device=cuda:1",
        "dense.top_mlp=[8, 4] + dense.net=dcn_v2(1000)",
        f"embedding.optimizer={ALL_ROWS}",
        f"train.update=lookahead + tables.u.optimizer={ALL_ROWS}",
        "dense.compile=inductor",
        "dense.tensor_size=2 + dense.net=mine:net + dense.tensor_plan=head = rowwise",
        'dense.remote_mlp=4 + dense_groups.g.parameters=["head.*", "remote.*"]',
        "dense_groups.g.parameters=head.*",
        "data.label= + tasks.s.type=binary + train.patience=2",
        "train.patience=2 + data.split=none + data.validation=random",
        "train.update=async + tables.u.dim=4",
        "schedule.kind=cosine(warmup_steps = 9)",
        "schedule.kind=cosine(steps = 9, warmup_steps = 8)",
        "schedule.kind=cosine(steps = 9) + data.stream=files() + data.vocabulary=hash",
        "tables.u.init=zeros + tables.v.initial=positions(a.npy)",
        "dense.net=pkg.nets:mine + data.dense=[] + tasks.s.type=retrieval(user)",
        *(
            f"data.format=criteo + data.sparse=[] + data.dense=[] + {more}"
            for more in (
                "dense.net=two_towers + tasks.s.type=retrieval(C1)",
                "data.stream=files() + data.vocabulary=hash",
            )
        ),
        'data.dense=[] + dense.net=two_towers + tasks.s.type=retrieval(user, dim = 8) + '
        'tasks.s.metrics=["recall@10", "ndcg@10"]',
        "train.max_steps=13 + profile.steps=3",
    ],
)  # fmt: skip
def test_accepted_settings(settings: str) -> None:
    load_config(None, [*DATA, *settings.split(" + ")])


@pytest.mark.parametrize(
    ("steps", "before", "total", "expected"),
    [
        ((3,), 0, 13, range(10, 13)),
        ((1, 0), 0, 1, range(1)),
        ((3, 2), 16, 21, range(18, 21)),  # counted from the step that the run resumes at
        ((), 0, 1, range(10, 10)),
        ((3,), 0, 12, None),
        ((3,), 16, 28, None),
    ],
)
def test_recorded_steps_are_within_the_run(
    steps: tuple[int, ...], before: int, total: int, expected: range | None
) -> None:
    profile = ProfileSection(steps=steps)
    if expected is None:
        with pytest.raises(ConfigError, match=r"^profile\.steps = "):
            recorded_steps(profile, before, total)
    else:
        assert recorded_steps(profile, before, total) == expected
