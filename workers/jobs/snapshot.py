"""All trained tensors of a job, on the cluster and in one process, and their differences."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from hybrid import transport
from hybrid.checkpoint.checkpoint_manifest import DENSE_FILE, REMOTE_FILE, shard_file
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import unpack_dense
from hybrid.errors import HybridError
from hybrid.reference.reference_training import Reference
from workers.controller.remote_trainer import Trainer
from workers.controller.session import Session

# Relative and absolute. Rounding is 1e-16 in float64, but an optimizer that divides by the gradient norm
# multiplies it by rate / eps if the exact gradient is zero: by 5e6 for the default tables.
TOLERANCES = {"float64": (1e-7, 1e-8), "float32": (1e-5, 1e-6)}
VALUE = "value"


class DifferenceError(HybridError):
    """The results of the cluster and of one process differ."""


class TensorName(NamedTuple):
    """The name of a tensor: its parameter, and "value" or the kind of optimizer state."""

    parameter: str
    kind: str = VALUE

    def __str__(self) -> str:
        return self.parameter if self.kind == VALUE else f"{self.parameter}, {self.kind}"


Snapshot: TypeAlias = dict[TensorName, Tensor]


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two tensors that should be equal.

    Attributes:
        part: name of the tensor.
        largest: largest absolute difference.
        ratio: largest difference as a fraction of the tolerance.
    """

    part: TensorName
    largest: float
    ratio: float

    @classmethod
    def between(cls, part: TensorName, ours: Tensor, expected: Tensor) -> Difference:
        if not expected.numel():
            return cls(part, 0.0, 0.0)
        apart = (ours.double() - expected.double()).abs().nan_to_num(torch.inf)
        if not expected.is_floating_point():  # such as the step count of a batch normalization
            return cls(part, apart.max().item(), torch.inf if apart.any() else 0.0)
        relative, absolute = TOLERANCES["float64" if expected.dtype == torch.float64 else "float32"]
        allowed = absolute + relative * expected.double().abs()
        return cls(part, apart.max().item(), (apart / allowed).max().item())


def snapshot(session: Session, names: Sequence[str] = (), remote_names: Sequence[str] = ()) -> Snapshot:
    """Return the rows, the nets of all trainers, the remote net, and the optimizer state of a cluster.

    Args:
        names, remote_names: of the parameters of the dense net and of the remote net, in order; without
            names, only the tables are returned.
    """
    with tempfile.TemporaryDirectory(prefix="hybrid-") as scratch:
        stored = Checkpoint.open(session.save(Path(scratch) / "all", 0, 0))
        found = stored_tables(stored)
        if names:
            folders = [Path(scratch) / str(index) for index in range(len(session.trainers))]
            transport.gather([trainer.call(Trainer.begin_save, DENSE_FILE) for trainer in session.trainers])
            transport.gather(
                [t.call(Trainer.write, folder) for t, folder in zip(session.trainers, folders, strict=True)]
            )
            for index, folder in enumerate(folders):
                packed = Checkpoint(folder, stored.manifest).tensors(DENSE_FILE)
                found |= _net(f"trainer {index}", packed, names)
        if remote_names:
            found |= _net("remote net", stored.tensors(REMOTE_FILE), remote_names)
        return found


def stored_tables(stored: Checkpoint) -> Snapshot:
    """Return the full tables of a checkpoint, and their optimizer state."""
    found: Snapshot = {}
    for table, (num_rows, _, count) in stored.manifest.tables.items():
        for index in range(count):
            for kind, rows in stored.tensors(shard_file(table, index, count)).items():
                part = TensorName(f"table {table}", VALUE if kind == "weight" else kind)
                whole = found.setdefault(part, rows.new_empty(num_rows, *rows.shape[1:]))
                whole[index::count] = rows
    return found


def _net(owner: str, packed: Mapping[str, Tensor], names: Sequence[str]) -> Snapshot:
    net, states = unpack_dense(packed)
    return _named(f"{owner}: ", net, {names[index]: state for index, state in states.items()})


def _named(prefix: str, values: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Tensor]]) -> Snapshot:
    """Return parameters and their optimizer state under the names of a snapshot."""
    found = {TensorName(f"{prefix}{name}"): tensor for name, tensor in values.items()}
    for name, state in states.items():
        found |= {TensorName(f"{prefix}{name}", kind): tensor for kind, tensor in state.items()}
    return found


def reference_snapshot(reference: Reference) -> Snapshot:
    """Return the tensors of one process, under the same names as :func:`snapshot`."""
    found: Snapshot = {}
    for table, rows_RD in reference.tables.items():
        found |= _named("table ", {table: rows_RD}, {table: reference.table_states[table]})
    nets: dict[str, nn.Module] = {f"trainer {index}": net for index, net in enumerate(reference.nets)}
    if reference.remote_net is not None:
        nets["remote net"] = reference.remote_net
    for owner, net in nets.items():
        states = {
            name: {kind: torch.as_tensor(value) for kind, value in state.items() if value is not None}
            for name, state in reference.dense_state(net).items()
        }
        found |= _named(f"{owner}: ", net.state_dict(), states)
    return found


def differences(ours: Snapshot, expected: Snapshot) -> list[Difference]:
    """Return the difference of each tensor, in the order of ``expected``.

    Raises:
        DifferenceError: one side lacks a tensor.
    """
    if ours.keys() != expected.keys():
        alone = min(ours.keys() ^ expected.keys())
        raise DifferenceError(f"{alone} exists on one side only")
    return [Difference.between(part, ours[part], expected[part]) for part in expected]
