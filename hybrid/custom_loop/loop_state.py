"""What a checkpoint of a custom loop holds besides tables: module, optimizers, schedulers and progress.

A pass is one loop of the script over ``cluster.batches(...)``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from hybrid.checkpoint.checkpoint_folders import DENSE_FILE, MANIFEST_FILE
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import load_state, pack_dense, unpack_dense
from hybrid.custom_loop.local_batches import length_of
from hybrid.custom_loop.loop_warnings import LoopWarnings
from hybrid.dense.dense_optimizer import DenseOptimizer
from hybrid.errors import CheckpointError, DataError
from hybrid.metrics import Metrics
from hybrid.storage.file_formats import parse_fields, parse_value
from hybrid.updates.update_rules import Schedule

# Keys of a manifest's progress.
_OBJECTS, _TYPES, _POSITION, _EPOCH, _START = "objects", "types", "position", "in_epoch", "start"
_POSITION_FIELDS = "epoch", "first_pass", "pass_index", "samples"
_PAIRS, _TUPLE, PARAMETERS = "pairs", "tuple", "parameters"
# Settings of a group: its parameters, and choices of kernels that depend on the device.
_NOT_LOADED = ("params", "foreach", "fused", "capturable", "differentiable")
_MAX_EMPTY_PASSES = 10_000  # passes and epochs of a loop without a step
_MAX_SAMPLES = 1 << 48  # of a pass


class Stateful(Protocol):
    """An optimizer, or an object with a state of JSON values and tuples, such as a scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass
class LoopProgress:
    """The epoch, pass and sample that a script has reached, and results that a restarted script needs."""

    epoch: int = 0  # index of the epoch, see Cluster.epochs
    first_pass: int = 0  # index of the epoch's first pass over training batches
    pass_index: int = 0  # index of the current pass
    samples: int = 0  # number of samples in the completed steps of this pass, over all trainers
    lengths: tuple[int, ...] = ()  # of the data of each training pass of the epoch; -1 if unknown
    evaluations: tuple[dict[str, float], ...] = ()  # metrics of evaluations between passes of the epoch
    # Values that should be equal when the script resumes; see describe_start.
    start: dict[str, str] = field(default_factory=dict)

    def is_possible(self, num_steps: int) -> bool:
        """Return whether a loop can have this progress after ``num_steps`` steps."""
        most = num_steps + _MAX_EMPTY_PASSES
        is_in_order = 0 <= self.first_pass <= self.pass_index <= most
        return is_in_order and 0 <= self.epoch <= most and 0 <= self.samples < _MAX_SAMPLES


class PassHistory:
    """The training passes and evaluations of a script, in this process and before the resumed checkpoint.

    Attributes:
        now: the progress so far.
        before: the progress in the checkpoint; without a checkpoint, the progress of a new script.
        is_recorded: whether ``now`` records lengths of data and results of evaluations, which a restarted
            script needs. True after ``cluster.resume``, unless the script reads from a stream.
    """

    def __init__(self, warnings: LoopWarnings) -> None:
        self.now, self.before = LoopProgress(), LoopProgress()
        self.is_recorded = False
        self._warnings = warnings
        self._is_in_pass = False  # a pass has begun and is not yet counted
        self._has_stream = False  # whether the script has read from a stream

    def begin_stream(self) -> None:
        """End the current pass. Further steps belong to a stream, which records its own position."""
        self.end_pass()
        self._has_stream, self.is_recorded = True, False

    def begin_epoch(self, epoch: int) -> None:
        """End the current pass; further passes belong to ``epoch``."""
        self.end_pass()
        first = max(self.now.pass_index, self.before.first_pass)
        self.now = LoopProgress(epoch, first, first, start=self.now.start)

    def begin_pass(self, data: Any) -> bool:
        """Begin a pass over ``data``. Return False if the pass precedes the checkpoint, and must be skipped.

        RuntimeError if the script has read from a stream.
        """
        if self._has_stream:
            raise RuntimeError(
                "a script that has read from a stream trains on its rows only: read other data first"
            )
        self.end_pass()
        now, before = self.now, self.before
        if self.is_recorded:
            self._record_length(length_of(data))
        if now.pass_index < before.pass_index:
            now.pass_index += 1
            return False
        now.samples = before.samples if now.pass_index == before.pass_index else 0
        self._is_in_pass = True
        return True

    def end_pass(self) -> None:
        """Count the current pass as done, whether the script read all of its batches or left it."""
        if self._is_in_pass:
            self.now.pass_index += 1
            self.now.samples = 0
            self._is_in_pass = False

    @property
    def is_replaying(self) -> bool:
        """Whether a resumed script has not yet entered the pass in which its checkpoint was written."""
        is_before = self.now.pass_index + self._is_in_pass <= self.before.pass_index
        return is_before and self.before != LoopProgress()

    def known_evaluation(self) -> Metrics | None:
        """Return the metrics of the next evaluation if the checkpoint has them, else None."""
        index, known = len(self.now.evaluations), self.before.evaluations
        return known[index] if self.is_replaying and index < len(known) else None

    def _record_length(self, length: int) -> None:
        number, known = len(self.now.lengths), self.before.lengths
        is_before = self.now.pass_index <= self.before.pass_index
        if is_before and number < len(known) and known[number] != length:
            self._warnings.warn(
                f"pass {number} of epoch {self.now.epoch} reads data of length {length}; before the "
                f"checkpoint, it was {known[number]}. The position in other data is not that of the run"
            )
        self.now.lengths += (length,)

    def resume(self, before: LoopProgress, source: str) -> None:
        """Continue from ``before``, the progress of checkpoint ``source``; warn if settings differ."""
        self.before = before
        names = sorted(before.start.keys() | self.now.start.keys())
        pairs = [(name, before.start.get(name), self.now.start.get(name)) for name in names]
        differences = [f"the {name}: {old}, and {new} now" for name, old, new in pairs if old != new]
        if differences:
            self._warnings.warn(
                f"{source}: the script that wrote the checkpoint began with another value of "
                f"{'; '.join(differences)}. The states of the checkpoint apply, but results may differ from "
                "those of an uninterrupted run"
            )


def describe_start(net: nn.Module, objects: Sequence[Stateful], num_trainers: int) -> dict[str, str]:
    """Return the settings that a resumed script should not have changed.

    These are the settings of optimizers and schedulers, such as {"lr of SGD (object 0, group 0)": "0.1"}, and
    the number of trainers if the net has dropout. DataError if a checkpoint cannot store an object's state.
    """
    start: dict[str, str] = {}
    for number, each in enumerate(objects):
        state: Any = each.state_dict()
        groups = state["param_groups"] if isinstance(each, torch.optim.Optimizer) else [state]
        _encode(groups, type(each).__name__)  # DataError if a value cannot be stored
        if isinstance(each, torch.optim.Optimizer | LRScheduler):
            for index, group in enumerate(groups):
                values = {name: value for name, value in group.items() if name != "params"}
                owner = f"{type(each).__name__} (object {number}, group {index})"
                start |= {f"{name} of {owner}": repr(value) for name, value in values.items()}
    dropouts = [name for name, module in net.named_modules() if _has_dropout(module)]
    if dropouts:
        start[f"number of trainers, on which dropout in {dropouts[0]} depends"] = str(num_trainers)
    return start


def _has_dropout(module: nn.Module) -> bool:
    probability = getattr(module, "p" if "Dropout" in type(module).__name__ else "dropout", 0.0)
    return isinstance(probability, int | float) and probability > 0


def pack_state(
    net: nn.Module, objects: Sequence[Stateful], progress: LoopProgress
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of module and optimizers, and all other values as JSON for the manifest.

    DataError if the state of an object has a value that a checkpoint cannot store.
    """
    tensors: dict[int, Mapping[str, Any]] = {}
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    encoded, parameters = [], list[str]()
    for each in objects:
        state: Any = each.state_dict()
        if isinstance(each, torch.optim.Optimizer):
            tensors |= {len(parameters) + index: values for index, values in state["state"].items()}
            state = [{**group, "params": None} for group in state["param_groups"]]
            parameters += [names.get(id(p), "") for group in each.param_groups for p in group["params"]]
        encoded.append(_encode(state, type(each).__name__))
    fields = {
        _OBJECTS: encoded,
        _TYPES: [type(each).__name__ for each in objects],
        _POSITION: [getattr(progress, name) for name in _POSITION_FIELDS],
        _EPOCH: {"lengths": progress.lengths, "evaluations": progress.evaluations},
        _START: progress.start,
        PARAMETERS: parameters,
    }
    return pack_dense(net.state_dict(), tensors), fields


def load_progress(net: nn.Module, objects: Sequence[Stateful], stored: Checkpoint) -> LoopProgress:
    """Load the module, and the objects if there are any, from a checkpoint; return its progress.

    CheckpointError if the checkpoint has another module, other objects, or invalid progress.
    """
    state, tensors = unpack_dense(stored.tensors(DENSE_FILE))
    load_state(net, state, stored.folder)
    states, progress = _parse_progress(stored)
    first = 0
    if objects and len(states) != len(objects):
        rule = f"has the state of {len(states)} optimizers and schedulers, not of {len(objects)}"
        raise CheckpointError(f"{stored.folder}: the checkpoint {rule}; pass the objects of its script")
    for each, (name, code) in zip(objects, states, strict=False):
        groups = each.param_groups if isinstance(each, torch.optim.Optimizer) else None
        is_valid = name == type(each).__name__
        if is_valid and isinstance(each, torch.optim.Optimizer | LRScheduler):
            current = each.state_dict() if groups is None else groups
            is_valid = _fits(code, current, has_more=groups is not None)
        if not is_valid:
            rule = f"the state at the position of {type(each).__name__} does not fit; it is of {name}"
            raise CheckpointError(f"{stored.folder}: pass the objects of its script: {rule}")
        if not isinstance(each, torch.optim.Optimizer):
            each.load_state_dict(code)
            continue
        end = first + sum(len(group["params"]) for group in each.param_groups)
        values = {index - first: state for index, state in tensors.items() if first <= index < end}
        DenseOptimizer(each, Schedule()).load(values, stored.folder)
        for group, settings in zip(each.param_groups, code, strict=True):
            group.update({name: value for name, value in settings.items() if name not in _NOT_LOADED})
        first = end
    return progress


def _parse_progress(stored: Checkpoint) -> tuple[list[tuple[str, Any]], LoopProgress]:
    fields = stored.manifest.progress
    try:
        states = [_decode(code) for code in fields.get(_OBJECTS, ())]
        types = parse_value(_TYPES, tuple[str, ...], fields.get(_TYPES, [""] * len(states)))
        position = zip(_POSITION_FIELDS, fields.get(_POSITION, (0, 0, 0, 0)), strict=True)
        content = dict(position) | fields.get(_EPOCH, {}) | {_START: fields.get(_START, {})}
        progress = parse_fields(LoopProgress, content)
        if progress.is_possible(stored.manifest.step):
            return [*zip(types, states, strict=True)], progress
    except (TypeError, ValueError, KeyError, AttributeError):
        pass
    rule = "has no valid state of a loop; use another checkpoint"
    raise CheckpointError(f"{stored.folder / MANIFEST_FILE}: {rule}")


def _fits(value: Any, current: Any, *, has_more: bool = True) -> bool:
    """Return whether the stored state ``value`` has the structure and types of the state ``current``.

    A dict in ``value`` may lack keys that ``current`` has. It may have further keys, whose values must be
    numbers. Without ``has_more``, the outermost dict may have no further keys.
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


def _encode(value: Any, owner: str) -> Any:
    if isinstance(value, dict):
        return {_PAIRS: [[_encode(k, owner), _encode(v, owner)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        values = [_encode(each, owner) for each in value]
        return values if isinstance(value, list) else {_TUPLE: values}
    if not isinstance(value, int | float | str | None) or (isinstance(value, int) and abs(value) >= 1 << 64):
        kinds = "dicts, lists, texts and numbers of at most 64 bits"
        raise DataError(f"the state of {owner} has a {type(value).__name__}; checkpoints store {kinds}")
    return value


def _decode(code: Any) -> Any:
    if isinstance(code, dict):
        if _TUPLE in code:
            return tuple(map(_decode, code[_TUPLE]))
        return {_decode(key): _decode(value) for key, value in code[_PAIRS]}
    return [*map(_decode, code)] if isinstance(code, list) else code
