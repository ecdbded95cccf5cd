"""The checkpoints of a run: the progress in them, when they are written, and which are kept."""

import dataclasses
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import BEST, MANIFEST_FILE, OWES_EVALUATION, Best, Manifest
from hybrid.checkpoint.deltas import PARENT, DeltaChain, ModelVersion, delta_folder, identity_of
from hybrid.config import CheckpointSection, TaskSection, TrainSection
from hybrid.errors import CheckpointError, StorageError
from hybrid.metrics import Metrics, ProgressiveMetrics, task_metrics
from hybrid.storage.remote_path import StoragePath
from workers.controller.deployment import HeldCheckpoint
from workers.controller.remote_trainer import TrainerReport
from workers.controller.session import DatasetSession
from workers.run_folder.run_files import RunFolder

_POLL_SECONDS = 0.05
_MAX_DELTAS = 1000  # of deltas since a full checkpoint; a new follower applies all of these deltas
_WRITE_ERRORS = (CheckpointError, StorageError)  # a store may refuse even a listing


@dataclass
class Interval:
    """The reports of the trainers on the steps since the last log step."""

    num_steps: int = 0
    seconds: float = 0.0  # time of the trainers for these steps
    # Time by phase, mean over the trainers; in a resumed run, since the resume.
    phase_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    # Reports of each trainer, one per call.
    reports: dict[int, list[TrainerReport]] = field(default_factory=lambda: defaultdict(list))

    def add(self, reports: Sequence[TrainerReport], seconds: float) -> None:
        self.num_steps += len(reports[0].losses)
        self.seconds += seconds
        for trainer, report in enumerate(reports):
            self.reports[trainer].append(report)
            for phase, phase_seconds in report.phase_seconds.items():
                self.phase_seconds[phase] += phase_seconds / len(reports)

    @property
    def _by_rank(self) -> list[TrainerReport]:
        return [report for trainer in sorted(self.reports) for report in self.reports[trainer]]

    @property
    def num_samples(self) -> int:
        return sum(len(report.labels) for report in self._by_rank)

    @property
    def loss(self) -> float:
        """Mean loss of the steps."""
        return math.fsum(loss for report in self._by_rank for loss in report.losses) / self.num_steps

    def score(self, task: TaskSection) -> float:
        """Return the main metric of the first task, on the predictions of these steps; NaN without labels."""
        outputs_N = torch.cat([report.outputs for report in self._by_rank])
        labels_N = torch.cat([report.labels for report in self._by_rank])
        has_label_N = ~labels_N.isnan()
        task = replace(task, metrics=())  # others may be slow, or need groups
        return task_metrics("", task, outputs_N[has_label_N], labels_N[has_label_N], None)[task.main_metric]

    def progressive_metrics(self) -> dict[str, float]:
        """Return the metrics of the first task, which must be binary, on the predictions of these steps."""
        metrics = ProgressiveMetrics()
        for report in self._by_rank:
            metrics.add(report.outputs, report.labels)
        return metrics.metrics()


@dataclass
class RunProgress:
    """The counters and metrics of a run, which checkpoints store besides the model."""

    step: int = 0  # number of completed steps
    metrics: Metrics | None = None  # metrics of the last evaluation, if there was one
    owes_evaluation: bool = False  # whether an evaluation of this step is due and not done
    samples: int = 0
    seconds: float = 0.0  # time of the trainers for these samples
    skipped_steps: int = 0  # see TrainerReport
    # The steps of evaluations in which the metric of the best checkpoint was undefined.
    undefined: list[int] = field(default_factory=list)
    interval: Interval = field(default_factory=Interval)  # the steps since the last log step
    # Progressive metrics of the current unit of a stream.
    unit: ProgressiveMetrics = field(default_factory=ProgressiveMetrics, compare=False)

    def add(self, reports: Sequence[TrainerReport], seconds: float, *, in_unit: bool = False) -> None:
        """Add reports on steps that took ``seconds``; if ``in_unit``, also to the metrics of the unit."""
        self.step += len(reports[0].losses)
        self.samples += sum(len(report.labels) for report in reports)
        self.seconds += seconds
        self.skipped_steps += reports[0].skipped_steps  # the same on every trainer
        self.interval.add(reports, seconds)
        for report in reports if in_unit else ():
            self.unit.add(report.outputs, report.labels)

    def has_lost_patience(
        self, train: TrainSection, steps_per_epoch: int, best: Best | None, start: int = 0
    ) -> bool:
        """Return whether ``train.patience`` evaluations since ``best`` were not better, so that the run ends.

        Evaluations are counted by steps, so a resumed run ends at the same step. If ``best`` is None or NaN,
        the count begins after step ``start``. NaN evaluations do not count.
        """
        every = train.eval_every_steps or steps_per_epoch
        best_step = start if best is None or math.isnan(best.value) else best.step
        undefined = sum(best_step < each <= self.step for each in self.undefined)
        return 0 < train.patience <= self.step // every - best_step // every - undefined

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a checkpoint stores of this object: values for the manifest, and tensors by name."""
        values = {
            OWES_EVALUATION: self.owes_evaluation,
            "samples": self.samples,
            "seconds": self.seconds,
            "skipped_steps": self.skipped_steps,
            "undefined": [*self.undefined],
            "interval_num_steps": self.interval.num_steps,
            "interval_seconds": self.interval.seconds,
        }
        tensors: dict[str, Tensor] = {}
        for trainer, reports in self.interval.reports.items():
            losses = [loss for report in reports for loss in report.losses]
            tensors[f"losses.{trainer}"] = torch.tensor(losses, dtype=torch.float64)
            tensors[f"outputs.{trainer}"] = torch.cat([report.outputs for report in reports])
            tensors[f"labels.{trainer}"] = torch.cat([report.labels for report in reports])
        if self.unit.sums[0]:
            tensors |= {"unit.counts": self.unit.counts.clone(), "unit.sums": self.unit.sums.clone()}
        return values, tensors

    @classmethod
    def unpack(cls, step: int, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Return the progress after ``step`` from what :meth:`pack` returned; CheckpointError if invalid."""
        if not values:
            return cls(step)
        try:
            interval = Interval(values["interval_num_steps"], values["interval_seconds"])
            unit = ProgressiveMetrics()
            if "unit.counts" in tensors:
                unit.counts.copy_(tensors["unit.counts"])
                unit.sums.copy_(tensors["unit.sums"])
            for trainer in range(sum(name.startswith("losses.") for name in tensors)):
                losses, outputs, labels = (tensors[f"{n}.{trainer}"] for n in ("losses", "outputs", "labels"))
                interval.reports[trainer] = [TrainerReport(losses.tolist(), outputs, labels, {}, 0)]
            owes_evaluation, undefined = bool(values.get(OWES_EVALUATION)), [*values["undefined"]]
            numbers = values["samples"], values["seconds"], values["skipped_steps"]
            return cls(step, None, owes_evaluation, *numbers, undefined, interval, unit)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            rule = "resume it with the version of hybrid that wrote it, or start a new run"
            raise CheckpointError(f"another version wrote the counts in the checkpoint: {rule}") from error


class _PendingCheckpoint(NamedTuple):
    """A checkpoint or a delta that is being written."""

    kind: str  # "checkpoint" or "delta"
    step: int
    best: Best | None  # the best evaluation, once this checkpoint is complete
    written: Future[dict[str, float]]  # numbers for the log


@dataclass(eq=False)
class Checkpoints:
    """The checkpoints and deltas of a run, written one at a time while the run trains.

    If writing fails, a warning is shown and training continues. Only a failure of the last checkpoint is an
    error. The first delta that is due after a start, a resume or a failure is replaced by a checkpoint; the
    same happens after 1000 deltas. A delta that is due while a checkpoint is written waits for a later step,
    unless the delta is due by event time: then training waits.
    """

    session: DatasetSession
    run: RunFolder  # folder for checkpoints and their log entries
    section: CheckpointSection  # when checkpoints are due, how many are kept, and the metric of the best
    warn: Callable[[str], object]  # called with each warning, also by the thread that writes
    # The best evaluation that has a checkpoint; None if there is none. A resumed run gives its earlier best.
    best: Best | None
    # The step of the last checkpoint, at first that of the resumed run; -1 if it could not be written.
    saved_step: int = 0

    def __post_init__(self) -> None:
        self._pending: _PendingCheckpoint | None = None
        self._has_warned_of_wait = False
        self._begun_at = self._delta_begun_at = time.monotonic()
        self._delta_step = 0  # step of the last delta or checkpoint
        self._chain: DeltaChain | None = None
        self.run.make_room = self.finish

    @property
    def expected_best(self) -> Best | None:
        """The value that ``best`` will have after the pending checkpoint is written."""
        return self._pending.best if self._pending else self.best

    def steps_to_next(self, step: int) -> float:
        """Return the steps until the next checkpoint or delta that is due by steps; infinite if none is."""
        every, of_delta = self.section.every_steps, self.section.delta_call.arguments.get("steps", 0)
        return min(
            every - step % every if every else math.inf,
            max(1, self._delta_step + of_delta - step) if of_delta else math.inf,
        )

    def write_if_due(self, now: RunProgress, is_evaluated: bool, is_waiting: bool = False) -> None:
        """Begin to write a due checkpoint or delta. A checkpoint is also due if the model is the best so far.

        Args:
            is_evaluated: whether ``now.metrics`` belong to this step.
            is_waiting: whether the run waits for rows. Then ``every_steps`` does not make a checkpoint due.
        """
        if self.session.is_delta_due:
            self.finish()
        expected = self.expected_best
        is_best = is_evaluated and self._choose_best(now, expected) != expected
        steps, minutes = self.section.every_steps, self.section.every_minutes
        is_due_by_steps = steps and now.step % steps == 0 and not is_waiting
        is_due_by_time = 0 < 60 * minutes <= time.monotonic() - self._begun_at and now.step != self.saved_step
        is_delta_due, chain = self._is_delta_due(now), self._chain
        needs_base = chain is None or chain.last.sequence - chain.base.sequence >= _MAX_DELTAS
        if is_best or is_due_by_steps or is_due_by_time or (is_delta_due and needs_base):
            start = time.perf_counter()
            self.finish()
            self._write_delta(now)
            self._begun_at = time.monotonic()
            best = self._choose_best(now, self.best) if is_evaluated else self.best
            with self._warn_on_failure(now.step):
                self._save(now, best, start, in_background=True)
        elif is_delta_due:
            self._begin_delta(now)

    def poll(self) -> None:
        """Complete the pending checkpoint or delta if all its files are written; called between steps."""
        if self._pending is not None and self._pending.written.done():
            self.finish()

    def finish(self) -> bool:
        """Wait for the pending checkpoint or delta; warn if it fails. Return whether one was pending."""
        if self._pending is None:
            return False
        with self._warn_on_failure(self._pending.step):
            self._end()
        return True

    def write_last(self, now: RunProgress, is_stopped: bool = False) -> None:
        """Write the last checkpoint of a run unless it exists; CheckpointError if writing fails.

        Args:
            is_stopped: whether the run has stopped before its end. Then ``best`` does not change, because the
                last evaluation may be of an earlier step. The chain of deltas stays open for a resume.
        """
        self.finish()
        self._write_delta(now)
        best = self.best if is_stopped else self._choose_best(now, self.best)
        try:
            self._save(now, best, time.perf_counter(), in_background=False)
            self._end()
            if self._has_deltas and not is_stopped:
                path = checkpoint_folders.step_folder(self.run.checkpoint_root, now.step) / MANIFEST_FILE
                chain = self._chain or self._rebased(Manifest.read(path), time.time())
                dataclasses.replace(chain, has_ended=True).write(self.run.checkpoint_root)
        except _WRITE_ERRORS as error:
            raise CheckpointError(f"{error}; the last state of the run is not saved") from error

    @contextmanager
    def _warn_on_failure(self, step: int) -> Iterator[None]:
        try:
            yield
        except _WRITE_ERRORS as error:
            self._chain, self.saved_step = None, -1  # the roles have forgotten the changes
            self.warn(f"no checkpoint of step {step}: {error}; training continues")

    def _add_evaluation(self, folder: StoragePath, now: RunProgress, best: Best | None) -> None:
        """Set ``best``. Add the evaluation of this step to its checkpoint if it is missing there."""
        manifest = Manifest.read(folder / MANIFEST_FILE)
        if manifest.progress.get(OWES_EVALUATION) and not now.owes_evaluation:
            self.run.sync()
            metrics = dict(now.metrics or {})
            progress = {**manifest.progress, **now.pack()[0], BEST: best}
            dataclasses.replace(manifest, metrics=metrics, progress=progress).write(folder)
            self._prune(best)
        self.best = best

    @property
    def _has_deltas(self) -> bool:
        return self.section.delta_call.name != "none"

    def _is_delta_due(self, now: RunProgress) -> bool:
        last = self.saved_step if self._chain is None else self._chain.last.step
        if not self._has_deltas or self._pending is not None or now.step == last:
            return False
        call = self.section.delta_call
        is_due_by_time = 0 < call["seconds"] <= time.monotonic() - self._delta_begun_at
        is_due_by_steps = 0 < call["steps"] <= now.step - self._delta_step
        return self.session.is_delta_due or is_due_by_time or is_due_by_steps

    def _write_delta(self, now: RunProgress) -> None:
        """Write a delta of this step, so that ``hybrid.follow`` can skip the checkpoint that comes next."""
        if self._chain is not None and self._chain.last.step != now.step:
            self._begin_delta(now)
            self.finish()

    def _begin_delta(self, now: RunProgress) -> None:
        chain, start = self._chain, time.perf_counter()
        assert chain is not None
        self._delta_begun_at, self._delta_step = time.monotonic(), now.step
        with self._warn_on_failure(now.step):
            folder = delta_folder(self.run.checkpoint_root, now.step)
            manifest = self._manifest(now, {PARENT: chain.last.identity}, {})
            saving = self.session.begin_delta(folder, manifest)
            self._start("delta", saving, self.best, start)

    def _save(self, now: RunProgress, best: Best | None, start: float, in_background: bool) -> None:
        """Make every role prepare its files, and begin to write. Training has paused since ``start``."""
        root = self.run.checkpoint_root
        folder, self.saved_step = checkpoint_folders.step_folder(root, now.step), now.step
        if folder in checkpoint_folders.list_checkpoints(root):  # was due at this step, or by a stopped run
            self._add_evaluation(folder, now, best)
            return
        progress, reports = now.pack()
        manifest = self._manifest(now, {**progress, BEST: best}, dict(now.metrics or {}))
        saving = self.session.begin_save(folder, manifest, reports, in_background)
        self._delta_begun_at, self._delta_step = time.monotonic(), now.step
        self._start("checkpoint", saving, best, start)
        if in_background and not (saving.is_copied or self._has_warned_of_wait):
            self._has_warned_of_wait = True
            self.warn("no memory for copies of the tables: training waits while checkpoints are written")

    def _manifest(self, now: RunProgress, progress: dict[str, Any], metrics: dict[str, float]) -> Manifest:
        epoch = now.step // self.session.steps_per_epoch
        return Manifest(now.step, epoch, {}, metrics=metrics, progress=progress)

    def _start(self, kind: str, saving: HeldCheckpoint, best: Best | None, start: float) -> None:
        """Begin to write a checkpoint or delta; if the roles have no copies, wait until it is written."""
        pending = _PendingCheckpoint(kind, saving.manifest.step, best, Future())
        arguments = saving, pending, start
        # A daemon thread does not keep a failed process alive.
        threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True).start()
        self._pending = pending  # a thread that cannot start completes nothing
        if not saving.is_copied:
            self._await(pending)

    def _write(self, saving: HeldCheckpoint, pending: _PendingCheckpoint, start: float) -> None:
        begun, is_delta = time.perf_counter(), pending.kind == "delta"
        try:
            if not is_delta:
                self.run.sync()
            manifest = saving.write()
            ended = time.perf_counter()
            if self._has_deltas:
                self._publish(manifest, is_delta, time.time() - (ended - start))
            if not is_delta:
                self._prune(pending.best)
            numbers = {
                "seconds_stopped": (begun if saving.is_copied else time.perf_counter()) - start,
                "seconds_writing": ended - begun,
                "bytes": sum(size for size, _ in manifest.files.values()),
            }
            pending.written.set_result(numbers)
        except BaseException as error:  # finish and write_last raise it
            pending.written.set_exception(error)

    def _publish(self, manifest: Manifest, is_delta: bool, taken_at: float) -> None:
        """Add a model to ``deltas/current.json``, and remove the deltas that the file no longer lists."""
        root, before = self.run.checkpoint_root, self._chain
        if not is_delta:
            chain = self._rebased(manifest, taken_at)
        else:
            assert before is not None
            last = before.last
            version = ModelVersion(
                last.sequence + 1, manifest.step, identity_of(manifest), last.identity, taken_at
            )
            chain = dataclasses.replace(before, deltas=(*before.deltas, version))
        chain.write(root)
        self._chain = chain
        kept = {delta.step for delta in chain.deltas}
        try:
            for delta in before.deltas if before else ():
                if delta.step not in kept:
                    checkpoint_folders.remove(delta_folder(root, delta.step))
        except _WRITE_ERRORS as error:
            self.warn(f"an old delta could not be removed: {error}")

    def _rebased(self, manifest: Manifest, taken_at: float) -> DeltaChain:
        """Return ``deltas/current.json`` for a new checkpoint of a step that ended at time ``taken_at``."""
        chain, identity = self._chain, identity_of(manifest)
        if chain is None or chain.last.step != manifest.step:
            return DeltaChain(ModelVersion(0, manifest.step, identity, "", taken_at), identity)
        # Followers of the previous checkpoint still find the deltas that lead to this checkpoint.
        recent = tuple(delta for delta in chain.deltas if delta.sequence > chain.base.sequence)
        return DeltaChain(chain.last, identity, recent)

    def _prune(self, best: Best | None) -> None:
        try:
            checkpoint_folders.prune(self.run.checkpoint_root, self.section.keep_last, best and best.step)
        except _WRITE_ERRORS as error:
            self.warn(f"an old checkpoint could not be removed: {error}")

    def _end(self) -> None:
        """Wait for the pending checkpoint or delta, and log it. Raise the error if writing has failed."""
        pending = self._pending
        if pending is None:
            return
        self._pending = None
        self._await(pending)
        self.run.log(pending.kind, pending.step, pending.written.result())
        self.best = pending.best

    def _await(self, pending: _PendingCheckpoint) -> None:
        while not wait([pending.written], _POLL_SECONDS).done:
            self.session.meanwhile()

    def _choose_best(self, now: RunProgress, best: Best | None) -> Best | None:
        metric = self.section.keep_best
        return checkpoint_folders.choose_best(best, metric, now.metrics or {}, now.step)
