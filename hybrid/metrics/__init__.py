"""Metrics of each task on a test set: binary labels, numbers, classes, and rankings within groups."""

from hybrid.metrics.task_metrics import (
    BinaryMetrics as BinaryMetrics,
    Metrics as Metrics,
    Predictions as Predictions,
    binary_metrics as binary_metrics,
    check_custom_metrics as check_custom_metrics,
    compute_predictions as compute_predictions,
    probabilities as probabilities,
    score as score,
)
