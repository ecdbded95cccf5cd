"""The profile of recorded steps: a trace and a table of the spans (timed operations) of all roles.

========== ===================================================================================
trace.json all spans in Chrome's trace event format, for ui.perfetto.dev or chrome://tracing
table.md   by role and span: calls, duration, processor time and bytes per step
========== ===================================================================================
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from hybrid.primitives.step_timings import STEP, STEPS_THREAD, Span
from hybrid.storage.files import write_bytes
from hybrid.storage.private_files import make_folder
from hybrid.topology import Role

# Names of a span and its enclosing spans, outermost first.
SpanPath: TypeAlias = tuple[str, ...]


class Profile:
    """The spans of all roles in the recorded steps that at least one trainer has completed.

    Args:
        spans: the spans of each role, from :meth:`StepClock.take_spans`.

    Attributes:
        step_seconds: mean duration of a trainer's step; 0 without steps.
        steps: the recorded steps, ascending.
        spans: the spans of these steps by role, sorted by start. A span precedes the spans that it encloses.
    """

    def __init__(self, spans: Mapping[Role, Sequence[Span]]) -> None:
        whole_steps = [span for of_role in spans.values() for span in of_role if span.name == STEP]
        self.steps = sorted({span.step for span in whole_steps})
        self.step_seconds = fmean(map(_seconds, whole_steps)) if whole_steps else 0.0
        self.spans = {
            role: sorted((s for s in of_role if s.step in self.steps), key=lambda s: (s.start_ns, -s.end_ns))
            for role, of_role in spans.items()
        }

    def trace(self) -> dict[str, Any]:
        """Return the trace as JSON values: a process per role, with its threads and calls."""
        origin_ns = min(span.start_ns for of_role in self.spans.values() for span in of_role)
        events = []
        for pid, (role, spans) in enumerate(self.spans.items()):
            threads = dict.fromkeys(span.thread for span in spans if span.thread)
            tids = {thread: i for i, thread in enumerate(sorted(threads, key=lambda t: t != STEPS_THREAD))}
            for name, values in (("name", {"name": str(role)}), ("sort_index", {"sort_index": pid})):
                events.append({"ph": "M", "name": f"process_{name}", "pid": pid, "tid": 0, "args": values})
            for thread, tid in tids.items():
                args = {"name": thread}
                events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": args})
            for span in spans:
                event = {"name": span.name, "cat": role.kind, "pid": pid, "args": _details(span)}
                start, end = ((ns - origin_ns) / 1e3 for ns in (span.start_ns, span.end_ns))
                if span.thread:
                    tid = tids[span.thread]
                    events.append(event | {"ph": "X", "tid": tid, "ts": start, "dur": end - start})
                else:  # calls of several threads, which viewers show in separate rows
                    event["id"] = len(events)
                    events += [event | {"ph": "b", "ts": start}, event | {"ph": "e", "ts": end}]
        return {"displayTimeUnit": "ms", "traceEvents": events}

    def table(self) -> str:
        lines = [
            "# Profile of a step",
            "",
            f"Mean of steps {self.steps[0]} to {self.steps[-1]}; a trainer's step takes "
            f"{1e3 * self.step_seconds:.2f} ms.",
            "Nested spans are indented. Threads run in parallel, so percentages may exceed 100 % in total.",
        ]
        for role, spans in self.spans.items():
            lines += ["", f"## {role}", "", *self._rows(spans)]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        make_folder(folder)
        for name, text in (("trace.json", json.dumps(self.trace())), ("table.md", self.table())):
            write_bytes(folder / name, text.encode())

    def _rows(self, spans: Sequence[Span]) -> Iterator[str]:
        """Yield the lines of a role's table in order of first occurrence; children follow their parent."""
        by_path: dict[SpanPath, list[Span]] = defaultdict(list)
        for path, span in _paths(spans):
            by_path[path].append(span)
        order = {path: number for number, path in enumerate(by_path)}
        ordered = sorted(by_path, key=lambda path: [order[path[: i + 1]] for i in range(len(path))])
        names = {path: "· " * (len(path) - 1) + path[-1] for path in ordered}
        width = max(map(len, names.values()), default=4)
        yield f"| {'span':<{width}} |  calls |       ms |   CPU ms | % of step |      KiB |"
        yield f"|{'-' * (width + 2)}|-------:|---------:|---------:|----------:|---------:|"
        for path, name in names.items():
            calls, num_steps = by_path[path], len(self.steps)
            seconds = sum(map(_seconds, calls)) / num_steps
            cpu_ns = [span.cpu_ns for span in calls if span.cpu_ns is not None]
            cpu = f"{1e-6 * sum(cpu_ns) / num_steps:.2f}" if cpu_ns else ""
            num_bytes = sum(span.num_bytes for span in calls) / num_steps
            kib = f"{num_bytes / 1024:.1f}" if num_bytes else ""
            yield (
                f"| {name:<{width}} | {len(calls) / num_steps:6.3g} | {1e3 * seconds:8.2f} | {cpu:>8} "
                f"| {seconds / self.step_seconds:9.1%} | {kib:>8} |"
            )


def _seconds(span: Span) -> float:
    return 1e-9 * (span.end_ns - span.start_ns)


def _details(span: Span) -> dict[str, float]:
    details: dict[str, float] = {"step": span.step}
    if span.cpu_ns is not None:
        details["cpu_ms"] = span.cpu_ns / 1e6
    if span.num_bytes:
        details["bytes"] = span.num_bytes
    return details


def _paths(spans: Sequence[Span]) -> Iterator[tuple[SpanPath, Span]]:
    """Yield each span of a role with its path: the names of the spans that enclose it, and its own name."""
    enclosing: dict[str, list[tuple[SpanPath, int]]] = defaultdict(list)
    for span in spans:
        path: SpanPath = (span.name,)
        if span.thread:
            stack = enclosing[span.thread]
            while stack and stack[-1][1] <= span.start_ns:
                stack.pop()
            path = (*(stack[-1][0] if stack else ()), span.name)
            stack.append((path, span.end_ns))
        yield path, span
