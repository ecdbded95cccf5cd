"""Optimizers of FBGEMM's tables, which step within the backward pass."""

from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType

from benchmark.workloads import Workload
from hybrid.config.table_sections import TABLE_OPTIMIZERS

_KINDS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def fused_optimizer(workload: Workload) -> dict[str, Any]:
    """Return the arguments of FBGEMM for the tables of a workload."""
    embedding = workload.config().embedding
    return {
        "optimizer": _KINDS[workload.optimizer],
        "learning_rate": embedding.learning_rate,
        "eps": TABLE_OPTIMIZERS.parse("embedding.optimizer", embedding.optimizer).arguments.get("eps", 0.0),
    }
