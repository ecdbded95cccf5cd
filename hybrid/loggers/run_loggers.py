"""The loggers of a run, each in a thread of its own.

A logger can neither stop a run nor delay its steps. If a logger raises an exception or does not respond, the
run continues without it, after one warning. At its end, a run waits for the loggers, for at most a minute.
"""

import importlib.util
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Full, Queue
from typing import Any

from hybrid.config import RunConfig
from hybrid.config.loading import key_values
from hybrid.errors import ConfigError
from hybrid.loggers.tools import LoggedRun, MlflowLogger, RunLogger, TensorBoardLogger, WandbLogger
from hybrid.user_code.user_modules import describe_error, load_function

FAILED_SECONDS = 3.0  # time limit of the last calls of a run that fails, before its roles are killed
_KEY = "cluster.loggers"
# By the name of the package, and of the extra.
_BUILT_IN: dict[str, Callable[[], RunLogger]]
_BUILT_IN = {"tensorboard": TensorBoardLogger, "mlflow": MlflowLogger, "wandb": WandbLogger}
_SILENT_SECONDS = 60.0  # time limit of one call
_MAX_CALLS = 1000  # calls that wait for a slow logger
_LOG = logging.getLogger(__name__)


class RunLoggers:
    """The loggers that a configuration names. Call ``start``, then ``log`` for each record, then ``finish``.

    Args:
        warn: receives warnings, in the thread that calls the methods of this object.

    Raises:
        ConfigError: a package is missing, or a class of the user cannot be imported or lacks a method.
    """

    def __init__(self, config: RunConfig, warn: Callable[[str], object]) -> None:
        self._config = config
        self._warn = warn
        self._makers = {name: _load(name) for name in dict.fromkeys(config.cluster.loggers)}
        self._threads: list[_LoggerThread] = []

    def start(self, name: str, folder: Path, step: int) -> None:
        """Begin to record the run ``name``, which has taken ``step`` steps; ``folder`` is its run folder."""
        config = {f"{section}.{key}": value for section, key, _, value in key_values(self._config)}
        run = LoggedRun(name, folder, config, step)
        self._threads = [_LoggerThread(each, make) for each, make in self._makers.items()]
        self._call("start", run)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the finite numbers of ``values``."""
        self._call("log", step, {name: value for name, value in values.items() if math.isfinite(value)})

    def finish(self, result: Mapping[str, Any] | None, seconds: float = _SILENT_SECONDS) -> None:
        """End the recording (:meth:`RunLogger.finish`). Wait at most ``seconds`` for all loggers together."""
        self._call("finish", result)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive() and not thread.failure:
                thread.failure = "has not written its last values in time"
        self._drop_failed()
        self._threads = []

    def _call(self, method: str, *args: object) -> None:
        for thread in self._threads:
            thread.call(method, args)
        self._drop_failed()

    def _drop_failed(self) -> None:
        for thread in [each for each in self._threads if each.failure]:
            self._threads.remove(thread)
            self._warn(f"the logger {thread.name} {thread.failure}; the run continues without it ({_KEY})")


def _load(name: str) -> Callable[[], RunLogger]:
    if name not in _BUILT_IN:
        logger = load_function(_KEY, name)
        if not all(callable(getattr(logger, method, None)) for method in ("start", "log", "finish")):
            raise ConfigError(_KEY, "needs the methods start, log and finish (docs/watching.md)", name)
        return logger
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.has_location:  # a folder of this name is no package
        raise ConfigError(_KEY, f"needs its package; run pip install 'hybrid-parallel[{name}]'", name)
    return _BUILT_IN[name]


class _LoggerThread(threading.Thread):
    def __init__(self, name: str, make: Callable[[], RunLogger]) -> None:
        super().__init__(name=name, daemon=True)
        self.failure = ""  # why the logger gets no further calls
        self._make = make
        self._calls = Queue[tuple[str, tuple[object, ...]]](_MAX_CALLS)
        self._busy_since = math.inf  # start of the running call
        self.start()

    def call(self, method: str, args: tuple[object, ...]) -> None:
        """Queue a call of the logger's ``method``. If the logger does not respond, set ``failure``."""
        try:
            self._calls.put_nowait((method, args))
        except Full:
            self._busy_since = -math.inf
        if not self.failure and time.monotonic() - self._busy_since > _SILENT_SECONDS:
            self.failure = "does not respond"

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread handles them
        try:
            logger: RunLogger | None = None
            method = ""
            while method != "finish":
                method, args = self._calls.get()
                self._busy_since = time.monotonic()
                logger = logger or self._make()
                getattr(logger, method)(*args)
                self._busy_since = math.inf
        except BaseException as error:  # user code may raise anything
            _LOG.info("the logger %s has failed", self.name, exc_info=True)
            self.failure = f"has failed: {describe_error(error)}"
