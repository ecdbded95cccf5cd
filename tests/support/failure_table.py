"""What happens when a role fails: the first table of docs/failures.md, from the rows that tests bring about.

``PYTHONPATH=tests python -m support.failure_table`` prints it.
"""

from itertools import product

from support.failure_plans import HOWS, PHASES, ROLES, Row

_TITLES = {"ValueError": "exception", "MemoryError": "out of memory"}


def describe() -> str:
    """The table: by role and moment a line, by the way to fail a column."""
    heads = " | ".join(_TITLES.get(how, how) for how in HOWS)
    lines = [f"| role | when | {heads} |", "|---" * (2 + len(HOWS)) + "|"]
    for role, phase in product(ROLES, PHASES):
        cells = " | ".join(_consequence(Row(role, how, phase)) for how in HOWS)
        lines.append(f"| {role} | {phase} | {cells} |")
    return "\n".join(lines) + "\n"


def _consequence(row: Row) -> str:
    if row.ends_launch:
        return "ends"
    return {"start": "starts again", "shutdown": "finished"}.get(row.phase, "goes on")


if __name__ == "__main__":
    print(describe(), end="")
