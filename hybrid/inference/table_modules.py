"""Tables of a checkpoint as modules: growing tables in memory, and tables of any kind in mapped files.

For a key without a row, a growing table returns the initial row or zeros, as ``Growth.unknown`` says.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hybrid.checkpoint.tensor_file import expect_random_reads
from hybrid.embedding.initial_rows import random_salt
from hybrid.embedding.table_spec import TableSpec
from hybrid.primitives.bfloat16_arrays import assign_rows, to_floats
from hybrid.primitives.key_hashes import NUM_BUCKETS, bucket_of

# The arrays of each file of a table, from :meth:`Checkpoint.map_rows` or :func:`map_keys`.
Shards: TypeAlias = Sequence[Mapping[str, npt.NDArray[Any]]]
ReadRows: TypeAlias = Callable[[npt.NDArray[np.int64]], Mapping[str, npt.NDArray[Any]]]


def _signed(number: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return (number ^ 2**63) - 2**63


_SIGN = -(2**63)  # after ``key ^ _SIGN``, signed comparison orders keys as unsigned numbers
_STEP = _signed(0x9E3779B97F4A7C15)  # the constants of SplitMix64


class GrowingTable(nn.Module):
    """A growing table in memory, of N rows.

    Attributes:
        weight: the N rows, followed by a row of zeros, (N + 1, D).
    """

    ordered_keys: Tensor  # int64 (N + 1,): ``key ^ _SIGN`` of each row, ascending; then a 0

    def __init__(self, table: TableSpec, seed: int, shards: Shards, dtype: torch.dtype) -> None:
        super().__init__()
        self._table, self._seed = table, seed
        keys_N = torch.from_numpy(np.concatenate([shard["keys"] for shard in shards]))
        self.register_buffer("ordered_keys", torch.cat([keys_N ^ _SIGN, keys_N.new_zeros(1)]))
        self.weight = nn.Parameter(torch.zeros(len(keys_N) + 1, table.dim, dtype=dtype))
        start = 0
        for shard in shards:
            end = start + len(shard["weight"])
            assign_rows(self.weight.detach(), slice(start, end), shard["weight"])
            start = end

    @property
    def keys(self) -> Tensor:
        """The keys of the rows, int64, ascending as unsigned numbers."""
        return self.ordered_keys[:-1] ^ _SIGN

    def update(self, keys_U: Tensor, rows_UD: Tensor, evicted_E: Tensor) -> None:
        """Replace or add the rows of ``keys_U``, and remove the rows of ``evicted_E`` that exist."""
        weight = self.weight.detach()
        ordered_N, ordered_U = self.ordered_keys[:-1], keys_U ^ _SIGN
        row_U = torch.searchsorted(ordered_N, ordered_U)
        is_new_U = (self.ordered_keys[row_U] != ordered_U) | (row_U == len(ordered_N))
        weight[row_U[~is_new_U]] = rows_UD[~is_new_U].to(weight.dtype)
        is_kept_N = ~torch.isin(ordered_N, evicted_E ^ _SIGN)
        if is_kept_N.all() and not is_new_U.any():
            return
        keys_N = torch.cat([ordered_N[is_kept_N], ordered_U[is_new_U]])
        weight_ND = torch.cat([weight[:-1][is_kept_N], rows_UD[is_new_U].to(weight.dtype)])
        order_N = keys_N.argsort()
        self.ordered_keys = torch.cat([keys_N[order_N], keys_N.new_zeros(1)])
        self.weight = nn.Parameter(torch.cat([weight_ND[order_N], weight.new_zeros(1, weight.shape[1])]))

    def forward(self, keys_L: Tensor) -> Tensor:
        """Return vectors (keys, D), with operators that torch can export."""
        num_rows, ordered_L = self.ordered_keys.shape[0] - 1, keys_L ^ _SIGN
        row_L = torch.searchsorted(self.ordered_keys[:num_rows], ordered_L)
        is_known_L = (self.ordered_keys[row_L] == ordered_L) & (row_L < num_rows)
        vectors_LD = self.weight[torch.where(is_known_L, row_L, num_rows)]
        if _has_zeros(self._table):
            return vectors_LD
        unknown_U = (~is_known_L).nonzero().squeeze(1)
        initial_UD = initial_rows(keys_L[unknown_U], self._table, self._seed)
        return vectors_LD.index_put((unknown_U,), initial_UD.to(vectors_LD.dtype))


class MappedTable(nn.Module):
    """A table in memory-mapped shards, which may be larger than memory; a batch reads only its rows.

    Args:
        read: function from row numbers, or keys of a growing table, to a dict with the rows as "weight".
        dtype: data type of the vectors; the method ``to`` of the module changes it.
    """

    empty: Tensor

    def __init__(self, read: ReadRows, shards: Shards, dtype: torch.dtype) -> None:
        super().__init__()
        self.shards, self._read = shards, read
        for shard in shards:
            expect_random_reads(shard["weight"])
        self.register_buffer("empty", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def keys(self) -> Tensor:
        """The keys of a growing table, int64, ascending as unsigned numbers; read into memory."""
        return torch.from_numpy(np.concatenate([shard["keys"] for shard in self.shards]))

    def forward(self, ids_L: Tensor) -> Tensor:
        """Return vectors (ids, D); the ids of a growing table are keys."""
        return torch.from_numpy(self._read(ids_L.numpy())["weight"]).to(self.empty.dtype)


def read_by_key(
    keys_L: npt.NDArray[np.int64], shards: Shards, table: TableSpec, seed: int
) -> dict[str, npt.NDArray[Any]]:
    """Return a dict with the vectors of keys as "weight", (keys, D), from shards of a growing table."""
    unsigned_U, inverse_L = np.unique(keys_L.view(np.uint64), return_inverse=True)
    keys_U = unsigned_U.view(np.int64)  # in the order of the shards
    vectors_UD = np.zeros((len(keys_U), table.dim), to_floats(shards[0]["weight"][:0]).dtype)
    if not _has_zeros(table):
        vectors_UD[:] = initial_rows(torch.from_numpy(keys_U), table, seed).double().numpy()
    firsts = np.searchsorted(bucket_of(keys_U) * len(shards) // NUM_BUCKETS, np.arange(len(shards) + 1))
    for index in np.flatnonzero(np.diff(firsts)).tolist():
        own, shard = slice(firsts[index], firsts[index + 1]), shards[index]
        keys_N, own_U = shard["keys"].view(np.uint64), unsigned_U[own]
        if len(keys_N):
            rows_U = np.minimum(np.searchsorted(keys_N, own_U), len(keys_N) - 1)
            known = np.flatnonzero(keys_N[rows_U] == own_U)
            vectors_UD[own][known] = to_floats(shard["weight"][rows_U[known]])
    return {"weight": vectors_UD[inverse_L]}


def _has_zeros(table: TableSpec) -> bool:
    return table.init == "zeros" or (table.growth is not None and table.growth.unknown == "zeros")


def initial_rows(keys_U: Tensor, table: TableSpec, seed: int) -> Tensor:
    """Compute the initial rows of keys as workers do, but with operators that torch can export."""
    counter_UD = keys_U.unsqueeze(1) * table.dim + torch.arange(table.dim)
    hashes_UD = hash_ids((counter_UD + _signed(random_salt(seed, table.name))) * _STEP)
    values_UD = _shift(hashes_UD, 40).to(torch.float32) * 2**-24
    if table.init == "normal":
        values_UD = torch.special.ndtri(values_UD.double() + 2**-25)
    else:
        values_UD = values_UD * 2 - 1
    values_UD = values_UD * table.init_scale
    return values_UD.to(torch.bfloat16) if table.has_bfloat16_rows else values_UD


def hash_ids(ids: Tensor) -> Tensor:
    """Return the key of each int64 id, as :func:`hybrid.primitives.key_hashes.next_random` does."""
    x = ids + _STEP
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted
