"""A host that helps to prepare, in this process."""

from typing import Any

from hybrid.data.prepare.other_hosts import LookJob, Stage
from hybrid.data.prepare.process_pool import Event
from hybrid.errors import ClusterError, HybridError


class Elsewhere:
    """It does a job when it is heard; see :class:`hybrid.data.prepare.other_hosts.Host`.

    Attributes:
        looks: what it was asked to see.
        done: the numbers of its jobs, in their order.
        answers: whether it does, once it has done one.
    """

    name = "elsewhere"

    def __init__(self) -> None:
        self.given: list[tuple[int, Stage, Any]] = []
        self.looks: list[LookJob] = []
        self.done: list[int] = []
        self.answers = True
        self.is_closed = False

    def give(self, number: int, work: Stage, job: Any) -> None:
        self.given.append((number, work, job))
        if isinstance(job, LookJob):
            self.looks.append(job)

    def hear(self) -> list[Event]:
        if self.done and not self.answers:
            raise ClusterError("does not answer")
        if not self.given:
            return []
        number, work, job = self.given.pop(0)
        events: list[Event] = []
        try:
            result = work(job, lambda rows, share: events.append(Event("told", number, (rows, share))))
        except HybridError as error:
            self.given.clear()
            return [Event("failed", number, str(error))]
        self.done.append(number)
        return [*events, Event("done", number, result)]

    def close(self) -> None:
        self.is_closed = True
