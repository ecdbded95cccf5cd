"""A trained model as a plain module in this process, tables and all."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.checkpoint.checkpoint_files import DENSE_FILE
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.dense_state import load_state, unpack_dense
from hybrid.custom_loop.embedding_modules import TableModule, plain_copy
from hybrid.custom_loop.jagged import Jagged
from hybrid.custom_loop.prepared_batches import DENSE, features_of
from hybrid.dense.matmul import use_torch
from hybrid.embedding.table_spec import Pooling, tables_of
from hybrid.errors import CheckpointError, ConfigError
from hybrid.inference.mapped_table import MappedTable
from hybrid.inference.model_outputs import predictions
from hybrid.inference.pooling import pooled, sequences
from hybrid.inference.raw_rows import table_batch
from hybrid.inference.trained_run import Trained
from hybrid.metrics import Predictions
from hybrid.storage.remote_path import StoragePath, parse_path

# End the names of tensors beside the ids of a column.
OFFSETS, WEIGHTS = ".offsets", ".weights"
SAMPLES, STARTS = "samples", "samples + 1"  # sizes that differ from batch to batch


@overload
def load(folder: str | StoragePath, *, trust_code: bool = False) -> TrainedModule: ...


@overload
def load(folder: str | StoragePath, module: nn.Module, *, trust_code: bool = False) -> nn.Module: ...


def load(
    folder: str | StoragePath, module: nn.Module | None = None, *, trust_code: bool = False
) -> nn.Module:
    """A trained model as a plain module in this process, its tables among its parameters.

    Args:
        folder: a run, of whose checkpoints the best is taken; or a checkpoint.
        module: for what a loop of your own has saved: the module, built as there. It takes the parameters of
            the checkpoint; what is returned is a copy with ``nn.Embedding`` and ``nn.EmbeddingBag``.
        trust_code: whether code that a run names (``dense.net``) may be run though you have not signed it.

    Returns:
        A :class:`TrainedModule`, or the copy of ``module``; to predict (``eval()``).

    Raises:
        CheckpointError: there is none, or it is damaged, or of another module.
        ConfigError: it names code that may not be run.
    """
    if module is not None:
        return _own(Checkpoint.best_valid(parse_path(folder), warnings.warn), module)
    return TrainedModule(Trained.read(parse_path(folder), warnings.warn, trust_code))


def _own(stored: Checkpoint, module: nn.Module) -> nn.Module:
    names = {id(each): name for name, each in module.named_modules() if isinstance(each, TableModule)}
    if set(names.values()) != stored.manifest.tables.keys():
        known = ", ".join(sorted(names.values())) or "no table"
        there = ", ".join(sorted(stored.manifest.tables))
        raise CheckpointError(
            f"{stored.folder}: is of another module: it has {there}, {type(module).__name__} has {known}"
        )

    def rows_of(table: TableModule) -> Tensor:
        return stored.read_rows(names[id(table)], (table.num_embeddings, table.embedding_dim))

    load_state(module, unpack_dense(stored.tensors(DENSE_FILE))[0], stored.folder)
    return plain_copy(module, rows_of).eval()


class Input(NamedTuple):
    """A plain tensor of a batch.

    Attributes:
        name: in the batch.
        dtype: of its values.
        shape: its sizes; a name for the first, which differs from batch to batch: :data:`SAMPLES`,
            :data:`STARTS`, or the ids of a column.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Feature:
    """A categorical column: its name, the place of its table, and how its rows become a vector, or of how
    many at most they are a sequence."""

    name: str
    table: int
    is_multi_hot: bool
    is_weighted: bool
    pooling: Pooling
    sequence: int

    @property
    def inputs(self) -> list[Input]:
        """What there is of it in a batch."""
        if not self.is_multi_hot:
            return [Input(self.name, torch.int64, (SAMPLES,))]
        ids = (f"ids of {self.name}",)
        weights = [Input(self.name + WEIGHTS, torch.float32, ids)] if self.is_weighted else []
        starts = Input(self.name + OFFSETS, torch.int64, (STARTS,))
        return [Input(self.name, torch.int64, ids), *weights, starts]


class TrainedModule(nn.Module):
    """A configured run's model, tables and all.

    It takes a batch as a dict: ``dense``, (samples, numeric columns), and for each categorical column, under
    its name, ids: (samples,), or a :class:`hybrid.Jagged` where a sample may have any number. In place of
    that, the ids of all samples under its name and int64 (samples + 1), where those of each start, under
    ``NAME.offsets``. The weights of ids are ``NAME.weights``, in the same form as these. These are numbers,
    scaled as in training, and rows of tables: :meth:`encode` makes them of raw values.

    It gives what ``hybrid predict`` writes, as a dict: ``probability``, (samples,), or (samples, classes);
    of a regression ``value``. Where there are several tasks, the names begin with theirs:
    ``click.probability``.

    Args:
        trained: what it is read out of. Its tables need memory for all of their rows.

    Raises:
        ConfigError: two of its inputs would have the same name.

    Attributes:
        trained: the same; ``trained.origin`` says which checkpoint it is.
        inputs: the plain tensors that make a batch, in their order.
        tables: one module a table, which gives vectors for ids.
        table_names: of these.
        num_dense: how many numeric columns there are.
        dtype: of its nets, and of what it gives.
        autocast: lower precision in which the nets compute where that is safe, or None.
    """

    def __init__(self, trained: Trained, *, in_memory: bool = True) -> None:
        super().__init__()
        self.trained = trained
        blueprint = trained.blueprint
        self.net, self.remote_net = trained.nets()
        for net in (self.net, self.remote_net):
            if net is not None:
                use_torch(net)  # so that what is exported runs without this package
        names = [table.name for table in blueprint.tables]
        self.tables = nn.ModuleList()
        for table in blueprint.tables:
            shape = table.num_rows, table.dim
            if in_memory:
                rows_RD = trained.stored.read_rows(table.name, shape).to(blueprint.dtype)
                self.tables.append(nn.Embedding.from_pretrained(rows_RD, freeze=False))
            else:
                shards = trained.stored.map_rows(table.name, *shape)
                self.tables.append(MappedTable(shards, blueprint.dtype))
        self.table_names = tuple(names)
        spec = blueprint.input_spec
        self.num_dense = len(spec.dense_features)
        self._features = [
            _Feature(
                feature.name,
                names.index(table.name),
                feature.multi_hot,
                feature.weighted,
                table.pooling,
                table.sequence,
            )
            for feature, table in zip(spec.sparse_features, tables_of(spec, blueprint.tables), strict=True)
        ]
        self.inputs = self._inputs()
        self._tasks = trained.config.all_tasks
        num_outputs = trained.config.num_outputs
        self._shape = (-1,) if num_outputs == 1 else (-1, num_outputs)
        self.dtype = blueprint.dtype
        precision = trained.config.dense.autocast
        self.autocast: torch.dtype | None = None if precision == "none" else getattr(torch, precision)
        self.eval()

    def _inputs(self) -> tuple[Input, ...]:
        found = [Input(DENSE, torch.float32, (SAMPLES, self.num_dense))] if self.num_dense else []
        found += [each for feature in self._features for each in feature.inputs]
        names = [each.name for each in found]
        if taken := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError("data.sparse", "makes several inputs of one name; rename a column", taken)
        return tuple(found)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Of ``inputs``."""
        return tuple(each.name for each in self.inputs)

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Predictions by name."""
        return predictions(self._tasks, self.outputs(batch))

    def outputs(self, batch: Mapping[str, Any]) -> Tensor:
        """``outputs_BO`` of the dense net; ``outputs_B`` where there is one of a sample."""
        pooled_BE = torch.cat([self._vectors(feature, batch) for feature in self._features], dim=1)
        dense_BF = batch[DENSE] if self.num_dense else pooled_BE.new_empty(pooled_BE.shape[0], 0)
        dense_BF = dense_BF.to(self.dtype)
        with self._precision(pooled_BE.device):
            hidden_BH = self.net.interaction(self.net.bottom(dense_BF), pooled_BE)
        if self.remote_net is not None:
            hidden_BH = self.remote_net(hidden_BH.to(self.dtype))
        with self._precision(pooled_BE.device):
            outputs_BO: Tensor = self.net.head(hidden_BH).view(self._shape)
        return outputs_BO.to(self.dtype)

    def rows(self, table: str) -> Tensor:
        """All rows of a table, (rows, D)."""
        module = self.tables[self.table_names.index(table)]
        assert isinstance(module, nn.Embedding)
        return module.weight

    def encode(self, columns: Any) -> dict[str, Tensor]:
        """A batch of raw values, as they stand in files.

        Args:
            columns: lists or arrays by column, a pyarrow table, or a data frame of pandas. Where a sample
                may have any number of values, they are a list; ids with weights are text, as in files, or
                lists of it, or a map or pairs of pyarrow.

        Raises:
            ConfigError: a column of the model is missing.
            DataError: a value cannot be used; names it and its row.
        """
        features = features_of(table_batch(self.trained, columns), self.trained.encoder.input_spec)
        batch = {DENSE: features[DENSE]} if self.num_dense else {}
        for feature in self._features:
            values = features[feature.name]
            if not feature.is_multi_hot:
                batch[feature.name] = values
                continue
            batch |= {feature.name: values.values, feature.name + OFFSETS: values.offsets}
            if feature.is_weighted:
                batch[feature.name + WEIGHTS] = features[feature.name + WEIGHTS].values
        return batch

    def predict(self, batch: Batch) -> Predictions:
        """Compute the outputs for a batch of any size, the same for equal samples, without gradients."""
        spec, size = self.trained.encoder.input_spec, self.trained.config.train.batch_size
        chunks = batch.split(max(1, -(-len(batch.labels) // size)))
        with torch.no_grad():
            outputs_BO = torch.cat([self.outputs(features_of(chunk, spec)) for chunk in chunks])
        return Predictions.of(batch, outputs_BO, self.trained.blueprint.sequences).tied()

    def _vectors(self, feature: _Feature, batch: Mapping[str, Any]) -> Tensor:
        given, offsets = batch[feature.name], batch.get(feature.name + OFFSETS)
        if isinstance(given, Jagged):
            given, offsets = given
        rows_LD: Tensor = self.tables[feature.table](given).to(self.dtype)
        if feature.is_weighted:
            weights = batch[feature.name + WEIGHTS]
            weights_L = weights.values if isinstance(weights, Jagged) else weights
            rows_LD = rows_LD * weights_L.unsqueeze(1).to(rows_LD)
        if offsets is None:
            return rows_LD
        if feature.sequence:
            return sequences(rows_LD, offsets, feature.sequence)
        return pooled(rows_LD, offsets, feature.pooling)

    def _precision(self, device: torch.device) -> AbstractContextManager[object]:
        return nullcontext() if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)
