"""What a trace of a profile must be, whatever was recorded."""

from collections import defaultdict
from typing import Any

# Times in a trace are microseconds with a fraction; that of a nanosecond may be rounded away.
ROUNDING = 0.001


def slices(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The spans of a trace by role, once all that any viewer relies on is seen to hold."""
    events = trace["traceEvents"]
    roles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert len(set(roles.values())) == len(roles)
    by_role: dict[str, list[dict[str, Any]]] = {role: [] for role in roles.values()}
    by_track = defaultdict(list)
    for event in (event for event in events if event["ph"] != "M"):
        assert (event["pid"], event["tid"]) in tracks
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            by_role[roles[event["pid"]]].append(event)
            by_track[event["pid"], event["tid"]].append(event)
    for track in by_track.values():
        _check_nesting(track)
    return by_role


def arrows(trace: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Both ends of every arrow of a trace; each has exactly two."""
    ends: dict[str, dict[int, dict[str, Any]]] = {"s": {}, "f": {}}
    for event in trace["traceEvents"]:
        if event["ph"] in ends:
            assert event["id"] not in ends[event["ph"]]
            ends[event["ph"]][event["id"]] = event
    assert ends["s"].keys() == ends["f"].keys()
    return [(start, ends["f"][number]) for number, start in ends["s"].items()]


def _check_nesting(track: list[dict[str, Any]]) -> None:
    """Two spans of a track lie apart, or one within the other."""
    around: list[float] = []
    for event in sorted(track, key=lambda e: (e["ts"], -e["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while around and around[-1] <= start + ROUNDING:
            around.pop()
        assert not around or end <= around[-1] + ROUNDING, event
        around.append(end)
