"""The checkpoints of a run: when they are due, how they are written, and which are kept."""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_manifest import BEST, MANIFEST_FILE, OWES_EVALUATION, Best, Manifest
from hybrid.config import CheckpointSection
from hybrid.config.task_sections import is_lower_better
from hybrid.errors import CheckpointError, StorageError
from hybrid.metrics import Metrics
from workers.controller.deployment import Saving
from workers.controller.session import Session
from workers.jobs.run_counters import Tally
from workers.run_folder.run_files import RunFolder

_POLL_SECONDS = 0.05
_WRITE_ERRORS = (CheckpointError, StorageError)  # a store may refuse even a listing


class Moment(NamedTuple):
    """The state of a run after a step.

    Attributes:
        step, epoch: number of completed steps and epochs.
        metrics: of the last evaluation, if there was one.
        tally: the counts of the run.
        owes_evaluation: whether an evaluation of this step is due and not done.
    """

    step: int
    epoch: int
    metrics: Metrics | None
    tally: Tally
    owes_evaluation: bool = False


@dataclass(frozen=True, slots=True)
class _PendingCheckpoint:
    """A checkpoint that is being written.

    Attributes:
        best: the best evaluation, once this checkpoint is complete.
        seconds_stopped: how long training has waited for it.
        written: the seconds and the bytes that were written, and why old checkpoints could not be removed.
    """

    step: int
    best: Best | None
    seconds_stopped: float
    written: Future[tuple[float, int, str]]


class Checkpoints:
    """Writes the checkpoints of a run while it trains; at most one is being written at a time.

    A checkpoint that cannot be written is reported and skipped; the next one is tried when it is due. Only
    the last checkpoint of a run must succeed.

    Args:
        session: the job to save.
        run: folder for checkpoints and their log entries.
        section: when checkpoints are due, how many are kept, and by which metric the best.
        warn: called with each line for the user.
        progress: the progress in the checkpoint of a resumed run; empty for a new run.

    Attributes:
        best: the best evaluation with a checkpoint; None if there is none.
    """

    def __init__(
        self,
        session: Session,
        run: RunFolder,
        section: CheckpointSection,
        warn: Callable[[str], object],
        progress: dict[str, Any],
    ) -> None:
        self._session = session
        self._run = run
        self._section = section
        self._warn = warn
        self.best = Best(*progress[BEST]) if progress.get(BEST) else None
        if self.best is not None and self.best.metric != section.keep_best:
            self.best = None
        self._pending: _PendingCheckpoint | None = None
        self._has_warned_of_wait = False
        self._begun_at = time.monotonic()
        run.make_room = self.finish

    @property
    def expected_best(self) -> Best | None:
        """``best`` after the pending checkpoint is written."""
        return self._pending.best if self._pending else self.best

    def steps_to_next(self, step: int) -> float:
        """Return the number of steps until a checkpoint is due by ``every_steps``; may be infinite."""
        every = self._section.every_steps
        return every - step % every if every else math.inf

    def write_if_due(self, now: Moment, is_evaluated: bool) -> None:
        """Begin to write a checkpoint if it is due by steps or minutes, or if the model is the best so far.

        Args:
            is_evaluated: whether ``now.metrics`` belong to this step.
        """
        expected = self.expected_best
        is_best = is_evaluated and self._better(now, expected) != expected
        steps, minutes = self._section.every_steps, self._section.every_minutes
        is_due = steps and now.step % steps == 0
        is_due = is_due or (minutes > 0 and time.monotonic() - self._begun_at >= 60 * minutes)
        if is_best or is_due:
            start = time.perf_counter()
            self.finish()
            self._begun_at = time.monotonic()
            best = self._better(now, self.best) if is_evaluated else self.best
            with self._warning_of_failure(now.step):
                if self._exists(now):
                    self._add_evaluation(now, best)
                else:
                    self._begin(now, best, start, in_background=True)

    def poll(self) -> None:
        """Finish the pending checkpoint if it is written; called between steps."""
        if self._pending is not None and self._pending.written.done():
            self.finish()

    def finish(self) -> bool:
        """Wait for the pending checkpoint, which is removed if it fails; return whether there was one."""
        if self._pending is None:
            return False
        with self._warning_of_failure(self._pending.step):
            self._end()
        return True

    def write_last(self, now: Moment, is_stopped: bool = False) -> None:
        """Write the last checkpoint of a run that ends, or was asked to stop, unless it exists.

        Raises:
            CheckpointError: it cannot be written; the message names the run's last checkpoint.
        """
        self.finish()
        best = self.best if is_stopped else self._better(now, self.best)
        try:
            if self._exists(now):  # it was due at this step, or the run was stopped here before
                self._add_evaluation(now, best)
            else:
                self._begin(now, best, time.perf_counter(), in_background=False)
                self._end()
        except _WRITE_ERRORS as error:
            why = "the run was asked to stop" if is_stopped else "the run is at its end"
            try:
                before = checkpoint_folders.list_checkpoints(self._run.checkpoint_root)
                state = f"only its state at {before[0].name} is saved" if before else "nothing of it is saved"
            except StorageError:  # as in the error that is raised
                state = "its saved checkpoints cannot be listed now"
            raise CheckpointError(f"{error}; {why}, and {state}") from error

    @contextmanager
    def _warning_of_failure(self, step: int) -> Iterator[None]:
        try:
            yield
        except _WRITE_ERRORS as error:
            self._warn(f"no checkpoint of step {step}: {error}; training continues")

    def _add_evaluation(self, now: Moment, best: Best | None) -> None:
        """Add the evaluation to the checkpoint of this step, written by a run that stopped before it."""
        folder = checkpoint_folders.step_folder(self._run.checkpoint_root, now.step)
        there = Manifest.read(folder / MANIFEST_FILE)
        if there.progress.get(OWES_EVALUATION) and not now.owes_evaluation:
            self._run.sync()
            metrics = dict(now.metrics or {})
            progress = {**there.progress, BEST: best, OWES_EVALUATION: False}
            dataclasses.replace(there, metrics=metrics, progress=progress).write(folder)
            if trouble := self._prune(best):
                self._warn(trouble)
        self.best = best

    def _exists(self, now: Moment) -> bool:
        return checkpoint_folders.step_folder(
            self._run.checkpoint_root, now.step
        ) in checkpoint_folders.list_checkpoints(self._run.checkpoint_root)

    def _begin(self, now: Moment, best: Best | None, start: float, in_background: bool) -> None:
        """Let every role hold its part, and begin to write; training has waited since ``start``."""
        now.tally.count_staleness(self._session, now.step)
        packed = now.tally.pack()
        more = {BEST: best, OWES_EVALUATION: now.owes_evaluation}
        progress = packed._replace(values={**packed.values, **more})
        folder = checkpoint_folders.step_folder(self._run.checkpoint_root, now.step)
        saving = self._session.begin_save(folder, now.step, now.epoch, now.metrics, progress, in_background)
        written: Future[tuple[float, int, str]] = Future()
        # A daemon thread does not keep a failed process alive.
        threading.Thread(
            target=self._write, args=(saving, best, written), name="checkpoint", daemon=True
        ).start()
        if not saving.is_copied:
            self._await(written)
            if in_background and not self._has_warned_of_wait:
                self._has_warned_of_wait = True
                self._warn("no memory for copies of the tables: training waits while checkpoints are written")
        self._pending = _PendingCheckpoint(now.step, best, time.perf_counter() - start, written)

    def _write(self, saving: Saving, best: Best | None, written: Future[tuple[float, int, str]]) -> None:
        start = time.perf_counter()
        try:
            self._run.sync()
            sealed = saving.write()
            seconds = time.perf_counter() - start
            trouble = self._prune(best)
            num_bytes = sum(size for size, _ in sealed.files.values())
            written.set_result((seconds, num_bytes, trouble))
        except BaseException as error:  # raised by finish
            written.set_exception(error)

    def _prune(self, best: Best | None) -> str:
        try:
            checkpoint_folders.prune(self._run.checkpoint_root, self._section.keep_last, best and best.step)
        except _WRITE_ERRORS as error:
            return f"an old checkpoint could not be removed: {error}"
        return ""

    def _end(self) -> None:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        self._await(pending.written)
        seconds, num_bytes, trouble = pending.written.result()
        self.best = pending.best
        self._run.log_checkpoint(pending.step, pending.seconds_stopped, seconds, num_bytes)
        if trouble:
            self._warn(trouble)

    def _await(self, written: Future[tuple[float, int, str]]) -> None:
        while not wait([written], _POLL_SECONDS).done:
            self._session.meanwhile()

    def _better(self, now: Moment, best: Best | None) -> Best | None:
        """Return the better one of the current evaluation and ``best``."""
        metric = self._section.keep_best
        if metric == "none" or now.metrics is None:
            return best
        value = now.metrics[metric]
        if best is None or math.isnan(best.value):
            return Best(metric, value, now.step)
        is_better = value < best.value if is_lower_better(metric) else value > best.value
        return Best(metric, value, now.step) if is_better else best
