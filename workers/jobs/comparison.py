"""Comparison of a job or a script on a cluster with the same job or script in one process."""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from hybrid import transport
from hybrid.batch import Batch
from hybrid.checkpoint.checkpoint_folders import DENSE_FILE, REMOTE_FILE, shard_file
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.stored_keys import KINDS_OF_KEYS, PENDING, STEPS_BEFORE
from hybrid.checkpoint.tensor_file import unpack_dense
from hybrid.config import RunConfig
from hybrid.config.data_sections import TRAIN
from hybrid.config.task_sections import metric_name, metric_title
from hybrid.custom_loop.backend import BACKEND, SingleProcess
from hybrid.custom_loop.loop_state import PARAMETERS
from hybrid.data.batches import BatchLoader
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.stream.stream_cursor import open_reader
from hybrid.data.stream.units import StreamUnit
from hybrid.embedding.initial_rows import random_rows
from hybrid.engine.retrieval import ItemRanking
from hybrid.errors import HybridError
from hybrid.metrics import Predictions
from hybrid.reference.reference_training import Reference
from hybrid.storage.files import write_bytes
from hybrid.storage.remote_path import StoragePath
from hybrid.topology import Topology
from workers.cluster_task import CompareTask
from workers.console import TerminalView, json_text
from workers.controller.remote_trainer import Trainer, make_loader
from workers.controller.script_job import run_script
from workers.controller.session import Session
from workers.controller.stream_session import open_session
from workers.exit_codes import ExitCode

# Relative and absolute tolerance. A rounding error is about 1e-16 in float64. If the exact gradient is zero,
# an optimizer that divides by the gradient's size multiplies the error by rate / eps: 5e8 for default tables.
TOLERANCES = {"float64": (1e-7, 1e-8), "float32": (1e-5, 1e-6)}
VALUE = "value"


class DifferenceError(HybridError):
    """The results of the cluster and of one process differ."""


class TensorName(NamedTuple):
    """The name of a compared tensor, such as ("table user", "value")."""

    parameter: str  # a parameter or buffer of a net, "table NAME", or "loss of every step"
    kind: str = VALUE  # "value", an optimizer state, or an array of a growing table's key records

    def __str__(self) -> str:
        return self.parameter if self.kind == VALUE else f"{self.parameter}, {self.kind}"


Snapshot: TypeAlias = dict[TensorName, Tensor]


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two tensors that should be equal; a ``ratio`` above 1 exceeds the tolerance."""

    name: TensorName
    largest: float  # largest absolute difference
    ratio: float  # largest difference divided by the tolerance

    @classmethod
    def between(cls, name: TensorName, actual: Tensor, expected: Tensor) -> Self:
        """Compare two tensors; if a value is NaN or the shapes differ, the difference is infinite."""
        if actual.shape != expected.shape:  # the two sides have different keys of a growing table
            return cls(name, torch.inf, torch.inf)
        if not expected.numel():
            return cls(name, 0.0, 0.0)
        distance = (actual.double() - expected.double()).abs().nan_to_num(torch.inf)
        if not expected.is_floating_point():  # such as the step count of a batch normalization
            return cls(name, distance.max().item(), torch.inf if distance.any() else 0.0)
        relative, absolute = TOLERANCES["float64" if expected.dtype == torch.float64 else "float32"]
        tolerance = absolute + relative * expected.double().abs()
        return cls(name, distance.max().item(), (distance / tolerance).max().item())


def snapshot(session: Session, names: Sequence[str] = (), remote_names: Sequence[str] = ()) -> Snapshot:
    """Return the tables, the nets of all trainers, the remote net, and the optimizer state of a cluster.

    ``names`` and ``remote_names`` are the names of the parameters of the dense net and of the remote net, in
    order. If a list is empty, its net is left out.
    """
    with tempfile.TemporaryDirectory(prefix="hybrid-") as scratch:
        stored = Checkpoint.open(session.save(Path(scratch) / "all", 0))
        tensors = stored_tables(stored)
        if names:
            transport.gather([trainer.call(Trainer.begin_save, DENSE_FILE) for trainer in session.trainers])
            for index, trainer in enumerate(session.trainers):
                folder = Path(scratch) / str(index)
                trainer.call(Trainer.write, folder).wait()
                packed = Checkpoint(folder, stored.manifest).tensors(DENSE_FILE)
                tensors |= _net(f"trainer {index}: ", packed, names)
        if remote_names:
            tensors |= _net("remote net: ", stored.tensors(REMOTE_FILE), remote_names)
        return tensors


def stored_tables(stored: Checkpoint) -> Snapshot:
    """Return the full tables of a checkpoint, and their optimizer state."""
    tensors: Snapshot = {}
    for table, (num_rows, _, count) in stored.manifest.tables.items():
        shards = [stored.tensors(shard_file(table, index, count)) for index in range(count)]
        for kind in shards[0]:
            name = TensorName(f"table {table}", VALUE if kind == "weight" else kind)
            if "keys" in shards[0]:
                of_shards = [shard[kind] for shard in shards]
                tensors[name] = of_shards[0] if kind == STEPS_BEFORE else torch.cat(of_shards)
                continue
            full = tensors[name] = shards[0][kind].new_empty(num_rows, *shards[0][kind].shape[1:])
            for index, shard in enumerate(shards):
                full[index::count] = shard[kind]
    return tensors


def _net(prefix: str, packed: Mapping[str, Tensor], names: Sequence[str]) -> Snapshot:
    net, states = unpack_dense(packed)
    return _named(prefix, net, {names[index]: state for index, state in states.items()})


def _named(prefix: str, values: Mapping[str, Tensor], states: Mapping[Any, Mapping[str, Any]]) -> Snapshot:
    tensors = {TensorName(f"{prefix}{name}"): tensor for name, tensor in values.items()}
    for name, state in states.items():
        for kind, value in state.items():
            if value is not None:
                tensors[TensorName(f"{prefix}{name}", kind)] = torch.as_tensor(value)
    return tensors


def reference_snapshot(reference: Reference) -> Snapshot:
    """Return the tensors of the training in one process, under the names that :func:`snapshot` uses."""
    tensors = _named("table ", reference.tables, reference.table_states)
    for table, keys in reference.keys.items():
        of_table = TensorName(f"table {table}")
        with_rows = sorted(keys.row_of)
        rows = torch.tensor([keys.row_of[key] for key in with_rows], dtype=torch.int64)
        for name in [name for name in tensors if name.parameter == of_table.parameter]:
            tensors[name] = tensors[name][rows]
        tensors[of_table._replace(kind=STEPS_BEFORE)] = torch.tensor([keys.steps_before])
        for prefix, of_keys in (("", with_rows), (PENDING, sorted(keys.seen.keys() - keys.row_of.keys()))):
            signed = [key - (key >> 63 << 64) for key in of_keys]
            counts, last_steps = (
                zip(*(keys.seen[key] for key in of_keys), strict=True) if of_keys else ((), ())
            )
            for kind, values in zip(KINDS_OF_KEYS, (signed, counts, last_steps), strict=True):
                tensors[of_table._replace(kind=prefix + kind)] = torch.tensor(values, dtype=torch.int64)
    for owner, net in _named_nets(reference).items():
        tensors |= _named(f"{owner}: ", net.state_dict(), reference.dense_state(net))
    return tensors


def _restore(reference: Reference, start: Snapshot) -> None:
    """Copy the cluster's nets and optimizer state before the first step into ``reference``."""
    for table, state in reference.table_states.items():
        for kind, tensor in state.items():
            tensor.copy_(start[TensorName(f"table {table}", kind)])
    for prefix, net in _named_nets(reference).items():
        net.load_state_dict({name: start[TensorName(f"{prefix}: {name}")] for name in net.state_dict()})
        for name, parameter in net.named_parameters():
            own = {key.kind: start[key] for key in start if key.parameter == f"{prefix}: {name}"}
            own.pop(VALUE)
            reference.optimizer.state[parameter].update(own)


def _named_nets(reference: Reference) -> dict[str, nn.Module]:
    nets: dict[str, nn.Module] = {f"trainer {index}": net for index, net in enumerate(reference.nets)}
    return nets if reference.remote_net is None else {**nets, "remote net": reference.remote_net}


def differences(actual: Snapshot, expected: Snapshot) -> list[Difference]:
    """Return the differences, in the order of ``expected``; DifferenceError if one side lacks a tensor."""
    if actual.keys() != expected.keys():
        unmatched = min(actual.keys() ^ expected.keys())
        raise DifferenceError(f"{unmatched} exists only on the cluster, or only in one process")
    return [Difference.between(name, actual[name], expected[name]) for name in expected]


class Comparison:
    """A job that trains the first ``steps`` steps of a run twice: on the cluster, and in one process."""

    def __init__(self, config: RunConfig, task: CompareTask) -> None:
        self.doing = "at start"
        self._config = config
        self._task = task
        self._dtype: torch.dtype = getattr(torch, config.train.dtype)

    def run(self, topology: Topology, data: Callable[[], StoragePath], view: TerminalView) -> ExitCode:
        """Train on both sides, and print the differences; DifferenceError if they exceed rounding."""
        session = open_session(topology, self._config, None, data, view)
        blueprint = session.blueprint
        ranking, item_counts = None, None
        if self._config.retrieval is not None:
            ranking = ItemRanking(self._config, blueprint.input_spec)
            item_counts = session.open_split(TRAIN).count_ids(ranking.feature)
        start = snapshot(session)
        rows = {table.name: start[TensorName(f"table {table.name}")] for table in blueprint.tables}
        reference = Reference(
            blueprint.config,
            blueprint.input_spec,
            blueprint.tables,
            rows,
            blueprint.dense_net(),
            blueprint.remote_net(),
            session.total_steps,
            lambda table, keys: random_rows(np.array(keys, np.uint64), table, self._config.run.seed),
            item_counts,
        )
        for table, keys in reference.keys.items():
            keys.steps_before = int(start[TensorName(f"table {table}", STEPS_BEFORE)])
            for prefix in ("", PENDING):
                kinds = (TensorName(f"table {table}", prefix + kind) for kind in KINDS_OF_KEYS)
                of_keys, *records = (start[kind].tolist() for kind in kinds)
                keys.load([key % 2**64 for key in of_keys], *records, has_rows=not prefix)
        initial = session.initial
        if initial is not None and (initial.dense or any(t.has_initial_state for t in initial.tables)):
            _restore(reference, snapshot(session, *reference.parameter_names))
        steps = min(self._task.steps, session.total_steps)
        self.doing = "while training on the cluster"
        view.status(f"training {steps} steps on the cluster")
        losses: list[float] = []
        units: list[tuple[StreamUnit, FeatureEncoder]] = []
        while len(losses) < min(steps, session.total_steps):
            if not session.is_ready(len(losses)):
                continue
            if session.unit and not session.unit.step:
                units.append((session.unit, session.encoder))
            left_in_epoch = session.steps_per_epoch - len(losses) % session.steps_per_epoch
            reports = session.train(len(losses), min(left_in_epoch, steps - len(losses)))
            losses += [sum(summands) for summands in zip(*(report.losses for report in reports), strict=True)]
        steps = len(losses)  # a stream may have ended
        actual = snapshot(session, *reference.parameter_names)
        held_out = [split for split in session.reports if split != TRAIN and session.has_rows(split)]
        metrics = {split: session.evaluate(steps, split) for split in held_out}
        session.close()
        self.doing = "while training in one process"
        view.status(f"training {steps} steps in one process")
        if self._config.data.is_stream:
            slices = _stream_slices(self._config, units)
        else:
            slices = _slices(self._config, session.open_split(TRAIN))
        expected_losses = [reference.step(each) for each in itertools.islice(slices, steps)]
        actual[TensorName("loss of every step")] = torch.tensor(losses, dtype=self._dtype)
        expected = reference_snapshot(reference)
        expected[TensorName("loss of every step")] = torch.tensor(expected_losses, dtype=self._dtype)
        evaluated = []
        tasks = self._config.all_tasks
        outputs_of = reference.outputs if ranking is None else ranking.ranks_by(reference.outputs)
        for split, of_split in metrics.items():
            loader = BatchLoader(session.open_split(split), batch_size=self._config.train.batch_size)
            with loader.batches(0) as batches:
                predictions = [Predictions.of(b, outputs_of(b), blueprint.sequences) for b in batches]
            single = session.metrics(predictions)
            scores = [metric_name(tasks, name, task.main_metric) for name, task in tasks.items()]
            evaluated += [
                f"{split} {metric_title(name)}: cluster {of_split[name]:.6f}, one process {single[name]:.6f}"
                for name in scores
            ]
        judge(view, differences(actual, expected), self._config.train.dtype, self._task.result, evaluated)
        return ExitCode.DONE


def judge(
    view: TerminalView, compared: Sequence[Difference], dtype: str, result: Path, metrics: Sequence[str] = ()
) -> None:
    """Print and write the differences; DifferenceError if one exceeds rounding in ``dtype``.

    ``result`` is the JSON file to write; ``metrics`` are lines to print below the differences.
    """
    num_same = sum(each.largest == 0 for each in compared)
    failed = [each for each in compared if each.ratio > 1]
    verdict = "the results differ" if failed else "the results are equal up to rounding"
    equal = f"{verdict}; {num_same} of {len(compared)} tensors are the same bit for bit"
    view.show(comparison_table(compared), *metrics, equal)
    of_tensors = {str(each.name): {"largest": each.largest, "of_tolerance": each.ratio} for each in compared}
    content = {"is_equal": not failed, "num_identical": num_same, "dtype": dtype, "tensors": of_tensors}
    write_bytes(result, json_text(content).encode())
    relative, absolute = TOLERANCES[dtype]
    if not failed:
        return
    worst = max(failed, key=lambda each: each.ratio)
    message = (
        f"{len(failed)} of {len(compared)} tensors differ by more than the tolerance, {absolute:g} + "
        f"{relative:g} of the value. Relative to the tolerance, {worst.name} differs most, by "
        f"{worst.largest:.2g}"
    )
    if dtype == "float32":
        message += (
            ". In float32, rounding alone can exceed the tolerance, because Adagrad and Adam divide a "
            "gradient by its own size. Compare in float64 before you look for a mistake: --dtype float64, "
            "and for a script its module and inputs in float64 (.double())"
        )
    raise DifferenceError(message)


def comparison_table(compared: Sequence[Difference]) -> Table:
    """Return a table with the differences of each parameter and its optimizer state, the largest last."""
    by_parameter: dict[str, list[Difference]] = {}
    for each in sorted(compared, key=lambda each: each.ratio):
        # The differences are in ascending order: the largest one of a parameter decides the row's position.
        by_parameter[each.name.parameter] = [*by_parameter.pop(each.name.parameter, []), each]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("largest difference of", overflow="fold")
    for heading in ("value", "optimizer state", "of tolerance"):
        table.add_column(heading, justify="right", no_wrap=True)
    for parameter, members in by_parameter.items():
        value = max((m.largest for m in members if m.name.kind == VALUE), default=0.0)
        state = max((m.largest for m in members if m.name.kind != VALUE), default=0.0)
        cells = [f"{number:.1e}" if number else "none" for number in (value, state)]
        ratio = members[-1].ratio
        if ratio <= 1:
            table.add_row(parameter, *cells, f"{ratio:.2%}" if ratio else "")
        else:
            times = f"{ratio:,.1f} times" if ratio < 1000 else "over 1000 times"
            table.add_row(parameter, *cells, times, style="red")
    return table


def _slices(config: RunConfig, dataset: PreparedDataset) -> Iterator[tuple[Batch, ...]]:
    loaders = [make_loader(config, dataset, i, is_training=True) for i in range(config.cluster.trainers)]
    for epoch in itertools.count():
        with ExitStack() as stack:
            streams = [stack.enter_context(loader.batches(epoch)) for loader in loaders]
            yield from zip(*streams, strict=True)


def _stream_slices(
    config: RunConfig, units: Sequence[tuple[StreamUnit, FeatureEncoder]]
) -> Iterator[tuple[Batch, ...]]:
    num_trainers = config.cluster.trainers
    for unit, encoder in units:
        empty = Batch.empty(*encoder.input_spec.sizes)
        readers = [open_reader(config, encoder, unit, i, num_trainers) for i in range(num_trainers)]
        with ExitStack() as stack:
            streams = [stack.enter_context(reader.batches()) for reader in readers]
            for slices in itertools.zip_longest(*streams, fillvalue=empty):
                size = sum(len(batch.labels) for batch in slices)
                weights = [batch.weights.double().sum(0) for batch in slices if batch.weights is not None]
                totals = torch.stack(weights).sum(0) if weights else None
                yield tuple(b._replace(global_size=size, total_weights=totals) for b in slices)


def compare_script(
    config: RunConfig, path: str, arguments: tuple[str, ...], cluster: Path, result: Path
) -> None:
    """Run a script to ``train.max_steps`` in this process, and print the differences.

    Args:
        cluster: the checkpoint of a cluster after the same number of steps.
        result: file to write: the differences as JSON.

    Raises:
        DifferenceError: a difference is larger than rounding.
        HybridError: the script takes fewer steps.
    """
    single = cluster.with_name("single")
    token = BACKEND.set(SingleProcess(config, single))
    try:
        torch.set_num_threads(config.cluster.threads)
        run_script(path, arguments)
    finally:
        BACKEND.reset(token)
    if not single.exists():
        raise HybridError("--steps: the script ends before it has taken these steps; compare fewer steps")
    with TerminalView() as view:
        compared = differences(_script_snapshot(cluster), _script_snapshot(single))
        judge(view, compared, config.train.dtype, result)


def _script_snapshot(folder: Path) -> Snapshot:
    stored = Checkpoint.open(folder)
    names = stored.manifest.progress[PARAMETERS]
    return stored_tables(stored) | _net("module: ", stored.tensors(DENSE_FILE), names)
