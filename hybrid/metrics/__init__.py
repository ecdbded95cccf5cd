"""How good a model is, by task: of probabilities, numbers and classes, and of the order within groups.

Begin with ``predictions``: what trainers make of a test set, wherever its samples were. Metrics are of all of
it. ``binary`` and ``ranking`` compute them, ``tasks`` says which ones a task has.
"""

from hybrid.metrics.binary_metrics import (
    BinaryMetrics as BinaryMetrics,
    binary_metrics as binary_metrics,
    probabilities as probabilities,
)
from hybrid.metrics.gathered_predictions import Predictions as Predictions
from hybrid.metrics.task_metrics import (
    Metrics as Metrics,
    check_custom_metrics as check_custom_metrics,
    predicted as predicted,
    score as score,
)
