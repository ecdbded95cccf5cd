"""What a checkpoint of a custom loop holds beside the tables: module, optimizers, schedulers, position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import DENSE_FILE, MANIFEST_FILE, Best
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import load_state, pack_dense, unpack_dense
from hybrid.custom_loop.backend import Backend
from hybrid.custom_loop.trainer_group import TrainerGroup
from hybrid.dense.dense_optimizer import DenseOptimizer
from hybrid.errors import CheckpointError, DataError, StorageError
from hybrid.metrics import Metrics
from hybrid.protocol.update_rules import Schedule
from hybrid.storage.remote_path import StoragePath

# Keys of a manifest's progress.
_OBJECTS, _TYPES, _POSITION, _EPOCH, _START = "objects", "types", "position", "in_epoch", "start"
_PAIRS, _TUPLE = "pairs", "tuple"
# Settings of a group: its parameters, and choices of kernels that depend on the device.
_NOT_LOADED = ("params", "foreach", "fused", "capturable", "differentiable")
_MAX_EMPTY_PASSES = 10_000  # passes and epochs of a loop without a step
_MAX_SAMPLES = 1 << 48  # of a pass


class Stateful(Protocol):
    """An optimizer, a scheduler, or another object whose state is made of numbers, text, lists and dicts."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Position(NamedTuple):
    """The position of a loop between two steps.

    Attributes:
        epoch: index of the epoch, see :meth:`Cluster.epochs`.
        first_pass: index of the epoch's first pass over training batches.
        pass_index: index of the current pass.
        samples: number of samples of this pass, of all trainers, whose steps are done.
    """

    epoch: int = 0
    first_pass: int = 0
    pass_index: int = 0
    samples: int = 0


@dataclass
class EpochRecord:
    """What a script has done in an epoch between its passes, and does again if it resumes within the epoch.

    Attributes:
        lengths: length of the data of each training pass; -1 if unknown.
    """

    lengths: list[int] = field(default_factory=list)
    evaluations: list[Metrics] = field(default_factory=list)


def describe_start(net: nn.Module, objects: Sequence[Stateful], num_trainers: int) -> dict[str, str]:
    """Return what is expected to be equal when a script resumes, before its first step."""
    start: dict[str, str] = {}
    for number, each in enumerate(objects):
        state: dict[str, Any] = each.state_dict()
        if isinstance(each, torch.optim.Optimizer | LRScheduler):
            for index, group in enumerate(state.get("param_groups", [state])):
                values = {name: value for name, value in group.items() if name != "params"}
                owner = f"{type(each).__name__} (object {number}, group {index})"
                start |= {f"{name} of {owner}": repr(value) for name, value in values.items()}
    if dropouts := [name for name, module in net.named_modules() if _has_dropout(module)]:
        condition = f"number of trainers, on which the masks of dropout in {dropouts[0]} depend"
        start[condition] = str(num_trainers)
    return start


def _has_dropout(module: nn.Module) -> bool:
    probability = getattr(module, "p" if "Dropout" in type(module).__name__ else "dropout", 0.0)
    return isinstance(probability, int | float) and probability > 0


def pack_state(
    net: nn.Module,
    objects: Sequence[Stateful],
    position: Position,
    in_epoch: EpochRecord,
    start: Mapping[str, str],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the progress of a checkpoint.

    Args:
        start: see :func:`describe_start`.

    Raises:
        DataError: the state of an object has a value that a checkpoint cannot store.
    """
    tensors: dict[int, Mapping[str, Any]] = {}
    encoded, first = [], 0  # first: index of the first parameter of an optimizer
    for each in objects:
        state: Any = each.state_dict()
        if isinstance(each, torch.optim.Optimizer):
            tensors |= {first + index: values for index, values in state["state"].items()}
            state = [{**group, "params": None} for group in state["param_groups"]]
            first += _num_parameters(each)
        encoded.append(_encode(state, type(each).__name__))
    progress = {_OBJECTS: encoded, _TYPES: [type(each).__name__ for each in objects], _POSITION: position}
    return pack_dense(net.state_dict(), tensors), progress | {_EPOCH: asdict(in_epoch), _START: start}


def load_progress(
    net: nn.Module, objects: Sequence[Stateful], stored: Checkpoint
) -> tuple[Position, EpochRecord, dict[str, str]]:
    """Load the module and the objects from a checkpoint; return its position, record and start.

    Raises:
        CheckpointError: the checkpoint is of another module, or of other objects.
    """
    state, tensors = unpack_dense(stored.tensors(DENSE_FILE))
    load_state(net, state, stored.folder)
    states, position, record, start = _parse_progress(stored)
    first = 0
    if objects and len(states) != len(objects):
        rule = f"has the state of {len(states)} optimizers and schedulers, not of {len(objects)}"
        raise CheckpointError(f"{stored.folder}: the checkpoint {rule}; pass the objects of its script")
    for each, (name, code) in zip(objects, states, strict=False):
        groups = each.param_groups if isinstance(each, torch.optim.Optimizer) else None
        is_other = name != type(each).__name__
        if is_other or len(groups or ()) != (len(code) if isinstance(code, list) else 0):
            rule = f"has no state for {type(each).__name__} at its position among the objects of cluster.save"
            raise CheckpointError(
                f"{stored.folder}: {rule}, with the same number of parameter groups, but for {name}"
            )
        is_checked = isinstance(each, torch.optim.Optimizer | LRScheduler)
        current = each.state_dict() if groups is None else groups
        if is_checked and not _fits(code, current, has_more=groups is not None):
            rule = f"has a state that does not fit {type(each).__name__}; pass the objects of its script"
            raise CheckpointError(f"{stored.folder}: the checkpoint {rule}")
        if not isinstance(each, torch.optim.Optimizer):
            each.load_state_dict(code)
            continue
        end = first + _num_parameters(each)
        values = {index - first: state for index, state in tensors.items() if first <= index < end}
        DenseOptimizer(each, Schedule()).load(values, stored.folder)
        for group, settings in zip(each.param_groups, code, strict=True):
            group.update({name: value for name, value in settings.items() if name not in _NOT_LOADED})
        first = end
    return position, record, start


def _parse_progress(
    stored: Checkpoint,
) -> tuple[list[tuple[str, Any]], Position, EpochRecord, dict[str, str]]:
    """Return type and state of each object, the position, the record of the epoch, and the start.

    Raises:
        CheckpointError: a value is invalid, or a loop cannot have reached the position.
    """
    progress, most = stored.manifest.progress, stored.manifest.step + _MAX_EMPTY_PASSES
    try:
        states = [_decode(code) for code in progress.get(_OBJECTS, ())]
        types = progress.get(_TYPES, [""] * len(states))
        position = Position(*progress.get(_POSITION, ()))
        record, start = EpochRecord(**progress.get(_EPOCH, {})), progress.get(_START, {})
        numbers = [value for metrics in record.evaluations for value in metrics.values()]
        is_valid = (
            all(type(each) is int and each >= 0 for each in position)
            and max(position[:-1]) <= most
            and position.samples < _MAX_SAMPLES
            and position.first_pass <= position.pass_index
            and all(type(each) is int for each in record.lengths)
            and all(isinstance(each, int | float) for each in numbers)
            and all(isinstance(each, str) for each in (*types, *start, *start.values()))
        )
        if is_valid:
            return [*zip(types, states, strict=True)], position, record, start
    except (TypeError, ValueError, KeyError, AttributeError):
        pass
    rule = "has no valid state of a loop; use another checkpoint"
    raise CheckpointError(f"{stored.folder / MANIFEST_FILE}: {rule}")


def _fits(value: Any, current: Any, *, has_more: bool = True) -> bool:
    """Return whether a stored value may replace a current one of an object of torch.

    Args:
        has_more: whether a stored dict may have further names, with numbers.
    """
    if isinstance(current, dict):
        return isinstance(value, dict) and all(
            name in _NOT_LOADED or ((has_more or name in current) and _fits(each, current.get(name, 0.0)))
            for name, each in value.items()
        )
    if isinstance(current, list | tuple):
        is_as_long = isinstance(value, type(current)) and len(value) == len(current)
        return is_as_long and all(map(_fits, value, current))
    kind = next((kind for kind in (bool, str, int | float) if isinstance(current, kind)), None)
    return isinstance(value, kind) if kind else not isinstance(value, dict | list | tuple)


def _num_parameters(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _encode(value: Any, owner: str) -> Any:
    """Return a value for JSON that :func:`_decode` turns back."""
    if isinstance(value, dict):
        return {_PAIRS: [[_encode(k, owner), _encode(v, owner)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        values = [_encode(each, owner) for each in value]
        return values if isinstance(value, list) else {_TUPLE: values}
    if not isinstance(value, bool | int | float | str | None):
        raise DataError(f"the state of {owner} has a {type(value).__name__}, which a checkpoint cannot store")
    return value


def _decode(code: Any) -> Any:
    if isinstance(code, dict):
        if _TUPLE in code:
            return tuple(map(_decode, code[_TUPLE]))
        return {_decode(key): _decode(value) for key, value in code[_PAIRS]}
    return [*map(_decode, code)] if isinstance(code, list) else code


@dataclass
class LoopCheckpoints:
    """The checkpoints of a custom loop in its run folder. All trainers call the methods together.

    Attributes:
        save: writes a checkpoint of the loop, given its folder and the best evaluation.
        saved_step: step of the newest checkpoint; 0 if there is none.
        best: the best evaluation of which there is a checkpoint, or will be before the next step, or None.
    """

    backend: Backend
    trainers: TrainerGroup
    root: StoragePath
    every_steps: int
    save: Callable[[StoragePath, Best | None], None]
    saved_step: int = 0
    best: Best | None = None
    _saved_best: Best | None = None

    def open_newest(self) -> Checkpoint | None:
        """Return the newest valid checkpoint, which others will follow; None if there is none.

        Raises:
            CheckpointError: all checkpoints are damaged.
        """
        step = -1
        if self.backend.trainer == 0 and checkpoint_folders.list_checkpoints(self.root):
            step = Checkpoint.newest_valid(self.root, self.backend.warn).manifest.step
            checkpoint_folders.remove_after(self.root, step)
        step = int(self.trainers.gather(torch.tensor([step]))[0])
        if step < 0:
            return None
        stored = Checkpoint.open(checkpoint_folders.step_folder(self.root, step))
        self.saved_step, self.best = step, stored.manifest.best
        self._saved_best = self.best
        return stored

    def record_evaluation(self, metrics: Metrics, step: int) -> None:
        """Record an evaluation; if it is the best one, a checkpoint follows before the next step."""
        by = self.backend.config.best_by
        self.best = checkpoint_folders.choose_best(self.best, by, metrics, step)

    def write_if_due(self, step: int, *, is_last: bool = False) -> None:
        """Write a checkpoint between two steps, if it is due; remove old ones.

        If that fails, there is a warning, and the script continues. Only the last checkpoint must succeed.

        Raises:
            CheckpointError: the last checkpoint cannot be written.
        """
        is_best = self.best is not None and self.best.step == step
        if step == self.saved_step or not (is_last or is_best or step % self.every_steps == 0):
            return
        try:
            self.save(checkpoint_folders.step_folder(self.root, step), self.best)
        except CheckpointError as error:  # of all trainers
            failure = f"no checkpoint of step {step}: {error}"
            if is_last:
                raise CheckpointError(
                    f"{failure}; a new start resumes from step {self.saved_step}"
                ) from error
            if self.backend.trainer == 0:
                self.backend.warn(f"{failure}; training continues")
            self.best = self._saved_best
            return
        self.saved_step, self._saved_best = step, self.best
        if self.backend.trainer == 0:
            keep_last = self.backend.config.checkpoint.keep_last
            try:
                checkpoint_folders.prune(self.root, keep_last, self.best and self.best.step)
            except (CheckpointError, StorageError) as error:
                self.backend.warn(f"an old checkpoint could not be removed: {error}")
