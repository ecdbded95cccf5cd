"""When a run ends early: after so many evaluations without a better one."""

import math
from dataclasses import dataclass

from hybrid.checkpoint.checkpoint_manifest import Best


@dataclass(frozen=True)
class Patience:
    """Counts evaluations by the steps at which they are due, so that a run that goes on counts the same.

    Attributes:
        evaluations: without a better one, after which the run ends; 0 for never.
        every: steps between two evaluations.
    """

    evaluations: int
    every: int

    def is_lost(self, best: Best | None, step: int) -> bool:
        """Whether the run ends after ``step``.

        Args:
            best: the best evaluation so far.
        """
        best_step = 0 if best is None or math.isnan(best.value) else best.step
        return 0 < self.evaluations <= step // self.every - best_step // self.every
