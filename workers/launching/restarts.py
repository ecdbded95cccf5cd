"""Whether a run that failed is started again, and what to say of it."""

import json
import time
from contextlib import closing
from pathlib import Path

from hybrid.errors import HybridError
from workers.exit_codes import Cause, ExitCode, ToldError, code_of, may_help
from workers.launching.role_outcome import Outcome
from workers.run_folder.append_only_file import AppendOnlyFile
from workers.run_folder.run_paths import run_write_errors
from workers.run_folder.run_state import RunState

FILE_NAME = "restarts.jsonl"


class Restarts:
    """Follows the starts of one run.

    Args:
        folder: of the run.
        maximum: how many restarts in a row may bring no new checkpoint.
    """

    def __init__(self, folder: Path, maximum: int) -> None:
        self._folder = folder
        self._maximum = maximum
        self._at_start = RunState.of(folder)
        self._in_vain = 0
        self._first: Outcome | None = None  # of those without a new checkpoint since

    def after(self, failure: Outcome) -> str:
        """What to tell the user before the next start, which goes on from the newest checkpoint.

        Raises:
            ToldError: there is to be none, for the reason that it says.
        """
        before, now = self._at_start, RunState.of(self._folder)
        has_stepped = now.has_stepped_since(before)
        if (now.checkpoint_step or 0) > (before.checkpoint_step or 0):
            self._in_vain, self._first = 0, None
        self._first = self._first or failure
        if not may_help(failure.cause, has_stepped):
            rule = (
                "; it would run out again before the first step; free some, or choose smaller tables "
                '(embedding.dim, data.vocabulary = "hash")'
            )
            is_starved = failure.cause is Cause.STARVED
            raise ToldError(failure.message + rule * is_starved, ExitCode.FAILED)
        if self._in_vain == self._maximum:
            tried = f"{self._in_vain} restart(s) without a new checkpoint (cluster.max_restarts)"
            raise ToldError(self._first.message + (f"; given up after {tried}" if self._in_vain else ""))
        self._in_vain += 1
        self._at_start = now
        lost = now.logged_step if has_stepped else now.resumed_step
        trouble = self._log(failure, lost, now.resumed_step)
        return f"{failure.message}; {_what_is_lost(lost, now.checkpoint_step)}{trouble}"

    def code_of(self, failure: Outcome) -> ExitCode:
        """What to end with where the run is not started again."""
        return code_of(failure.cause, RunState.of(self._folder).has_stepped_since(self._at_start))

    def is_finished(self) -> bool:
        """Whether the run has come to its end since the last start."""
        result = RunState.of(self._folder).result
        return result is not None and result != self._at_start.result

    def _log(self, failure: Outcome, step: int, resumed_step: int) -> str:
        """Add a restart to the record; why that is left out, where the disk does not take it."""
        record = {
            "time": round(time.time(), 3),
            "cause": failure.cause.value,
            "message": failure.message,
            "step": step,
            "resumed_step": resumed_step,
        }
        path = self._folder / FILE_NAME
        try:
            with run_write_errors(path), closing(AppendOnlyFile(path, lambda: False)) as file:
                file.write(f"{json.dumps(record)}\n".encode())
        except HybridError as error:  # the run may go on without
            return f"; {error}"
        return ""


def _what_is_lost(step: int, checkpoint_step: int | None) -> str:
    """What a restart after ``step`` steps costs."""
    start = checkpoint_step or 0
    go_on = "starting from the beginning" if checkpoint_step is None else f"going on from step {start}"
    if step <= start:
        return f"nothing is lost, {go_on}"
    return f"steps {start} to {step - 1} are lost, {go_on}"
