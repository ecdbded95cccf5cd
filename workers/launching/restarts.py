"""The decision whether to restart a failed run, and its record in the run folder."""

import json
import time
from contextlib import closing
from pathlib import Path

from hybrid.errors import HybridError
from workers.exit_codes import Cause, ExitCode, ReportedError, code_of, may_help
from workers.launching.role_failure import RoleFailure
from workers.run_folder.append_only_file import AppendOnlyFile
from workers.run_folder.run_paths import run_write_errors
from workers.run_folder.run_state import RunState

FILE_NAME = "restarts.jsonl"


class Restarts:
    """The starts of one run.

    Args:
        folder: of the run.
        maximum: number of restarts in a row without a new checkpoint.
    """

    def __init__(self, folder: Path, maximum: int) -> None:
        self._folder = folder
        self._maximum = maximum
        self._at_start = RunState.of(folder)
        self._without_checkpoint = 0
        self._first: RoleFailure | None = None  # since the last checkpoint

    def after(self, failure: RoleFailure) -> str:
        """Return the message before the next start, which continues from the newest checkpoint.

        Raises:
            ReportedError: the run is not restarted, for the reason in the message.
        """
        before, now = self._at_start, RunState.of(self._folder)
        has_stepped = now.has_stepped_since(before)
        if (now.checkpoint_step or 0) > (before.checkpoint_step or 0):
            self._without_checkpoint, self._first = 0, None
        self._first = self._first or failure
        if not may_help(failure.cause, has_stepped):
            rule = (
                "; a restart would run out of memory before the first step; free some, or choose smaller "
                'tables (embedding.dim, data.vocabulary = "hash")'
            )
            is_starved = failure.cause is Cause.STARVED
            raise ReportedError(failure.message + rule * is_starved, ExitCode.FAILED)
        if self._without_checkpoint == self._maximum:
            tried = f"{self._maximum} restart(s) without a new checkpoint (cluster.max_restarts)"
            raise ReportedError(self._first.message + (f"; stopped after {tried}" if self._maximum else ""))
        self._without_checkpoint += 1
        self._at_start = now
        step = now.logged_step if has_stepped else now.resumed_step
        start = now.checkpoint_step or 0
        lost = f"steps {start} to {step - 1} are lost" if step > start else "nothing is lost"
        has_checkpoint = now.checkpoint_step is not None
        next_start = f"resuming from step {start}" if has_checkpoint else "starting from the beginning"
        record = {
            "time": round(time.time(), 3),
            "cause": failure.cause.value,
            "message": failure.message,
            "step": step,
            "resumed_step": now.resumed_step,
        }
        path, trouble = self._folder / FILE_NAME, ""
        try:
            with run_write_errors(path), closing(AppendOnlyFile(path, lambda: False)) as file:
                file.write(f"{json.dumps(record)}\n".encode())
        except HybridError as error:  # the run can continue without the record
            trouble = f"; {error}"
        return f"{failure.message}; {lost}, {next_start}{trouble}"

    def code_of(self, failure: RoleFailure) -> ExitCode:
        """Return the exit code of a run that is not restarted."""
        return code_of(failure.cause, RunState.of(self._folder).has_stepped_since(self._at_start))

    def is_finished(self) -> bool:
        """Whether the run has come to its end since the last start."""
        result = RunState.of(self._folder).result
        return result is not None and result != self._at_start.result
