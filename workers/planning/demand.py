"""What a step asks of each role: how often each thing is done that costs processor time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from hybrid.config import ClusterSection, RunConfig
from hybrid.embedding.placement import Placement
from hybrid.embedding.table_spec import TableSpec, tables_of
from hybrid.embedding.traffic import Traffic, traffic
from hybrid.engine.table_setup import place_tables, samples_of_lookup, wire_bytes_per_value
from hybrid.input_spec import InputSpec
from hybrid.transport.shared_memory.host_aggregation import may_combine, pays
from hybrid.transport.shared_memory.shared_block import MOST_MEMBERS
from workers.planning.dense_cost import DenseWork, dense_work

Terms: TypeAlias = Mapping[str, float]

BYTES_PER_GRADIENT = 4
# A message is one there and back, of one trainer's part or of several. A peer is another trainer that shares
# memory; gloo joins those that do not. What trainers hand each other, to ask together, is handed.
TRAINER_TERMS = (
    "step", "socket_message", "rpc_message", "byte", "sample", "id", "value", "flop", "parameter",
    "peer", "peer_parameter", "gloo_round", "gloo_byte", "handed_part", "handed_byte", "handed_peer",
)  # fmt: skip
WORKER_TERMS = ("step", "socket_message", "rpc_message", "part", "byte", "row", "value", "updated_value")


class Messages(NamedTuple):
    """How many messages a step takes, there and back: of a trainer, of a worker, and of all together.

    Attributes:
        together: how many trainers ask together; 1 where each asks alone.
    """

    of_trainer: float
    of_worker: float
    total: int
    together: int


@dataclass(frozen=True)
class Demand:
    """A step of a cluster.

    Attributes:
        config: of the run.
        tables, placement: what its workers hold.
        trainer: terms of a trainer's step.
        workers: terms of each worker's step.
        traffic: between a trainer and each worker.
        dense: the net of each trainer.
    """

    config: RunConfig
    tables: tuple[TableSpec, ...]
    placement: Placement
    trainer: Terms
    workers: tuple[Terms, ...]
    traffic: Traffic
    dense: DenseWork

    @property
    def cluster(self) -> ClusterSection:
        return self.config.cluster


def messages(config: RunConfig, hosts: int) -> Messages:
    """One message for each worker and trainer, or group of trainers of one host that ask together, each time.

    In ``sync``, gradients do not go with ids.
    """
    trainers, workers = config.cluster.trainers, config.cluster.workers
    times = config.train.micro_batches * (2 if config.train.update == "sync" else 1)
    together = min(MOST_MEMBERS, math.ceil(trainers / hosts))
    if not (may_combine(config) and pays(together, workers)):
        together = 1
    groups = math.ceil(trainers / together)
    return Messages(workers * groups / trainers * times, groups * times, groups * workers * times, together)


def why_not_modelled(config: RunConfig) -> str | None:
    """What of a configuration no costs have been measured of; None where there is nothing."""
    dense = config.dense
    if dense.parallel != "none":
        return f"dense.parallel is {dense.parallel}"
    if dense.remote_mlp:
        return "dense.remote_mlp is set"
    if dense.device not in ("auto", "cpu"):
        return f"dense.device is {dense.device}"
    return None


def demand(
    config: RunConfig, input_spec: InputSpec, ids_per_sample: Mapping[str, float], *, hosts: int
) -> Demand:
    """The demand of a configuration.

    Args:
        ids_per_sample: mean number of ids of each multi-hot feature.
        hosts: over which trainers are spread evenly.
    """
    cluster = config.cluster
    tables, placement = place_tables(config, input_spec, ids_per_sample)
    widths = [table.width for table in tables_of(input_spec, tables)]
    dense = DenseWork(0.0, 0) if why_not_modelled(config) else dense_work(config, input_spec, widths)
    samples = config.train.batch_size / cluster.trainers
    moved = traffic(
        tables,
        placement,
        ids_per_sample,
        samples_of_lookup(config),
        cluster.trainers,
        wire_bytes_per_value(config),
    )
    return Demand(
        config,
        tables,
        placement,
        _of_trainer(config, samples, moved, dense, hosts),
        _of_workers(config, moved, hosts),
        moved,
        dense,
    )


def _message(config: RunConfig) -> str:
    return "rpc_message" if config.train.update == "sync" else "socket_message"


def _of_trainer(config: RunConfig, samples: float, moved: Traffic, dense: DenseWork, hosts: int) -> Terms:
    trainers, parts = config.cluster.trainers, config.train.micro_batches
    sent = messages(config, hosts)
    num_bytes = parts * float(moved.up_bytes_W.sum() + moved.down_bytes_W.sum())
    others = sent.together - 1
    terms = dict.fromkeys(TRAINER_TERMS, 0.0) | {
        "step": 1.0,
        _message(config): sent.of_trainer,
        "byte": num_bytes,
        "sample": samples,
        "id": parts * moved.ids,
        "value": parts * moved.values,
        "flop": samples * dense.flops,
        "parameter": dense.parameters,
        "handed_part": parts * config.cluster.workers * others / sent.together,
        "handed_byte": num_bytes * others / sent.together,
        "handed_peer": 2 * parts * others,
    }
    peers = trainers - 1
    if hosts == 1 and trainers <= MOST_MEMBERS:
        return terms | {"peer": peers, "peer_parameter": peers * dense.parameters}
    return terms | {"gloo_round": 2 * peers, "gloo_byte": gradient_bytes(trainers, dense)}


def gradient_bytes(trainers: int, dense: DenseWork) -> float:
    """What a trainer sends in the ring by which gloo adds up gradients; it receives as much."""
    return 2 * (trainers - 1) / trainers * dense.parameters * BYTES_PER_GRADIENT


def _of_workers(config: RunConfig, moved: Traffic, hosts: int) -> tuple[Terms, ...]:
    trainers, parts = config.cluster.trainers, config.train.micro_batches
    bytes_W = trainers * (moved.up_bytes_W + moved.down_bytes_W)
    common = dict.fromkeys(WORKER_TERMS, 0.0) | {
        "step": 1.0,
        _message(config): messages(config, hosts).of_worker,
        "part": trainers * parts,
    }
    return tuple(
        common
        | {"byte": parts * num_bytes, "row": parts * read, "value": parts * values, "updated_value": updated}
        for num_bytes, read, values, updated in np.stack(
            (bytes_W, moved.rows_W, moved.values_W, moved.updated_W), axis=1
        ).tolist()
    )
