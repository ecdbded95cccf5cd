"""The log of a script: lines of ``metrics.jsonl`` in its run folder, and calls of the loggers."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from hybrid.config import RunConfig
from hybrid.loggers.record_file import (
    METRICS_FILE,
    NO_NUMBERS,
    AppendOnlyFile,
    Record,
    read_records,
    write_records,
)
from hybrid.loggers.run_loggers import FAILED_SECONDS, RunLoggers
from hybrid.storage.private_files import make_folder

_FIELDS = {*NO_NUMBERS, "step", "time"}


class ScriptLog:
    """The log of a script that has taken ``step`` steps. Records of later steps are deleted from the file.

    Raises:
        ConfigError: a logger of the configuration cannot be loaded (:class:`RunLoggers`).
        OSError: the file cannot be read or written; :meth:`append` raises it, too.
    """

    def __init__(self, folder: Path, config: RunConfig, step: int, warn: Callable[[str], object]) -> None:
        self._loggers = RunLoggers(config, warn)
        path = folder / METRICS_FILE
        kept = [each for each in read_records(path) if each["step"] <= step]
        # The names in each record before the restart, and in each record of the last step.
        self._known = {_names(each) for each in kept}
        self._known_of_step = {_names(each) for each in kept if each["step"] == step}
        self._step = step
        make_folder(folder)
        write_records(path, kept)
        self._file = AppendOnlyFile(path, lambda: False)
        self._loggers.start(folder.name, folder, step)

    def append(self, step: int, values: Mapping[str, float], is_replaying: bool) -> None:
        """Append the values of a step, unless the script recorded them before its restart.

        A restarted script repeats calls of the checkpoint's step. Values are skipped if an old record of this
        step has the same names. With ``is_replaying``, an old record of any step with these names is enough.

        Raises:
            ValueError: a value has the name of a field that all records have, such as ``step``.
        """
        if reserved := _FIELDS & values.keys():
            raise ValueError(f"cluster.log: choose another name than {min(reserved)}")
        names = frozenset(values)
        if names in (self._known if is_replaying else self._known_of_step) and step == self._step:
            return
        self._file.append("log", step, values)
        self._loggers.log(step, values)

    def finish(self) -> None:
        """End the recording at the end of the script. An unhandled exception marks the run as failed."""
        if hasattr(sys, "last_type") or sys.exc_info()[0] is not None:
            self._loggers.finish(None, FAILED_SECONDS)
        else:
            self._loggers.finish({})


def _names(record: Record) -> frozenset[str]:
    return frozenset(record) - _FIELDS
