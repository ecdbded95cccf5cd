"""Every way in which each role may fail at each moment of a run, and what ``launch`` says then."""

from dataclasses import dataclass
from itertools import product

from support.faults import RAISED, STARVED, WORDS

PHASES = ("start", "step", "evaluation", "checkpoint", "shutdown")
ROLES = ("master", "trainer", "worker")
HOWS = ("SIGKILL", "SIGSTOP", "ValueError", "MemoryError")
STEPS = 16  # of a run
CHECKPOINT_STEPS = 4
HEARTBEAT_SECONDS = 2

# With one trainer and one worker only, nobody would wait for another of his kind.
_INDICES = {"start": 0, "step": 1, "evaluation": 0, "checkpoint": 1, "shutdown": 1}
_SIGNALS = {"SIGKILL": "SIGKILL", STARVED: "SIGKILL, probably since memory ran out"}
_DOING = {
    "start": r"at (start|step 0)",
    "step": r"at step 2",
    "evaluation": rf"while evaluating after step {STEPS}",
    "checkpoint": r"(at step \d+|while writing the checkpoint)",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One failure under ``launch``.

    Attributes:
        role: who fails.
        how: a signal, an exception, or that the kernel ends it for want of memory.
        phase: of the run.
    """

    role: str
    how: str
    phase: str

    @property
    def fault(self) -> tuple[str, str, str]:
        """What support/faulty_net.py is told."""
        return self.role, self.how, self.phase

    @property
    def ends_launch(self) -> bool:
        """Whether ``launch`` fails with it: an exception before the first step would come again."""
        return self.how in RAISED and self.phase == "start"

    @property
    def line(self) -> str:
        """What ``launch`` says, as a regular expression."""
        if self.ends_launch:
            return f"hybrid launch: {self._failure}"
        return f"hybrid launch: {self._failure}; {self._lost}"

    @property
    def _failure(self) -> str:
        if self.how in _SIGNALS:
            return rf"{self.role} \(pid \d+\) was killed by {_SIGNALS[self.how]}; see \S+\.log"
        if self.how == "SIGSTOP":
            return self._frozen
        if self.role == "trainer 0":  # a call to it raises
            where = r"\S*faulty_net.py:\d+, in reach"
            layer = "; in bottom of the net, Bottom" if self.phase in ("step", "evaluation") else ""
            said = rf"trainer 0 on \S+: {where}: {self.how}: {WORDS}{layer} \({_DOING[self.phase]}\)"
        else:
            said = rf"{self.role}: \S*faulty_roles.py:\d+, in _raise: {self.how}: {WORDS}"
        return rf"{said}; see \S+/{self.role.replace(' ', '-')}\.log"

    @property
    def _frozen(self) -> str:
        timeout = rf"{HEARTBEAT_SECONDS} s \(cluster\.heartbeat_timeout_seconds\)"
        who = "the master" if self.role == "master" else rf"{self.role} \(host \S+, pid \d+\)"
        said = f"{who} is frozen: no heartbeat for {timeout}"
        if self.role == "master" or self.phase == "shutdown":
            return said
        return f"{said} {_DOING[self.phase]}; its log may have the cause"

    @property
    def _lost(self) -> str:
        if self.phase == "shutdown":
            return "the run had finished, nothing is lost"
        if self.phase == "start":
            return "nothing is lost, starting from the beginning"
        if self.phase == "step":
            return "steps 0 to 1 are lost, starting from the beginning"
        return r"steps (?P<step>\d+) to \d+ are lost, resuming from step (?P=step)"


@dataclass(frozen=True, slots=True)
class Plan:
    """One run, which lives through its rows one after the other.

    Attributes:
        kind: of the role that fails.
        how: it fails, every time.
    """

    kind: str
    how: str

    def __str__(self) -> str:
        return f"{self.kind} {self.how}"

    @property
    def update(self) -> str:
        """How the run trains: one way or the other, in turn."""
        if self.how == STARVED:
            return "pipelined"
        return ("sync", "pipelined")[(ROLES.index(self.kind) + HOWS.index(self.how)) % 2]

    @property
    def phases(self) -> tuple[str, ...]:
        return ("step",) if self.how == STARVED else PHASES

    @property
    def rows(self) -> list[Row]:
        return [Row(self._role(phase), self.how, phase) for phase in self.phases]

    @property
    def launches(self) -> list[list[Row]]:
        """The rows of each ``launch`` that the run takes."""
        rows = self.rows
        return [rows[:1], rows[1:]] if rows[0].ends_launch else [rows]

    def _role(self, phase: str) -> str:
        if self.kind == "master":
            return "master"
        # Trainer 0 raises within a call, as a user's net does, but for the shutdown.
        raises = self.kind == "trainer" and self.how in RAISED and phase != "shutdown"
        return f"{self.kind} {0 if raises else _INDICES[phase]}"


PLANS = [Plan(kind, how) for kind, how in product(ROLES, HOWS)]
STARVED_PLANS = [Plan(kind, STARVED) for kind in ROLES]
# One for each way to fail, and each kind of role among them; the others take minutes.
SHORT_PLANS = [
    Plan("trainer", "SIGKILL"),
    Plan("worker", "SIGSTOP"),
    Plan("worker", "ValueError"),
    Plan("master", "MemoryError"),
]
