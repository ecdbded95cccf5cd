"""The table of upstream names, the tests of ours that show their behaviour, and where those run.

``PYTHONPATH=tests python -m support.upstream`` prints it; docs/upstream.md keeps it.
"""

from pathlib import Path

from support.upstream_marks import Marked, read_marks
from support.upstream_names import ALL_NAMES, NOT_APPLICABLE, UPSTREAM, Group

TESTS = Path(__file__).parents[1]

_CPU = "passes on CPU"
_CPU_AND_GPU = "passes on CPU; more on a GPU"
_GPU_ONLY = "needs a GPU"
_NOT_HERE = "does not apply"
_MISSING = "no test"
_STATES = {
    _CPU: "with CPUs for devices, also where upstream takes GPUs",
    _CPU_AND_GPU: "the same; some of these tests, or cases of them, are marked `gpu`",
    _GPU_ONLY: "every case of these tests is marked `gpu`",
    _NOT_HERE: "for the reason given",
}


def describe(places: dict[str, list[Marked]]) -> str:
    """Every upstream name with our tests and its state, as Markdown tables by group."""
    lines = [
        "# What torch's own tests show, and which tests show it here",
        "",
        "Every test, class and function of the named files of the pytorch repository, with the tests of this",
        "project that bear its name in an `upstream` mark. This page is written by",
        "`PYTHONPATH=tests python -m support.upstream > docs/upstream.md`.",
        "",
        "| state | meaning |",
        "|---|---|",
        *(f"| {state} | {meaning} |" for state, meaning in _STATES.items()),
    ]
    for name, group in UPSTREAM.items():
        lines += ["", f"## {name}", "", _sources(group), "", "| there | our tests | state |", "|---|---|---|"]
        lines += [_row(name, of_group, places) for of_group in group.names]
    return "\n".join(lines) + "\n"


def _sources(group: Group) -> str:
    return f"Of {' and '.join(f'`{source}`' for source in group.sources)}."


def _row(group: str, name: str, places: dict[str, list[Marked]]) -> str:
    full_name = f"{group}/{name}"
    marked = places.get(full_name, [])
    links = "<br>".join(map(_link, marked))
    return f"| `{name}` | {links} | {_state(full_name, marked)} |"


def _state(full_name: str, marked: list[Marked]) -> str:
    if full_name in NOT_APPLICABLE:
        return f"{_NOT_HERE}: {NOT_APPLICABLE[full_name]}"
    if not marked:
        return _MISSING
    if not any(place.runs_on_cpu for place in marked):
        return _GPU_ONLY
    return _CPU_AND_GPU if any(place.runs_on_gpu for place in marked) else _CPU


def _link(place: Marked) -> str:
    shown = "::".join(filter(None, [place.file.name, place.name]))
    return f"[{shown}](../tests/{place.file.as_posix()})"


def mistakes(places: dict[str, list[Marked]]) -> list[str]:
    """What is wrong with marks and reasons taken together, a line each."""
    unknown = [(name, place) for name in places if name not in ALL_NAMES for place in places[name]]
    return [
        *(f"{name} is no upstream name: {place.file}::{place.name}" for name, place in unknown),
        *(f"{name} has tests, and a reason to have none" for name in NOT_APPLICABLE if name in places),
        *(f"{name} has no test" for name in ALL_NAMES if name not in places and name not in NOT_APPLICABLE),
    ]


if __name__ == "__main__":
    print(describe(read_marks(TESTS)), end="")
