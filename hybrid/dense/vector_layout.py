"""Where the vectors of each column lie among all that a net gets of a sample.

Of most columns that is one vector. Of a sequence (``columns.NAME.pooling = "none"``) it is as many as it may
have, zeros after its last one, and then how many it has::

    pooled_BE    [ user, 2 values | history, up to 3 of 2 values:  x x | x x | 0 0 | 2.0 | item, 2 values ]
"""

# No postponed annotations here: TorchScript checks those of buffers, as types.

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from hybrid.config import ColumnSection, RunConfig
from hybrid.config.data_sections import UNPOOLED
from hybrid.config.resolved_columns import sequence_length
from hybrid.errors import ConfigError
from hybrid.input_spec import InputSpec


class ColumnVector(nn.Module):
    """Takes the vector of one column out of those of all: ``vector_BD``."""

    def __init__(self, start: int, dim: int) -> None:
        super().__init__()
        self.start = start
        self.dim = dim

    def forward(self, pooled_BE: Tensor) -> Tensor:
        return pooled_BE.narrow(1, self.start, self.dim)


class ColumnSequence(nn.Module):
    """Takes the vectors of a sequence of up to N ids out of those of all.

    It gives ``(vectors_BND, is_there_BN)``: zeros, and False, after the last of each sample.
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


class VectorPlaces:
    """The columns of ``data.sparse``, as a net gets them.

    Args:
        config, input_spec, widths: by which the net is built.

    Attributes:
        widths: of each vector, those of a sequence one by one.
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
        """What takes the vector of a column; ConfigError where there is none, or it is a sequence."""
        self._check(name, is_sequence=False)
        return ColumnVector(self._starts[name], self._dims[name])

    def sequence(self, name: str) -> ColumnSequence:
        """What takes the vectors of a sequence; ConfigError where there is none."""
        self._check(name, is_sequence=True)
        return ColumnSequence(self._starts[name], self._dims[name], self._lengths[name])

    def _check(self, name: str, *, is_sequence: bool) -> None:
        if name not in self._lengths:
            raise ConfigError("data.sparse", f"must name {name}, which the net takes", tuple(self._lengths))
        if is_sequence != bool(self._lengths[name]):
            rule = f"must be {UNPOOLED}" if is_sequence else f"must not be {UNPOOLED}"
            what = "a sequence" if is_sequence else "one vector"
            raise ConfigError(f"columns.{name}.pooling", f"{rule}, since the net takes the column as {what}")

    def of_vectors(self, interaction: nn.Module) -> nn.Module:
        """An interaction that is given all vectors, and of a sequence not their number."""
        if not any(self._lengths.values()):
            return interaction
        kept = [
            self._starts[name] + value
            for name, length in self._lengths.items()
            for value in range((length or 1) * self._dims[name])
        ]
        return _OfVectors(interaction, kept)


class _OfVectors(nn.Module):
    """An interaction that is given some columns of ``pooled_BE``."""

    kept_H: Tensor

    def __init__(self, interaction: nn.Module, kept: Sequence[int]) -> None:
        super().__init__()
        self.interaction = interaction
        self.register_buffer("kept_H", torch.tensor(kept), persistent=False)

    def forward(self, bottom_BH: Tensor, pooled_BE: Tensor) -> Tensor:
        hidden_BH: Tensor = self.interaction(bottom_BH, pooled_BE.index_select(1, self.kept_H))
        return hidden_BH
