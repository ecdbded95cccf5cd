"""Runs on a Kafka topic: rows that come while they train, kills, and another number of trainers."""

import signal
from pathlib import Path

import numpy as np
import pytest
from cli.test_streams import COMMON, assert_equal, final_state, records
from support.commands import ONE_EACH, output_of, run, settings, started
from support.mock_kafka import MockKafka

SENT = 40  # rows of each partition per step: a quarter of the batch, 4 partitions


@pytest.fixture
def kafka(tmp_path: Path) -> MockKafka:
    (tmp_path / "users.csv").write_text("user,country\n" + "".join(f"u{u},c{u % 3}\n" for u in range(40)))
    return MockKafka()


def send(kafka: MockKafka, topic: str, steps: range) -> None:
    """Send the rows of some steps; one of a partition is invalid in each step."""
    for partition in range(4):
        rng = np.random.default_rng([partition, steps.start])
        users = rng.integers(50, size=SENT * len(steps))
        rows = [f"{(user % 3 == 0) * 1},{rng.random():.4f},u{user}" for user in users]
        for each in range(5 if partition == 2 else len(rows), len(rows), SENT):
            rows[each] = "1,x,u1"
        kafka.send(topic, partition, rows)


def stream(kafka: MockKafka, topic: str, hours: float = 0.0001) -> list[str]:
    call = f"kafka(brokers = '{kafka.brokers}', topic = '{topic}', wait_hours = {hours})"
    return settings(data={"stream": call})


# A scaling would depend on the rows that are there at the start.
ROWS = {
    "format": "csv",
    "path": [],
    "columns": ["label", "price", "user"],
    "sparse": ["user", "country"],
    "joins": 'table("users.csv", key = "user")',
    "weight": "",
}
KAFKA = [*COMMON, *settings(data={**ROWS, "numeric_scaling": "none"}, train={"batch_size": 4 * SENT})]


def common(kafka: MockKafka, topic: str, folder: str, hours: float = 0.0001) -> list[str]:
    return [*KAFKA, *stream(kafka, topic, hours), *settings(run={"folder": folder})]


def test_killed_and_resized_runs_lose_and_repeat_no_row(kafka: MockKafka, tmp_path: Path) -> None:
    for topic in ("whole", "parts"):
        send(kafka, topic, range(6))
    with started(["launch", *common(kafka, "parts", "parts", 1), *ONE_EACH], tmp_path) as command:
        command.await_text("step 5 ")
        command.role("trainer 0").kill()
        command.await_text("waiting for rows")
        for topic in ("whole", "parts"):
            send(kafka, topic, range(6, 9))
        command.await_text("step 9 ")
        command.process.send_signal(signal.SIGINT)
        assert command.wait().code == 130
    for topic in ("whole", "parts"):
        send(kafka, topic, range(9, 12))
    more = [*stream(kafka, "parts"), *settings(cluster={"trainers": 2})]
    output_of(["launch", "--resume", "parts", *more], tmp_path)
    printed = output_of(["launch", *common(kafka, "whole", "whole"), *ONE_EACH], tmp_path)
    assert "skipped 12 invalid row(s), such as whole:" in printed
    assert [each["num_samples"] for each in records(tmp_path / "parts", "unit")] == [12 * (4 * SENT - 1)]
    assert_equal(final_state(tmp_path / "parts"), final_state(tmp_path / "whole"), 1e-9)
    ended = run(["launch", "--resume", "whole", *stream(kafka, "parts")], tmp_path)
    assert ended.code == 1
    assert "whole" in ended.stderr
    assert "parts" in ended.stderr


@pytest.mark.long
def test_topic_is_that_of_one_process(kafka: MockKafka, tmp_path: Path) -> None:
    send(kafka, "compared", range(6))
    more = settings(cluster={"trainers": 3}, train={"update": "lookahead"})
    printed = output_of(["compare", "--steps", 5, *common(kafka, "compared", "run"), *more], tmp_path)
    assert "equal up to rounding" in printed


def test_timestamps_of_messages_write_deltas(kafka: MockKafka, tmp_path: Path) -> None:
    rng, num_steps = np.random.default_rng(8), 18
    times = 1e9 + np.arange(SENT * num_steps) / 5 + rng.integers(15, size=(4, SENT * num_steps))
    for partition in range(4):
        rows = [f"{n % 2},{n % 5},u{n % 9}" for n in range(SENT * num_steps)]
        kafka.send("timed", partition, rows, times[partition])
    largest = np.maximum.accumulate(times.reshape(4, num_steps, SENT).max((0, 2)))
    due = [s + 1 for s in range(1, num_steps) if largest[s] // 20 > largest[s - 1] // 20]
    checkpoint = {"every_steps": 0, "deltas": "every(event_seconds = 20, seconds = 0)"}
    # No other line of progress, so a call takes several steps.
    more = settings(checkpoint=checkpoint, train={"log_every_steps": 100, "update": "lookahead"})
    output_of(["launch", *common(kafka, "timed", "run"), *more], tmp_path)
    first, *others = due
    assert [each["step"] for each in records(tmp_path / "run", "checkpoint")] == [first, num_steps]
    assert [each["step"] for each in records(tmp_path / "run", "delta")] == [*others, num_steps]
    assert [each["num_samples"] for each in records(tmp_path / "run", "unit")] == [4 * SENT * num_steps]
