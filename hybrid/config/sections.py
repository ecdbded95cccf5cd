"""``RunConfig``, and its sections run, cluster, dense, dense_groups, train, checkpoint, schedule, profile."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from hybrid.config.data_sections import ColumnSection, DataSection
from hybrid.config.key import (
    BUILT_IN,
    MAX_LAYERS,
    USER_FUNCTION,
    CallSignatures,
    Key,
    argument,
    by_host,
    fixed,
    keys_of,
    model,
    option,
    setting,
    split_call,
)
from hybrid.config.table_sections import EmbeddingSection, TableSection
from hybrid.config.task_sections import LABEL, TaskSection, main_metric
from hybrid.topology import Topology

_HISTORY = argument("history", str, None), argument("candidate", str, None)
_BLOCKS = argument("blocks", int, 2, minimum=1, maximum=MAX_LAYERS)
_EXPERTS = argument("experts", int, 4, minimum=1, maximum=MAX_LAYERS)
_EXPERT_MLP = argument("expert_mlp", int, (64, 32), is_list=True, minimum=1)
NET_CALLS = CallSignatures(
    {
        "dlrm": (),
        "dcn_v2": (argument("cross_layers", int, 2, minimum=1, maximum=MAX_LAYERS),),
        "deepfm": (),
        "wide_deep": (),
        "mmoe": (_EXPERTS, _EXPERT_MLP),
        "ple": (_EXPERTS, _EXPERT_MLP),
        "din": (*_HISTORY, argument("attention_mlp", int, (32,), is_list=True, minimum=1)),
        "self_attention": (*_HISTORY, _BLOCKS, argument("heads", int, 1, minimum=1)),
        "hstu": (*_HISTORY, _BLOCKS, argument("heads", int, 2, minimum=1)),
        "two_towers": (),
    },
    others=USER_FUNCTION,
    others_rule="module:function",
)
COMPILERS = ("inductor", "aot_eager")
NETS = NET_CALLS.names
HISTORY_NETS = ("din", "self_attention", "hstu")  # the elements of NETS that take one column as a history
_INITIAL = argument("initial_factor", float, 0.04, above=0, maximum=1)
_FINAL = argument("final_factor", float, 0.0, minimum=0, maximum=1)
_STEPS = argument("steps", int, 0, minimum=0)
_WARMUP = argument("warmup_steps", int, 0, minimum=0)
DELTA_CALLS = CallSignatures(
    {
        "none": (),
        "every": (
            argument("steps", int, 0, minimum=0),
            argument("seconds", float, 10.0, minimum=0),
            argument("event_seconds", float, 0.0, minimum=1),
        ),
    }
)
SCHEDULE_CALLS = CallSignatures(
    {
        "constant": (_WARMUP, _INITIAL),
        "step": (
            argument("decay_every", int, 1000, minimum=1),
            argument("decay_factor", float, 0.1, above=0, maximum=1),
            _WARMUP,
            _INITIAL,
        ),
        "cosine": (_FINAL, _STEPS, _WARMUP, _INITIAL),
        "polynomial": (argument("power", float, 1.0, above=0), _FINAL, _STEPS, _WARMUP, _INITIAL),
        "one_cycle": (
            argument("peak_fraction", float, 0.3, above=0, maximum=0.999999),
            argument("final_factor", float, 4e-6, minimum=0, maximum=1),  # as torch's OneCycleLR
            _STEPS,
            _INITIAL,
        ),
    }
)
LOGGER_CALLS = CallSignatures(
    {"tensorboard": (), "mlflow": (), "wandb": ()}, others=USER_FUNCTION, others_rule="module:Class"
)
DTYPES = ("float32", "float64")


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """The name, the folder and the seed of a run."""

    name: str = option("run", "Name of the run; its folder is runs/NAME-DATE-TIME.")
    folder: str = option(
        "", "Run folder, or its URL in an object store (docs/storage.md); empty for a new folder under runs/."
    )
    seed: int = model(1, "Seed of tables, dense nets, shuffling, test rows and synthetic data.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    """The processes of a run, and how they connect."""

    trainers: int = option(2, "Number of trainers.", minimum=1)
    workers: int = option(2, "Number of workers.", minimum=1)
    master: str = option(
        "127.0.0.1",
        "Address on which the master listens: HOST, HOST:PORT or [IPv6]:PORT. Without a port, launch takes a "
        "free port, and a master that is started by hand takes port 29300.",
    )
    interface: str = by_host(
        "auto",
        "Network interface for all traffic, such as lo or eth0; auto takes the one that reaches the master.",
    )
    namespace: str = option(
        "auto",
        "With auto, the roles of launch get a separate network namespace if loopback suffices "
        "and the system allows it; off keeps the host's network, for user code that opens "
        "connections.",
        choices=("auto", "off"),
    )
    threads: int = by_host(1, "Intra-op threads of each trainer and worker.", minimum=1)
    start_timeout_seconds: float = by_host(60.0, "Time limit for roles to register with the master.", above=0)
    timeout_seconds: float = option(
        60.0,
        "Time limit of a role's wait for another one, and of the last step and checkpoint of a stopped run.",
        above=0,
    )
    heartbeat_timeout_seconds: float = option(
        10.0, "Time without a heartbeat after which a role is considered frozen.", above=0
    )
    max_restarts: int = option(
        3,
        "Number of restarts in a row, without a new checkpoint between them, after which the command ends.",
        minimum=0,
    )
    metrics_port: int = option(
        0,
        "Port on which launch, or a master that is started by hand, serves /metrics for Prometheus, and "
        "/healthz, at the host of cluster.master; 0 for none. For configured runs only.",
        minimum=0,
        maximum=65535,
    )
    loggers: tuple[str, ...] = option(
        ("tensorboard",),
        "Tools that receive the numbers of metrics.jsonl: TensorBoard, MLflow, W&B, or your class "
        "(docs/watching.md).",
        signatures=LOGGER_CALLS,
    )
    secret_file: str = by_host(
        "",
        "File with the cluster's secret, readable by its owner only; empty for the environment "
        "variable HYBRID_SECRET. Without either, launch creates a secret.",
    )

    @property
    def master_endpoint(self) -> tuple[str, int]:
        """The host name or IP address on which the master listens, and its port, or 0 if none is set."""
        match = re.fullmatch(r"\[([^\[\]]+)\](?::(\d{1,5}))?|([^:\[\]\s]+)(?::(\d{1,5}))?", self.master)
        if match is None:  # an IPv6 address without brackets
            return self.master, 0
        return match[1] or match[3], int(match[2] or match[4] or 0)

    @property
    def stop_timeout_seconds(self) -> float:
        """The time that a role has to exit after an error or an interrupt, before it is killed."""
        return max(4.0, self.timeout_seconds / 15)

    @property
    def topology(self) -> Topology:
        return Topology(self.trainers, self.workers)


@dataclass(frozen=True, kw_only=True)
class DenseSection:
    """The dense nets and their training."""

    net: str = fixed(
        "dlrm",
        "The model: a built-in model, or your function that builds a net. `experts` is the number of experts "
        "(mmoe), or the number of experts per task and of shared experts in each layer (ple). `expert_mlp` "
        "lists the hidden units of an expert. `history` is a column with pooling = none, such as the items "
        "that a user has seen, and `candidate` is the column of the item to score (din, self_attention, "
        "hstu).",
        signatures=NET_CALLS,
        unsigned=BUILT_IN,
    )
    bottom_mlp: tuple[int, ...] = model(
        (64, 32), "Hidden units of the net over numeric features (dlrm).", minimum=1
    )
    top_mlp: tuple[int, ...] = model(
        (128, 64),
        "Hidden units of the net over all features, or of each tower (mmoe, ple, two_towers).",
        minimum=1,
    )
    remote_mlp: tuple[int, ...] = model(
        (),
        "Hidden units of a dense net on a worker, between interaction and head; empty for none.",
        minimum=1,
    )
    optimizer: str = setting(
        "Adam",
        'A class of torch.optim, with its arguments: "SGD(momentum = 0.9, weight_decay = 1e-4)".',
        is_name_fixed=True,
    )
    learning_rate: float = setting(0.002, "Learning rate of the dense nets.", above=0)
    ddp: str = setting(
        "outside",
        "Parameters under DDP: none, those of the head (inside), or all local parameters (outside).",
        choices=("none", "inside", "outside"),
    )
    device: str = by_host(
        "auto",
        "cpu, cuda, cuda:N, or auto (a GPU for each trainer if there is one). Several devices, such as "
        "cuda:0,cuda:1, hold replicas, over which a trainer splits its samples. The first device holds the "
        "parameters.",
    )
    tensor_size: int = setting(
        0,
        "Number of trainers that split the layers of a net, a divisor of cluster.trainers; 0 for none.",
        minimum=0,
    )
    tensor_plan: tuple[str, ...] = setting(
        (),
        'How layers are split, such as ["head.0 = colwise", "head.2 = rowwise"]; empty for the '
        "built-in plan of a built-in net.",
    )
    compile: str = option(
        "none",
        "Execution backend of the local net: none for eager mode, or a backend of torch.compile.",
        choices=("none", *COMPILERS),
    )
    autocast: str = setting(
        "none",
        "Precision in torch.autocast of the local net, for operations for which bfloat16 is safe.",
        choices=("none", "bfloat16"),
    )

    net_call = NET_CALLS.property_of("dense.net")

    @property
    def optimizer_call(self) -> tuple[str, tuple[str, ...]]:
        """The name of a class of torch.optim, and its arguments as lines of TOML."""
        return split_call("dense.optimizer", self.optimizer)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of a trainer's replicas; empty if ``device`` is only one device."""
        return tuple(device.strip() for device in self.device.split(",")) if "," in self.device else ()

    @property
    def parallel(self) -> str:
        """``replicas`` on devices of a trainer, ``tensor`` parallelism over trainers, or ``none``."""
        return "replicas" if self.devices else "tensor" if self.tensor_size else "none"

    @property
    def trainers_per_net(self) -> int:
        """The number of trainers over which a dense net is split; 1 without a split."""
        return self.tensor_size or 1


@dataclass(frozen=True, kw_only=True)
class DenseGroupSection:
    """Separate optimizer arguments for some parameters of dense nets."""

    parameters: tuple[str, ...] = setting(
        (),
        'Names or patterns of parameters, such as "head.*" or "*.bias"; parameters of the remote net '
        'begin with "remote.".',
    )
    optimizer_options: tuple[str, ...] = setting(
        (), 'Arguments that differ from [dense], such as ["lr = 0.001", "weight_decay = 0"].'
    )

    @property
    def learning_rate(self) -> float | None:
        """The argument ``lr``; None if the rate of [dense] applies. ValueError if ``lr`` is no number."""
        rates = [value for name, _, value in self._options if name.strip() == "lr"]
        return float(rates[-1]) if rates else None

    @property
    def other_options(self) -> tuple[str, ...]:
        return tuple("".join(option) for option in self._options if option[0].strip() != "lr")

    @property
    def _options(self) -> list[tuple[str, str, str]]:
        return [text.partition("=") for text in self.optimizer_options]


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """Steps, batches, and how trainers update parameters."""

    epochs: int = setting(1, "Number of passes over the training rows.", minimum=1)
    max_steps: int = setting(0, "Number of steps after which the run stops; 0 for no limit.", minimum=0)
    batch_size: int = model(1024, "Number of samples per step over all trainers.", minimum=1)
    micro_batches: int = setting(
        1, "Number of micro-batches that a trainer computes per step, one after another.", minimum=1
    )
    update: str = setting(
        "sync",
        "sync: one exact step of all trainers, by distributed autograd. lookahead: the same step with ids "
        "sent ahead, which is faster. async: workers apply each trainer's gradients when they arrive.",
        choices=("sync", "lookahead", "async"),
    )
    clip_norm: float | None = setting(
        None, "Norm over all tables and dense nets to which larger gradients are scaled down.", above=0
    )
    non_finite: str = setting(
        "stop",
        "Whether a loss or gradient that is not finite stops the run, or skips the step.",
        choices=("stop", "skip"),
    )
    dtype: str = setting(
        "float32",
        "Type of dense parameters and optimizer state, and of rows unless their dtype is set.",
        choices=DTYPES,
    )
    initial: str = fixed(
        "",
        "Run, for its best checkpoint, or checkpoint whose model is the initial model: dense nets, rows of "
        "tables by value, and optimizer state; a path or URL that all hosts can read. tables.NAME.initial "
        "overrides it for a table.",
    )
    log_every_steps: int = setting(10, "Number of steps between two progress lines.", minimum=1)
    eval_every_steps: int = setting(0, "Steps between two evaluations; 0 for one per epoch.", minimum=0)
    patience: int = setting(
        0,
        "Number of evaluations without improvement (checkpoint.keep_best) after which the run ends; "
        "0 for no limit.",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When checkpoints are written, in addition to the last step, and which checkpoints are kept."""

    every_steps: int = option(
        0, "Number of steps between two checkpoints; 0 for checkpoints by time only.", minimum=0
    )
    every_minutes: float = option(
        5.0, "Minutes between two checkpoints; 0 for checkpoints by steps only.", minimum=0
    )
    keep_last: int = option(2, "Number of newest checkpoints to keep.", minimum=1)
    keep_best: str = setting(
        "auto",
        "Metric by which the best checkpoint is kept, too, such as auc, or NAME.auc with several tasks. "
        "auto is AUC, RMSE or accuracy of the first task; none keeps no best checkpoint.",
    )
    deltas: str = setting(
        "none",
        "`every` writes the changes of the model since the last checkpoint or delta, for `hybrid.follow` and "
        "`hybrid export --follow`: after this number of steps, or of seconds; 0 disables a rule. With "
        "`event_seconds`, also after the step in which the event time of a stream reaches a multiple of it.",
        signatures=DELTA_CALLS,
    )

    delta_call = DELTA_CALLS.property_of("checkpoint.deltas")


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """The learning-rate schedule of tables and dense nets."""

    kind: str = setting(
        "constant",
        "The learning rate by step. The rate rises linearly from `initial_factor` times the full rate over "
        "`warmup_steps`. Then it falls until step `steps` (0: until the end of the run), which includes the "
        "warm-up. In one_cycle, it rises in the fraction `peak_fraction` of the steps, and momentum "
        "and betas stay (cycle_momentum=False of torch's OneCycleLR).",
        signatures=SCHEDULE_CALLS,
    )

    call = SCHEDULE_CALLS.property_of("schedule.kind")

    @property
    def steps(self) -> int:
        """The step at which the schedule ends; 0 if it ends with the run, or has no end."""
        return int(self.call.arguments.get("steps", 0))

    @property
    def warmup_steps(self) -> int:
        """The number of steps in which the rate rises to the full rate; 0 for one_cycle."""
        return int(self.call.arguments.get("warmup_steps", 0))


@dataclass(frozen=True, kw_only=True)
class ProfileSection:
    """Profiles: a trace and a table of some steps of every role, in the run folder."""

    steps: tuple[int, ...] = option(
        (),
        "Number of recorded steps, and of steps before them: [5, 100] records five steps after the first "
        "hundred, [5] after the first ten; empty for none.",
        minimum=0,
    )

    @property
    def count(self) -> int:
        return self.steps[0] if self.steps else 0

    @property
    def first_step(self) -> int:
        """The number of steps before the first step of the profile."""
        return self.steps[1] if len(self.steps) > 1 else 10


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The whole configuration of a run."""

    run: RunSection = RunSection()
    cluster: ClusterSection = ClusterSection()
    data: DataSection = DataSection()
    embedding: EmbeddingSection = EmbeddingSection()
    dense: DenseSection = DenseSection()
    train: TrainSection = TrainSection()
    checkpoint: CheckpointSection = CheckpointSection()
    schedule: ScheduleSection = ScheduleSection()
    profile: ProfileSection = ProfileSection()
    tables: Mapping[str, TableSection] = field(default_factory=dict)
    tasks: Mapping[str, TaskSection] = field(default_factory=dict)
    columns: Mapping[str, ColumnSection] = field(default_factory=dict)
    dense_groups: Mapping[str, DenseGroupSection] = field(default_factory=dict)

    def replace(self, **sections: Any) -> RunConfig:
        return dataclasses.replace(self, **sections)

    def replace_value(self, section: str, name: str, value: Any) -> RunConfig:
        """Return a copy with another value of a key; ``section`` may be ``tables.NAME``, which must exist."""
        kind, dot, inner = section.partition(".")
        before = getattr(self, kind)
        changed = dataclasses.replace(before[inner] if dot else before, **{name: value})
        return self.replace(**{kind: {**before, inner: changed} if dot else changed})

    @property
    def all_tasks(self) -> dict[str, TaskSection]:
        return tasks_of(self.tasks, self.data)

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the dense net per sample, over all tasks."""
        return sum(task.num_outputs for task in self.all_tasks.values())

    @property
    def retrieval(self) -> TaskSection | None:
        """The retrieval task, or None. A run with a retrieval task has no other task."""
        return next((task for task in self.all_tasks.values() if task.kind == "retrieval"), None)

    @property
    def has_ranking_loss(self) -> bool:
        """Whether a task has a ranking loss, which needs whole groups in each step."""
        return any(task.ranking_loss for task in self.tasks.values())

    @property
    def saving_trainers(self) -> range:
        """The trainers that write into checkpoints: trainer 0 if dense nets are equal, else one per net."""
        num_writers = 1 if self.dense.ddp == "outside" else self.cluster.trainers
        return range(0, num_writers, self.dense.trainers_per_net)

    @property
    def best_by(self) -> str:
        """The metric that selects the best checkpoint, or "none"."""
        by = self.checkpoint.keep_best
        return main_metric(self.all_tasks) if by == "auto" else by


def tasks_of(tasks: Mapping[str, TaskSection], data: DataSection) -> dict[str, TaskSection]:
    """Return ``tasks`` with defaults for empty labels; without ``tasks``, a binary task with data.label."""
    sections = tasks or {LABEL: TaskSection(label=data.label)}
    return {
        name: dataclasses.replace(task, label=task.label or (task.item if task.kind == "retrieval" else name))
        for name, task in sections.items()
    }


_TYPES = get_type_hints(RunConfig)
SECTION_TYPES: dict[str, Any] = {
    name: kind for name, kind in _TYPES.items() if dataclasses.is_dataclass(kind)
}
SECTION_KEYS: dict[str, dict[str, Key]] = {name: keys_of(section) for name, section in SECTION_TYPES.items()}
# The sections [KIND.NAME], whose fields are Mapping[str, SECTION].
NAMED_TYPES: dict[str, Any] = {
    name: get_args(kind)[1] for name, kind in _TYPES.items() if name not in SECTION_TYPES
}
NAMED_KEYS: dict[str, dict[str, Key]] = {name: keys_of(section) for name, section in NAMED_TYPES.items()}
