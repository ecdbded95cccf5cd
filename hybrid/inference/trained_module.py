"""A trained model as a plain module in this process, with its tables."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from hybrid.batch import Batch, split_outputs
from hybrid.checkpoint.checkpoint_folders import DENSE_FILE, REMOTE_FILE
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.stored_keys import map_keys
from hybrid.checkpoint.tensor_file import load_state, unpack_dense
from hybrid.config import TaskSection
from hybrid.config.loading import CONFIG_FILE
from hybrid.config.task_sections import metric_name
from hybrid.custom_loop.embedding_modules import Jagged, TableModule, plain_copy
from hybrid.custom_loop.local_batches import DENSE, features_of
from hybrid.dense.matmul import use_torch
from hybrid.embedding.table_spec import Pooling, TableSpec, tables_of
from hybrid.errors import CheckpointError, ConfigError
from hybrid.inference.raw_rows import table_batch
from hybrid.inference.table_modules import GrowingTable, MappedTable, read_by_key
from hybrid.inference.trained_run import TrainedRun
from hybrid.input_spec import FeatureSpec
from hybrid.metrics import Predictions, compute_predictions
from hybrid.primitives.bfloat16_arrays import to_floats
from hybrid.storage.remote_path import StoragePath, parse_path
from hybrid.user_code.run_signature import load_run_config

OFFSETS, WEIGHTS = ".offsets", ".weights"  # suffixes of the names of tensors
SAMPLES, STARTS = "samples", "samples + 1"  # sizes of samples, and of offsets of bags


@overload
def load(folder: str | StoragePath, *, trust_code: bool = False) -> TrainedModule: ...


@overload
def load(folder: str | StoragePath, module: nn.Module, *, trust_code: bool = False) -> nn.Module: ...


def load(
    folder: str | StoragePath, module: nn.Module | None = None, *, trust_code: bool = False
) -> nn.Module:
    """Load a trained model as a plain module for inference.

    Tables are parameters in memory. The exception is an export that is loaded without ``module``: its tables
    stay in files, which are mapped into memory, so they may be larger than the memory.

    Args:
        folder: a run, of which the best checkpoint is used, a checkpoint, an export with tables, or the
            output of ``hybrid export --follow``.
        module: only for a checkpoint of a custom training loop: the module, built as in the loop. The
            trained parameters are loaded into it.
        trust_code: whether user code of a configured run (a net, loss or metric) may be executed if you have
            not signed it.

    Returns:
        A ``TrainedModule`` in evaluation mode. With ``module``, a copy of ``module`` in evaluation mode, with
        ``nn.Embedding`` or ``nn.EmbeddingBag`` for each fixed table, and for each growing table a module that
        is called with the same arguments.

    Raises:
        CheckpointError, DataError: there is no checkpoint, or it is damaged, or of another module or version.
        ConfigError: the run names code that may not be executed, or that fails.
        StorageError: the store refuses a request.
    """
    if module is None:
        trained = TrainedRun.read(parse_path(folder), warnings.warn, trust_code)
        return ConfiguredModule(trained, in_memory=not trained.stored.is_exported)
    stored = Checkpoint.best_valid(parse_path(folder), warnings.warn)
    names = {table: name for name, table in load_parameters(module, stored).items()}

    def rows_of(table: TableModule) -> Tensor | nn.Module:
        if table.growth is None:
            rows_RD = stored.read_rows(names[table], (table.num_embeddings, table.embedding_dim))
            return rows_RD.float() if rows_RD.dtype is torch.bfloat16 else rows_RD
        from hybrid.inference.custom_module import StoredTable  # custom_module imports this module

        seed = load_run_config(stored.files_folder / CONFIG_FILE, trust_code=trust_code).run.seed
        shards = [*map_keys(stored, names[table], {"weight": (table.embedding_dim,)})]
        dtype: torch.dtype = getattr(torch, to_floats(shards[0]["weight"][:0]).dtype.name)
        rows = GrowingTable(table.spec(names[table], dtype.itemsize), seed, shards, dtype)
        return StoredTable(table, rows, dtype)

    return plain_copy(module, rows_of).eval()


def load_parameters(module: nn.Module, stored: Checkpoint) -> dict[str, TableModule]:
    """Load the dense parameters of a checkpoint into ``module``; return the tables in ``module`` by name.

    The tables are not loaded. Raise CheckpointError if the checkpoint is of another module.
    """
    tables = {name: each for name, each in module.named_modules() if isinstance(each, TableModule)}
    if tables.keys() != stored.manifest.tables.keys():
        expected = ", ".join(sorted(tables)) or "no tables"
        known = ", ".join(sorted(stored.manifest.tables))
        rule = f"is of another module: the checkpoint has {known}, {type(module).__name__} has {expected}"
        raise CheckpointError(f"{stored.folder}: {rule}")
    load_state(module, unpack_dense(stored.tensors(DENSE_FILE))[0], stored.folder)
    return tables


class Input(NamedTuple):
    """Name, data type and shape of a plain tensor in a batch."""

    name: str
    dtype: torch.dtype
    # The first size depends on the batch. It is a name: SAMPLES, STARTS, or "ids of COLUMN".
    shape: tuple[Any, ...]


class TrainedModule(nn.Module):
    """A trained model with its tables, of a configured run or of a custom training loop.

    The argument is a batch, a dict that :meth:`encode` makes of raw values:

    - ``dense``: the numeric columns, (samples, columns).
    - ``NAME`` of a categorical column: its ids, (samples,). If samples have any number of ids, the value is a
      :class:`hybrid.Jagged`, or a tensor of all samples' ids. With such a tensor, int64 ``NAME.offsets``
      (samples + 1) has the start of each sample's ids, and the end.
    - ``NAME.weights``: the weights of the ids, a Jagged or a tensor like the ids, with the same offsets.

    The result is a dict: ``probability`` of shape (samples,) or (samples, classes), or ``value`` for a
    regression. With several tasks, names start with the task, as in ``click.probability``. For retrieval, the
    dict has ``score`` (samples,), and ``user_vector`` and ``item_vector`` (samples, D).

    Args:
        tables: the tables, with names as in the checkpoint.
        sequences: indices of the sparse columns that may be sequences, in which the order of ids matters.
        in_memory: whether tables are parameters in memory. Otherwise the rows are read from the files.

    Raises:
        ConfigError: two inputs would have the same name.

    Attributes:
        inputs: the plain tensors of a batch, in order.
        tables: one module per table, which returns vectors for ids, or for keys if the table grows.
        growing_tables: the names of the tables that grow.
        autocast: lower precision of the nets, as for ``torch.autocast``, or None.
        dense_states: the parameters of the dense nets, by the names of their files.
        step: number of steps after which the run had this model.
        taken_at: for :func:`hybrid.follow`, when this step had ended, in seconds since 1970; else NaN.
    """

    def __init__(
        self,
        trained: TrainedRun,
        tables: Sequence[TableSpec],
        sequences: Sequence[int],
        in_memory: bool = True,
    ) -> None:
        super().__init__()
        self.trained = trained
        self.step, self.taken_at = trained.stored.manifest.step, math.nan
        self.dtype: torch.dtype = getattr(torch, trained.config.train.dtype)
        self.tables = nn.ModuleList()
        stored, seed = trained.stored, trained.config.run.seed
        for table in tables:
            name, shape, dtype = table.name, (table.num_rows, table.dim), self.row_dtype(table)
            module: nn.Module
            if table.growth is not None:
                shards = [*map_keys(stored, name, {"weight": (table.dim,)})]
                read = partial(read_by_key, shards=shards, table=table, seed=seed)
                kind = partial(GrowingTable, table, seed) if in_memory else partial(MappedTable, read)
                module = kind(shards, dtype)
            elif in_memory:
                module = nn.Embedding.from_pretrained(stored.read_rows(name, shape).to(dtype), freeze=False)
            else:
                rows = stored.map_rows(name, *shape)
                module = MappedTable(rows.read, rows.shards, dtype)
            self.tables.append(module)
        self.table_specs = tuple(tables)
        self.table_names = tuple(table.name for table in tables)
        self.growing_tables = tuple(table.name for table in tables if table.growth is not None)
        self._sequences = sequences
        spec = trained.encoder.input_spec
        self.num_dense = len(spec.dense_features)
        inputs = [Input(DENSE, torch.float32, (SAMPLES, self.num_dense))] if self.num_dense else []
        for feature in spec.sparse_features:
            ids = (f"ids of {feature.name}",) if feature.multi_hot else (SAMPLES,)
            inputs.append(Input(feature.name, torch.int64, ids))
            if feature.weighted:
                inputs.append(Input(feature.name + WEIGHTS, torch.float32, ids))
            if feature.multi_hot:
                inputs.append(Input(feature.name + OFFSETS, torch.int64, (STARTS,)))
        self.input_names = names = tuple(each.name for each in inputs)
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError("data.sparse", "makes several inputs of one name; rename a column", repeated)
        self.inputs = tuple(inputs)
        self._tasks = trained.config.all_tasks
        num_outputs = trained.config.num_outputs
        self._output_shape = (-1,) if num_outputs == 1 else (-1, num_outputs)
        self.autocast: torch.dtype | None = None
        self.dense_states: dict[str, dict[str, Tensor]] = {}

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        columns = dict(batch)
        for feature in self.trained.encoder.sparse:
            if feature.multi_hot and isinstance(batch[feature.name], Tensor):
                weights = [feature.name + WEIGHTS] if feature.weighted else []
                for name in (feature.name, *weights):
                    columns[name] = Jagged(batch[name], batch[feature.name + OFFSETS])
        return predictions(self._tasks, self.outputs(columns))

    def outputs(self, columns: Mapping[str, Any]) -> Tensor:
        """Return the outputs for a batch, before sigmoid or softmax: (B, O), or (B,) if O = 1.

        Multi-hot ids in ``columns`` are of type :class:`hybrid.Jagged`.
        """
        raise NotImplementedError

    def rows(self, table: str) -> Tensor:
        """Return all rows of a table, (rows, D); if the table grows, in the order of :meth:`keys`."""
        index = self.table_names.index(table)
        module, spec = self.tables[index], self.table_specs[index]
        if isinstance(module, GrowingTable):
            return module.weight[:-1]
        if isinstance(module, nn.Embedding):
            return module.weight
        rows: Tensor = module(self.keys(table) if spec.growth else torch.arange(spec.num_rows))
        return rows

    def keys(self, table: str) -> Tensor:
        """Return the keys of all rows of a growing table, int64, ascending as unsigned numbers."""
        module = self.tables[self.table_names.index(table)]
        assert isinstance(module, GrowingTable | MappedTable)
        return module.keys

    def encode(self, columns: Any) -> dict[str, Tensor]:
        """Convert raw values, such as the training files contain, to a batch.

        Args:
            columns: a dict of lists or arrays, a pyarrow table, or a pandas data frame. A column with any
                number of values per sample has lists. Ids with weights are texts such as "7:0.5", lists of
                these texts, or maps or pairs of pyarrow.

        Raises:
            ConfigError: a column of the model is missing.
            DataError: a value is invalid, and the message names it and its row; or columns differ in length.
        """
        features = features_of(table_batch(self.trained, columns), self.trained.encoder.input_spec)
        tensors: dict[str, Tensor] = {}
        for name, values in features.items():
            if isinstance(values, Jagged):
                tensors |= {name: values.values, name + OFFSETS: values.offsets}
            else:
                tensors[name] = values
        return {name: tensors[name] for name in self.input_names}

    def row_dtype(self, table: TableSpec) -> torch.dtype:
        """Return the type of the rows of a table."""
        return torch.bfloat16 if table.has_bfloat16_rows else self.dtype

    def predict(self, batch: Batch) -> Predictions:
        """Compute the outputs for a batch of any size, without gradients."""
        spec, size = self.trained.encoder.input_spec, self.trained.config.train.batch_size
        chunks = batch.split(max(1, -(-len(batch.labels) // size)))
        with torch.no_grad():
            outputs_BO = torch.cat([self.outputs(features_of(chunk, spec)) for chunk in chunks])
        return Predictions.of(batch, outputs_BO, self._sequences)


class ConfiguredModule(TrainedModule):
    """The model of a configured run; see :class:`TrainedModule`."""

    def __init__(self, trained: TrainedRun, *, in_memory: bool = True) -> None:
        nets, blueprint = trained.nets(), trained.blueprint
        super().__init__(trained, blueprint.tables, blueprint.sequences, in_memory)
        self.net, self.remote_net = nets
        for net in (self.net, self.remote_net):
            if net is not None:
                use_torch(net)  # so that an exported program runs without this package
        named = zip((DENSE_FILE, REMOTE_FILE), nets, strict=True)
        self.dense_states = {name: net.state_dict() for name, net in named if net is not None}
        spec = blueprint.input_spec
        self._features = list(zip(spec.sparse_features, tables_of(spec, blueprint.tables), strict=True))
        precision = trained.config.dense.autocast
        self.autocast = None if precision == "none" else getattr(torch, precision)
        self.eval()

    def outputs(self, columns: Mapping[str, Any]) -> Tensor:
        pooled_BE = torch.cat([self._vectors(*each, columns) for each in self._features], dim=1)
        dense_BF = columns[DENSE] if self.num_dense else pooled_BE.new_empty(pooled_BE.shape[0], 0)
        dense_BF = dense_BF.to(self.dtype)
        with self._precision(pooled_BE.device):
            hidden_BH = self.net.interaction(self.net.bottom(dense_BF), pooled_BE)
        if self.remote_net is not None:
            hidden_BH = self.remote_net(hidden_BH.to(self.dtype))
        with self._precision(pooled_BE.device):
            outputs_BO: Tensor = self.net.head(hidden_BH).view(self._output_shape)
        return outputs_BO.to(self.dtype)

    def _vectors(self, feature: FeatureSpec, table: TableSpec, columns: Mapping[str, Any]) -> Tensor:
        ids = columns[feature.name]
        ids_L, offsets = ids if isinstance(ids, Jagged) else (ids, None)
        rows_LD: Tensor = self.tables[self.table_names.index(table.name)](ids_L).to(self.dtype)
        if feature.weighted:
            rows_LD = rows_LD * columns[feature.name + WEIGHTS].values.unsqueeze(1).to(rows_LD)
        if offsets is None:
            return rows_LD
        if table.sequence:
            return pad_sequences(rows_LD, offsets, table.sequence)
        return pool_bags(rows_LD, offsets, table.pooling)

    def _precision(self, device: torch.device) -> AbstractContextManager[object]:
        return nullcontext() if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)


def pool_bags(rows_LD: Tensor, offsets: Tensor, pooling: Pooling) -> Tensor:
    """Return one vector per bag, of shape (bags, D); zeros for an empty bag.

    This uses gathers and scatters, because ``embedding_bag`` would become a loop over the bags in ONNX.

    Args:
        rows_LD: the rows of all bags, one bag after another.
        offsets: int64 of shape (bags + 1): the start of each bag, and the end.
    """
    num_bags = offsets.shape[0] - 1
    bags_LD = _bag_indices(offsets, rows_LD.shape[0]).unsqueeze(1).expand(-1, rows_LD.shape[1])
    lengths_B1 = (offsets[1:] - offsets[:-1]).unsqueeze(1)
    if pooling is Pooling.MAX:
        lowest_BD = rows_LD.new_full((num_bags, rows_LD.shape[1]), float("-inf"))
        highest_BD = lowest_BD.scatter_reduce(0, bags_LD, rows_LD, "amax", include_self=True)
        return torch.where(lengths_B1 > 0, highest_BD, torch.zeros_like(highest_BD))
    sums_BD = rows_LD.new_zeros(num_bags, rows_LD.shape[1]).scatter_add(0, bags_LD, rows_LD)
    return sums_BD / lengths_B1.clamp(min=1) if pooling is Pooling.MEAN else sums_BD


def pad_sequences(rows_LD: Tensor, offsets: Tensor, length: int) -> Tensor:
    """Return one vector per bag, (bags, length * D + 1): at most ``length`` rows, then their number.

    A bag with fewer rows is padded with zeros. ``rows_LD`` and ``offsets`` are as for :func:`pool_bags`.
    """
    num_bags, dim = offsets.shape[0] - 1, rows_LD.shape[1]
    bag_L = _bag_indices(offsets, rows_LD.shape[0])
    position_L = torch.arange(rows_LD.shape[0], device=offsets.device) - offsets[bag_L]
    # Rows beyond the length go to an extra row at the end, which is dropped.
    target_L = torch.where(position_L < length, bag_L * length + position_L, num_bags * length)
    targets_LD = target_L.unsqueeze(1).expand(-1, dim)
    rows_VD = rows_LD.new_zeros(num_bags * length + 1, dim).scatter(0, targets_LD, rows_LD)
    lengths_B1 = (offsets[1:] - offsets[:-1]).clamp(max=length).unsqueeze(1)
    return torch.cat([rows_VD[:-1].view(num_bags, length * dim), lengths_B1.to(rows_LD)], dim=1)


def _bag_indices(offsets: Tensor, num_rows: int) -> Tensor:
    ends = offsets.new_zeros(num_rows + 1).scatter_add(0, offsets[1:], torch.ones_like(offsets[1:]))
    return ends.cumsum(0)[:-1]


def prediction_names(tasks: Mapping[str, TaskSection]) -> list[str]:
    """Return the name of the prediction of each task.

    A name ends in ``probability`` (binary tasks and tasks of classes), ``value`` (regression) or ``score``
    (retrieval). With several tasks, the name of the task comes first, as in ``click.probability``.
    """
    names = {"regression": "value", "retrieval": "score"}
    return [metric_name(tasks, name, names.get(task.kind, "probability")) for name, task in tasks.items()]


def predictions(tasks: Mapping[str, TaskSection], outputs_BO: Tensor) -> dict[str, Tensor]:
    """Convert the outputs of a module to predictions by name, of shape (B,), or (B, C) for C classes.

    For retrieval, ``score`` (B,) is the dot product of ``user_vector`` and ``item_vector``, both (B, D).
    """
    if any(task.kind == "retrieval" for task in tasks.values()):
        users_BD, items_BD = outputs_BO.chunk(2, dim=1)
        return {"score": (users_BD * items_BD).sum(dim=1), "user_vector": users_BD, "item_vector": items_BD}
    activations = {"binary": torch.sigmoid, "classes": lambda logits_BC: logits_BC.softmax(dim=1)}
    return {
        name: activations.get(task.kind, lambda values: values)(outputs)
        for name, task, outputs in _by_task(tasks, outputs_BO)
    }


def prediction_columns(tasks: Mapping[str, TaskSection], outputs_NO: Tensor) -> dict[str, Tensor]:
    """Return float64 predictions (N,) by column name; each class has a column, such as ``probability.0``."""
    columns: dict[str, Tensor] = {}
    for name, task, outputs in _by_task(tasks, outputs_NO):
        values_NC = compute_predictions(task, outputs)
        if task.kind == "classes":
            columns |= {f"{name}.{number}": column_N for number, column_N in enumerate(values_NC.unbind(1))}
        else:
            columns[name] = values_NC
    return columns


def _by_task(
    tasks: Mapping[str, TaskSection], outputs_BO: Tensor
) -> Iterator[tuple[str, TaskSection, Tensor]]:
    segments = split_outputs(outputs_BO, [task.num_outputs for task in tasks.values()])
    return zip(prediction_names(tasks), tasks.values(), segments, strict=True)
