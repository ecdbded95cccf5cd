"""Kafka topics as streams, with the mock cluster of librdkafka: rows of a step, waiting, and errors."""

import threading
import time
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.mock_kafka import MockKafka

from hybrid.batch import Batch
from hybrid.config import RunConfig
from hybrid.config.loading import load_config
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.parse.column_check import check_input_columns
from hybrid.data.stream.kafka_partitions import Topic, advance_unit
from hybrid.data.stream.stream_cursor import open_reader
from hybrid.data.stream.units import StreamUnit, fit_on_blocks
from hybrid.errors import ConfigError, DataError, OutageError

BATCH = 10


@pytest.fixture(scope="module")
def kafka() -> MockKafka:
    return MockKafka()


def configure(kafka: MockKafka, topic: str, *more: str) -> RunConfig:
    settings = [
        'data.format = "csv"',
        f"data.stream = \"kafka(brokers = '{kafka.brokers}', topic = '{topic}')\"",
        'data.columns = ["label", "number", "user"]',
        'data.dense = ["number"]',
        'data.sparse = ["user"]',
        'data.vocabulary = "grow"',
        'data.numeric_scaling = "none"',
        f"train.batch_size = {BATCH}",
        *more,
    ]
    return load_config(None, settings)


def number_of(partition: Any, offset: Any) -> Any:
    """Return the value of the column "number", which is unique."""
    return 100_000 * partition + offset


def row(partition: int, offset: int) -> str:
    return f"{offset % 2},{number_of(partition, offset)},u{offset % 7}"


def fill(kafka: MockKafka, topic: str, counts: list[int], start: int = 0) -> None:
    for partition, count in enumerate(counts):
        kafka.send(topic, partition, [row(partition, start + n) for n in range(count)])


def opened(config: RunConfig) -> tuple[Topic, StreamUnit, FeatureEncoder]:
    topic = Topic(config)
    unit = topic.find(None)
    return topic, unit, fit_on_blocks(config, topic.sample(unit))


def read(
    config: RunConfig, encoder: FeatureEncoder, unit: StreamUnit, num_steps: int, trainers: int
) -> list[list[int]]:
    """Return the sorted numbers of the rows of each step, of all trainers."""
    found: list[list[int]] = [[] for _ in range(num_steps)]
    for trainer in range(trainers):
        with open_reader(config, encoder, unit, trainer, trainers).batches() as stream:
            for step in found:
                step += next(stream).dense_features[:, 0].int().tolist()
    return [sorted(step) for step in found]


def test_step_has_equally_many_offsets_of_each_partition(kafka: MockKafka) -> None:
    fill(kafka, "even", [200, 90, 100, 30])
    config = configure(kafka, "even")
    topic, unit, encoder = opened(config)
    num_steps = topic.count_steps(unit)
    assert num_steps == 15  # partitions 0 and 1 give 3 rows, 2 and 3 give 2; partition 3 has the fewest
    whole = read(config, encoder, unit, num_steps, 1)
    rows = (3, 3, 2, 2)
    for step, numbers in enumerate(whole):
        assert numbers == [number_of(p, step * n + i) for p, n in enumerate(rows) for i in range(n)]
    for trainers in (2, 4):
        assert read(config, encoder, unit, num_steps, trainers) == whole
    for step, trainers in product((1, 7, 14), (1, 3)):
        at_step = advance_unit(config, unit, step)
        assert read(config, encoder, at_step, 15 - step, trainers) == whole[step:]


def test_partition_that_is_behind_is_waited_for(kafka: MockKafka) -> None:
    fill(kafka, "behind", [60_000, 60_000, 1000, 1000])
    config = configure(kafka, "behind", "train.batch_size = 4000")
    topic, unit, encoder = opened(config)
    assert topic.count_steps(unit) == 1
    with open_reader(config, encoder, unit, 0, 1).batches() as stream:
        next(stream)
        taken: list[Batch] = []
        reading = threading.Thread(target=lambda: taken.append(next(stream)))
        reading.start()
        reading.join(2.0)
        assert not taken
        fill(kafka, "behind", [0, 0, 49_000, 49_000], start=1000)
        assert topic.count_steps(advance_unit(config, unit, 1)) == 49
        reading.join(30)
        taken += [next(stream) for _ in range(48)]
    for step, batch in enumerate(taken, start=1):
        numbers = batch.dense_features[:, 0].int().reshape(4, 1000)
        assert (numbers == number_of(torch.arange(4)[:, None], 1000 * step + torch.arange(1000))).all()


def test_reader_that_waits_is_closed_at_once(kafka: MockKafka) -> None:
    fill(kafka, "closed", [3, 3, 3, 3])
    config = configure(kafka, "closed")
    _, unit, encoder = opened(config)
    stream = open_reader(config, encoder, unit, 0, 1).batches()
    next(stream)
    start = time.monotonic()
    stream.close()
    assert time.monotonic() - start < 3
    assert not [each for each in threading.enumerate() if each.name == "batch reader"]


def test_validity_of_a_message_depends_on_the_message(kafka: MockKafka) -> None:
    """Lines of a file can be one invalid row, if a quote of one is closed in another."""
    wrong = ['1,2,"a', row(1, 21), 'b"', '1,2,u1"', "1,2,u1\n1,3,u1", b"\xff", "1,x,u1", "", None]
    fill(kafka, "wrong", [20] * 4)
    kafka.send("wrong", 1, wrong)
    fill(kafka, "wrong", [9, 0, 9, 9], start=20)
    fill(kafka, "wrong", [6] * 4, start=29)
    config = configure(kafka, "wrong", "train.batch_size = 140", "data.max_invalid_fraction = 0.5")
    _, unit, encoder = opened(config)
    for trainers in (1, 4):
        (numbers,) = read(config, encoder, unit, 1, trainers)
        lost = [20, 22, *range(24, 29)]
        expected = [number_of(p, n) for p in range(4) for n in range(35) if p != 1 or n not in lost]
        expected[expected.index(number_of(1, 23))] = 2  # a quote within a field is text
        assert numbers == sorted(expected)
    reader = open_reader(config, encoder, unit, 1, 2)
    with reader.batches() as stream:
        next(stream)
    report = reader.invalid_rows()
    assert report.total == 5  # blank messages are no rows, like blank lines
    assert report.examples[0].startswith("wrong:20:")
    assert "partition 1" in report.examples[0]


def test_too_many_invalid_rows_end_a_topic(kafka: MockKafka) -> None:
    fill(kafka, "poor", [4000] * 4)
    for partition in range(4):
        kafka.send("poor", partition, ["1,x,u1"] * 2000)
    config = configure(kafka, "poor", "train.batch_size = 1000")
    _, unit, encoder = opened(config)
    message, reader = r"data\.max_invalid_fraction", open_reader(config, encoder, unit, 0, 1)
    with reader.batches() as stream, pytest.raises(DataError, match=message):
        list(islice(stream, 24))


def test_topic_that_does_not_fit_is_refused(kafka: MockKafka) -> None:
    fill(kafka, "fits", [5] * 4)
    config = configure(kafka, "fits")
    topic, unit, encoder = opened(config)
    with pytest.raises(DataError, match="absent"):
        Topic(configure(kafka, "absent"))
    with pytest.raises(ConfigError, match=r"^data\.dense = "):
        check_input_columns(configure(kafka, "fits", 'data.dense = ["absent"]'))
    for key, value in (("cluster.trainers", 5), ("train.batch_size", 3)):
        with pytest.raises(ConfigError, match="fits") as caught:
            Topic(configure(kafka, "fits", f"{key} = {value}"))
        assert caught.value.key == key
    late = advance_unit(config, unit, 9)
    for changed in (replace(unit, offsets=(0,) * 3), replace(unit, name="other"), late):
        with pytest.raises(DataError, match="fits"):
            topic.count_steps(changed)
    with open_reader(config, encoder, late, 0, 1).batches() as stream, pytest.raises(DataError, match="fits"):
        next(stream)


@pytest.mark.long
def test_unreachable_brokers_are_an_outage(kafka: MockKafka) -> None:
    stream = "data.stream = \"kafka(brokers = '127.0.0.1:1', topic = 'any')\""
    with pytest.raises(OutageError, match="any: "):
        Topic(configure(kafka, "any", stream))


def test_properties_of_a_file_reach_the_client(kafka: MockKafka, tmp_path: Path) -> None:
    fill(kafka, "secured", [5] * 4)
    stream = f"kafka(brokers = '{kafka.brokers}', topic = 'secured', properties = '{tmp_path}/client')"
    config, file = configure(kafka, "secured", f'data.stream = "{stream}"'), tmp_path / "client"
    file.write_text("# a comment\n\nclient.id = x\n")
    _, unit, encoder = opened(config)
    file.write_text("test.mock.num.brokers = 1")  # the client connects to a cluster without topics
    with pytest.raises(DataError, match="secured"):
        Topic(config)
    for key in ("foo", "security.protocol", "error_cb", "bootstrap.servers", ""):
        file.write_text(f"{key} = a secret" if key else "a secret")
        with open_reader(config, encoder, unit, 0, 1).batches() as batches:
            for use in (partial(Topic, config), partial(next, batches)):
                with pytest.raises(ConfigError, match=rf"{file}.*{key}") as caught:
                    use()
                assert "a secret" not in str(caught.value)
