"""The profile of a step, from the spans that all roles have recorded: a trace and a table.

========== ===================================================================================
trace.json all spans in Chrome's trace event format, for ui.perfetto.dev or chrome://tracing
table.md   by role and span: calls per step, duration, processor time
========== ===================================================================================
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

from hybrid.primitives.step_timings import STEP, STEPS_THREAD, Flow, Span
from hybrid.storage.private_files import make_folder, open_file
from hybrid.topology import Role, RoleKind

WIRE = "wire"

# Names of a span and its enclosing spans, outermost first.
SpanPath: TypeAlias = tuple[str, ...]
Event: TypeAlias = dict[str, Any]


class PlacedSpan(NamedTuple):
    """A span and its position in a trace.

    Attributes:
        track: spans of a track are nested or follow one another.
        path: names of the enclosing spans and of this one.
    """

    span: Span
    track: str
    path: SpanPath


class TracedCall(NamedTuple):
    """A trainer's call and the spans of workers that serve it, by time."""

    span: Span
    serving: list[Span]

    def wire(self) -> tuple[Span, Span]:
        """Return the spans on the wire: before a worker's first span, and after its last."""
        span = self.span
        arrived_ns = self._within(self.serving[0].start_ns)
        left_ns = self._within(max(each.end_ns for each in self.serving))
        there = Span(WIRE, span.step, span.start_ns, arrived_ns)
        return there, Span(WIRE, span.step, left_ns, span.end_ns)

    def _within(self, time_ns: int) -> int:
        # Clocks of machines may differ.
        return min(max(time_ns, self.span.start_ns), self.span.end_ns)


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """The spans of one path in one role: mean per recorded step.

    Attributes:
        count: number of spans.
        seconds: total duration; spans of several threads may take longer than the step.
        own_seconds: duration without that of nested spans.
        cpu_seconds: processor time of their threads; None if unknown.
        num_bytes: transferred bytes.
        fraction: ``seconds`` as a fraction of the trainers' step.
    """

    path: SpanPath
    count: float
    seconds: float
    own_seconds: float
    cpu_seconds: float | None
    num_bytes: float
    fraction: float


class Profile:
    """The spans of all roles in some steps that a trainer has completed.

    Args:
        spans: by role, from :meth:`StepClock.take_spans`.

    Attributes:
        steps: the recorded steps.
        step_seconds: mean duration of a trainer's step.
        calls: calls that a trainer and a worker have recorded, by flow.
        placed: all spans by role, with wire spans of calls.
    """

    def __init__(self, spans: Mapping[Role, Sequence[Span]]) -> None:
        whole = [span for of_role in spans.values() for span in of_role if span.name == STEP]
        self.steps = sorted({span.step for span in whole})
        self.step_seconds = fmean(map(_seconds, whole)) if whole else 0.0
        self._starts = {s: min(span.start_ns for span in whole if span.step == s) for s in self.steps}
        kept = {role: [span for span in of if span.step in self._starts] for role, of in spans.items()}
        serving: dict[Flow, list[Span]] = defaultdict(list)
        for role, of_role in kept.items():
            for span in sorted(of_role, key=lambda s: s.start_ns):
                if role.kind is RoleKind.WORKER and span.flow is not None:
                    serving[span.flow].append(span)
        of_trainers = (s for role, of in kept.items() if role.kind is RoleKind.TRAINER for s in of)
        self.calls: dict[Flow | None, TracedCall] = {
            s.flow: TracedCall(s, serving[s.flow]) for s in of_trainers if s.flow in serving
        }
        wire = {
            role: [
                each
                for span in of
                if (call := self.calls.get(span.flow)) is not None and call.span == span
                for each in call.wire()
            ]
            for role, of in kept.items()
        }
        self.placed = {role: [*_place([*of, *wire[role]])] for role, of in kept.items()}

    def rows(self, role: Role) -> list[ProfileRow]:
        """Return the rows of one role in the order of a step; nested spans follow their enclosing span."""
        by_path: dict[SpanPath, list[Span]] = defaultdict(list)
        for placed in self.placed[role]:
            by_path[placed.path].append(placed.span)
        starts = {p: fmean(s.start_ns - self._starts[s.step] for s in spans) for p, spans in by_path.items()}
        inner: dict[SpanPath, float] = defaultdict(float)
        for path, spans in by_path.items():
            inner[path[:-1]] += sum(map(_seconds, spans))
        ordered = sorted(by_path, key=lambda p: [(starts[p[: i + 1]], p[i]) for i in range(len(p))])
        num_steps, rows = len(self.steps), []
        for path in ordered:
            spans = by_path[path]
            seconds = sum(map(_seconds, spans)) / num_steps
            cpu = [span.cpu_ns for span in spans if span.cpu_ns is not None]
            rows.append(
                ProfileRow(
                    path=path,
                    count=len(spans) / num_steps,
                    seconds=seconds,
                    own_seconds=seconds - inner[path] / num_steps,
                    cpu_seconds=1e-9 * sum(cpu) / num_steps if cpu else None,
                    num_bytes=sum(span.num_bytes for span in spans) / num_steps,
                    fraction=seconds / self.step_seconds,
                )
            )
        return rows

    def top(self, count: int) -> list[tuple[str, float]]:
        """Return the ``count`` spans with the largest fractions of a trainer's step, without nested spans.

        ``other`` is the time outside of all spans within the step.
        """
        own: dict[str, float] = defaultdict(float)
        trainers = [role for role in self.placed if role.kind is RoleKind.TRAINER]
        for row in (row for role in trainers for row in self.rows(role)):
            if row.path[0] == STEP:
                own[row.path[-1] if row.path != (STEP,) else "other"] += (
                    row.own_seconds / len(trainers) / self.step_seconds
                )
        return sorted(own.items(), key=lambda item: -item[1])[:count]

    def trace(self) -> dict[str, Any]:
        """Return the trace as JSON values: a process per role, with tracks for its threads and calls."""
        origin_ns = min(placed.span.start_ns for of_role in self.placed.values() for placed in of_role)
        events = [e for pid, role in enumerate(self.placed, 1) for e in self._events(role, pid, origin_ns)]
        return {"displayTimeUnit": "ms", "traceEvents": events}

    def table(self) -> str:
        """Return the table as Markdown."""
        lines = [
            "# Profile of a step",
            "",
            f"Mean of steps {self.steps[0]} to {self.steps[-1]}; a trainer's step takes "
            f"{1e3 * self.step_seconds:.2f} ms.",
            "Nested spans are indented. Threads run in parallel: fractions may add up to more than 100 %.",
        ]
        for role in self.placed:
            lines += ["", f"## {role}", "", *_markdown(self.rows(role))]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Write trace.json and table.md into ``folder``."""
        make_folder(folder)
        for name, text in (("trace.json", json.dumps(self.trace())), ("table.md", self.table())):
            with open(folder / name, "w", encoding="utf-8", opener=open_file) as file:
                file.write(text)

    def _events(self, role: Role, pid: int, origin_ns: int) -> Iterator[Event]:
        # The thread of the steps comes first.
        placed = sorted(self.placed[role], key=lambda p: (p.track != STEPS_THREAD, p.span.start_ns))
        tids = {track: tid for tid, track in enumerate(dict.fromkeys(p.track for p in placed), 1)}
        yield from _named("process", str(role), pid, {"pid": pid, "tid": 0})
        for track, tid in tids.items():
            yield from _named("thread", track, tid, {"pid": pid, "tid": tid})
        for span, track, _ in placed:
            where: Event = {"pid": pid, "tid": tids[track], "ts": (span.start_ns - origin_ns) / 1e3}
            args: dict[str, float] = {"step": span.step}
            if span.cpu_ns is not None:
                args["cpu_ms"] = span.cpu_ns / 1e6
            if span.num_bytes:
                args["bytes"] = span.num_bytes
            duration = (span.end_ns - span.start_ns) / 1e3
            yield where | {"ph": "X", "name": span.name, "cat": role.kind, "dur": duration, "args": args}
            # One end of the arrow from a call to the worker's first span.
            call = self.calls.get(span.flow)
            if call is not None and span in (call.span, call.serving[0]):
                number = list(self.calls).index(span.flow)
                end = {"ph": "s"} if span == call.span else {"ph": "f", "bp": "e"}
                yield where | {"name": call.span.name, "cat": "call", "id": number, **end}


def _seconds(span: Span) -> float:
    return 1e-9 * (span.end_ns - span.start_ns)


def _place(spans: Iterable[Span]) -> Iterator[PlacedSpan]:
    """Assign tracks to the spans of a role: one per thread, and one per concurrent call."""
    open_of: dict[str, list[tuple[Span, SpanPath]]] = defaultdict(list)
    ends_of: dict[str, list[int]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        if span.thread is None:
            ends = ends_of[span.name]
            lane = next((i for i, end_ns in enumerate(ends) if end_ns <= span.start_ns), len(ends))
            ends[lane : lane + 1] = [span.end_ns]
            yield PlacedSpan(span, f"{span.name} {lane + 1}" if lane else span.name, (span.name,))
        else:
            around = open_of[span.thread]
            while around and around[-1][0].end_ns <= span.start_ns:
                around.pop()
            path = (*(around[-1][1] if around else ()), span.name)
            around.append((span, path))
            yield PlacedSpan(span, span.thread, path)


def _named(kind: str, name: str, order: int, where: Event) -> Iterator[Event]:
    """Yield the name of a process or thread and its position in the viewer."""
    yield where | {"ph": "M", "name": f"{kind}_name", "args": {"name": name}}
    yield where | {"ph": "M", "name": f"{kind}_sort_index", "args": {"sort_index": order}}


def _markdown(rows: Sequence[ProfileRow]) -> Iterator[str]:
    names = ["· " * (len(row.path) - 1) + row.path[-1] for row in rows]
    width = max(map(len, names), default=4)
    yield f"| {'span':<{width}} | a step |       ms |   CPU ms | of a step |      KiB |"
    yield f"|{'-' * (width + 2)}|-------:|---------:|---------:|----------:|---------:|"
    for name, row in zip(names, rows, strict=True):
        cpu = "" if row.cpu_seconds is None else f"{1e3 * row.cpu_seconds:.2f}"
        kib = f"{row.num_bytes / 1024:.1f}" if row.num_bytes else ""
        yield (
            f"| {name:<{width}} | {row.count:6.3g} | {1e3 * row.seconds:8.2f} | {cpu:>8} "
            f"| {row.fraction:9.1%} | {kib:>8} |"
        )
