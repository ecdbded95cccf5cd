"""Hosts whose processes do jobs of a preparation, each where it sees the same files as this one.

Where they see the folder of the parts, what they do is done. Else they send it, and this host is given the
job once more, to fetch what is there then.

A host that does not see them, or on which a job fails, takes no part any more; its jobs are done again on
this one, which tells what is wrong if that lies in the files. One that does not answer, and may still write,
ends the preparation.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from hybrid.data.parse.input_files import InputFile
from hybrid.data.prepare.memory_limit import free_bytes
from hybrid.data.prepare.process_pool import Event, Told
from hybrid.errors import DataError, StorageError
from hybrid.storage.files import read_text, write_bytes
from hybrid.storage.remote_path import Place, RemotePath, place

_LOOK = -1  # the number of the job by which a host says whether it takes part
_TOKEN_BYTES = 16
_PROBE = "seen-by-all"

# A function of a module, which is given a job, and whom to tell how far it is.
Stage: TypeAlias = Callable[..., Any]


class Host(Protocol):
    """A host with processes that do jobs."""

    @property
    def name(self) -> str: ...

    def give(self, number: int, work: Stage, job: Any) -> None:
        """Have it do ``work`` on a job, and tell nobody but :meth:`hear`."""
        ...

    def hear(self) -> list[Event]:
        """What its jobs have said by now; where one has failed, with a text, all have ended.

        Raises:
            ClusterError: it does not answer.
        """
        ...

    def close(self) -> None:
        """End its processes."""
        ...


class Helpers(NamedTuple):
    """Other hosts that may help.

    Attributes:
        found: gives them, from when they are there; more and more.
        files: of the input, which they must see.
        sent: where in a store they send parts; None where they see the folder of the parts.
    """

    found: Callable[[], Sequence[Host]]
    files: Sequence[InputFile]
    sent: RemotePath | None = None


class LookJob(NamedTuple):
    """What a host must see that takes part.

    Attributes:
        files: of the input.
        probe: a file of the folder, or of the store, that the jobs write to.
        token: what that file holds.
        process_bytes: of memory, that a process takes.
    """

    files: tuple[InputFile, ...]
    probe: Place
    token: str
    process_bytes: int


def look(job: LookJob, told: Told) -> int:
    """How many processes this host can have; DataError if none, or where it does not see what it must."""
    for file in job.files:
        found = InputFile.of(place(file.path), is_whole=False)
        seen, expected = ((each.size, each.modified_ns, each.sampled) for each in (found, file))
        if seen != expected:
            raise DataError(f"{file.path} on host {socket.gethostname()} is another file")
    try:
        is_same = read_text(job.probe) == job.token
    except StorageError:
        raise
    except OSError:
        is_same = False
    if not is_same:
        rule = "data.cache_folder must be storage that all hosts share"
        raise DataError(f"{job.probe.parent} on host {socket.gethostname()} is another folder; {rule}")
    if not (room := free_bytes() // job.process_bytes):
        raise DataError(f"half of its free memory is less than the {job.process_bytes:,} bytes of a process")
    return min(len(os.sched_getaffinity(0)), room)


class OtherHosts:
    """Those that take part, from when they are there; to be closed.

    Args:
        helpers: the hosts that may, and what they must see.
        folder: that the jobs write to.
        tell: told who takes part, and who does not.
        stages: what they do in place of a stage; where that is another, this host is to do the job, too.
        process_bytes: of memory, that a process takes.
    """

    def __init__(
        self,
        helpers: Helpers,
        folder: Place,
        tell: Callable[[str], None],
        stages: Mapping[Stage, Stage],
        process_bytes: int,
    ) -> None:
        self._found = helpers.found
        self._stages = stages
        self._is_whole = True  # what they do now
        probe, token = folder.absolute() / _PROBE, secrets.token_hex(_TOKEN_BYTES)
        self._look = LookJob(tuple(helpers.files), probe, token, process_bytes)
        self._tell = tell
        self._num_asked = 0
        self._sizes: dict[Host, int] = {}  # how many processes each has; 0 before it has said so
        self._given: dict[Host, set[int]] = {}

    @property
    def are_there(self) -> bool:
        """Whether there is any to hear."""
        return bool(self._sizes)

    @property
    def num_processes(self) -> int:
        """How many they have, together."""
        return sum(self._sizes.values())

    @property
    def text(self) -> str:
        """Who takes part, if anybody does."""
        if not self.num_processes:
            return ""
        num_hosts = sum(size > 0 for size in self._sizes.values())
        return f"{self.num_processes} more process(es) on {num_hosts} more host(s)"

    def does(self, work: Stage) -> bool:
        """Whether they do a stage, or another in its place."""
        return work in self._stages

    def give(self, work: Stage, jobs: Sequence[Any], waiting: deque[int]) -> None:
        """Have hosts that have room do the first of the jobs that are waiting; asks those that are new."""
        self._ask()
        theirs = self._stages[work]
        self._is_whole = theirs is work
        for host, size in self._sizes.items():
            while waiting and len(self._given[host]) < size:
                number = waiting.popleft()
                self._given[host].add(number)
                host.give(number, theirs, jobs[number])

    def _ask(self) -> None:
        found = self._found()
        if found and not self._num_asked:
            write_bytes(self._look.probe, self._look.token.encode())
        for host in found[self._num_asked :]:
            self._sizes[host], self._given[host] = 0, set()
            host.give(_LOOK, look, self._look)
        self._num_asked = len(found)

    def hear(self) -> tuple[list[Event], list[int]]:
        """What jobs have said, and the numbers of those that this host is to do."""
        events: list[Event] = []
        left: list[int] = []
        for host in [*self._sizes]:
            for event in host.hear():
                if event.kind == "failed":
                    left += self._leave(host, event.content)
                    break
                if event.number == _LOOK:
                    self._sizes[host] = event.content
                    self._tell(f"host {host.name} helps to prepare: {self.text}")
                    continue
                if event.kind == "done":
                    self._given[host].remove(event.number)
                    if not self._is_whole:
                        left.append(event.number)
                        continue
                events.append(event)
        return events, left

    def _leave(self, host: Host, reason: str) -> list[int]:
        host.close()
        del self._sizes[host]
        self._tell(f"host {host.name} does not help to prepare: {reason}")
        return sorted(self._given.pop(host))

    def close(self) -> None:
        """End what they do."""
        for host in self._sizes:
            host.close()
        self._sizes.clear()
        self._given.clear()
