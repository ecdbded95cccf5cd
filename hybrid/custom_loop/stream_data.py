"""The rows of a stream, for custom training loops.

The rows come in units: a file, a folder, or a topic. Trainer 0 finds the units and sends their descriptions
to the others. Each trainer reads its slice of every step (``hybrid/data/stream/units.py``).
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from hybrid.batch import Batch
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.custom_loop.backend import Backend
from hybrid.custom_loop.local_batches import EncodedData, LocalBatch, Slicing, pad_from_others
from hybrid.custom_loop.trainer_group import TrainerGroup
from hybrid.data.batches import BatchStream
from hybrid.data.encode.feature_encoder import FILE_NAME, FeatureEncoder
from hybrid.data.parse.input_files import check_unchanged
from hybrid.data.stream.stream_cursor import Reader, StreamCursor, open_reader
from hybrid.data.stream.units import SINCE_CHECKPOINT, LanePosition, StreamUnit, with_scaling_of
from hybrid.data.values.invalid_rows import InvalidRowReport
from hybrid.engine.uneven_batches import align_batches
from hybrid.errors import CheckpointError, ConfigError
from hybrid.storage import files as storage
from hybrid.storage.file_formats import parse_fields


class StreamData(EncodedData):
    """The rows of ``data.stream``, once and in order, for :meth:`Cluster.batches`.

    All trainers call each method together.

    Args:
        report: receives messages about what is read or waited for.

    Raises:
        ConfigError: see :meth:`Cluster.stream`; or ``hybrid compare`` cannot read the rows twice.
        DataError, StorageError: the first unit is missing or unreadable. Methods raise them for later units.
    """

    def __init__(self, backend: Backend, report: Callable[[str], object]) -> None:
        self.config = config = backend.config
        if not config.data.is_stream:
            raise ConfigError("data.stream", "must be files(...) or kafka(...) for cluster.stream()", "none")
        if backend.snapshot is not None and config.data.stream_call.arguments.get("start") == "latest":
            rule = "must start at 'earliest': hybrid compare reads the rows twice"
            raise ConfigError("data.stream", rule, config.data.stream)
        self._backend, self._trainer, self._group = backend, backend.trainer, backend.group
        self._trainers = TrainerGroup(backend.group)
        self._report = report
        self._cursor = StreamCursor(config, backend.warn if backend.trainer == 0 else lambda _: None, report)
        self._reader: Reader | None = None  # of the unit, while it is read
        self._batches: BatchStream | None = None
        self._step = 0  # the steps of the loop until the position of the unit
        while not (self._has_rows() or self._cursor.is_over):
            pass
        fitted = asdict(self._cursor.fit_encoder()) if self._trainer == 0 else None
        self._set_encoder(parse_fields(FeatureEncoder, self._trainers.gather_json(fitted)[0]))
        self.check_names(has_groups=bool(config.data.group))

    @property
    def unit(self) -> str:
        """The path of the file or folder that is read, or the name of the topic; empty between two units."""
        return "" if self._cursor.unit is None else self._cursor.unit.name

    def open(self, step: int, before_wait: Callable[[], object]) -> bool:
        """Wait for the rows of the next steps; return False if the stream ends.

        Args:
            step: number of steps taken.
            before_wait: called once if the wait for the next unit is long.
        """
        cursor, was_waiting = self._cursor, False
        while not self._has_rows():
            if cursor.is_over:
                return False
            if cursor.is_waiting and cursor.unit is None and not was_waiting:
                was_waiting = True
                before_wait()
        if self._reader is None:
            assert cursor.unit is not None
            self._report(f"reading {cursor.unit.name}")
            scaled = cursor.scale(self._encoder) if self._trainer == 0 else self._encoder
            encoder, unit = self._trainers.gather_json([asdict(scaled), asdict(cursor.unit)])[0]
            self._set_encoder(parse_fields(FeatureEncoder, encoder))
            cursor.unit = parse_fields(StreamUnit, unit)
            arguments = self.config, self._encoder, cursor.unit, self._trainer, self._group.size()
            self._reader = open_reader(*arguments)
            self._batches = self._reader.batches()
        self._step = step
        return True

    def slices(self, slicing: Slicing) -> Iterator[LocalBatch]:
        """Yield this trainer's slice of each step whose rows exist: for files, all steps of the unit."""
        assert self._batches is not None
        empty, num_tasks = Batch.empty(*self.input_spec.sizes), len(self.config.all_tasks)
        batches = islice(self._batches, self._cursor.num_ready)
        for batch in align_batches(batches, empty, self._group, num_tasks):
            size = len(batch.labels)
            values = self.columns_of(batch)
            if batch.global_size:
                values = pad_from_others(values, size, self._trainers)
            yield LocalBatch(values, size, batch.global_size, slicing)

    def advance_to(self, step: int) -> None:
        """Record that ``step`` steps are taken. End the unit if it had fewer steps than ``open`` found."""
        self._advance(step)
        if self._cursor.num_ready:  # the rows of the unit have ended earlier
            self._end_unit()

    def end(self) -> None:
        """End the last unit; warn about rows of a topic that are too few for a step.

        Raises:
            DataError: the last unit (``until`` in ``data.stream``) is missing, a file has changed, or too
                many rows are invalid.
        """
        cursor = self._cursor
        if self._trainer == 0 and (left := cursor.source.check_end(cursor.unit or cursor.last)):
            self._backend.warn(left)
        if self._reader is not None:
            self._end_unit()

    def pause(self, step: int) -> None:
        """Stop reading after ``step`` steps of the loop; :meth:`open` continues there."""
        if self._reader is not None:
            self.progress(step)
            self._forget()

    def close(self) -> None:
        """Stop the background reading of a pass that the script leaves. The position is kept."""
        if self._batches is not None:
            self._batches.close()

    def progress(self, step: int) -> dict[str, Any]:
        """Return the position after ``step`` steps, for the progress of a checkpoint."""
        cursor = self._cursor
        if self._reader is not None:
            self._advance(step)
            if self.config.data.is_topic:  # which has no end at which invalid rows are reported
                cursor.add_invalid_rows(self._invalid_rows())
            assert cursor.unit is not None
            found = self._trainers.gather_json(self._reader.positions(cursor.unit.step))
            cursor.set_lanes({int(lane): LanePosition(*at) for each in found for lane, at in each.items()})
        return cursor.pack()

    def restore(self, stored: Checkpoint) -> None:
        """Continue at the position in a checkpoint, with its encoding of columns.

        Raises:
            CheckpointError: the checkpoint has no position in a stream, or other columns.
            DataError: a file of the unit has changed since the checkpoint.
            ConfigError, DataError, StorageError: the topic or a side table cannot be read.
        """
        self._cursor.restore(stored)
        encoder = FeatureEncoder.load(stored.files_folder)
        if encoder.input_spec != self.input_spec:
            rule = "has other columns, or tables of other sizes, than the stream; keep [data] as it was"
            raise CheckpointError(f"{stored.folder}: {rule}")
        self._set_encoder(encoder)
        if self._trainer == 0 and self._cursor.unit is not None:
            check_unchanged(self._cursor.unit.files, SINCE_CHECKPOINT)

    def scale_as(self, stored: Checkpoint) -> None:
        """Scale numeric columns as in checkpoint ``stored``, if it contains an encoder of columns."""
        if storage.exists(stored.files_folder / FILE_NAME):
            before = FeatureEncoder.load(stored.files_folder, with_values=False)
            self._set_encoder(with_scaling_of(self.config, before, self._encoder))

    def _set_encoder(self, encoder: FeatureEncoder) -> None:
        self._encoder, self.input_spec = encoder, encoder.input_spec
        self._backend.texts[FILE_NAME] = encoder.to_json()

    def _has_rows(self) -> bool:
        """Return whether there are rows for the next step; trainer 0 searches for them."""
        cursor = self._cursor
        if not cursor.num_ready:
            if self._trainer == 0:
                cursor.has_rows()
            unit = cursor.unit and asdict(cursor.unit)
            state = self._trainers.gather_json([unit, cursor.num_ready, cursor.is_waiting, cursor.is_over])[0]
            unit, cursor.num_ready, cursor.is_waiting, cursor.is_over = state
            cursor.unit = unit and parse_fields(StreamUnit, unit)
        return cursor.num_ready > 0

    def _advance(self, step: int) -> None:
        self._cursor.advance(step - self._step)
        self._step = step

    def _end_unit(self) -> None:
        cursor = self._cursor
        if self._trainer == 0 and cursor.unit is not None:
            check_unchanged(cursor.unit.files)
        cursor.end_unit(self._invalid_rows())
        self._forget()

    def _invalid_rows(self) -> list[InvalidRowReport]:
        assert self._reader is not None
        reports = self._trainers.gather_json(asdict(self._reader.invalid_rows()))
        return [parse_fields(InvalidRowReport, each) for each in reports]

    def _forget(self) -> None:
        self.close()
        self._reader = self._batches = None
        self._cursor.num_ready = 0
