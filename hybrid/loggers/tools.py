"""Loggers for TensorBoard, MLflow and W&B; their packages are imported when a run starts."""

import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hybrid.loggers.record_file import AppendOnlyFile
from hybrid.storage import files


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger records, at its start or resume."""

    name: str
    folder: Path  # the run folder, where a logger may store the id of the run in its tool
    config: Mapping[str, Any]  # the values of the configuration by key, such as "train.batch_size"
    step: int  # number of steps taken; values of later steps were logged before a restart and are invalid


class RunLogger(Protocol):
    """A destination of the numbers of a run. One thread calls all methods of an object, in order."""

    def start(self, run: LoggedRun) -> None:
        """Begin, or continue, to record a run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record finite numbers by name, such as ``train/loss``."""

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """End the recording.

        Args:
            result: the content of ``result.json``; {} for a custom loop; None for a run that stops or fails.
        """


class TensorBoardLogger:
    """Writes an event file with scalars, and the configuration as text.

    SummaryWriter is not used: its thread prints a stack and loses records if the disk is full.
    """

    def start(self, run: LoggedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # type: ignore[import-untyped]
        from tensorboard.plugins.text.summary_v2 import text_pb  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendOnlyFile(run.folder / name, lambda: False)
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        # TensorBoard ignores the records of earlier files after the step from which the run resumes.
        self._add(step=run.step + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        text = "".join(f"    {key} = {value!r}\n" for key, value in run.config.items())
        self._add(step=run.step, summary=text_pb("config", text))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(step=step, summary=self._summary(value=scalars))

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self._file.close()

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


class MlflowLogger:
    """Writes metrics, and the configuration as parameters. A resumed run continues its MLflow run."""

    def start(self, run: LoggedRun) -> None:
        import mlflow

        self._mlflow = mlflow
        self._last_steps: dict[str, int] = {}  # by metric, before the run was resumed
        path = run.folder / "mlflow.txt"
        if files.is_file(path):
            active = mlflow.start_run(run_id=files.read_text(path))
            history = mlflow.MlflowClient().get_metric_history
            for name in active.data.metrics:
                self._last_steps[name] = max(each.step for each in history(active.info.run_id, name))
            return
        active = mlflow.start_run(run_name=run.name)
        parameters = [(_mlflow_name(key), str(value)) for key, value in run.config.items()]
        for first in range(0, len(parameters), 100):  # the limit of MLflow
            mlflow.log_params(dict(parameters[first : first + 100]))
        files.write_bytes(path, active.info.run_id.encode())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        named = {_mlflow_name(name): value for name, value in values.items()}
        # Otherwise, MLflow would show two values for a step that a resumed run repeats.
        new = {name: value for name, value in named.items() if step > self._last_steps.get(name, -1)}
        self._mlflow.log_metrics(new, step=step)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self._mlflow.end_run("KILLED" if result is None else "FINISHED")


def _mlflow_name(text: str) -> str:
    return re.sub(r"[^/\w.\- ]", "_", text)


class WandbLogger:
    """Writes a history, the configuration and a summary. A resumed run continues its W&B run.

    W&B takes steps in ascending order only. Therefore, values are left out if values of a later step have
    been logged before, for example if a resumed run repeats steps.
    """

    def start(self, run: LoggedRun) -> None:
        import wandb

        path = run.folder / "wandb.txt"
        if not files.is_file(path):
            files.write_bytes(path, secrets.token_hex(4).encode())
        self._run = wandb.init(
            id=files.read_text(path),
            name=run.name,
            dir=run.folder,
            config=dict(run.config),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._run.step:
            self._run.log(dict(values), step=step)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self._run.summary.update(result or {})
        self._run.finish(exit_code=int(result is None))
