"""What the master tells every trainer, and what a trainer tells of its steps."""

from dataclasses import dataclass

from torch import Tensor

from hybrid.embedding.placement import Placement
from hybrid.engine.model_builder import Blueprint
from hybrid.protocol.update_rules import UpdateRules
from hybrid.transport import RemoteNet, RemoteTables


@dataclass(frozen=True, slots=True)
class Job:
    """What the master tells every trainer.

    Attributes:
        blueprint: of the nets, and of the tables.
        placement: where the tables' rows are.
        rules: how gradients become updates.
        remote_tables: a stub for every worker that holds rows.
        remote_net: the remote dense net, or None.
        data_source: where the prepared data are (:func:`open_split`); None where batches
            are given.
    """

    blueprint: Blueprint
    placement: Placement
    rules: UpdateRules
    remote_tables: dict[int, RemoteTables]
    remote_net: RemoteNet | None
    data_source: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """What a trainer has seen since the last report.

    Attributes:
        losses: this trainer's part of the loss, one value a step.
        outputs, labels: of all samples of these steps, for the first task; a label is NaN where the sample
            does not count for it.
        phase_seconds: where the time went.
        skipped_steps: how many of the steps made no update, on any side.
        weighted: the sparse features of which an id of the caller's own batches had another weight than 1.
    """

    losses: list[float]
    outputs: Tensor
    labels: Tensor
    phase_seconds: dict[str, float]
    skipped_steps: int
    weighted: tuple[str, ...] = ()
