"""A model of one training step: what it sends, the memory of each role, and how long it takes.

Each role has a number of operations per step, and each operation costs CPU-seconds, which were fitted to
measurements on one AMD EPYC core. In ``pipelined`` and ``async`` runs trainers, workers and the network work
at the same time, so the slowest of them limits a step; in ``sync`` they wait for each other. Roles are
assigned to hosts in turn, trainers first.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.flop_counter import FlopCounterMode

from hybrid.config import RunConfig
from hybrid.dense.matmul import use_torch
from hybrid.dense.net_builder import build_dense_net
from hybrid.embedding.placement import Placement
from hybrid.embedding.table_spec import TableSpec, tables_of
from hybrid.embedding.traffic import Traffic, traffic
from hybrid.engine.table_setup import place_tables, samples_of_lookup, wire_bytes_per_value
from hybrid.errors import ConfigError
from hybrid.input_spec import InputSpec
from hybrid.transport.shared_memory.host_aggregation import can_aggregate, saves_work
from hybrid.transport.shared_memory.shared_block import MOST_MEMBERS

TRAINERS, WORKERS, NETWORK = "trainers' cores", "workers' cores", "network of a host"
_GRADIENT_BYTES = 4
# Seconds of one operation, by role. A peer is a trainer that shares memory; gloo connects the others.
_TRAINER_SECONDS = {
    "step": 2.471e-3, "socket message": 4.465e-4, "rpc message": 9.231e-4, "byte": 5.209e-10,
    "sample": 1.512e-6, "id": 1.089e-8, "value": 9.544e-9, "flop": 1.97e-11, "parameter": 8.749e-9,
    "peer": 8.758e-5, "peer parameter": 7.205e-10, "gloo round": 2.339e-4, "gloo byte": 2.211e-8,
}  # fmt: skip
_WORKER_SECONDS = {
    "step": 7.068e-4, "socket message": 5.455e-4, "rpc message": 9.689e-4, "trainer": 2.81e-4,
    "byte": 1.061e-9, "row": 6.512e-8, "updated value": 2.639e-9,
}  # fmt: skip
_BUSY = 0.908  # the fraction of a step in which its slowest role works
# Bytes of a process beside tables and nets, of a value of a vector, and of a byte of a message.
_TRAINER_BYTES, _BYTES_PER_VALUE = 52.67e6, 99.87
_WORKER_BYTES, _BYTES_PER_BYTE = 41.05e6, 10.28


@dataclass(frozen=True)
class Hosts:
    """Equal machines.

    Attributes:
        cores, memory_bytes: of one host.
        bytes_per_second: network of one host, in each direction.
    """

    count: int
    cores: int
    memory_bytes: float
    bytes_per_second: float


class Link(NamedTuple):
    """What one step sends from one kind of role to another."""

    messages: int
    num_bytes: float


@dataclass(frozen=True)
class Plan:
    """What to expect of a cluster.

    Attributes:
        traffic: of one lookup between a trainer and each worker.
        links: by name, such as "trainer -> worker".
        trainer_bytes, worker_bytes: memory of a trainer, and of the largest worker.
        host_bytes: memory of all roles of the fullest host.
        seconds: the time of a step if one limit applied alone, by limit.
        limit: the limit that applies.
        fractions: of the seconds of the limiting role, by operation; empty for the network.
        step_seconds: None if the speed of the dense net is unknown; see ``unknown``.
        unknown: the configuration key for which no costs were measured, with its value, or "".
    """

    tables: tuple[TableSpec, ...]
    placement: Placement
    traffic: Traffic
    links: Mapping[str, Link]
    trainer_bytes: float
    worker_bytes: float
    host_bytes: float
    seconds: Mapping[str, float]
    limit: str
    fractions: Mapping[str, float]
    step_seconds: float
    unknown: str


def make_plan(
    config: RunConfig, input_spec: InputSpec, ids_per_sample: Mapping[str, float], hosts: Hosts
) -> Plan:
    """Plan a run.

    Args:
        ids_per_sample: mean number of ids of each multi-hot feature.

    Raises:
        ConfigError: there are more hosts than trainers and workers.
    """
    trainers, workers, lookups = config.cluster.trainers, config.cluster.workers, config.train.micro_batches
    if hosts.count > trainers + workers:
        rule = f"must be at most the {trainers + workers} trainers and workers"
        raise ConfigError("--hosts", rule, hosts.count)
    tables, placement = place_tables(config, input_spec, ids_per_sample)
    samples, wire_bytes = samples_of_lookup(config), wire_bytes_per_value(config)
    moved = traffic(tables, placement, ids_per_sample, samples, trainers, wire_bytes)
    up_W, down_W = lookups * moved.up_bytes_W, lookups * moved.down_bytes_W
    unknown = "dense.remote_mlp is set" if config.dense.remote_mlp else ""
    for key, known in (("parallel", ("none",)), ("device", ("auto", "cpu"))):
        if not unknown and (value := getattr(config.dense, key)) not in known:
            unknown = f"dense.{key} is {value}"
    flops, parameters = 0.0, 0
    if not unknown:
        flops, parameters = _dense_work(config, input_spec, [t.width for t in tables_of(input_spec, tables)])
    # Trainers of a host can send one message for all of them.
    group = min(MOST_MEMBERS, math.ceil(trainers / hosts.count))
    groups = math.ceil(trainers / group) if can_aggregate(config) and saves_work(group, workers) else trainers
    is_sync = config.train.update == "sync"
    rounds = groups * lookups * (2 if is_sync else 1)  # in sync, gradients do not travel with the next ids
    message = "rpc message" if is_sync else "socket message"
    local_batch = config.train.batch_size / trainers
    ring_bytes = 2 * (trainers - 1) / trainers * parameters * _GRADIENT_BYTES
    trainer = {
        "step": 1.0,
        message: workers * rounds / trainers,
        "byte": float(up_W.sum() + down_W.sum()),
        "sample": local_batch,
        "id": lookups * moved.ids,
        "value": lookups * moved.values,
        "flop": local_batch * flops,
        "parameter": parameters,
    }
    is_ring = hosts.count > 1 or trainers > MOST_MEMBERS
    if is_ring:
        trainer |= {"gloo round": 2 * (trainers - 1), "gloo byte": ring_bytes}
    else:
        trainer |= {"peer": trainers - 1, "peer parameter": (trainers - 1) * parameters}
    of_workers = [
        {
            "step": 1.0,
            message: rounds,
            "trainer": trainers * lookups,
            "byte": trainers * num_bytes,
            "row": lookups * rows,
            "updated value": updated,
        }
        for num_bytes, rows, updated in zip(up_W + down_W, moved.rows_W, moved.updated_W, strict=True)
    ]
    trainer_seconds = {name: count * _TRAINER_SECONDS[name] for name, count in trainer.items()}
    worker_seconds = [{name: count * _WORKER_SECONDS[name] for name, count in w.items()} for w in of_workers]
    seconds_W = np.array([sum(each.values()) for each in worker_seconds])

    trainers_H = np.bincount(np.arange(trainers) % hosts.count, minlength=hosts.count)
    host_W = (trainers + np.arange(workers)) % hosts.count

    def by_host(value_W: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.bincount(host_W, value_W, hosts.count).astype(np.float64)

    # What crosses between hosts: a trainer's messages to workers of other hosts, and the ring.
    others_H, ring_H = trainers - trainers_H, trainers_H * (ring_bytes if hosts.count > 1 else 0.0)
    out_H = trainers_H * (up_W.sum() - by_host(up_W)) + others_H * by_host(down_W) + ring_H
    in_H = trainers_H * (down_W.sum() - by_host(down_W)) + others_H * by_host(up_W) + ring_H
    of_trainers_H, of_workers_H = sum(trainer_seconds.values()) * trainers_H, by_host(seconds_W)
    fullest = int((of_trainers_H + of_workers_H).argmax())
    shared = float(of_trainers_H[fullest] + of_workers_H[fullest]) / hosts.cores
    seconds = {
        TRAINERS: sum(trainer_seconds.values()),
        WORKERS: float(seconds_W.max()),
        NETWORK: float(max(out_H.max(), in_H.max())) / hosts.bytes_per_second,
    }
    limit = max(seconds, key=lambda name: seconds[name])
    alone = sum(seconds.values()) if is_sync else seconds[limit]
    if shared > alone:  # the roles of a host wait for its cores
        limit = TRAINERS if of_trainers_H[fullest] >= of_workers_H[fullest] else WORKERS
    limiting = {TRAINERS: trainer_seconds, WORKERS: worker_seconds[int(seconds_W.argmax())], NETWORK: {}}[
        limit
    ]

    links = {
        "trainer -> worker": Link(workers * rounds, trainers * float(up_W.sum())),
        "worker -> trainer": Link(workers * rounds, trainers * float(down_W.sum())),
    }
    ring_messages = 2 * trainers * (trainers - 1) if is_ring else 0
    if is_ring:
        links["trainer -> trainer"] = Link(ring_messages, trainers * ring_bytes)
    if hosts.count > 1:
        local = float(trainers_H @ by_host(np.ones(workers))) / (trainers * workers)
        count = round(2 * (1 - local) * workers * rounds) + ring_messages
        links["host -> host"] = Link(count, float(out_H.sum()))

    # A net has its parameters, their gradients, and two values more for its optimizer.
    trainer_bytes = _TRAINER_BYTES + _BYTES_PER_VALUE * trainer["value"] + 4 * _GRADIENT_BYTES * parameters
    bytes_W = np.array([_WORKER_BYTES + _BYTES_PER_BYTE * each["byte"] for each in of_workers])
    for shard in placement.shards:
        bytes_W[shard.worker] += shard.num_bytes
        if config.train.update == "pipelined" and shard.table.optimizer.steps_all_rows:
            # The rows before the last update, which checkpoints need.
            bytes_W[shard.worker] += shard.num_rows * shard.table.dim * shard.table.bytes_per_value
    return Plan(
        tables,
        placement,
        moved,
        links,
        trainer_bytes,
        float(bytes_W.max()),
        float((trainer_bytes * trainers_H + by_host(bytes_W)).max()),
        seconds | {"cores of a host": shared},
        limit,
        {name: value / sum(limiting.values()) for name, value in limiting.items()},
        max(shared, alone) / _BUSY,
        unknown,
    )


def _dense_work(config: RunConfig, input_spec: InputSpec, widths: list[int]) -> tuple[float, int]:
    """Return the floating-point operations per sample, forward and backward, and the number of parameters."""
    net = build_dense_net(config, input_spec, widths)
    use_torch(net)  # since FlopCounterMode knows torch's own operators only
    dtype = next((parameter.dtype for parameter in net.parameters()), torch.float32)
    dense_BF = torch.zeros(1, len(input_spec.dense_features), dtype=dtype)
    pooled_BE = torch.zeros(1, sum(widths), dtype=dtype, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        net(dense_BF, pooled_BE).sum().backward()
    return counter.get_total_flops(), sum(p.numel() for p in net.parameters())
