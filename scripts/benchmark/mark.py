"""How a system under measurement tells the bench where its timed steps begin and end."""

import json
from collections.abc import Sequence

PREFIX = "bench: "


def begin() -> None:
    """The warm-up is over; what follows is timed."""
    _say({"event": "begin"})


def end(seconds: float, losses: Sequence[float]) -> None:
    """The timed steps are done.

    Args:
        seconds: that they took.
        losses: of all steps, the warm-up's first, over all trainers.
    """
    _say({"event": "end", "seconds": seconds, "losses": list(losses)})


def _say(event: dict[str, object]) -> None:
    print(PREFIX + json.dumps(event), flush=True)
