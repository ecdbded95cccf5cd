"""The hosts of trainers, as the master's preparation has them help.

::

    master                                          a trainer of another host, one of each
    ──────                                          ──────────────────────────────────────
    jobs, by the names of their stages  ──────────► gives them to processes of its own (Preparer)
    hears what they say (HelpingHost)   ◄────────── answers as soon as one of them says something
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from os import sched_getaffinity
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from hybrid import transport
from hybrid.data.prepare.other_hosts import look
from hybrid.data.prepare.process_pool import Event, Pool
from hybrid.data.prepare.stages import learn_piece, parse_part, send_part
from hybrid.data.prepare.vocabulary_order import rank_words
from hybrid.errors import DataError, first_line
from hybrid.topology import Role

# What a trainer's host can be asked to do.
STAGES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {stage.__name__: stage for stage in (look, parse_part, send_part, learn_piece, rank_words)}
)
_HEAR_SECONDS = 0.5
_CREATE_SECONDS = 60.0


def _classes(hints: Iterable[Any], found: set[type[Any]]) -> Iterator[type[Any]]:
    """The classes that hold the data of some types, besides those that are ``found`` already."""
    for hint in hints:
        yield from _classes(get_args(hint), found)
        if not isinstance(hint, type) or hint in found:
            continue
        if is_dataclass(hint) or hasattr(hint, "_fields") or issubclass(hint, Enum):
            found.add(hint)
            yield hint
            yield from _classes(get_type_hints(hint).values(), found)


# Whatever the stages take and give.
DATA: tuple[type[Any], ...] = (
    Event,
    *_classes([hint for stage in STAGES.values() for hint in get_type_hints(stage).values()], set()),
)


class Preparer:
    """Lives on a trainer; made and called by the master, it has processes of this host do jobs.

    Args:
        folder: that the master works in, which paths start at. Where there is none here, absolute ones count.
    """

    def __init__(self, folder: Path) -> None:
        self._pool = Pool(len(sched_getaffinity(0)), folder if folder.is_dir() else None)
        self._lock = Lock()  # calls come in any thread

    def exchange(self, jobs: list[tuple[int, str, Any]], seconds: float) -> list[Event]:
        """What jobs say, which is waited for so long; where one has failed, all are ended by then.

        Args:
            jobs: further ones, each with its number and stage.
        """
        with self._lock:
            try:
                for number, stage, job in jobs:
                    self._pool.give(number, STAGES[stage], job)
                events = self._pool.hear(seconds)
            except (DataError, OSError) as error:  # a process has died, or cannot be started
                events = [Event("failed", 0, error)]
            failed = [each for each in events if each.kind == "failed"]
            if failed:
                self._pool.close()
                return [each._replace(content=first_line(each.content)) for each in failed]
            return events

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._pool.close()


class HelpingHost:
    """A trainer's host; see :class:`hybrid.data.prepare.other_hosts.Host`.

    Args:
        name: of the host.
        role: the trainer.
    """

    def __init__(self, name: str, role: Role) -> None:
        self.name = name
        self._role = role
        self._created: transport.Pending[transport.Remote[Preparer]] | None = None
        self._asked: transport.Pending[list[Event]] | None = None
        self._jobs: list[tuple[int, str, Any]] = []
        self._open: set[int] = set()

    def give(self, number: int, work: Callable[..., Any], job: Any) -> None:
        if self._created is None:
            self._created = transport.create(
                self._role, Preparer, Path.cwd(), timeout_seconds=_CREATE_SECONDS
            )
        self._jobs.append((number, work.__name__, job))
        self._open.add(number)

    def hear(self) -> list[Event]:
        events: list[Event] = []
        if self._asked is not None and self._asked.done():
            events, self._asked = self._asked.wait(), None
            self._open -= {each.number for each in events if each.kind != "told"}
        if self._asked is None and self._open and self._created is not None and self._created.done():
            preparer, jobs, self._jobs = self._created.wait(), self._jobs, []
            self._asked = preparer.call(Preparer.exchange, jobs, _HEAR_SECONDS)
        return events

    def close(self) -> None:
        if self._created is not None:
            self._created.wait().call(Preparer.close).wait()
            self._created = None
