"""The partitions of a Kafka topic as lanes of a stream; a message is a row, and an offset is a position.

::

    partition 0    offsets 100 .. 149 | 150 .. 199 | ...     trainer 0
    partition 1    offsets   7 ..  56 |  57 .. 106 | ...     trainer 1
    partition 2    offsets  40 ..  89 |  90 .. 139 | ...     trainer 0
                             step 0       step 1

The number of offsets per step is fixed for each partition. So the rows of a step do not depend on the number
of trainers, and the position after any step is known. An offset without a valid row (the message is invalid,
or compaction has removed it) makes the batch smaller. Trainers take a step once all of its offsets exist.
"""

import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from hybrid.batch import Batch
from hybrid.config import RunConfig
from hybrid.data.batches import BatchStream
from hybrid.data.dataset.prepared_dataset import block_batch
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.delimited_text import parse_lines
from hybrid.data.parse.input_files import find_side_files
from hybrid.data.parse.sources import RawBlock, parse
from hybrid.data.stream.units import LanePosition, StreamUnit
from hybrid.data.values.invalid_rows import MAX_LEADING_INVALID, InvalidRow, InvalidRowLog, InvalidRowReport
from hybrid.errors import ConfigError, DataError, OutageError
from hybrid.storage import files as storage
from hybrid.storage.remote_path import parse_path

_REQUEST_SECONDS = 30.0
_OUTAGES = ("_TRANSPORT", "_TIMED_OUT", "_RESOLVE", "_ALL_BROKERS_DOWN")  # errors that may pass
_FETCH_MESSAGES, _FETCH_SECONDS = 1 << 13, 0.1
_MAX_HELD = 1 << 15  # messages of a partition that wait for those of other partitions
_SAMPLED_ROWS = 1 << 18


def _rows_of_step(config: RunConfig, unit: StreamUnit) -> list[int]:
    rows, more = divmod(config.train.batch_size, max(1, len(unit.offsets)))
    return [rows + (partition < more) for partition in range(len(unit.offsets))]


def advance_unit(config: RunConfig, unit: StreamUnit, num_steps: int) -> StreamUnit:
    """Return ``unit`` with ``step`` and ``offsets`` advanced by ``num_steps`` steps."""
    offsets = zip(unit.offsets, _rows_of_step(config, unit), strict=True)
    moved = tuple(offset + num_steps * rows for offset, rows in offsets)
    return replace(unit, step=unit.step + num_steps, offsets=moved)


def _import_kafka() -> Any:
    try:
        return import_module("confluent_kafka")
    except ImportError as error:
        rule = "kafka needs the package confluent-kafka; run pip install 'hybrid-parallel[kafka]'"
        raise ConfigError("data.stream", rule) from error


def _connect(config: RunConfig) -> Any:
    """Return a Kafka ``Consumer`` that commits no offsets, because checkpoints store the offsets.

    Raise ConfigError if the ``properties`` are unusable. The error hides the values, which may be secret.
    """
    kafka, call = _import_kafka(), config.data.stream_call
    fixed = {
        "bootstrap.servers": call["brokers"],
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "error",
        "log_level": 0,  # errors are raised
    }
    path = call["properties"]
    properties = _read_properties(path) if path else {}
    if refused := ", ".join(properties.keys() & {*fixed, "logger"}):
        raise ConfigError("data.stream", f"{path} must not set {refused}")
    try:
        # A group is required, but partitions are assigned explicitly, without a group.
        return kafka.Consumer({"group.id": "hybrid", **properties, **fixed})
    except (kafka.KafkaException, TypeError) as error:
        text = str(error.args[0] if isinstance(error, TypeError) else error.args[0].str()).strip()
        for value in properties.values():
            text = text.replace(f'"{value}"', "(not shown)")
        raise ConfigError("data.stream", f"{path}: {text}") from None  # the cause has the value


def _read_properties(path: str) -> dict[str, str]:
    try:
        with storage.open_reader(parse_path(path), follows_links=True) as file:
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    except OSError as error:
        raise ConfigError("data.stream", f"{path} cannot be read ({error.strerror})") from error
    pairs = [line.partition("=") for line in lines if line and line[0] != "#"]
    if any(not separator for _, separator, _ in pairs):
        raise ConfigError("data.stream", f"{path}: each line must be KEY = VALUE, or a comment after #")
    return {key.strip(): value.strip() for key, _, value in pairs}


class Topic:
    """A topic as the source of a stream, with the methods of :class:`hybrid.data.stream.units.FileSource`.

    Raises:
        ConfigError: ``confluent-kafka`` is missing, the properties cannot be used, the topic has fewer
            partitions than there are trainers, or a step has fewer rows than the topic has partitions.
        DataError: the topic does not exist. Methods raise DataError and OutageError, too.
        OutageError: no broker responds.
    """

    poll_seconds = 0.1

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._kafka = _import_kafka()
        self._consumer = _connect(config)
        self.name: str = config.data.stream_call["topic"]
        num_partitions, size = self._count_partitions(), config.train.batch_size
        if config.cluster.trainers > num_partitions:
            rule = f"must be at most {num_partitions}, the number of partitions of {self.name}"
            raise ConfigError("cluster.trainers", rule, config.cluster.trainers)
        if size < num_partitions:
            rule = f"must be at least {num_partitions}, the number of partitions of {self.name}"
            raise ConfigError("train.batch_size", rule, size)

    def find(self, last: StreamUnit | None) -> StreamUnit:
        """Return the topic as a unit, from the end of ``last`` on, or from ``start`` if ``last`` is None."""
        if last is None:
            is_latest = self._config.data.stream_call["start"] == "latest"
            edge = self._kafka.OFFSET_END if is_latest else self._kafka.OFFSET_BEGINNING
            last = StreamUnit(0, self.name, (), offsets=(*self._edges(edge, self._count_partitions()),))
        return replace(last, side_files=find_side_files(self._config.data))

    def count_rows(self, unit: StreamUnit) -> list[int]:
        """Return the number of offsets in each partition after the position of ``unit``.

        Raise DataError if name or number of partitions differ from ``unit``, or a position is out of range.
        """
        count = self._count_partitions()
        if (unit.name, len(unit.offsets)) != (self.name, count):
            began = f"but the run began with {unit.name}, which had {len(unit.offsets)}"
            raise DataError(f"{self.name}: has {count} partitions, {began}; start a new run")
        ends = self._edges(self._kafka.OFFSET_END, count)
        starts = self._edges(self._kafka.OFFSET_BEGINNING, count)
        for partition, (start, at, end) in enumerate(zip(starts, unit.offsets, ends, strict=True)):
            if not start <= at <= end:
                found = f"partition {partition} has the offsets from {start} to {end}"
                raise DataError(f"{self.name}: {found}, but the next one to read is {at}; start a new run")
        return [end - at for at, end in zip(unit.offsets, ends, strict=True)]

    def count_steps(self, unit: StreamUnit) -> int:
        """Return how many of the next steps have all their rows; raise the errors of ``count_rows``."""
        rows = zip(self.count_rows(unit), _rows_of_step(self._config, unit), strict=True)
        return min(found // of_step for found, of_step in rows)

    def sample(self, unit: StreamUnit | None) -> Iterator[RawBlock]:
        """Yield rows of the next steps, about 262,144 at most; DataError if no step has all its rows."""
        if unit is None or not (num_ready := self.count_steps(unit)):
            raise DataError(f"{self.name}: too few rows for the first step; check data.stream")
        config, partitions = self._config, range(len(unit.offsets))
        num_steps = min(num_ready, -(-_SAMPLED_ROWS // config.train.batch_size))
        layout = unit.layout(config)
        with closing(_read_steps(config, unit, partitions, threading.Event())) as steps:
            for messages in islice(steps, num_steps):
                if messages:
                    yield _parse(unit.name, messages, layout)[0]

    def wait_hours(self, last: StreamUnit | None) -> float:
        """Return ``wait_hours`` of data.stream. If a step waits longer for its rows, the stream ends."""
        return float(self._config.data.stream_call["wait_hours"])

    def check_end(self, at: StreamUnit | None) -> str:
        """Return a warning if the stream ends at ``at``, but the topic has more rows; else an empty text."""
        if at is None or not any(rows := self.count_rows(at)):
            return ""
        behind = min(range(len(rows)), key=rows.__getitem__)
        left = f"{sum(rows):,} row(s) are left for a later run"
        return f"{self.name}: partition {behind} has too few rows for a step; {left}"

    def _count_partitions(self) -> int:
        with _convert_errors(self.name):
            found = self._consumer.list_topics(self.name, timeout=_REQUEST_SECONDS).topics[self.name]
            if found.error is not None:
                raise self._kafka.KafkaException(found.error)
        return len(found.partitions)

    def _edges(self, edge: int, count: int) -> list[int]:
        asked = [self._kafka.TopicPartition(self.name, partition, edge) for partition in range(count)]
        with _convert_errors(self.name):
            found = self._consumer.offsets_for_times(asked, timeout=_REQUEST_SECONDS)
            for each in found:
                if each.error is not None:
                    raise self._kafka.KafkaException(each.error)
        return [each.offset for each in found]


@contextmanager
def _convert_errors(topic: str) -> Iterator[None]:
    try:
        yield
    except _import_kafka().KafkaException as error:
        kind = OutageError if error.args[0].name() in _OUTAGES else DataError
        raise kind(f"{topic}: {error.args[0].str()}; check data.stream, and the brokers") from error


def _read_steps(
    config: RunConfig, unit: StreamUnit, partitions: Sequence[int], is_over: threading.Event
) -> Generator[list[Any], None, None]:
    """Yield for each step the messages of ``partitions``, until ``is_over`` is set; for errors, see Topic."""
    kafka, rows = _import_kafka(), _rows_of_step(config, unit)
    fetched: dict[int, deque[Any]] = {p: deque() for p in partitions}  # messages of later steps
    ends = {p: unit.offsets[p] for p in partitions}  # the first offset that is not yet fetched
    paused: set[int] = set()
    with closing(_connect(config)) as consumer, _convert_errors(unit.name):
        consumer.assign([kafka.TopicPartition(unit.name, p, end) for p, end in ends.items()])
        while True:
            unit = advance_unit(config, unit, 1)
            while any(end < unit.offsets[p] for p, end in ends.items()):
                if is_over.is_set():
                    return
                for message in consumer.consume(_FETCH_MESSAGES, _FETCH_SECONDS):
                    error, p = message.error(), message.partition()
                    if error is None:
                        fetched[p].append(message)
                        ends[p] = message.offset() + 1
                    elif error.code() == kafka.KafkaError._PARTITION_EOF:
                        ends[p] = message.offset()
                    else:
                        raise kafka.KafkaException(error)
                # A partition that is ahead waits, so that memory is limited.
                held = {p for p, messages in fetched.items() if len(messages) > max(_MAX_HELD, 2 * rows[p])}
                consumer.pause([kafka.TopicPartition(unit.name, p) for p in held - paused])
                consumer.resume([kafka.TopicPartition(unit.name, p) for p in paused - held])
                paused = held
            of_step = []
            for p, messages in fetched.items():
                while messages and messages[0].offset() < unit.offsets[p]:
                    of_step.append(messages.popleft())
            yield of_step


def _parse(topic: str, messages: Sequence[Any], layout: Layout) -> tuple[RawBlock, list[InvalidRow]]:
    """Return the valid rows of messages, and the invalid rows, with offsets as line numbers."""
    values = [message.value() or b"" for message in messages]
    text = b"\n".join([*values, b""])
    if text.count(b"\n") > len(values):  # a line feed within a message makes it an invalid row
        text = b"\n".join([*(each.rstrip(b"\r\n").replace(b"\n", b"\r") for each in values), b""])
    block, invalid = parse(Path(topic), parse_lines(text, layout), layout)
    sources = [messages[row.line - 1] for row in invalid]
    return block, [
        row._replace(line=source.offset(), found=f"{row.found}, in partition {source.partition()}")
        for row, source in zip(invalid, sources, strict=True)
    ]


class PartitionReader:
    """Reads the batches of one trainer from a topic, from the offsets of ``unit`` on."""

    def __init__(
        self, config: RunConfig, encoder: FeatureEncoder, unit: StreamUnit, trainer: int, num_trainers: int
    ) -> None:
        self._config, self._encoder, self._unit = config, encoder, unit
        self._partitions = range(trainer, len(unit.offsets), num_trainers)
        self._log = InvalidRowLog(config.data.max_invalid_fraction)

    def batches(self) -> BatchStream:
        """Return this trainer's endless batches. ``global_size`` counts only samples of this trainer."""
        is_over = threading.Event()
        return BatchStream(self._read(is_over), is_over=is_over)

    def positions(self, step: int) -> dict[int, LanePosition]:
        return {}  # the unit has the offsets

    def invalid_rows(self) -> InvalidRowReport:
        """Return a report of invalid rows so far. If they are too many, the next batch raises DataError."""
        return self._log.report()

    def _read(self, is_over: threading.Event) -> Generator[Batch, None, None]:
        layout, spec, num_read = self._unit.layout(self._config), self._encoder.input_spec, 0
        with closing(_read_steps(self._config, self._unit, self._partitions, is_over)) as steps:
            for messages in steps:
                if not messages:
                    yield Batch.empty(*spec.sizes)
                    continue
                block, invalid = _parse(self._unit.name, messages, layout)
                self._log.add(Path(self._unit.name), len(block.source_rows_B), invalid)
                num_read += len(messages)
                # A topic has no end, so the fraction is checked once there are enough messages for one.
                if num_read > MAX_LEADING_INVALID:
                    self._log.finish()
                batch = block_batch(self._encoder.encode(block), spec)
                if not self._config.data.time_column:
                    batch = batch._replace(event_time=max(each.timestamp()[1] for each in messages) / 1000)
                yield batch
