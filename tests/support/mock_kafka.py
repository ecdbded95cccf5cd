"""A Kafka cluster of librdkafka, in this process; other processes reach it over loopback."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pytest


class MockKafka:
    """A cluster that creates a topic, with 4 partitions, when messages are sent to it."""

    def __init__(self) -> None:
        kafka: Any = pytest.importorskip("confluent_kafka", reason="needs the extra kafka")
        self._producer = kafka.Producer(
            {"bootstrap.servers": "unused", "test.mock.num.brokers": 2, "log_level": 0, "linger.ms": 50}
        )
        brokers = self._producer.list_topics(timeout=30).brokers.values()
        self.brokers = ",".join(f"{each.host}:{each.port}" for each in brokers)

    def send(
        self, topic: str, partition: int, rows: Sequence[str | bytes | None], times: Sequence[float] = ()
    ) -> None:
        """Send messages, perhaps with timestamps in seconds; fewer than the 100,000 that the client holds."""
        for row, seconds in zip_longest(rows, times, fillvalue=0):
            self._producer.produce(topic, row, partition=partition, timestamp=int(1000 * seconds))
        assert not self._producer.flush(30)
