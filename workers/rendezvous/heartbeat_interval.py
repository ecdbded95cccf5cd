"""How often roles hear of each other, and how long one may be silent. Free of torch.

Silence is counted in turns, each of which waits anew: neither a clock that is set nor a time in which the own
process was stopped looks like the silence of another.
"""

import math
from dataclasses import dataclass

_FEWEST_TURNS = 5


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How often signs of life are sent, and how many may be missing.

    Args:
        timeout_seconds: silence after which the other side is taken for frozen.
    """

    timeout_seconds: float

    @property
    def turns(self) -> int:
        """How many turns of at most one second the timeout has."""
        return max(_FEWEST_TURNS, math.ceil(self.timeout_seconds))

    @property
    def turn_seconds(self) -> float:
        return self.timeout_seconds / self.turns

    @property
    def timeout(self) -> str:
        """How long that is, and who says so."""
        return f"{self.timeout_seconds:g} s (cluster.heartbeat_timeout_seconds)"

    def frozen(self, who: str) -> str:
        """What is said of one on this host, or one whose host lives, that was silent for so long."""
        return f"{who} is frozen: no sign of life for {self.timeout}"

    def unreachable(self, who: str, verb: str = "is") -> str:
        """What is said where nobody can know whether it is frozen, gone, or cut off."""
        return f"{who} {verb} unreachable: no sign of life for {self.timeout}"
