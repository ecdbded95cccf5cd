"""Update barriers of texts, for tests of when contributions are applied and lookups answered."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch.futures import Future

from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import UpdateMode, UpdateRules
from hybrid.server.barrier import Update, UpdateBarrier

PATIENCE_SECONDS = 10.0
NORM = 7.0
Applied = list[list[str]]
Barrier = UpdateBarrier[str]
Result = TypeVar("Result")


class Merged:
    """An update that says to ``apply`` what it was made of, and by what it is multiplied."""

    def __init__(self, contributions: list[str], apply: Callable[[list[str]], None]) -> None:
        self._contributions = contributions
        self._apply = apply

    def squared_norm(self) -> float:
        return NORM

    def apply(self, scale: float) -> None:
        scaled = self._contributions if scale == 1.0 else [f"{scale}*{c}" for c in self._contributions]
        self._apply(scaled)


@contextmanager
def barrier(
    num_trainers: int,
    apply: Callable[[list[str]], None],
    mode: UpdateMode = UpdateMode.SYNC,
    timeout_seconds: float = 2 * PATIENCE_SECONDS,
    *,
    parts: int = 1,
    decided: bool = False,
) -> Iterator[Barrier]:
    """A barrier whose threads are gone when the block ends."""

    def merge(step: int, contributions: list[str]) -> Update:
        return Merged(contributions, apply)

    before = set(threading.enumerate())
    rules = UpdateRules(num_trainers, mode, parts, check_finite=not decided, timeout_seconds=timeout_seconds)
    each = Barrier(rules, merge)
    try:
        yield each
    finally:
        each.close()
    assert set(threading.enumerate()) <= before


def when(each: Barrier, version: int, work: Callable[[], Result], trainer: int = 0) -> Future[Result]:
    """A lookup for step ``version`` that must see all updates before it."""
    return each.run_when_ready(Ticket(trainer, version, version), work)


def ahead(
    each: Barrier, trainer: int, step: int, work: Callable[[], Result], part: int = 0
) -> Future[Result]:
    """A lookup for ``step`` that must see all updates before it but the last."""
    return each.run_when_ready(Ticket(trainer, step, max(0, step - 1), part, Purpose.PREFETCH), work)


def give(
    each: Barrier,
    trainer: int,
    step: int,
    contribution: str = "",
    *,
    part: int = 0,
    followed: bool = False,
    updates_here: bool = False,
) -> None:
    ticket = Ticket(trainer, step, step, part, Purpose.PREFETCH, followed)
    each.contribute(ticket, contribution or f"t{trainer}s{step}", step, updates_here=updates_here)


def nothing() -> None:
    """What a lookup does here where only its time matters."""


def ignore(contributions: list[str]) -> None:
    """An update that nobody looks at."""


def answer(future: Future[Result]) -> Result:
    """What ``future`` holds or raises; a bare ``wait`` would hold up even pytest's timeout."""
    assert is_done(future, PATIENCE_SECONDS), "nobody answered"
    return future.wait()


def is_done(future: Future[Result], within_seconds: float = 0.02) -> bool:
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait(within_seconds)


class Gate:
    """An ``apply`` that stops at each update until let through, and remembers what it was given."""

    def __init__(self) -> None:
        self.applied: Applied = []
        self.entered = threading.Semaphore(0)
        self._open = threading.Semaphore(0)

    def __call__(self, contributions: list[str]) -> None:
        self.entered.release()
        assert self._open.acquire(timeout=PATIENCE_SECONDS)
        self.applied.append(contributions)

    def await_entry(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE_SECONDS)

    def let_through(self) -> None:
        self._open.release()
