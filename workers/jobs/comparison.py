"""A job on the cluster and in one process of plain torch, and the difference of their results."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import torch
from rich.table import Table

from hybrid.batch import Batch
from hybrid.config import RunConfig
from hybrid.config.task_sections import metric_name, metric_title
from hybrid.data.batches.batch_loader import BatchLoader
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.prepare.dataset_location import open_split
from hybrid.metrics import Metrics, Predictions
from hybrid.reference.reference_training import Reference
from hybrid.topology import Topology
from workers.console.terminal import TerminalView
from workers.controller.dataset_session import DatasetSession
from workers.controller.shared_folders import SharedFolders
from workers.exit_codes import ExitCode
from workers.jobs.snapshot import (
    TOLERANCES,
    VALUE,
    Difference,
    DifferenceError,
    TensorName,
    differences,
    reference_snapshot,
    snapshot,
)

# Epoch, first step in it, number of steps, steps before.
Run: TypeAlias = tuple[int, int, int, int]


class Comparison:
    """Trains the first steps of a run twice.

    Args:
        steps: number of steps, at most those of the run.
    """

    def __init__(self, config: RunConfig, steps: int) -> None:
        self.doing = "at start"
        self._config = config
        self._steps = steps
        self._dtype: torch.dtype = getattr(torch, config.train.dtype)

    def run(
        self, topology: Topology, data: Callable[[], Path], view: TerminalView, folders: SharedFolders
    ) -> ExitCode:
        """Train on the cluster, then in this process, and print the differences.

        Raises:
            DifferenceError: a difference is larger than rounding.
        """
        data_folder = data()
        folders.check_data(data_folder)
        view.status("placing tables and building nets")
        session = DatasetSession(topology, self._config, data_folder)
        for line in session.warnings:
            view.warn(line)
        reference = self._reference(session, data_folder)
        steps = min(self._steps, session.total_steps)
        self.doing = "while training on the cluster"
        view.status(f"training {steps} steps on the cluster")
        runs = list(_runs(steps, session.steps_per_epoch))
        losses: list[float] = []
        for run in runs:
            reports = session.train(*run)
            losses += [sum(parts) for parts in zip(*(report.losses for report in reports), strict=True)]
        ours = snapshot(session, *reference.parameter_names)
        metrics = session.evaluate(steps) if session.has_test_rows else None
        session.close()
        self.doing = "while training in one process"
        view.status(f"training {steps} steps in one process")
        expected_losses = list(self._train_reference(reference, data_folder, runs))
        ours[TensorName("loss of every step")] = torch.tensor(losses, dtype=self._dtype)
        expected = reference_snapshot(reference)
        expected[TensorName("loss of every step")] = torch.tensor(expected_losses, dtype=self._dtype)
        found = differences(ours, expected)
        same = sum(each.largest == 0 for each in found)
        evaluated = []
        if metrics is not None:
            alone = self._evaluate_reference(reference, data_folder, session.blueprint.sequences)
            tasks = self._config.all_tasks
            scores = [metric_name(tasks, name, task.score) for name, task in tasks.items()]
            evaluated = [
                f"test {metric_title(name)}: cluster {metrics[name]:.6f}, one process {alone[name]:.6f}"
                for name in scores
            ]
        view.show(
            comparison_table(found),
            *evaluated,
            f"{same} of {len(found)} tensors are the same bit for bit",
        )
        judge(found, self._config.train.dtype)
        return ExitCode.DONE

    def _reference(self, session: DatasetSession, data_folder: Path) -> Reference:
        blueprint = session.blueprint
        config, spec, tables = blueprint.config, blueprint.input_spec, blueprint.tables
        net, remote_net = blueprint.dense_net(), blueprint.remote_net()
        start = snapshot(session)
        rows = {table.name: start[TensorName(f"table {table.name}")] for table in tables}
        return Reference(config, spec, tables, rows, net, remote_net, session.total_steps)

    def _train_reference(
        self, reference: Reference, data_folder: Path, runs: Sequence[Run]
    ) -> Iterator[float]:
        dataset = open_split(data_folder, "train", self._config.data)
        for epoch, _, count, _ in runs:
            reference.see_all_updates()
            for slices in _slices(self._config, dataset, epoch, count):
                yield reference.step(slices)

    def _evaluate_reference(
        self, reference: Reference, data_folder: Path, sequences: Sequence[int]
    ) -> Metrics:
        dataset = open_split(data_folder, "test", self._config.data)
        with BatchLoader(dataset, batch_size=self._config.train.batch_size).batches(0) as batches:
            parts = [Predictions.of(batch, reference.outputs(batch), sequences) for batch in batches]
        is_weighted = self._config.data.weighted_metrics
        return Predictions.concatenate(parts).metrics(self._config.all_tasks, is_weighted=is_weighted)


def judge(found: Sequence[Difference], dtype: str) -> None:
    """Raise DifferenceError if a tensor differs by more than rounding in ``dtype``."""
    relative, absolute = TOLERANCES[dtype]
    apart = [each for each in found if each.ratio > 1]
    if not apart:
        return
    farthest = max(apart, key=lambda each: each.ratio)
    message = (
        f"{len(apart)} of {len(found)} tensors differ by more than the tolerance, {absolute:g} + "
        f"{relative:g} of the value; the farthest is {farthest.part}, by {farthest.largest:.2g}"
    )
    if dtype == "float32":
        message += (
            ". In float32, rounding alone can exceed the tolerance, because Adagrad and Adam divide a "
            "gradient by its own size. Compare in float64 before you look for a mistake: --dtype float64"
        )
    raise DifferenceError(message)


def comparison_table(found: Sequence[Difference]) -> Table:
    """Return a table with the differences of each parameter and its optimizer state, the largest last."""
    by_parameter: dict[str, list[Difference]] = {}
    for each in found:
        by_parameter.setdefault(each.part.parameter, []).append(each)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("largest difference of", no_wrap=True)
    for heading in ("value", "optimizer state", "of tolerance"):
        table.add_column(heading, justify="right")
    for parameter, members in sorted(by_parameter.items(), key=lambda item: _farthest(item[1])):
        value = max((m.largest for m in members if m.part.kind == VALUE), default=0.0)
        state = max((m.largest for m in members if m.part.kind != VALUE), default=0.0)
        cells = [f"{number:.1e}" if number else "none" for number in (value, state)]
        ratio = _farthest(members)
        style = "" if ratio <= 1 else "red"
        table.add_row(parameter, *cells, _readable(ratio), style=style)
    return table


def _readable(ratio: float) -> str:
    """Format a multiple of the tolerance: a percentage where it is small, else a factor."""
    if ratio <= 1:
        return f"{ratio:.2%}" if ratio else ""
    return f"{ratio:,.1f} times" if ratio < 1000 else "over 1000 times"


def _farthest(members: Sequence[Difference]) -> float:
    return max(member.ratio for member in members)


def _runs(steps: int, per_epoch: int) -> Iterator[Run]:
    """Yield a run of steps for each epoch within ``steps``."""
    for before in range(0, steps, per_epoch):
        yield before // per_epoch, 0, min(per_epoch, steps - before), before


def _slices(
    config: RunConfig, dataset: PreparedDataset, epoch: int, count: int
) -> Iterator[tuple[Batch, ...]]:
    """Yield the local batches of all trainers for the first ``count`` steps of an epoch."""
    loaders = [
        BatchLoader(
            dataset,
            batch_size=config.train.batch_size,
            trainer_index=index,
            num_trainers=config.cluster.trainers,
            seed=config.run.seed,
            shuffle=config.data.is_shuffled,
            lanes=config.data.shuffle_lanes,
            by_group=config.has_ranking_loss,
        )
        for index in range(config.cluster.trainers)
    ]
    with ExitStack() as stack:
        streams = [stack.enter_context(loader.batches(epoch)) for loader in loaders]
        yield from islice(zip(*streams, strict=True), count)
