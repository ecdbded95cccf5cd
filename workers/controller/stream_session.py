"""The session of a run that trains on a stream, one unit (a file, folder or Kafka topic) after another."""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.config.data_sections import TEST, TRAIN
from hybrid.data.dataset.dataset_manifest import NO_INVALID_ROWS, DatasetReport
from hybrid.data.encode.feature_encoder import FILE_NAME, FeatureEncoder
from hybrid.data.parse.input_files import InputFile, check_unchanged
from hybrid.data.prepare.preparation import LOCAL_CACHE
from hybrid.data.stream.stream_cursor import StreamCursor
from hybrid.data.stream.units import SINCE_CHECKPOINT, StreamUnit, with_scaling_of
from hybrid.data.values.invalid_rows import InvalidRowReport
from hybrid.errors import DataError
from hybrid.metrics import check_custom_metrics
from hybrid.storage import files as storage
from hybrid.storage.private_files import make_folder
from hybrid.storage.remote_path import StoragePath, parse_path
from hybrid.topology import Topology
from workers.console import TerminalView
from workers.controller.deployment import BULK_TIMEOUT_SECONDS
from workers.controller.remote_trainer import Trainer, TrainerReport
from workers.controller.session import DatasetSession, Session


def open_session(
    topology: Topology,
    config: RunConfig,
    stored: Checkpoint | None,
    data: Callable[[], StoragePath],
    view: TerminalView,
) -> DatasetSession:
    """Return the session of a configured run: of its stream, or of the prepared data from ``data()``.

    ``stored`` is the checkpoint that will be loaded; None for a new run.
    """
    if config.data.is_stream:
        return StreamSession(topology, config, stored, view.warn, view.status)
    data_folder = data()
    view.status("placing tables and building nets")
    return DatasetSession(topology, config, data_folder, is_new=stored is None, warn=view.warn)


class StreamSession(DatasetSession):
    """A session that trains on the units of a stream.

    Without ``train.max_steps``, ``total_steps`` is ``sys.maxsize`` until the stream ends.

    Args:
        stored: the checkpoint that will be loaded; None for a new run, which waits for its first unit.

    Raises:
        ConfigError: a topic, a column or a custom metric cannot be used; see also :class:`Session`.
        DataError, StorageError: the first unit is missing, or cannot be read.

    Attributes:
        encoder: fitted on a sample of the first unit. With ``train.initial``, it scales numbers as the
            initial model does. With ``scaling_momentum``, each unit changes the scaling.
    """

    def __init__(
        self,
        topology: Topology,
        config: RunConfig,
        stored: Checkpoint | None,
        warn: Callable[[str], object],
        report: Callable[[str], None],
    ) -> None:
        check_custom_metrics(config.all_tasks)
        self._report = report
        self._is_open = False  # whether the trainers read the unit
        self.config = config
        self._cursor = cursor = StreamCursor(config, warn, report)
        if stored is None:
            while not cursor.has_rows() and not cursor.is_over:
                pass
            encoder = cursor.fit_encoder()
        else:
            encoder = FeatureEncoder.load(stored.files_folder)
        self.reports = dict.fromkeys((TRAIN, TEST), DatasetReport(0, (), NO_INVALID_ROWS))
        self.best_auc = None
        self.limit = "train.max_steps" if config.train.max_steps else "data.stream"
        self.total_steps = self.steps_per_epoch = config.train.max_steps or sys.maxsize
        Session.__init__(
            self,
            topology,
            config,
            encoder.input_spec,
            self.total_steps,
            encoder=encoder,
            encoder_folder=self._share(encoder) if stored is None else None,
            is_new=stored is None,
            warn=warn,
        )
        self._warn = warn
        if self.initial is not None and self.initial.dense is not None:
            before = FeatureEncoder.load(self.initial.dense.files_folder, with_values=False)
            self.encoder = with_scaling_of(config, before, encoder)

    @property
    def unit(self) -> StreamUnit | None:
        return self._cursor.unit

    def is_ready(self, step: int) -> bool:
        """Return whether there are rows for step ``step + 1``. If a unit begins, let the trainers open it.

        Without rows, wait for a moment. If the stream has ended, set ``total_steps`` to ``step``.
        """
        cursor = self._cursor
        self.is_delta_due = False
        has_rows = cursor.has_rows()
        if cursor.unit is not None and not self._is_open:
            self._report(f"reading {cursor.unit.name}")
            self.encoder = cursor.scale(self.encoder)
            self._is_open = True
            # Trainers have other working directories.
            files = tuple(file.absolute() for file in cursor.unit.files)
            side_files = tuple(tuple(map(InputFile.absolute, each)) for each in cursor.unit.side_files)
            unit = replace(cursor.unit, files=files, side_files=side_files)
            self._on_trainers(BULK_TIMEOUT_SECONDS, Trainer.open_unit, unit, self.encoder, step)
        if cursor.is_over:
            if left := cursor.source.check_end(cursor.unit or cursor.last):
                self._warn(left)
            if cursor.unit is not None:
                self._end_unit(cursor.unit)
            self.total_steps, self.limit = step, "data.stream"
        elif not has_rows:
            self.meanwhile()
        return has_rows

    def train(self, steps_before: int, num_steps: int) -> list[TrainerReport]:
        num_steps, until = min(num_steps, self._cursor.num_ready), self._cursor.delta_time
        timeout = self._timeout_seconds(num_steps)
        reports = self._on_trainers(timeout, Trainer.train_on_unit, num_steps, steps_before, until)
        count, event_time = len(reports[0].losses), reports[0].event_time
        self._cursor.advance(count)
        self.is_delta_due = self._cursor.is_delta_due(event_time)
        if count < num_steps and event_time < until and self.unit is not None:
            self._end_unit(self.unit)
        return reports

    def _end_unit(self, unit: StreamUnit) -> None:
        check_unchanged(unit.files)
        self._cursor.end_unit(self._invalid_rows())
        self.reports[TRAIN] = DatasetReport(0, (), self._cursor.invalid_rows)
        self.ended_unit, self._is_open = unit.name, False

    def _invalid_rows(self) -> list[InvalidRowReport]:
        return self._on_trainers(BULK_TIMEOUT_SECONDS, Trainer.invalid_rows)

    def _own_progress(self) -> dict[str, Any]:
        cursor, unit = self._cursor, self.unit
        if unit is not None and self._is_open:
            if unit.offsets:  # a topic has no end at which invalid rows are reported
                cursor.add_invalid_rows(self._invalid_rows())
                self.reports[TRAIN] = DatasetReport(0, (), cursor.invalid_rows)
            found = self._on_trainers(BULK_TIMEOUT_SECONDS, Trainer.lane_positions, unit.step)
            cursor.set_lanes({lane: at for each in found for lane, at in each.items()})
        return cursor.pack()

    def load(self, stored: Checkpoint) -> None:
        """Load a checkpoint, and continue at the position in the stream that the checkpoint contains.

        CheckpointError if there is no such position; ConfigError, DataError or StorageError if the stream
        cannot be read from there; RemoteError if the checkpoint has another model.
        """
        self._cursor.restore(stored)
        if self.unit is not None:
            check_unchanged(self.unit.files, SINCE_CHECKPOINT)
        Session.load(self, stored)

    def _share(self, encoder: FeatureEncoder) -> StoragePath | None:
        """Write the encoder to a folder for workers; do nothing and return None without an initial model."""
        if not (self.config.train.initial or any(t.initial for t in self.config.tables.values())):
            return None
        text = encoder.to_json().encode()
        cache = parse_path(self.config.data.cache_folder or LOCAL_CACHE).absolute()
        folder = cache / f"stream-{hashlib.blake2b(text, digest_size=10).hexdigest()}"
        try:
            make_folder(folder)
            storage.write_bytes(folder / FILE_NAME, text)
        except OSError as error:
            raise DataError(f"{folder}: cannot be written ({error}); set data.cache_folder") from error
        return folder
