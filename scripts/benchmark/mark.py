"""Marks in the output of a measured system: the begin and end of its timed steps."""

import json
from collections.abc import Sequence

PREFIX = "bench: "


def begin() -> None:
    """Report the end of the warm-up."""
    _say({"event": "begin"})


def end(seconds: float, losses: Sequence[float]) -> None:
    """Report the end of the timed steps.

    Args:
        seconds: duration of the timed steps.
        losses: of all steps with the warm-up, over all trainers.
    """
    _say({"event": "end", "seconds": seconds, "losses": list(losses)})


def _say(event: dict[str, object]) -> None:
    print(PREFIX + json.dumps(event), flush=True)
