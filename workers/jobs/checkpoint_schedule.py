"""The checkpoints of a run: when they are due, how they end, and which are kept."""

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
from hybrid.checkpoint.checkpoint_files import MANIFEST_FILE
from hybrid.checkpoint.checkpoint_manifest import BEST, OWES_EVALUATION, Best, Manifest
from hybrid.config import CheckpointSection
from hybrid.config.task_sections import is_lower_better
from hybrid.errors import CheckpointError, StorageError
from hybrid.metrics import Metrics
from workers.controller.distributed_checkpoint import Saving
from workers.controller.session import Session
from workers.jobs.run_counters import Tally
from workers.run_folder.run_files import RunFolder

_POLL_SECONDS = 0.05
_NOT_WRITTEN = (CheckpointError, StorageError)  # a store may refuse even to tell what is there


class Moment(NamedTuple):
    """Where a run is.

    Attributes:
        step, epoch: how many of each are done.
        metrics: of the last evaluation, if there was one.
        tally: what the run has counted so far.
        owes_evaluation: whether one of this step is due, and not done yet.
    """

    step: int
    epoch: int
    metrics: Metrics | None
    tally: Tally
    owes_evaluation: bool = False


class _Written(NamedTuple):
    """A checkpoint that is there.

    Attributes:
        seconds: that it took to write.
        num_bytes: its size.
        trouble: why older ones are there that should not be, or nothing.
    """

    seconds: float
    num_bytes: int
    trouble: str


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A checkpoint being written: the best one then, and how long training has stood still for it."""

    step: int
    best: Best | None
    seconds_stopped: float
    written: Future[_Written]


class Checkpoints:
    """Writes the checkpoints of a run beside its training; at most one is under way.

    One that cannot be written is said and left out; the next is tried when it is due. Only the last of a
    run must succeed.

    Args:
        session: what to save.
        run: where to, and where it is logged.
        section: when, how many are kept, and by which metric the best.
        say: told, in a line each, what the user should know.
        progress: the values in the progress that the run goes on from; empty for a new run.

    Attributes:
        best: the best one that is kept; None where none is.
    """

    def __init__(
        self,
        session: Session,
        run: RunFolder,
        section: CheckpointSection,
        say: Callable[[str], object],
        progress: dict[str, Any],
    ) -> None:
        self._session = session
        self._run = run
        self._section = section
        self._say = say
        self.best = Best(*progress[BEST]) if progress.get(BEST) else None
        if self.best is not None and self.best.metric != section.keep_best:
            self.best = None
        self._under_way: _UnderWay | None = None
        self._has_said_that_it_waits = False
        self._begun_at = time.monotonic()
        run.make_room = self._make_room

    @property
    def expected_best(self) -> Best | None:
        """``best`` once the one that is under way is written."""
        return self._under_way.best if self._under_way else self.best

    def steps_to_next(self, step: int) -> float:
        """Steps from ``step`` until one is due by their number; infinite where none will be."""
        every = self._section.every_steps
        return every - step % every if every else math.inf

    def write_if_due(self, now: Moment, is_evaluated: bool) -> None:
        """Begin to write one if one is due by steps or minutes, or if the model is the best so far.

        Args:
            is_evaluated: whether ``now.metrics`` are those of this very step.
        """
        expected = self.expected_best
        is_best = is_evaluated and self._better(now, expected) != expected
        if is_best or self._is_due(now.step):
            start = time.perf_counter()
            self.finish()
            self._begun_at = time.monotonic()
            best = self._better(now, self.best) if is_evaluated else self.best
            with self._saying_why_none(now.step):
                if self._is_there(now):
                    self._add_evaluation(now, best)
                else:
                    self._begin(now, best, start, in_background=True)

    def poll(self) -> None:
        """Finish the one under way if it is written; called between the steps of a run."""
        if self._under_way is not None and self._under_way.written.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the one under way, if there is one."""
        if self._under_way is not None:
            with self._saying_why_none(self._under_way.step):
                self._end()

    def write_last(self, now: Moment) -> None:
        """Write that of the end of the run, unless it is there, and return once it is.

        Raises:
            CheckpointError: it cannot be written; says where the run's last checkpoint is.
        """
        self._write_now(now, True, "the run is at its end")

    def write_stop(self, now: Moment) -> None:
        """The same, for a run that was asked to stop."""
        self._write_now(now, False, "the run was asked to stop")

    def _write_now(self, now: Moment, is_evaluated: bool, why: str) -> None:
        self.finish()
        best = self._better(now, self.best) if is_evaluated else self.best
        try:
            if self._is_there(now):  # due at this very step, or stopped at before
                self._add_evaluation(now, best)
            else:
                self._begin(now, best, time.perf_counter(), in_background=False)
                self._end()
        except _NOT_WRITTEN as error:
            raise CheckpointError(f"{error}; {why}, and {self._left()}") from error

    def _left(self) -> str:
        """What is saved of the run."""
        try:
            before = checkpoint_folders.list_checkpoints(self._run.checkpoint_root)
        except StorageError:  # the error that is told says why
            return "nobody can look now what of it is saved"
        return f"only its state at {before[0].name} is saved" if before else "nothing of it is saved"

    @contextmanager
    def _saying_why_none(self, step: int) -> Iterator[None]:
        try:
            yield
        except _NOT_WRITTEN as error:
            self._say(f"no checkpoint of step {step}: {error}; training goes on")

    def _add_evaluation(self, now: Moment, best: Best | None) -> None:
        """To the checkpoint of this step, where the run had stopped before its evaluation."""
        folder = checkpoint_folders.step_folder(self._run.checkpoint_root, now.step)
        there = Manifest.read(folder / MANIFEST_FILE)
        if there.progress.get(OWES_EVALUATION) and not now.owes_evaluation:
            self._run.sync()
            metrics = dict(now.metrics or {})
            progress = {**there.progress, BEST: best, OWES_EVALUATION: False}
            dataclasses.replace(there, metrics=metrics, progress=progress).write(folder)
            if trouble := self._prune(best):
                self._say(trouble)
        self.best = best

    def _is_there(self, now: Moment) -> bool:
        return checkpoint_folders.step_folder(
            self._run.checkpoint_root, now.step
        ) in checkpoint_folders.list_checkpoints(self._run.checkpoint_root)

    def _begin(self, now: Moment, best: Best | None, start: float, in_background: bool) -> None:
        """Let every role hold its part, and begin to write; training has stood still since ``start``."""
        now.tally.count_staleness(self._session, now.step)
        packed = now.tally.pack()
        more = {BEST: best, OWES_EVALUATION: now.owes_evaluation}
        progress = packed._replace(values={**packed.values, **more})
        folder = checkpoint_folders.step_folder(self._run.checkpoint_root, now.step)
        saving = self._session.begin_save(folder, now.step, now.epoch, now.metrics, progress, in_background)
        written: Future[_Written] = Future()
        # A thread that does not keep a process alive which fails meanwhile.
        threading.Thread(
            target=self._write, args=(saving, best, written), name="checkpoint", daemon=True
        ).start()
        if not saving.is_copied:
            self._await(written)
            if in_background and not self._has_said_that_it_waits:
                self._has_said_that_it_waits = True
                self._say("no memory for copies of the tables: training waits while checkpoints are written")
        self._under_way = _UnderWay(now.step, best, time.perf_counter() - start, written)

    def _write(self, saving: Saving, best: Best | None, written: Future[_Written]) -> None:
        start = time.perf_counter()
        try:
            self._run.sync()
            sealed = saving.write()
            seconds = time.perf_counter() - start
            trouble = self._prune(best)
            num_bytes = sum(size for size, _ in sealed.files.values())
            written.set_result(_Written(seconds, num_bytes, trouble))
        except BaseException as error:  # raised where the checkpoint is waited for
            written.set_exception(error)

    def _prune(self, best: Best | None) -> str:
        try:
            checkpoint_folders.prune(self._run.checkpoint_root, self._section.keep_last, best and best.step)
        except _NOT_WRITTEN as error:
            return f"an old checkpoint is left: {error}"
        return ""

    def _end(self) -> None:
        """Wait for the one under way."""
        assert self._under_way is not None
        under_way, self._under_way = self._under_way, None
        self._await(under_way.written)
        written = under_way.written.result()
        self.best = under_way.best
        stopped = under_way.seconds_stopped
        self._run.log_checkpoint(under_way.step, stopped, written.seconds, written.num_bytes)
        if written.trouble:
            self._say(written.trouble)

    def _await(self, written: Future[_Written]) -> None:
        while not wait([written], _POLL_SECONDS).done:
            self._session.meanwhile()

    def _make_room(self) -> bool:
        """Wait for the one under way: if it does not find room itself, what it has written is removed.

        Returns:
            whether there was one.
        """
        was_under_way = self._under_way is not None
        self.finish()
        return was_under_way

    def _is_due(self, step: int) -> bool:
        steps, minutes = self._section.every_steps, self._section.every_minutes
        if steps and step % steps == 0:
            return True
        return minutes > 0 and time.monotonic() - self._begun_at >= 60 * minutes

    def _better(self, now: Moment, best: Best | None) -> Best | None:
        """The better one of that of now and ``best``."""
        metric = self._section.keep_best
        if metric == "none" or now.metrics is None:
            return best
        value = now.metrics[metric]
        if best is None or math.isnan(best.value):
            return Best(metric, value, now.step)
        is_better = value < best.value if is_lower_better(metric) else value > best.value
        return Best(metric, value, now.step) if is_better else best
