"""The script's batches, cut into the local batches of the trainers.

A batch is a structure of dicts, lists and tuples whose tensors have samples as their first dimension; a
:class:`Jagged` has any number of values per sample. All trainers read the same global batches. Each takes a
contiguous slice, which may be empty. If the groups of a column stay whole, a group belongs to the batch, and
to the slice, in whose range its last sample lies (``hybrid/primitives/grouping.py``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.batch import slice_bounds
from hybrid.custom_loop.call_sites import CallKey, CallSite, call_key, tensors_of
from hybrid.custom_loop.embedding_modules import Jagged, TableCall
from hybrid.embedding.trainer.module_lookups import TableRequest
from hybrid.errors import DataError
from hybrid.primitives.grouping import group_ends, last_end, split_group, whole_bounds


class LocalBatch:
    """One trainer's slice of a global batch.

    Args:
        values: the slice, in the structure of the script's batches.
        size: number of samples in the slice.
        global_size: number of samples of all trainers.
        sites: expected calls of tables; read when the batch is looked up.
    """

    ended = False

    def __init__(self, values: Any, size: int, global_size: int, sites: Iterable[CallSite]) -> None:
        self.values = values
        self.size = size
        self.global_size = global_size
        self._sites = sites

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All tensors of the slice."""
        return list(tensors_of(self.values))

    @cached_property
    def calls(self) -> dict[CallKey, TableCall]:
        """The calls that are looked up ahead, in their order."""
        calls = [call for site in self._sites if (call := site.call(self.tensors)) is not None]
        return {call_key(call): call for call in calls}

    @property
    def sparse_features(self) -> list[TableRequest]:
        """The lookups of these calls."""
        return [call.module.request(call) for call in self.calls.values()]

    def split(self, parts: int) -> list[LocalBatch]:
        """Return the batch itself: a custom loop has no micro-batches."""
        assert parts == 1
        return [self]


def local_batches(
    batches: Iterable[Any],
    trainer: int,
    num_trainers: int,
    sites: Iterable[CallSite],
    whole: str | None = None,
) -> Iterator[LocalBatch]:
    """Yield a trainer's slice of each global batch.

    Args:
        whole: column whose groups are not split between trainers, or None.

    Raises:
        DataError: the samples of a group are not adjacent in a batch.
    """
    for batch in batches:
        size = size_of(batch)
        start, stop = slice_bounds(size, trainer, num_trainers)
        if whole is not None:
            groups_B = _group_column(batch, whole)
            if (split := split_group(groups_B)) is not None:
                raise DataError(
                    f"samples of group {split} of {whole!r} are not adjacent in a batch: sort the data by it"
                )
            start, stop = whole_bounds(group_ends(groups_B), start, stop)
        values = batch if num_trainers == 1 else cut(batch, start, stop)
        yield LocalBatch(values, stop - start, size, sites)


def global_batches(data: Any, size: int | None, whole: str | None = None) -> Iterator[Any]:
    """Yield batches of ``size`` samples, of which the last may be smaller; as they come if that is None.

    Args:
        data: one structure with all samples, or an iterable of structures with any numbers of samples.
        whole: column whose groups are not split, so that sizes vary by up to a group; or None.

    Raises:
        DataError: ``data`` is neither, or a group is larger than a batch.
    """
    is_one = isinstance(data, Mapping | Jagged | Tensor)
    if not is_one and not isinstance(data, Iterable):
        raise DataError(
            f"cannot take batches of {type(data).__name__}; give an iterable, such as a DataLoader"
        )
    if size is not None and whole is not None:
        yield from _rebatch_whole([data] if is_one else data, size, whole)
    elif is_one:
        total = size_of(data)
        step = size or total
        yield from (cut(data, start, min(start + step, total)) for start in range(0, total, step))
    else:
        yield from data if size is None else _rebatch(data, size)


def _rebatch(batches: Iterable[Any], size: int) -> Iterator[Any]:
    held: list[Any] = []
    num_held = 0
    for batch in batches:
        num, start = size_of(batch), 0
        while num_held + num - start >= size:
            stop = start + size - num_held
            yield _concatenate([*held, cut(batch, start, stop)])
            held, num_held, start = [], 0, stop
        if start < num:
            held.append(cut(batch, start, num))
            num_held += num - start
    if held:
        yield _concatenate(held)


def _rebatch_whole(batches: Iterable[Any], size: int, whole: str) -> Iterator[Any]:
    """Yield batches of whole groups: batch s has those that end in [s * size, (s + 1) * size)."""
    held: list[Any] = []
    # Positions among all samples: the first held one, after the last held one, the end of the batch's range.
    start, num_read, stop = 0, 0, size
    rest = iter(batches)
    batch = next(rest, None)
    while batch is not None:
        following = next(rest, None)
        is_last = following is None
        held.append(batch)
        num_read += size_of(batch)
        batch = following
        if num_read <= stop and not is_last:
            continue
        joined = _concatenate(held)
        groups_B = _group_column(joined, whole)
        ends_G = start + group_ends(groups_B)
        sizes_G = np.diff(ends_G - start, prepend=0)
        if (largest := int(sizes_G.max(initial=0))) > size:
            group = groups_B[ends_G[sizes_G.argmax()] - start - 1]
            raise DataError(
                f"group {group} has {largest} samples, more than a batch of {size}: give a larger size"
            )
        first = start
        while stop < num_read or (is_last and start < num_read):
            # The last group may go on in the next batch, but not if a range ends before the group does.
            end = last_end(ends_G, stop)
            yield cut(joined, start - first, end - first)
            start, stop = end, stop + size
        held = [cut(joined, start - first, num_read - first)]


def _group_column(batch: Any, whole: str) -> npt.NDArray[np.generic]:
    """Return the group of each sample; DataError if the batch has no such column."""
    column = batch.get(whole) if isinstance(batch, Mapping) else None
    if not isinstance(column, Tensor) or column.dim() != 1:
        raise DataError(f"whole = {whole!r} must name a column of every batch with one number per sample")
    groups_B: npt.NDArray[np.generic] = column.cpu().numpy()
    return groups_B


def size_of(batch: Any) -> int:
    """Return the number of samples in a batch.

    Raises:
        DataError: the batch has no tensors, or their numbers of samples differ.
    """
    columns = _columns(batch)
    sizes = [len(c.offsets) - 1 if isinstance(c, Jagged) else len(c) for _, c in columns]
    if not sizes:
        raise DataError("a batch has no tensors")
    if len(set(sizes)) > 1:
        counts = ", ".join(f"{path}: {size}" for (path, _), size in zip(columns, sizes, strict=True))
        raise DataError(
            f"the tensors of a batch have different numbers of samples ({counts}). Their first dimension is "
            "the sample; give a column of any number of values per sample as hybrid.Jagged(values, offsets)"
        )
    return sizes[0]


def cut(batch: Any, start: int, stop: int) -> Any:
    """Return the samples from ``start`` to ``stop`` of a batch."""
    return _map_columns(
        batch,
        lambda column, _: column.samples(start, stop) if isinstance(column, Jagged) else column[start:stop],
    )


def checksum(batch: Any) -> int:
    """Return a checksum of the bytes of a batch's tensors."""
    total = 0
    for tensor in tensors_of(batch):
        total = zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, total)
    return total


def _concatenate(batches: Sequence[Any]) -> Any:
    """Return the samples of several batches of one structure as one batch."""
    if len(batches) == 1:
        return batches[0]
    columns = [[column for _, column in _columns(batch)] for batch in batches]
    if len({len(each) for each in columns}) != 1:
        raise DataError("batches of different structures cannot be joined into batches of another size")
    joined = iter([_concatenate_column(chunks) for chunks in zip(*columns, strict=True)])
    return _map_columns(batches[0], lambda *_: next(joined))


def _concatenate_column(chunks: Sequence[Any]) -> Any:
    if isinstance(chunks[0], Tensor):
        return torch.cat(list(chunks))
    if isinstance(chunks[0], Jagged):
        lengths = torch.cat([each.lengths for each in chunks])
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return Jagged(torch.cat([each.values for each in chunks]), offsets)
    return [value for each in chunks for value in each]


def _columns(batch: Any) -> list[tuple[str, Any]]:
    """Return the columns of a batch, each with its path of keys."""
    columns: list[tuple[str, Any]] = []
    _map_columns(batch, lambda column, path: columns.append((path, column)))
    return columns


def _map_columns(batch: Any, function: Callable[[Any, str], Any], path: str = "") -> Any:
    """Return a structure of the same form with ``function`` of each column and its path of keys.

    A column is a tensor, a :class:`Jagged`, or a list of other values, such as texts from a DataLoader.
    """
    if isinstance(batch, Tensor | Jagged):
        return function(batch, path)

    def mapped(key: object, value: Any) -> Any:
        return _map_columns(value, function, f"{path}[{key!r}]" if path else repr(key))

    if isinstance(batch, Mapping):
        return {name: mapped(name, value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(index, value) for index, value in enumerate(batch)))
    if isinstance(batch, list | tuple) and any(
        isinstance(each, Tensor | Mapping | list | tuple) for each in batch
    ):
        return type(batch)(mapped(index, value) for index, value in enumerate(batch))
    if isinstance(batch, list):
        return function(batch, path)
    raise DataError(f"a batch has a {type(batch).__name__} at {path or 'its top'}, where a tensor must be")
