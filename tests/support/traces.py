"""Checks of the trace of a profile."""

from collections import defaultdict
from typing import Any

# Times in a trace are microseconds as floats, which may round nanoseconds.
ROUNDING = 0.001


def slices(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Check the fields that a viewer needs; return the spans of a trace by role."""
    events = trace["traceEvents"]
    roles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert len(set(roles.values())) == len(roles)
    by_role: dict[str, list[dict[str, Any]]] = {role: [] for role in roles.values()}
    by_track = defaultdict(list)
    begun: dict[int, dict[str, Any]] = {}
    for event in (event for event in events if event["ph"] != "M"):
        assert event["ts"] >= 0
        if event["ph"] == "e":
            first = begun.pop(event["id"])
            event = first | {"dur": event["ts"] - first["ts"]}
        elif event["ph"] == "b":
            assert event["id"] not in begun
            begun[event["id"]] = event
            continue
        else:
            assert (event["pid"], event["tid"]) in tracks
            by_track[event["pid"], event["tid"]].append(event)
        assert event["dur"] >= 0
        by_role[roles[event["pid"]]].append(event)
    assert not begun
    for track in by_track.values():
        _check_nesting(track)
    return by_role


def _check_nesting(track: list[dict[str, Any]]) -> None:
    """Check that two spans of a track are disjoint or nested."""
    around: list[float] = []
    for event in sorted(track, key=lambda e: (e["ts"], -e["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while around and around[-1] <= start + ROUNDING:
            around.pop()
        assert not around or end <= around[-1] + ROUNDING, event
        around.append(end)
