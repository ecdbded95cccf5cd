"""The local batches of a trainer: slices of the script's batches, or of prepared data.

A batch is a structure of dicts, lists and tuples whose tensors have samples as their first dimension; a
:class:`Jagged` has any number of values per sample. Numbers, texts and None belong to the whole batch. All
trainers iterate over the same global batches. Each trainer takes a contiguous slice. An empty slice is padded
with a sample of another slice, since modules need not accept empty batches. Padding has no effect on the
loss, and looks up only rows that the batch reads anyway. If groups must not be split, the last sample of a
group decides which batch and slice get the group.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import length_hint
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hybrid.batch import Batch, by_task, padding_bounds, slice_bounds
from hybrid.config import RunConfig
from hybrid.custom_loop.embedding_modules import Column, Jagged, TableCall, TableModule
from hybrid.custom_loop.trainer_group import TrainerGroup
from hybrid.data.batches import BatchLoader
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.embedding.bags import TableRequest
from hybrid.errors import ConfigError, DataError
from hybrid.input_spec import InputSpec
from hybrid.primitives.grouping import find_split_group, group_ends, last_end

DENSE, GROUP = "dense", "group"
_LONG_BYTES = 1 << 12  # of a tensor; a checksum of all bytes would take a measurable fraction of a step


@dataclass
class PassSizes:
    """The sizes of the slices that a pass over batches has yielded, each without and with padding."""

    sizes: list[tuple[int, int]] = field(default_factory=list)
    is_padded: bool = False

    def add(self, batch: LocalBatch) -> None:
        self.sizes.append((batch.size, batch.padded_size))
        self.is_padded |= batch.size < batch.padded_size

    def without_padding(self, values: Tensor) -> Tensor:
        """Remove the entries of padding samples from ``values``.

        The length shows whether ``values`` have an entry for each sample of the last slice, or of all slices
        of the pass. Values of another length stay unchanged.
        """
        if not self.is_padded or not values.dim():
            return values
        for slices in (self.sizes[-1:], self.sizes):
            sizes, padded_sizes = zip(*slices, strict=True)
            if len(values) == sum(padded_sizes):
                pairs = zip(values.split(padded_sizes), sizes, strict=True)
                return torch.cat([chunk[:size] for chunk, size in pairs])
        return values


@dataclass(frozen=True)
class Slicing:
    """How data are cut into batches and slices.

    Args:
        size, whole, drop_last: see :meth:`Cluster.batches`.
        tables: the tables whose columns are looked up before the module runs.
        device: the device of the tensors that the script gets.
    """

    size: int | None = None
    whole: str | None = None
    drop_last: bool = False
    trainer: int = 0
    num_trainers: int = 1
    tables: Sequence[TableModule] = ()
    device: torch.device = torch.device("cpu")


@dataclass(eq=False)
class LocalBatch:
    """One trainer's slice of a global batch.

    Args:
        values: the slice, in the structure of the script's batches; padded with one sample if it is empty.
        size: number of samples of the slice, without padding.
        global_size: number of samples of the batch, over all trainers.
        checksum: :func:`checksum` of the global batch; 0 with one trainer, prepared data or a stream.
        drawn: the columns of :class:`Negatives`, equal on all trainers and in all micro-batches.
    """

    values: Any
    size: int
    global_size: int
    slicing: Slicing
    checksum: int = 0
    drawn: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def columns(self) -> Any:
        """``values``, with the ``drawn`` negatives added, if any. DataError if they cannot be added."""
        if not self.drawn:
            return self.values
        if not isinstance(self.values, Mapping) or self.drawn.keys() & self.values.keys():
            names = " and ".join(map(repr, self.drawn))
            raise DataError(f"negatives: a batch must be a dict without the columns {names}, which are drawn")
        return {**self.values, **self.drawn}

    @cached_property
    def device_columns(self) -> Any:
        """The columns, on ``slicing.device``."""
        device = self.slicing.device
        if device.type == "cpu":
            return self.columns

        def move(_: str, column: Any) -> Any:
            if isinstance(column, Jagged):
                return Jagged(*(each.to(device) for each in column))
            return column.to(device) if isinstance(column, Tensor) else column

        return _map_columns(move, self.columns)

    @property
    def padded_size(self) -> int:
        """Number of samples in ``values``."""
        return max(self.size, min(1, self.global_size))

    @cached_property
    def calls(self) -> list[TableCall]:
        """The calls that are looked up before the module runs: one per column in the ``ids`` of a table."""
        return self._calls(self.device_columns)

    def _calls(self, values: Any) -> list[TableCall]:
        columns = {name: c for name, c in _columns(values) if isinstance(c, Tensor | Jagged)}
        return [call for table in self.slicing.tables for call in table.calls(columns)]

    @property
    def sparse_features(self) -> list[TableRequest]:
        """The lookup requests of :attr:`calls`."""
        calls = self.calls if self.device_columns is self.columns else self._calls(self.columns)
        return [call.module.request(call) for call in calls]

    def split(self, count: int) -> list[LocalBatch]:
        """Split into ``count`` micro-batches; an empty micro-batch gets one sample of padding."""
        if count == 1:
            return [self]
        ends_G, whole = None, self.slicing.whole
        if whole is not None:
            ends_G = group_ends(_group_column(self.values, whole)[: self.size])
        ranges = [slice_bounds(self.size, each, count, ends_G) for each in range(count)]
        return [
            replace(self, values=_cut_padded(self.values, self.padded_size, start, stop), size=stop - start)
            for start, stop in ranges
        ]


def slice_batches(batches: Iterable[Any], slicing: Slicing) -> Iterator[LocalBatch]:
    """Yield this trainer's slices. DataError if a batch is invalid, or splits the samples of a group."""
    whole, num_trainers = slicing.whole, slicing.num_trainers
    for number, batch in enumerate(batches):
        size, ends_G = size_of(batch), None
        if whole is not None:
            groups_B = _group_column(batch, whole)
            if (split := find_split_group(groups_B)) is not None:
                raise DataError(
                    f"samples of group {split} of {whole!r} are not adjacent in a batch: sort the data by it"
                )
            ends_G = group_ends(groups_B)
        start, stop = slice_bounds(size, slicing.trainer, num_trainers, ends_G)
        values = batch if num_trainers == 1 else _cut_padded(batch, size, start, stop)
        yield LocalBatch(
            values, stop - start, size, slicing, checksum(batch, number) if num_trainers > 1 else 0
        )


def global_batches(data: Any, slicing: Slicing) -> Iterator[Any]:
    """Yield the batches of ``data``, one batch or an iterable of batches. ``slicing.size`` sets a new size.

    Raises:
        DataError: ``data`` has another type, batches cannot be joined, or a group is larger than a batch.
    """
    if isinstance(data, Mapping | Jagged | Tensor):
        data = [data]
    if not isinstance(data, Iterable):
        raise DataError(f"cannot take batches of {type(data).__name__}; give an iterable, such as a list")
    yield from data if slicing.size is None else _rebatch(data, slicing.size, slicing)


def _rebatch(chunks: Iterable[Any], size: int, slicing: Slicing) -> Iterator[Any]:
    """Yield batches of ``size`` samples.

    Batch s has the samples s * size to (s + 1) * size. With ``whole``, batch s has each group whose last
    sample is in this range.
    """
    whole = slicing.whole
    held: list[Any] = []
    # Positions among all samples: start and end of the held samples, and end of the batch's range.
    start, num_read, stop = 0, 0, size
    for chunk in chain(chunks, [None]):
        is_last = chunk is None
        if not is_last:
            held.append(chunk)
            num_read += size_of(chunk)
        # The last group may continue in the next chunk.
        num_complete = num_read if whole is None or is_last else num_read - 1
        if start == num_read or (stop > num_complete and not is_last):
            continue
        joined = held[0] if len(held) == 1 else _map_columns(_concatenate, *held)
        first = start
        ends_G = None if whole is None else start + _checked_group_ends(joined, whole, size)
        while stop <= num_complete or (is_last and start < num_read and not slicing.drop_last):
            # A range may end before the last group does.
            end = min(stop, num_read) if ends_G is None else last_end(ends_G, stop)
            yield cut(joined, start - first, end - first)
            start, stop = end, stop + size
        held = [cut(joined, start - first, num_read - first)]


def _checked_group_ends(batch: Any, whole: str, size: int) -> npt.NDArray[np.int64]:
    groups_B = _group_column(batch, whole)
    ends_G = group_ends(groups_B)
    sizes_G = np.diff(ends_G, prepend=0)
    if (largest := int(sizes_G.max())) > size:
        group = groups_B[ends_G[sizes_G.argmax()] - 1]
        raise DataError(f"group {group} has {largest} samples, more than size = {size}: give a larger size")
    return ends_G


def _group_column(batch: Any, whole: str) -> npt.NDArray[np.generic]:
    column = batch.get(whole) if isinstance(batch, Mapping) else None
    if not isinstance(column, Tensor) or column.dim() != 1:
        raise DataError(f"whole = {whole!r} must name a column of every batch with one number per sample")
    groups_B: npt.NDArray[np.generic] = column.cpu().numpy()
    return groups_B


def size_of(batch: Any) -> int:
    """Return the number of samples in a batch; DataError if there are no tensors, or sizes differ."""
    columns = _columns(batch)
    sizes = [len(c.offsets) - 1 if isinstance(c, Jagged) else len(c) for _, c in columns]
    if not sizes:
        raise DataError("a batch has no tensors")
    if len(set(sizes)) > 1:
        counts = ", ".join(f"{path!r}: {size}" for (path, _), size in zip(columns, sizes, strict=True))
        raise DataError(
            f"the tensors of a batch have different numbers of samples ({counts}). Their first dimension is "
            "the sample; give a column of any number of values per sample as hybrid.Jagged(values, offsets)"
        )
    return sizes[0]


def cut(batch: Any, start: int, stop: int) -> Any:
    """Return the samples ``start : stop`` of a batch."""
    return _map_columns(
        lambda _, column: column.samples(start, stop) if isinstance(column, Jagged) else column[start:stop],
        batch,
    )


def skip_samples(batches: Iterable[Any], count: int) -> Iterator[Any]:
    """Yield the batches after the first ``count`` samples. A batch that is partly skipped is cut."""
    remaining = iter(batches)
    while count and (batch := next(remaining, None)) is not None:
        if (size := size_of(batch)) > count:
            yield cut(batch, count, size)
        count -= min(count, size)
    yield from remaining


def length_of(data: Any) -> int:
    """Return the number of samples in ``data``, or of batches if it is a list of them; -1 if unknown."""
    if isinstance(data, Mapping | Jagged | Tensor):
        return size_of(data)
    if isinstance(data, DataLoader):
        return length_hint(data.sampler, length_hint(data.dataset, -1))  # a sampler may leave out samples
    return length_hint(data, -1)


def count_batches(data: Any, slicing: Slicing) -> tuple[int, int]:
    """Return the number of full batches, and the size of a smaller last batch or 0; (0, 0) if unknown."""
    size, drop_last = slicing.size, slicing.drop_last
    if isinstance(data, DataLoader) and size is None:
        size, drop_last = data.batch_size, data.drop_last
    elif isinstance(data, PreparedData):
        size = size or data.config.train.batch_size
    has_samples = isinstance(data, Mapping | Jagged | Tensor | DataLoader | PreparedData)
    num_batches, rest = divmod(max(0, length_of(data)), size) if has_samples and size else (0, 0)
    return num_batches, 0 if drop_last else rest


def cut_last(batches: Iterable[Any], num_steps: int | None, size: int) -> Iterator[Any]:
    """Yield the batches. If ``size`` is not 0, cut batch number ``num_steps`` (from 1) to ``size`` samples.

    ``hybrid compare`` calls this so that its last step has a smaller batch, as at the end of the data.
    """
    for number, batch in enumerate(batches, 1):
        yield cut(batch, 0, size) if number == num_steps and 0 < size < size_of(batch) else batch


def _cut_padded(batch: Any, size: int, start: int, stop: int) -> Any:
    """Return samples ``start : stop`` of a batch, or one neighboring sample if start equals stop."""
    first, last = padding_bounds(size, start, stop, 1)
    return cut(batch, first, last) if first < last else cut(batch, start, stop)


def pad_from_others(values: dict[str, Column], size: int, trainers: TrainerGroup) -> Any:
    """Return ``values``, this trainer's slice; if its ``size`` is 0, return a sample of another trainer.

    All trainers call it together. At least one slice must have a sample.
    """
    if not trainers.sum(torch.tensor(int(size == 0))):
        return values
    given = {name: _to_json(column) for name, column in cut(values, 0, 1).items()} if size else {}
    (first, *_) = [each for each in trainers.gather_json(given) if each]
    return values if size else {name: _of_json(code) for name, code in first.items()}


def _to_json(column: Column) -> list[tuple[str, list[Any]]]:
    tensors = [column] if isinstance(column, Tensor) else column
    return [(str(each.dtype).removeprefix("torch."), each.tolist()) for each in tensors]


def _of_json(code: list[tuple[str, list[Any]]]) -> Column:
    tensors = [torch.tensor(values, dtype=getattr(torch, dtype)) for dtype, values in code]
    return Jagged(*tensors) if len(tensors) > 1 else tensors[0]


def checksum(batch: Any, number: int) -> int:
    """Return a checksum of the batch with index ``number`` in its pass.

    For speed, the checksum covers all tensors of the first batch, but only one tensor of each later batch.
    For a tensor of 8 KiB or more, it detects most changes of the order of values, but not all.
    """
    columns = [
        [c] if isinstance(c, Tensor) else c for _, c in _columns(batch) if isinstance(c, Tensor | Jagged)
    ]
    tensors, total = [*chain.from_iterable(columns)], 0
    for tensor in [tensors[number % len(tensors)]] if number and tensors else tensors:
        values = tensor.detach().cpu()
        values = values.float() if values.dtype is torch.bfloat16 else values  # which NumPy lacks
        content = np.ascontiguousarray(values.numpy()).reshape(-1).view(np.uint8)
        if (stride := len(content) // _LONG_BYTES) > 1:
            end = len(content) // 8 * 8
            words, rest = content[:end].view(np.int64), content[end:]
            total = zlib.crc32(np.add.reduce(words).tobytes() + rest.tobytes(), total)
            content = words[::stride].copy().view(np.uint8)
        total = zlib.crc32(content.data, total)
    return total


def _concatenate(_: str, *chunks: Any) -> Any:
    if isinstance(chunks[0], Tensor):
        return torch.cat(chunks)
    if isinstance(chunks[0], Jagged):
        lengths = torch.cat([each.lengths for each in chunks])
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return Jagged(torch.cat([each.values for each in chunks]), offsets)
    return [value for each in chunks for value in each]


def _columns(batch: Any) -> list[tuple[str, Any]]:
    columns: list[tuple[str, Any]] = []
    _map_columns(lambda path, column: columns.append((path, column)), batch)
    return columns


def _map_columns(function: Callable[..., Any], *batches: Any, path: str = "") -> Any:
    """Return a batch like ``batches``, with the results of ``function`` in place of the columns.

    ``function`` gets the path of a column, and this column of each batch. A column is a tensor, a
    :class:`Jagged`, or a list or tuple of texts or numbers. Scalars, single texts and None stay as they are.

    DataError if the batches differ in structure, or in a scalar or text; or if a value has another type.
    """
    batch = batches[0]
    if isinstance(batch, Jagged) or (isinstance(batch, Tensor) and batch.dim()):
        return function(path, *batches)

    if isinstance(batch, list | tuple) and not any(
        isinstance(each, Tensor | Mapping | list | tuple) for each in batch
    ):
        return function(path, *batches)
    if any(_keys(other) != _keys(batch) for other in batches[1:]):
        raise DataError("batches of different structures cannot be joined into batches of another size")

    def mapped(key: Any) -> Any:
        inner = f"{path}[{key!r}]" if path else str(key)
        return _map_columns(function, *(each[key] for each in batches), path=inner)

    if isinstance(batch, Mapping):
        return {name: mapped(name) for name in batch}
    if isinstance(batch, list | tuple):
        results = [mapped(index) for index in range(len(batch))]
        return type(batch)(*results) if hasattr(batch, "_fields") else type(batch)(results)
    if not isinstance(batch, Tensor | str | bytes | int | float | None):
        raise DataError(f"a batch has a {type(batch).__name__} at {path!r}, not a tensor of samples")
    for other in batches[1:]:
        if batch != other:
            raise DataError(
                f"batches with {batch!r} and {other!r} at {path!r} cannot be joined into batches of another "
                "size: give one value per sample, as a tensor"
            )
    return batch


def _keys(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return batch.keys()
    return range(len(batch)) if isinstance(batch, list | tuple) else None


class EncodedData:
    """Samples that section [data] describes. A batch (:meth:`Cluster.batches`) is a dict of these columns:

    ================ ===================================================================================
    ``dense``        numeric columns, (samples, columns)
    ``COLUMN``       ids of a sparse column, (samples,), or a :class:`Jagged` if it is multi-hot
    ``COL.weights``  weights of the ids in the weighted multi-hot column ``COL``, a :class:`Jagged`
    ``TASK``         labels of a task, (samples,); ``label`` without sections [tasks.NAME]
    ``TASK.weights`` weights of the samples for a task, (samples,), if the data have weights
    ``group``        group of each sample, (samples,), if the data have groups
    ================ ===================================================================================
    """

    config: RunConfig
    input_spec: InputSpec

    @property
    def num_rows(self) -> dict[str, int]:
        """Number of rows that the table of each sparse column needs; 0 for a growing table."""
        return {each.name: each.num_rows for each in self.input_spec.sparse_features}

    @property
    def dense_columns(self) -> tuple[str, ...]:
        """Names of the numeric columns, in the order of ``dense``."""
        return self.input_spec.dense_features

    def check_names(self, *, has_groups: bool) -> None:
        """Raise ConfigError if two columns have one name. ``has_groups``: whether ``group`` is a column."""
        tasks = self.config.all_tasks
        names = [DENSE, *tasks, *(f"{task}.weights" for task in tasks), *self.num_rows]
        names += [GROUP] if has_groups else []
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            rule = "is the name of two columns in batches of prepared data; rename the column or the task"
            raise ConfigError("data.sparse", rule, repeated)

    def columns_of(self, batch: Batch) -> dict[str, Any]:
        """Return the columns of a batch by name, as in the table above."""
        values = features_of(batch, self.input_spec)
        tasks = self.config.all_tasks
        for t, task in enumerate(tasks):
            values[task] = by_task(batch.labels, len(tasks))[:, t]
            if batch.weights is not None:
                values[f"{task}.weights"] = by_task(batch.weights, len(tasks))[:, t]
        if batch.groups is not None:
            values[GROUP] = batch.groups
        return values


@dataclass
class PreparedData(EncodedData):
    """The samples of one split (train, validation or test), for :meth:`Cluster.batches`."""

    dataset: PreparedDataset
    config: RunConfig
    is_shuffled: bool  # whether each pass has another order

    def __post_init__(self) -> None:
        self.input_spec = self.dataset.input_spec
        self.check_names(has_groups=self.dataset.has_groups)

    def __len__(self) -> int:
        return self.dataset.num_samples

    def slices(self, slicing: Slicing, epoch: int = 0, first_sample: int = 0) -> Iterator[LocalBatch]:
        """Yield a trainer's slice of each batch, from ``first_sample`` on. ``epoch`` seeds the shuffle.

        Raises:
            DataError: ``slicing.whole`` is neither None nor "group". With "group": the data have no groups,
                a group is larger than a batch, or ``data.shuffle`` shuffles by lanes.
        """
        if slicing.whole not in (None, GROUP):
            raise DataError(
                f"whole = {slicing.whole!r} must be {GROUP!r} for prepared data; data.group names the column"
            )
        config = self.config
        loader = BatchLoader(
            self.dataset,
            batch_size=slicing.size or config.train.batch_size,
            trainer_index=slicing.trainer,
            num_trainers=slicing.num_trainers,
            seed=config.run.seed,
            shuffle=self.is_shuffled,
            lanes=config.data.shuffle_lanes if self.is_shuffled else 0,
            by_group=slicing.whole is not None,
            min_size=1,
            drop_last=slicing.drop_last,
        )
        with loader.batches(epoch, first_sample) as stream:
            for batch in stream:
                yield LocalBatch(self.columns_of(batch), batch.local_size, batch.global_size, slicing)


def features_of(batch: Batch, input_spec: InputSpec) -> dict[str, Any]:
    """Return the numeric and sparse columns of a batch, named as in :class:`EncodedData`."""
    values: dict[str, Any] = {DENSE: batch.dense_features}
    sparse = batch.sparse_features
    size, offsets = sparse.batch_size, sparse.offsets
    if offsets is None:
        offsets = torch.arange(len(sparse.ids_L) + 1)
    for k, feature in enumerate(input_spec.sparse_features):
        ends = offsets[k * size : (k + 1) * size + 1]
        ids = slice(int(ends[0]), int(ends[-1]))
        is_jagged = feature.multi_hot and sparse.offsets is not None
        values[feature.name] = Jagged(sparse.ids_L[ids], ends - ends[0]) if is_jagged else sparse.ids_L[ids]
        if is_jagged and feature.weighted:
            weights_L = torch.ones(len(sparse.ids_L)) if sparse.weights_L is None else sparse.weights_L
            values[f"{feature.name}.weights"] = Jagged(weights_L[ids], ends - ends[0])
    return values
