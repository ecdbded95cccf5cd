"""Advice on keys and values of earlier versions."""

# Former keys by advice. A key such as ``tables.pooling`` stands for all sections [tables.NAME].
_REPLACEMENTS = {
    "is no longer a key, since the program chooses the value; remove it": (
        "cluster.transport cluster.carrier cluster.combine cluster.stop_timeout_seconds data.checksum "
        "data.prefetch_batches data.synthetic_test_rows dense.remote_worker dense.bucket_mb dense.all_reduce "
        "dense.matmul"
    ),
    "follows from dense.device (cuda:0,cuda:1 for replicas) and dense.tensor_size": "dense.parallel",
    "is now dense.device, such as cuda:0,cuda:1": "dense.devices",
    "is the second number of profile.steps now, such as [5, 10]": "profile.first_step",
    "is now cluster.master, as HOST or HOST:PORT": "cluster.master_address cluster.master_port",
    "is now cluster.timeout_seconds": "cluster.rpc_timeout_seconds cluster.step_timeout_seconds",
    'is one of optimizer_options now: "lr = 0.001"': "dense_groups.learning_rate",
    "is now pooling in the sections [columns.NAME] of the table's columns": "tables.pooling",
    'is now type, as in type = "regression"': "tasks.kind",
    "is now data.max_invalid_fraction, where 0 stops at the first invalid row": "data.bad_rows",
    "is now data.max_invalid_fraction": "data.max_bad_fraction",
    'is now a kind, as in kind = "quantiles(10)"': "columns.quantiles",
}
# Former keys that are now arguments in the value of another key, by an example of that key.
_EXAMPLES = {
    'placement = "row(workers = [0, 1])"': "tables.workers",
    "placement = \"auto(pooled_by = 'trainers')\"": "embedding.pooled_by tables.pooled_by",
    'optimizer = "SGD(momentum = 0.9)"': "dense.optimizer_options",
    'optimizer = "adam(betas = [0.9, 0.999], eps = 1e-8, weight_decay = 0.01, all_rows = true)"': (
        "embedding.eps embedding.momentum embedding.beta1 embedding.beta2 embedding.weight_decay "
        "embedding.all_rows tables.all_rows"
    ),
    'optimizer = "ftrl(beta = 1.0, l1 = 0.1)"': "embedding.ftrl_beta embedding.ftrl_l1",
    'net = "dcn_v2(cross_layers = 2)"': "dense.cross_layers",
    'net = "mmoe(experts = 4, expert_mlp = [64, 32])"': "dense.experts dense.expert_mlp",
    'init = "uniform(scale = 0.01)"': "tables.init_scale",
    'type = "classes(5)"': "tasks.classes",
    'loss = "focal(gamma = 2.0)" or "huber(delta = 1.0)"': "tasks.focal_gamma tasks.huber_delta",
    'ranking_loss = "pairwise(fraction = 0.5)"': "tasks.ranking_share",
    'kind = "cosine(steps = 1000, warmup_steps = 100)"': (
        "schedule.steps schedule.warmup_steps schedule.initial_factor schedule.final_factor "
        "schedule.decay_every schedule.decay_factor schedule.power schedule.peak_fraction"
    ),
    'split = "time(when)"': "data.split_column",
    'shuffle = "lanes(64)"': "data.shuffle_lanes",
    'numeric_scaling = "standardize(log = true)"': "data.numeric_transform columns.numeric_transform",
    'vocabulary = "build(min_count = 4)" or "hash(rows = 100000)"': (
        "data.vocabulary_min_count columns.vocabulary_min_count data.hash_rows columns.hash_rows"
    ),
    'kind = "buckets(18, 65)" or "weighted(:)"': "columns.bounds columns.weight_separator",
}
_ADVICE = {key: text for text, keys in _REPLACEMENTS.items() for key in keys.split()}
_ADVICE |= {
    key: f"is an argument of {example.partition(' ')[0]} now, as in {example}"
    for example, keys in _EXAMPLES.items()
    for key in keys.split()
}
_SPELLINGS = {
    ("data.numeric_scaling", "standardise"): "standardize",
    ("columns.numeric_scaling", "standardise"): "standardize",
    ("columns.too_many_ids", "bad_row"): "invalid_row",
    ("train.update", "pipelined"): "lookahead",
    ("data.shuffle", "true"): "rows",
    ("data.shuffle", "false"): "none",
}


def advice(section: str, name: str) -> str | None:
    """Return the advice on a former key; None for any other name."""
    return _ADVICE.get(_key(section, name))


def advice_on_value(section: str, name: str, value: object) -> str | None:
    """Return the advice on a former value of a key; None for any other value."""
    new = _SPELLINGS.get((_key(section, name), str(value).lower()))  # a value may be a bool
    return None if new is None else f"is a former value; write {new!r}"


def _key(section: str, name: str) -> str:
    """Return the key without the name of a section: ``tables.dim`` for ``tables.user`` and ``dim``."""
    return f"{section.partition('.')[0]}.{name}"
