"""Small jobs that differ in cluster, model and training, to be compared with one process."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TypeAlias

import torch
from benchmark.batch_session import BatchSession
from support.cluster import small_config
from support.samples import features_of_bags
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.config import ColumnSection, RunConfig, TableSection, TaskSection
from hybrid.config.key import CallSignatures, toml_value
from hybrid.config.sections import NET_CALLS, SCHEDULE_CALLS
from hybrid.config.table_sections import PLACEMENT_CALLS, TABLE_OPTIMIZERS
from hybrid.dense.net_builder import build_dense_net, build_remote_net
from hybrid.embedding.table_spec import TableSpec, tables_of
from hybrid.engine.model_builder import table_specs
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.models.dense_net import DenseNet
from hybrid.primitives.grouping import ranking_totals
from hybrid.reference.reference_training import Reference
from workers.jobs.comparison import VALUE, Snapshot, reference_snapshot, snapshot
from workers.rendezvous.bootstrap import JoinedCluster

MakeBatches: TypeAlias = Callable[[int], Iterable[Batch]]

STEPS = 9
TOLERANCE = {"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-6)}
ROWS = {"a": 7, "b": 12, "c": 9, "d": 5}
_LARGEST_BAG = 4
# Sequences of an own table, and of a table that a feature of one id also reads.
SEQUENCES = {name: ColumnSection(pooling="none", max_ids=_LARGEST_BAG - 1) for name in ("a", "b")}
_GOLDEN = 0x9E3779B97F4A7C15
_SCALE = 0.5  # of the initial rows of growing tables
# Growing tables have keys in four buckets. A bucket has at most max_rows / 1024 rows. Step s evicts keys of
# the buckets 16 s to 16 s + 15, so these few steps evict keys of all buckets but the last.
GROWTH = {
    "admit": "grow(admit_after = 2, half_life = 3)",
    "age": "grow(evict_after = 1)",
    "limit": "grow(max_rows = 8192, half_life = 3)",
    "all": "grow(admit_after = 2, max_rows = 8192, evict_after = 3, half_life = 5)",
}
_GROWING = ("a", "b", "c")
_KEYS = torch.tensor(
    [
        (bucket << 54 | number * _GOLDEN % 2**54) - (bucket >> 9 << 64)
        for bucket in (60, 160, 540, 1023)
        for number in range(16)
    ]
)
DENSE_OPTIMIZERS = {"SGD": "SGD(momentum = 0.9)", "AdamW": "AdamW(eps = 0.01)"}
TASKS: dict[str, dict[str, TaskSection]] = {
    "one": {},
    "weighted": {},
    "several": {
        "click": TaskSection(),
        "stars": TaskSection(type="classes(3)", weight=0.5),
        "spent": TaskSection(type="regression", loss="huber(0.5)"),
        "skip": TaskSection(loss="focal", weight=2.0),
    },
    "ranked": {
        "click": TaskSection(ranking_loss="pairwise", weight=2.0),
        "spent": TaskSection(type="regression", ranking_loss="listwise(0.3)"),
        "stars": TaskSection(type="classes(3)"),
    },
}


def call_text(signatures: CallSignatures, name: str, arguments: Mapping[str, object]) -> str:
    """Return the value of a key with this name and those of the arguments that the name takes."""
    known = signatures.parse("", name).arguments
    given = [f"{key} = {toml_value(value)}" for key, value in arguments.items() if key in known]
    return f"{name}({', '.join(given)})"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job: cluster, model and training."""

    trainers: int = 2
    workers: int = 2
    ddp: str = "outside"
    placement: str = "table"
    pooled_by: str = "workers"
    optimizer: str = "sgd"
    inputs: str = "even"
    features: str = "one_hot"
    remote: bool = False
    dtype: str = "float64"
    row_dtype: str = "train"  # "mixed": bfloat16 in table "a" only
    update: str = "sync"
    micro_batches: int = 1
    clip_norm: float | None = None
    non_finite: str = "stop"
    schedule: str = "constant"
    weight_decay: float = 0.0
    all_rows: bool = False  # for optimizers that support it
    dense_optimizer: str = "SGD"
    autocast: str = "none"
    shared_table: bool = True
    net: str = "dcn_v2"
    top_mlp: tuple[int, ...] = (6,)
    remote_mlp: tuple[int, ...] = (5, 4)
    has_many_hosts: bool = False
    parallel: str = "none"
    compile: str = "none"
    tensor_size: int = 2
    tensor_plan: tuple[str, ...] = ()
    tasks: str = "one"
    growing: str = ""  # the rules in ``GROWTH`` for the features in ``_GROWING``; empty for fixed tables

    @property
    def name(self) -> str:
        """The values that are not defaults."""
        fields = dataclasses.fields(self)
        shown = {f.name: v for f in fields if (v := getattr(self, f.name)) != f.default}
        return f"{self.trainers}x{self.workers}-" + "-".join(
            str(value) if isinstance(value, str) else f"{name}={value}"
            for name, value in shown.items()
            if name not in ("trainers", "workers")
        )

    @property
    def config(self) -> RunConfig:
        """The configuration. A small eps would turn rounding errors into steps, so it is large."""
        warmup = 0 if self.schedule in ("constant", "one_cycle") else 4
        sizes = {"cross_layers": 1, "experts": 2, "expert_mlp": [5, 3]}
        config = small_config(
            cluster={"trainers": self.trainers, "workers": self.workers},
            embedding={
                "dim": 4,
                "pooling": self._pooling,
                "placement": call_text(PLACEMENT_CALLS, self.placement, {"pooled_by": self.pooled_by}),
                "optimizer": self._optimizer(all_rows=self.all_rows),
                "learning_rate": 0.1,
                "dtype": "train" if self.row_dtype == "mixed" else self.row_dtype,
            },
            dense={
                "net": call_text(NET_CALLS, self.net, sizes),
                "top_mlp": self.top_mlp,
                "bottom_mlp": (9, 6),
                "device": "cpu,cpu" if self.parallel == "replicas" else "cpu",
                "tensor_size": self.tensor_size if self.parallel == "tensor" else 0,
                "tensor_plan": self.tensor_plan,
                "compile": self.compile,
                "ddp": self.ddp,
                "autocast": self.autocast,
                "optimizer": DENSE_OPTIMIZERS[self.dense_optimizer],
                "learning_rate": 0.05,
                "remote_mlp": self.remote_mlp if self.remote else (),
            },
            train={
                "update": self.update,
                "micro_batches": self.micro_batches,
                "dtype": self.dtype,
                "clip_norm": self.clip_norm,
                "non_finite": self.non_finite,
            },
            schedule={
                "kind": call_text(SCHEDULE_CALLS, self.schedule, {"decay_every": 5, "warmup_steps": warmup})
            },
        )
        # Other nets than dcn_v2 need tables of one width.
        tables = {"d": TableSection(dim=2)} if self.net == "dcn_v2" else {}
        if self.shared_table:
            tables["bc"] = TableSection(features=("b", "c"))
        columns = SEQUENCES if self._has_sequences else {}
        if self.growing:
            columns = {
                name: dataclasses.replace(columns.get(name, ColumnSection()), vocabulary=GROWTH[self.growing])
                for name in _GROWING
            }
            for name in ("a", "bc") if self.shared_table else _GROWING:
                tables[name] = dataclasses.replace(
                    tables.get(name, TableSection()),
                    init=f"uniform(scale = {_SCALE})",
                    optimizer=self._optimizer(all_rows=False),
                    placement=self.placement,
                )
        if self.row_dtype == "mixed":
            tables["a"] = dataclasses.replace(tables.get("a", TableSection()), dtype="bfloat16")
        return config.replace(tables=tables, tasks=TASKS[self.tasks], columns=columns)

    def _optimizer(self, *, all_rows: bool) -> str:
        arguments = {"eps": 1e-2, "weight_decay": self.weight_decay, "all_rows": all_rows}
        return call_text(TABLE_OPTIMIZERS, self.optimizer, arguments)

    @property
    def _has_sequences(self) -> bool:
        return self.features in ("sequences", "weighted_sequences")

    @property
    def _pooling(self) -> str:
        return self.features if self.features in ("mean", "max") else "sum"

    @property
    def input_spec(self) -> InputSpec:
        bags: Collection[str] = SEQUENCES if self._has_sequences else ("a", "b", "c")
        if self.features == "one_hot":
            bags = ()
        weighted = self.features.startswith("weight")
        growing = _GROWING if self.growing else ()
        features = tuple(
            FeatureSpec(name, 0 if name in growing else rows, weighted or name in bags, weighted)
            for name, rows in ROWS.items()
        )
        return InputSpec(("x", "y"), features)

    def batches(self, trainer: int) -> list[Batch]:
        """Return the batches of one trainer; for ranking losses, with the totals of all trainers."""
        if self.tasks != "ranked":
            return self._batches(trainer)
        steps = [*zip_longest(*map(self._batches, range(self.trainers)), fillvalue=Batch.empty(2, len(ROWS)))]
        return [step[trainer]._replace(total_ranking_weights=_ranking_totals(step)) for step in steps]

    def _batches(self, trainer: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(100 + trainer)
        if self.inputs == "even":
            sizes = [6] * STEPS
        else:  # some trainers have fewer batches; one of three or four has none
            length = {0: STEPS if self.trainers == 1 else 6, 1: STEPS, 2: 0, 3: 3}[trainer]
            # DTensors plan their operators anew for each size.
            sizes = (3 * torch.randint(3, (length,), generator=generator) + 1).tolist()
        # With even slices, a trainer knows the size of the global batch.
        total = self.trainers * 6 if self.inputs == "even" else 0
        return [self._batch(size, total, generator) for size in sizes]

    def _batch(self, size: int, total: int, generator: torch.Generator) -> Batch:
        bags, weights = [], []
        for feature in self.input_spec.sparse_features:
            lengths = [1] * size
            if feature.multi_hot:
                lengths = torch.randint(0, _LARGEST_BAG, (size,), generator=generator).tolist()
            ids = _KEYS if feature.is_growing else torch.arange(feature.num_rows)
            bags.append([ids[torch.randint(len(ids), (n,), generator=generator)].tolist() for n in lengths])
            weights.append([(torch.rand(n, generator=generator) + 0.5).tolist() for n in lengths])
        sparse = features_of_bags(bags, weights if self.features.startswith("weight") else None)
        if self.features == "one_hot":
            sparse = sparse._replace(offsets=None)
        dense_BF = torch.randn(size, 2, generator=generator)
        labels = torch.randint(0, 2, (size,), generator=generator).float()
        sample_weights = None
        if self.tasks == "several":
            columns = [torch.randint(3, (size,), generator=generator), torch.randn(size, generator=generator)]
            labels = torch.stack([labels, *columns, 1 - labels], dim=1)
            sample_weights = torch.randint(0, 2, labels.shape, generator=generator).float()
        elif self.tasks == "weighted" and size != 4:  # other slices of the step have weights
            sample_weights = torch.rand(size, generator=generator) * torch.randint(
                0, 2, (size,), generator=generator
            )
        groups = None
        if self.tasks == "ranked":
            grades = torch.randint(0, 3, (2, size), generator=generator)
            labels = torch.stack([labels, *grades], dim=1)
            if size != 4:
                sample_weights = torch.rand(labels.shape, generator=generator)
                sample_weights *= torch.randint(0, 4, labels.shape, generator=generator) > 0
            # Groups differ between trainers.
            drawn = torch.randint(0, 3, (size,), generator=generator)
            groups = generator.initial_seed() + 1000 * drawn.sort().values
        return Batch(dense_BF, sparse, labels, total, weights=sample_weights, groups=groups)

    def slices(self, make_batches: MakeBatches | None = None) -> list[list[Batch]]:
        """Return the batches of all trainers by step."""
        own = [list((make_batches or self.batches)(trainer)) for trainer in range(self.trainers)]
        steps = []
        empty = Batch.empty(2, len(ROWS))
        for step in range(max(len(batches) for batches in own)):
            present = [batches[step] if step < len(batches) else empty for batches in own]
            size = sum(len(batch.labels) for batch in present)
            steps.append([batch._replace(global_size=size) for batch in present])
        return steps

    def nets(self) -> tuple[DenseNet, nn.Module | None]:
        """Return the initial dense net and the remote net."""
        config, spec = self.config, self.input_spec
        tables = table_specs(config, spec)
        widths = [table.width for table in tables_of(spec, tables)]
        remote_net = build_remote_net(config, spec, widths) if self.remote else None
        return build_dense_net(config, spec, widths), remote_net

    def reference(self, start: Snapshot) -> Reference:
        """Return one process with the rows of ``start``."""
        config, spec = self.config, self.input_spec
        tables = table_specs(config, spec)
        rows = {part.parameter.removeprefix("table "): rows_RD for part, rows_RD in start.items()}
        initial_rows = partial(_initial_rows, config.run.seed)
        return Reference(config, spec, tables, rows, *self.nets(), STEPS, initial_rows)


def _ranking_totals(batches: Sequence[Batch]) -> Tensor:
    """Return the sums of the ranking weights of all trainers by task."""
    present = [(each.labels, each.weights, each.groups) for each in batches if each.groups is not None]
    return torch.stack([ranking_totals(*each) for each in present]).sum(0)


def _initial_rows(seed: int, table: TableSpec, keys: Sequence[int]) -> Tensor:
    """Return the initial rows of keys: float32 hashes of seed, table, key and column."""
    salt = seed * _GOLDEN + zlib.crc32(table.name.encode()) * 0xD1B54A32D192ED03
    numbers = [
        _splitmix64(key * table.dim + column + salt) >> 40 for key in keys for column in range(table.dim)
    ]
    return (torch.tensor(numbers).view(-1, table.dim).float() / 2**23 - 1) * _SCALE


def _splitmix64(number: int) -> int:
    x = (number + 1) * _GOLDEN % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@dataclass(frozen=True)
class Outcome:
    """The result of training on a cluster.

    Attributes:
        losses: of each step, summed over trainers.
        skipped_steps: of each trainer.
        start: the rows before training.
        end: all state after training.
    """

    losses: list[float]
    skipped_steps: list[int]
    start: Snapshot
    end: Snapshot


def train_case(
    cluster: JoinedCluster, case: Case, make_batches: MakeBatches | None = None, rounds: int = 1
) -> Outcome:
    """Train a case to its end; runs in the master's process.

    Args:
        make_batches: replaces the batches of the case.
        rounds: number of passes over the batches.
    """
    names = [[] if net is None else [name for name, _ in net.named_parameters()] for net in case.nets()]
    session = BatchSession(cluster.topology, case.config, case.input_spec, STEPS)
    try:
        start = {part: rows for part, rows in snapshot(session).items() if part.kind == VALUE}
        losses: list[float] = []
        skipped = [0] * case.trainers
        for _ in range(rounds):
            reports = session.train_on(make_batches or case.batches, len(losses))
            losses += [sum(parts) for parts in zip(*(report.losses for report in reports), strict=True)]
            skipped = [count + r.skipped_steps for count, r in zip(skipped, reports, strict=True)]
        end = snapshot(session, *names)
        return Outcome(losses, skipped, start, end)
    finally:
        session.close()


def check_against_one_process(
    case: Case,
    outcome: Outcome,
    make_batches: MakeBatches | None = None,
    rounds: int = 1,
    *,
    bits: bool = False,
) -> Reference:
    """Check that losses, parameters and optimizer state equal those of one process; return that process.

    Args:
        make_batches, rounds: as in :func:`train_case`.
        bits: whether all bits must be equal.
    """
    reference = case.reference(outcome.start)
    losses: list[float] = []
    for _ in range(rounds):
        losses += [reference.step(slices) for slices in case.slices(make_batches)]
    end = reference_snapshot(reference)
    rtol, atol = (0.0, 0.0) if bits else TOLERANCE[case.dtype]
    assert len(outcome.losses) == rounds * STEPS
    torch.testing.assert_close(outcome.losses, losses, rtol=rtol, atol=atol, equal_nan=True)
    assert outcome.end.keys() == end.keys()
    for part, tensor in end.items():
        message = f"{part} differs from one process"
        torch.testing.assert_close(outcome.end[part], tensor, rtol=rtol, atol=atol, msg=message)
    return reference
