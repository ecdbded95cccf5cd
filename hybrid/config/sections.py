"""The configuration of a run: every key, its default, its rule and its meaning."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from hybrid.config.data_sections import ColumnSection, DataSection
from hybrid.config.key import (
    USER_FUNCTION,
    Call,
    CallSignatures,
    Key,
    argument,
    by_host,
    fixed,
    keys_of,
    option,
    split_call,
)
from hybrid.config.table_sections import EmbeddingSection, TableSection
from hybrid.config.task_sections import LABEL, TaskSection, leading_score
from hybrid.input_spec import TaskSpec
from hybrid.topology import Topology

_EXPERTS = argument("experts", int, 4, minimum=1)
_EXPERT_MLP = argument("expert_mlp", int, (64, 32), is_list=True, minimum=1)
NET_CALLS = CallSignatures(
    {
        "dlrm": (),
        "dcn_v2": (argument("cross_layers", int, 2, minimum=1),),
        "deepfm": (),
        "wide_deep": (),
        "mmoe": (_EXPERTS, _EXPERT_MLP),
        "ple": (_EXPERTS, _EXPERT_MLP),
    },
    others=USER_FUNCTION,
    others_rule="module:function",
)
DDP_MODES = ("none", "inside", "outside")
COMPILERS = ("script", "trace", "inductor", "aot_eager")
UPDATE_MODES = ("sync", "pipelined", "async")
NETS = NET_CALLS.names
_INITIAL = argument("initial_factor", float, 0.04, above=0, maximum=1)
_FINAL = argument("final_factor", float, 0.0, minimum=0, maximum=1)
_STEPS = argument("steps", int, 0, minimum=0)
_WARMUP = argument("warmup_steps", int, 0, minimum=0)
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
            _FINAL,
            _STEPS,
            _INITIAL,
        ),
    }
)
SCHEDULES = SCHEDULE_CALLS.names
DTYPES = ("float32", "float64")


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """The name, the folder and the seed of a run."""

    name: str = option("run", "Name of the run; its folder is runs/NAME-DATE-TIME.")
    folder: str = option(
        "", "Run folder, or its URL in an object store (docs/storage.md); empty for a new folder under runs/."
    )
    seed: int = fixed(1, "Seed of tables, dense nets, shuffling and synthetic data.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    """The processes of a run, and how they connect."""

    trainers: int = option(2, "Number of trainers.", minimum=1)
    workers: int = option(2, "Number of workers.", minimum=1)
    master: str = option(
        "127.0.0.1",
        "Address on which the master listens: HOST, HOST:PORT or [IPv6]:PORT. Without a port, launch takes a "
        "free one, and a master that is started by hand takes 29300.",
    )
    interface: str = by_host(
        "auto",
        "Network interface of all traffic, such as lo or eth0; auto takes the interface that "
        "reaches the master.",
    )
    namespace: str = option(
        "auto",
        "With auto, the roles of launch get a network namespace of their own if loopback suffices "
        "and the system allows it; off keeps the host's network, for user code that opens "
        "connections.",
        choices=("auto", "off"),
    )
    threads: int = by_host(1, "Intra-op threads of each trainer and worker.", minimum=1)
    start_timeout_seconds: float = by_host(
        60.0, "Time limit for all roles to register with the master.", above=0
    )
    timeout_seconds: float = option(
        60.0,
        "Time limit of a call, of a worker that waits for gradients, and of the last step and "
        "checkpoint of a run that is stopped.",
        above=0,
    )
    heartbeat_timeout_seconds: float = option(
        10.0, "A role without a heartbeat for this time is considered frozen.", above=0
    )
    max_restarts: int = option(
        3,
        "Number of restarts in a row, without a new checkpoint between them, after which launch gives up.",
        minimum=0,
    )
    secret_file: str = by_host(
        "",
        "File with the cluster's secret, readable by its owner only; empty for the environment "
        "variable HYBRID_SECRET. Without either, launch creates a secret.",
    )

    @property
    def master_address(self) -> str:
        """The host name or IP address on which the master listens."""
        return self._master[0]

    @property
    def master_port(self) -> int:
        """The port of the master; 0 for a free one."""
        return self._master[1]

    @property
    def _master(self) -> tuple[str, int]:
        match = re.fullmatch(r"\[([^\[\]]+)\](?::(\d{1,5}))?|([^:\[\]\s]+)(?::(\d{1,5}))?", self.master)
        if match is None:  # an IPv6 address without brackets
            return self.master, 0
        return match[1] or match[3], int(match[2] or match[4] or 0)

    @property
    def stop_timeout_seconds(self) -> float:
        """The time limit for a role to stop."""
        return max(4.0, self.timeout_seconds / 15)

    @property
    def topology(self) -> Topology:
        return Topology(self.trainers, self.workers)


@dataclass(frozen=True, kw_only=True)
class DenseSection:
    """The dense nets, and how they are trained."""

    net: str = fixed(
        "dlrm",
        "The model: a built-in one, or your function that builds a net. `experts` counts the shared experts "
        "(mmoe), or per layer those of each task and the shared ones (ple); `expert_mlp` are their hidden "
        "units.",
        signatures=NET_CALLS,
    )
    bottom_mlp: tuple[int, ...] = fixed((64, 32), "Hidden units of the net over numeric features (dlrm).")
    top_mlp: tuple[int, ...] = fixed(
        (128, 64), "Hidden units of the net over all features, or of each task's tower (mmoe, ple)."
    )
    remote_mlp: tuple[int, ...] = fixed(
        (),
        "Hidden units of a remote dense net between interaction and head, which a worker hosts; "
        "empty for none.",
    )
    optimizer: str = option(
        "Adam",
        'A class of torch.optim, with its arguments: "SGD(momentum = 0.9, weight_decay = 1e-4)".',
        is_name_fixed=True,
    )
    learning_rate: float = option(0.002, "Learning rate of the dense nets.", above=0)
    ddp: str = option(
        "outside",
        "Parameters under DDP: none, the head (inside), or all local ones (outside).",
        choices=DDP_MODES,
    )
    device: str = by_host(
        "auto",
        "cpu, cuda, cuda:N, or auto (a GPU for each trainer if there is one). Several, such as "
        "cuda:0,cuda:1, hold replicas, over which a trainer splits its samples; the first holds the "
        "parameters.",
    )
    tensor_size: int = option(
        0,
        "Number of trainers that split the layers of one net; it divides cluster.trainers. 0 for none.",
        minimum=0,
    )
    tensor_plan: tuple[str, ...] = option(
        (),
        'How layers are split, such as ["head.0 = colwise", "head.2 = rowwise"]; empty for the '
        "built-in plan of a built-in net.",
    )
    compile: str = option(
        "none",
        "Execution backend of dense nets, the remote one too: TorchScript, or a backend of torch.compile.",
        choices=("none", *COMPILERS),
    )
    autocast: str = option(
        "none",
        "Precision of the operations of the local net for which a lower one is safe.",
        choices=("none", "bfloat16"),
    )

    @property
    def net_call(self) -> Call:
        """The name of the net, and its arguments."""
        return NET_CALLS.parse("dense.net", self.net)

    @property
    def optimizer_name(self) -> str:
        """The class of torch.optim."""
        return split_call("dense.optimizer", self.optimizer)[0]

    @property
    def optimizer_options(self) -> tuple[str, ...]:
        """The arguments of the optimizer, as TOML."""
        return split_call("dense.optimizer", self.optimizer)[1]

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of a trainer's replicas; empty without replicas."""
        return tuple(part.strip() for part in self.device.split(",")) if "," in self.device else ()

    @property
    def parallel(self) -> str:
        """How a net is spread: over ``replicas`` of a trainer, over trainers (``tensor``), or ``none``."""
        return "replicas" if self.devices else "tensor" if self.tensor_size else "none"

    @property
    def trainers_per_net(self) -> int:
        """The number of trainers that hold a dense net together."""
        return self.tensor_size or 1


@dataclass(frozen=True, kw_only=True)
class DenseGroupSection:
    """Parameters of dense nets with optimizer arguments of their own."""

    parameters: tuple[str, ...] = option(
        (),
        'Names or patterns of parameters, such as "head.*" or "*.bias"; those of the remote net '
        'begin with "remote.".',
    )
    optimizer_options: tuple[str, ...] = option(
        (), 'Arguments of the optimizer that differ, such as ["lr = 0.001", "weight_decay = 0"].'
    )

    @property
    def learning_rate(self) -> float | None:
        """The option ``lr``; None for the learning rate of [dense]."""
        rates = [value for name, _, value in self._options if name.strip() == "lr"]
        return float(rates[-1]) if rates else None

    @property
    def other_options(self) -> tuple[str, ...]:
        """The options but ``lr``."""
        return tuple("".join(option) for option in self._options if option[0].strip() != "lr")

    @property
    def _options(self) -> list[tuple[str, str, str]]:
        return [text.partition("=") for text in self.optimizer_options]


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """Steps, batches, and how trainers update parameters."""

    epochs: int = option(1, "Number of passes over the training rows.", minimum=1)
    max_steps: int = option(0, "Number of steps after which the run stops; 0 for no limit.", minimum=0)
    batch_size: int = fixed(1024, "Number of samples per step over all trainers.", minimum=1)
    micro_batches: int = option(
        1, "Number of micro-batches that a trainer computes per step, one after another.", minimum=1
    )
    update: str = option(
        "sync",
        "sync: one exact step for all trainers; pipelined: the same, with rows that are one step "
        "old; async: each trainer's gradients as they arrive.",
        choices=UPDATE_MODES,
    )
    clip_norm: float | None = option(
        None, "Scale gradients down to this norm over all tables and dense nets.", above=0
    )
    non_finite: str = option(
        "stop", "Stop at a loss or gradient that is not finite, or skip that step.", choices=("stop", "skip")
    )
    dtype: str = option("float32", "Type of rows, dense parameters and optimizer state.", choices=DTYPES)
    log_every_steps: int = option(10, "Number of steps between two progress lines.", minimum=1)
    eval_every_steps: int = option(
        0, "Number of steps between two evaluations; 0 for one per epoch.", minimum=0
    )
    patience: int = option(
        0,
        "Number of evaluations without improvement (checkpoint.keep_best) after which the run ends; "
        "0 for no limit.",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When checkpoints are written, besides the one at the end, and which are kept."""

    every_steps: int = option(
        0, "Number of steps between two checkpoints; 0 for no limit by steps.", minimum=0
    )
    every_minutes: float = option(5.0, "Minutes between two checkpoints; 0 for no limit by time.", minimum=0)
    keep_last: int = option(2, "Number of newest checkpoints to keep.", minimum=1)
    keep_best: str = option(
        "auto",
        "Metric by which the best checkpoint is kept as well, such as auc, or NAME.auc with several "
        "tasks. auto is AUC, RMSE or accuracy of the first task; none keeps none.",
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """The learning-rate schedule of tables and dense nets."""

    kind: str = option(
        "constant",
        "How the learning rate changes, as a fraction of the full rate. It rises linearly over "
        "`warmup_steps`, then falls until step `steps`, warm-up included; 0 means the end of the run. "
        "`initial_factor` is the fraction at the start, `peak_fraction` the fraction of the steps before the "
        "full rate.",
        signatures=SCHEDULE_CALLS,
    )

    @property
    def call(self) -> Call:
        """The kind and its arguments."""
        return SCHEDULE_CALLS.parse("schedule.kind", self.kind)

    @property
    def steps(self) -> int:
        """The step at which the schedule ends; 0 for the end of the run."""
        return int(self.call.arguments.get("steps", 0))

    @property
    def warmup_steps(self) -> int:
        """The number of steps before the full rate."""
        return int(self.call.arguments.get("warmup_steps", 0))


@dataclass(frozen=True, kw_only=True)
class ProfileSection:
    """A trace and a table of some steps of every role, in the run folder."""

    steps: tuple[int, ...] = option(
        (),
        "Number of steps to record, and the number of steps before them, such as [5, 100]; [5] records five "
        "steps after a warm-up of ten; empty for none.",
        minimum=0,
    )

    @property
    def count(self) -> int:
        """The number of steps to record."""
        return self.steps[0] if self.steps else 0

    @property
    def first_step(self) -> int:
        """The number of steps before the first recorded one."""
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
        """Return a copy with other sections."""
        return dataclasses.replace(self, **sections)

    @property
    def all_tasks(self) -> dict[str, TaskSection]:
        """The tasks; see :func:`tasks_of`."""
        return tasks_of(self.tasks, self.data)

    @property
    def task_specs(self) -> tuple[TaskSpec, ...]:
        """The labels of all tasks, in their order."""
        return tuple(task.spec(name) for name, task in self.all_tasks.items())

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the dense net per sample, over all tasks."""
        return sum(task.num_outputs for task in self.all_tasks.values())

    @property
    def has_ranking_loss(self) -> bool:
        """Whether a task has a ranking loss, for which groups stay whole."""
        return any(task.ranking_loss for task in self.tasks.values())

    @property
    def best_by(self) -> str:
        """The metric that selects the best checkpoint, or "none"."""
        by = self.checkpoint.keep_best
        return leading_score(self.all_tasks) if by == "auto" else by


def tasks_of(tasks: Mapping[str, TaskSection], data: DataSection) -> dict[str, TaskSection]:
    """Return the tasks with their label columns; without sections, data.label is one binary task."""
    found = tasks or {LABEL: TaskSection(label=data.label)}
    return {name: dataclasses.replace(task, label=task.label or name) for name, task in found.items()}


SECTION_TYPES: dict[str, Any] = {
    name: hint for name, hint in get_type_hints(RunConfig).items() if dataclasses.is_dataclass(hint)
}
SECTION_KEYS: dict[str, dict[str, Key]] = {name: keys_of(section) for name, section in SECTION_TYPES.items()}
NAMED_TYPES: dict[str, Any] = {
    "tables": TableSection,
    "tasks": TaskSection,
    "columns": ColumnSection,
    "dense_groups": DenseGroupSection,
}
NAMED_KEYS: dict[str, dict[str, Key]] = {name: keys_of(section) for name, section in NAMED_TYPES.items()}
