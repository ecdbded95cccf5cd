"""The configuration of a run: every key, its default, its rule and its meaning.

Nothing here imports torch, so ``--help`` and a mistyped key answer at once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from hybrid.config.call import Call, Signatures, argument, split_call
from hybrid.config.data_sections import ColumnSection, DataSection
from hybrid.config.key import USER_FUNCTION, Key, by_host, fixed, keys_of, option
from hybrid.config.table_sections import EmbeddingSection, TableSection
from hybrid.config.task_sections import LABEL, TaskSection, leading_score
from hybrid.input_spec import TaskSpec
from hybrid.topology import Topology

_EXPERTS = argument("experts", int, 4, minimum=1)
_EXPERT_MLP = argument("expert_mlp", int, (64, 32), is_list=True, minimum=1)
NET_CALLS = Signatures(
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
SCHEDULE_CALLS = Signatures(
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
    """Where results go."""

    name: str = option("run", "name of the run; its folder is runs/NAME-DATE-TIME")
    folder: str = option(
        "", "run folder, or its URL in a store (docs/storage.md); empty for a new one under runs/"
    )
    seed: int = fixed(1, "seed of tables, dense nets, shuffling and synthetic data", minimum=0)


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    """How many processes, and how they find each other."""

    trainers: int = option(2, "number of trainers", minimum=1)
    workers: int = option(2, "number of workers", minimum=1)
    master: str = option(
        "127.0.0.1",
        "Address on which the master listens: HOST, HOST:PORT or [IPv6]:PORT. Without a port, launch takes a "
        "free one, and a master that is started by hand takes 29300.",
    )
    interface: str = by_host(
        "auto",
        "network interface of all traffic, such as lo or eth0; auto takes the one by which a role reaches "
        "the master, and for the master the one that has the address on which it listens",
    )
    namespace: str = option(
        "auto",
        "auto gives the roles of launch a network of their own, which nobody else can reach, where they need "
        "only loopback and the system allows it; off leaves them in the machine's, for code that connects",
        choices=("auto", "off"),
    )
    threads: int = by_host(1, "intra-op threads of each trainer and worker", minimum=1)
    start_timeout_seconds: float = by_host(
        60.0, "how long the master waits for every role, and a role for the master", above=0
    )
    timeout_seconds: float = option(
        60.0,
        "time limit of one call, of a step on a worker that waits for gradients, and of the last step and "
        "checkpoint of a run that is stopped",
        above=0,
    )
    heartbeat_timeout_seconds: float = option(
        10.0, "a role that sends no heartbeat for so long is considered frozen", above=0
    )
    max_restarts: int = option(
        3, "how often in a row launch starts a failed cluster again without a new checkpoint", minimum=0
    )
    secret_file: str = by_host(
        "",
        "file with the cluster's secret, which only its owner may read; empty takes that of the environment "
        "variable HYBRID_SECRET, and launch then makes its own where there is none",
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
        """How long a role may take to stop."""
        return max(4.0, self.timeout_seconds / 15)

    @property
    def topology(self) -> Topology:
        return Topology(self.trainers, self.workers)


@dataclass(frozen=True, kw_only=True)
class DenseSection:
    """The dense net that each trainer holds, and how it is trained."""

    net: str = fixed(
        "dlrm",
        "The model: a built-in one, or your function that builds a net. `experts` counts the shared experts "
        "(mmoe), or per layer those of each task and the shared ones (ple); `expert_mlp` are their hidden "
        "units.",
        signatures=NET_CALLS,
    )
    bottom_mlp: tuple[int, ...] = fixed((64, 32), "hidden units of the net over numeric features (dlrm)")
    top_mlp: tuple[int, ...] = fixed(
        (128, 64), "hidden units of the net over everything; of each task's tower (mmoe, ple)"
    )
    remote_mlp: tuple[int, ...] = fixed(
        (), "hidden units of a remote dense net, hosted by a worker between interaction and head"
    )
    optimizer: str = option(
        "Adam",
        'A class of torch.optim, with its arguments: "SGD(momentum = 0.9, weight_decay = 1e-4)".',
        is_name_fixed=True,
    )
    learning_rate: float = option(0.002, "learning rate of the dense net", above=0)
    ddp: str = option(
        "outside", "what DDP wraps: none, inside (the head) or outside (everything local)", choices=DDP_MODES
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
        'how layers are split, such as ["head.0 = colwise", "head.2 = rowwise"]; empty lets the built-in '
        "nets choose (tensor)",
    )
    compile: str = option(
        "none",
        "form in which dense nets run, the remote one too: TorchScript, or a backend of torch.compile",
        choices=("none", *COMPILERS),
    )
    autocast: str = option(
        "none", "precision in which the local net computes where that is safe", choices=("none", "bfloat16")
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
    """Parameters of dense nets that are trained otherwise than [dense] says."""

    parameters: tuple[str, ...] = option(
        (),
        'their names, or patterns of them: "head.*", "*.bias"; those of the remote net begin with "remote."',
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
    """How long and how."""

    epochs: int = option(1, "passes over the training rows", minimum=1)
    max_steps: int = option(0, "stop after this many steps; 0 for no limit", minimum=0)
    batch_size: int = fixed(1024, "samples of a step over all trainers together", minimum=1)
    micro_batches: int = option(
        1, "parts in which a trainer computes its share of a step, one after another", minimum=1
    )
    update: str = option(
        "sync",
        "sync: one exact step for all trainers; pipelined: the same, with rows one step old; "
        "async: each trainer's gradients on arrival",
        choices=UPDATE_MODES,
    )
    clip_norm: float | None = option(
        None, "scale gradients down to this norm over all tables and dense nets together", above=0
    )
    non_finite: str = option(
        "stop", "what a loss or gradient that is not finite does to the run", choices=("stop", "skip")
    )
    dtype: str = option("float32", "of rows, dense nets and optimizer state", choices=DTYPES)
    log_every_steps: int = option(10, "steps between two lines of progress", minimum=1)
    eval_every_steps: int = option(0, "steps between two evaluations; 0 for one an epoch", minimum=0)
    patience: int = option(
        0,
        "evaluations without a better one (checkpoint.keep_best) after which the run ends; 0 for never",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When checkpoints are written, besides at the end of a run, and which are kept."""

    every_steps: int = option(0, "steps between two checkpoints; 0 for none by steps", minimum=0)
    every_minutes: float = option(5.0, "minutes between two checkpoints; 0 for none by time", minimum=0)
    keep_last: int = option(2, "how many of the newest checkpoints are kept", minimum=1)
    keep_best: str = option(
        "auto",
        "metric of the evaluations by which the best checkpoint is kept as well, such as auc or, of several "
        "tasks, NAME.auc; auto takes AUC, RMSE (regression) or accuracy (classes) of the first task; "
        "none keeps none",
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """How learning rates change over the steps of a run, for tables and dense nets alike."""

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
    """What every role does in some steps, in detail: a trace and a table in the run folder."""

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
    """The whole configuration; immutable, hashable by its canonical text, free of torch."""

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
        """A copy with some sections replaced."""
        return dataclasses.replace(self, **sections)

    @property
    def all_tasks(self) -> dict[str, TaskSection]:
        """What is predicted; see :func:`tasks_of`."""
        return tasks_of(self.tasks, self.data)

    @property
    def task_specs(self) -> tuple[TaskSpec, ...]:
        """Of all tasks, in their order."""
        return tuple(task.spec(name) for name, task in self.all_tasks.items())

    @property
    def num_outputs(self) -> int:
        """How many numbers the dense net gives of a sample: those of each task, in their order."""
        return sum(task.num_outputs for task in self.all_tasks.values())

    @property
    def has_ranking_loss(self) -> bool:
        """Whether a loss is of the order within groups, which then stay whole."""
        return any(task.ranking_loss for task in self.tasks.values())

    @property
    def best_by(self) -> str:
        """The metric by which an evaluation is the best so far, or "none"."""
        by = self.checkpoint.keep_best
        return leading_score(self.all_tasks) if by == "auto" else by


def tasks_of(tasks: Mapping[str, TaskSection], data: DataSection) -> dict[str, TaskSection]:
    """The sections [tasks.NAME], each with its label column; without any, data.label as one binary task."""
    found = tasks or {LABEL: TaskSection(label=data.label)}
    return {name: dataclasses.replace(task, label=task.label or name) for name, task in found.items()}


# Of each section, and of those with names of their own: [tables.NAME] and so on.
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
