"""The runner of the bench, with make-believe systems: what it reads, what it refuses, what it leaves."""

import sys
import uuid
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from benchmark import running
from benchmark.job import Job
from benchmark.results import Measurement
from benchmark.running import MeasurementError, measure
from benchmark.systems import CONFIG, System
from benchmark.usage import cpu_seconds
from benchmark.workloads import WORKLOADS
from support.commands import LEFT_SECONDS, eventually, marked, marked_environment

JOB = Job(WORKLOADS["W3"], 1, 2)
BEGIN = """
import json, os, subprocess, sys, time
from benchmark import mark
mark.begin()
"""
AWAIT_SAMPLE = """
while not os.path.exists(os.environ["SAMPLES"] + "/{}"): time.sleep(0.005)
"""
END = f"""
mark.end(0.5, [3.0, 2.0, 1.0])
{AWAIT_SAMPLE.format(2)}
"""
CHILD = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
"""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything a system starts is found by a mark, and must be gone at the end of the test."""
    mark = uuid.uuid4().hex
    for name, value in marked_environment(mark).items():
        monkeypatch.setenv(name, value)
    yield
    assert eventually(lambda: not marked(mark), LEFT_SECONDS), marked(mark)


@pytest.fixture(autouse=True)
def _sampled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A system can wait until the runner has looked at its CPU time, once or twice."""
    numbers = count(1)

    def sample(root: int) -> dict[str, float]:
        used = cpu_seconds(root)
        (tmp_path / str(next(numbers))).touch()
        return used

    monkeypatch.setenv("SAMPLES", str(tmp_path))
    monkeypatch.setattr(running, "cpu_seconds", sample)


def system(code: str) -> System:
    """A system that runs this code."""
    return System("pretended", "pretended", sys.executable, ("-c", code))


def measured(code: str) -> Measurement:
    return measure(system(code), JOB, JOB.workload.config(), 4)


def test_it_reads_marks_among_other_output_and_cpu_time_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = iter([{"other": 3.0}, {"other": 3.5, "trainer": 0.25}])
    take = vars(running)["cpu_seconds"]

    def sample(root: int) -> dict[str, float]:
        take(root)
        return next(samples)

    monkeypatch.setattr(running, "cpu_seconds", sample)
    result = measured("print('hello')" + BEGIN + "print('in between')" + END)
    assert (result.workload, result.system, result.number) == ("W3", "pretended", 4)
    assert (result.num_samples, result.seconds) == (2 * 256, 0.5)
    assert result.losses == (3.0, 2.0, 1.0)
    assert result.cpu_seconds == {"other": 0.5, "trainer": 0.25}
    assert result.memory_bytes["other"] > 2**20


@pytest.mark.usefixtures("mark")
def test_what_a_living_role_and_children_that_have_ended_have_used_is_counted_by_its_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = SimpleNamespace(user=1.0, system=0.5, children_user=0.25, children_system=0.125)
    monkeypatch.setattr(psutil.Process, "cpu_times", lambda _: times)
    child = """
with open("trainer-0.log", "w") as log:
    trainer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stderr=log)
"""
    result = measured(BEGIN + AWAIT_SAMPLE.format(1) + child + END)
    assert result.cpu_seconds == {"other": 0.0, "trainer": 1.875}
    assert set(result.memory_bytes) == {"trainer", "other"}


@pytest.mark.usefixtures("mark")
def test_a_role_that_ends_before_it_is_looked_at_is_a_failure() -> None:
    start = """
import subprocess, sys
with open("worker-0.log", "w") as log:
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stderr=log)
"""
    leave = AWAIT_SAMPLE.format(1) + "worker.kill()\nworker.wait()" + END
    with pytest.raises(MeasurementError, match="its worker had ended when it was to be looked at"):
        measured(start + BEGIN + leave)


def test_the_system_is_told_its_job_and_configuration_in_a_session_of_its_own() -> None:
    told = """
import tomllib
from pathlib import Path
from types import SimpleNamespace
assert os.environ["BENCH_JOB"] == "W3 1 2"
assert tomllib.loads(Path(sys.argv[1]).read_text())["cluster"]["trainers"] == 2
assert os.getsid(0) == os.getpid()
"""
    arguments = ("-c", BEGIN + told + END, CONFIG)
    told_system = System("pretended", "pretended", sys.executable, arguments)
    assert measure(told_system, JOB, JOB.workload.config()).number == 1


FAIL = "print('on its way'); import sys; sys.exit('no such kernel')"
LAST = r"; it printed last:\n(.*\n)*    "


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (FAIL, f"ended with code 1 before 'begin'{LAST}no such kernel"),
        (BEGIN + FAIL, f"ended with code 1 before 'end'{LAST}no such kernel"),
        (BEGIN + END + FAIL, f"ended with code 1 after its last step{LAST}no such kernel"),
        ("print('nothing to say')", f"ended with code 0 before 'begin'{LAST}nothing to say"),
        (BEGIN + "print('in between')\nmark.begin()", f"said 'begin' where 'end' was due{LAST}in between"),
        (BEGIN + END.replace("[3.0, ", "["), "took 2 steps instead of those of W3 1 2"),
    ],
    ids=["at start", "in the timed steps", "after them", "silent", "begun twice", "other steps"],
)
def test_a_failure_says_when_it_came_and_what_was_printed_last(code: str, what: str) -> None:
    with pytest.raises(MeasurementError, match=f"pretended {what}"):
        measured(code)


@pytest.mark.usefixtures("mark")
@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("START_SECONDS", "import time; time.sleep(30)"),
        ("TIMED_SECONDS", BEGIN + CHILD + "time.sleep(30)"),
        ("EXIT_SECONDS", BEGIN + CHILD + END + "time.sleep(30)"),
    ],
)
def test_no_wait_is_for_ever_and_nothing_is_left(
    limit: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, limit, 0.4)
    with pytest.raises(MeasurementError, match=r"within 0\.4 s"):
        measured(code)


@pytest.mark.usefixtures("mark")
def test_what_outlives_a_system_in_a_session_of_its_own_is_ended() -> None:
    measured(BEGIN + CHILD + END)


@pytest.mark.usefixtures("mark")
def test_an_interrupt_ends_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(root: int) -> dict[str, float]:
        assert eventually(psutil.Process(root).children, 5)
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "cpu_seconds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured(BEGIN + CHILD + "time.sleep(600)")
