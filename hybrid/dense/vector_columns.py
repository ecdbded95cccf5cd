"""The layout of embedding vectors in the sparse input of a net.

Most columns have one vector. A sequence (``columns.NAME.pooling = "none"``) has ``max_ids`` vectors, and then
the number of its ids. Missing vectors are zeros. Example with vectors of 2 values, 2 ids, ``max_ids = 3``::

    pooled_BE    [ user: x x | history: x x | x x | 0 0 | 2.0 | item: x x ]
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from hybrid.config import ColumnSection, RunConfig
from hybrid.config.data_sections import UNPOOLED, sequence_length
from hybrid.errors import ConfigError
from hybrid.input_spec import InputSpec


class ColumnVector(nn.Module):
    """Selects the vector of one column in ``pooled_BE``, and returns it as ``vector_BD``."""

    def __init__(self, start: int, dim: int) -> None:
        super().__init__()
        self.start = start
        self.dim = dim

    def forward(self, pooled_BE: Tensor) -> Tensor:
        return pooled_BE.narrow(1, self.start, self.dim)


class ColumnSequence(nn.Module):
    """Selects the vectors of a sequence in ``pooled_BE``, and returns ``(vectors_BND, is_item_BN)``.

    N is ``max_ids``. After the last id of a sample, vectors are zeros and ``is_item_BN`` is False.
    """

    positions_N: Tensor

    def __init__(self, start: int, dim: int, length: int) -> None:
        super().__init__()
        self.start = start
        self.dim = dim
        self.length = length
        self.register_buffer("positions_N", torch.arange(length), persistent=False)

    def forward(self, pooled_BE: Tensor) -> tuple[Tensor, Tensor]:
        values_BH = pooled_BE.narrow(1, self.start, self.length * self.dim)
        lengths_B1 = pooled_BE.narrow(1, self.start + self.length * self.dim, 1)
        vectors_BND = values_BH.view(pooled_BE.size(0), self.length, self.dim)
        return vectors_BND, self.positions_N < lengths_B1


class ColumnLayout:
    """The positions of the columns of ``data.sparse`` in the sparse input of a net.

    Args:
        config, input_spec, widths: see :func:`hybrid.dense.net_builder.build_dense_net`.

    Attributes:
        widths: the width of each vector. A sequence has ``max_ids`` vectors.
    """

    def __init__(self, config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> None:
        names = [feature.name for feature in input_spec.sparse_features]
        sections = {name: config.columns.get(name, ColumnSection()) for name in names}
        self._lengths = {name: sequence_length(name, section) for name, section in sections.items()}
        self._starts = dict(zip(names, accumulate(widths, initial=0), strict=False))
        self._dims = {
            name: (width - 1) // length if (length := self._lengths[name]) else width
            for name, width in zip(names, widths, strict=True)
        }
        self.widths = [self._dims[name] for name in names for _ in range(self._lengths[name] or 1)]

    def vector(self, name: str) -> ColumnVector:
        """Return the selector of a column's vector; raise ConfigError for a missing column or a sequence."""
        self._check(name, is_sequence=False)
        return ColumnVector(self._starts[name], self._dims[name])

    def sequence(self, name: str) -> ColumnSequence:
        """Return the selector of a sequence's vectors; raise ConfigError if there is no such sequence."""
        self._check(name, is_sequence=True)
        return ColumnSequence(self._starts[name], self._dims[name], self._lengths[name])

    def _check(self, name: str, *, is_sequence: bool) -> None:
        if name not in self._lengths:
            raise ConfigError("data.sparse", f"must name {name}, which the net takes", tuple(self._lengths))
        if is_sequence != bool(self._lengths[name]):
            rule = f"must be {UNPOOLED}" if is_sequence else f"must not be {UNPOOLED}"
            what = "a sequence" if is_sequence else "one vector"
            raise ConfigError(f"columns.{name}.pooling", f"{rule}, since the net takes the column as {what}")

    def without_lengths(self, interaction: nn.Module) -> nn.Module:
        """Return a module that removes the number of ids of each sequence, then calls ``interaction``."""
        if not any(self._lengths.values()):
            return interaction
        kept = [
            self._starts[name] + value
            for name, length in self._lengths.items()
            for value in range((length or 1) * self._dims[name])
        ]
        return _WithoutLengths(interaction, kept)


class _WithoutLengths(nn.Module):
    kept_H: Tensor

    def __init__(self, interaction: nn.Module, kept: Sequence[int]) -> None:
        super().__init__()
        self.interaction = interaction
        self.register_buffer("kept_H", torch.tensor(kept), persistent=False)

    def forward(self, bottom_BH: Tensor, pooled_BE: Tensor) -> Tensor:
        hidden_BH: Tensor = self.interaction(bottom_BH, pooled_BE.index_select(1, self.kept_H))
        return hidden_BH
