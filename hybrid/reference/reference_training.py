"""Training in one process of plain torch, the reference for comparisons with clusters.

The reference shares no arithmetic with other packages, except a hash for random numbers. It uses autograd,
``F.embedding``, ``F.embedding_bag``, ``torch.optim``, torch's schedulers and ``clip_grad_norm_``. The dense
nets are the same modules, with the same matmul backend (``hybrid.dense.matmul``). A step has one backward
pass for the samples of all trainers. Stages of the net that trainers do not share (``dense.ddp``) run per
trainer. The rows that a step reads are leaf tensors, so gradients have the size of these rows.
"""

import copy
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, count, islice, repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hybrid.batch import Batch, SparseFeatures
from hybrid.config import DenseSection, RunConfig, ScheduleSection
from hybrid.embedding.table_spec import TableSpec
from hybrid.errors import ConfigError, NonFiniteError
from hybrid.input_spec import InputSpec
from hybrid.models.dense_net import DenseNet
from hybrid.models.layers import pad_histories
from hybrid.reference.reference_keys import ReferenceKeys
from hybrid.reference.reference_losses import ReferenceLoss
from hybrid.reference.reference_rows import initial_state, round_stochastically, update_rows


class _StepRows(NamedTuple):
    ids_U: Tensor
    rows_UD: Tensor


class Reference:
    """The training of a configuration in one process.

    Args:
        rows: initial rows by table; copied.
        net: the initial dense net of every trainer; copied.
        remote_net: the net between interaction and head, or None; copied.
        total_steps: steps of the run, on which the schedule may depend.
        initial_rows: function that returns the initial rows (keys, D) of keys of a growing table; may be
            None if no table grows.
        item_counts: for a retrieval task, the number of training samples with each item id.

    Attributes:
        tables: rows by table, with all updates.
        keys: the keys of each growing table, by table.
        table_states: optimizer state of each table, by table and by the name of the state on workers.
        nets: the dense net of each trainer; stages that trainers share are the same modules.
        remote_net: the trained remote net.
        optimizer: one optimizer for all dense parameters, since torch updates each parameter separately.
        skipped_steps: number of steps not applied, because the loss or a gradient was not finite.

    Raises:
        ConfigError: ``train.update`` is async, whose result depends on the timing of trainers.
    """

    def __init__(
        self,
        config: RunConfig,
        input_spec: InputSpec,
        tables: Sequence[TableSpec],
        rows: Mapping[str, Tensor],
        net: DenseNet,
        remote_net: nn.Module | None,
        total_steps: int,
        initial_rows: Callable[[TableSpec, Sequence[int]], Tensor] | None = None,
        item_counts: Tensor | None = None,
    ) -> None:
        if config.train.update == "async":
            raise ConfigError("train.update", "must be sync or lookahead to be compared", "async")
        self._config = config
        self._specs = tables
        self._features = input_spec.sparse_features
        self._table_of = {name: table.for_feature(name) for table in tables for name in table.features}
        self._dtype: torch.dtype = getattr(torch, config.train.dtype)

        self.tables = {each.name: rows[each.name].to(self._row_dtype(each), copy=True) for each in tables}
        self.keys = {table.name: ReferenceKeys(table.growth) for table in tables if table.growth is not None}
        self._initial_rows = initial_rows
        self._step = 0
        wide = {name: table_RD.to(self._dtype) for name, table_RD in self.tables.items()}
        self.table_states = {t.name: initial_state(t.optimizer, wide[t.name]) for t in tables}

        self.nets = _nets(net, config.dense, config.cluster.trainers)
        self.remote_net = copy.deepcopy(remote_net)
        # ModuleList.parameters() has each parameter once, also shared parameters.
        self._dense = nn.ModuleList(self.nets)
        if self.remote_net is not None:
            self._dense.append(self.remote_net)
        self._dense.to(self._dtype)
        self.optimizer = _dense_optimizer(self.nets, self.remote_net, config)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._factors = learning_rate_factors(config.schedule, total_steps)
        names = [feature.name for feature in self._features]
        self._loss = ReferenceLoss(config.all_tasks, names, item_counts)
        self.skipped_steps = 0

    def step(self, slices: Sequence[Batch]) -> float:
        """Take one optimizer step of all trainers; return the loss before this step.

        Args:
            slices: each trainer's slice of the batch; some may be empty.

        Raises:
            NonFiniteError: the loss or a gradient is not finite, and ``train.non_finite`` is stop.
        """
        factor = next(self._factors)
        rows = self._copy_rows(slices)
        for spec in self._specs:
            rows[spec.name].rows_UD.requires_grad_(spec.optimizer.name != "frozen")
        self._dense.train()
        self.optimizer.zero_grad()
        outputs = self._forward(self.nets[: len(slices)], slices, rows)
        loss = torch.stack(self._loss.contributions(outputs, slices)).sum()
        loss.backward()
        gradients = [leaf.grad for leaf in self._leaves(rows) if leaf.grad is not None]
        if all(bool(tensor.isfinite().all()) for tensor in (loss, *gradients)):
            self._update(rows, factor)
        elif self._config.train.non_finite == "stop":
            raise NonFiniteError("the loss or a gradient of the reference is not finite")
        else:
            self.skipped_steps += 1
        self._step += 1
        return loss.item()

    @torch.no_grad()
    def outputs(self, batch: Batch, trainer: int = 0) -> Tensor:
        """Return the current outputs of a trainer's net for ``batch``: (B, O), or (B,) for one output."""
        self._dense.eval()
        (outputs_BO,) = self._forward([self.nets[trainer]], [batch], self._copy_rows([batch]))
        return outputs_BO.squeeze(1)

    @property
    def parameter_names(self) -> tuple[list[str], list[str]]:
        """The parameter names of a trainer's net and of the net on a worker, in the order of modules."""
        remote = self.remote_net or nn.Module()
        return [n for n, _ in self.nets[0].named_parameters()], [n for n, _ in remote.named_parameters()]

    def dense_state(self, module: nn.Module) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer state of each parameter of a net, by name; {} before its first step."""
        return {name: self.optimizer.state.get(p, {}) for name, p in module.named_parameters()}

    def _row_dtype(self, table: TableSpec) -> torch.dtype:
        return torch.bfloat16 if table.has_bfloat16_rows else self._dtype

    def _copy_rows(self, batches: Sequence[Batch]) -> dict[str, _StepRows]:
        ids: dict[str, list[Tensor]] = {name: [] for name in self.tables}
        for batch in batches:
            for k, feature in enumerate(self._features):
                ids[self._table_of[feature.name].name].append(_bags(batch.sparse_features, k)[0])
        rows = {}
        for table in self._specs:
            ids_U = torch.cat(ids[table.name]).unique()
            rows[table.name] = _StepRows(ids_U, self._read(table, ids_U))
        return rows

    def _read(self, table: TableSpec, ids_U: Tensor) -> Tensor:
        """Return the rows of ids. An id of a growing table that has no row gets its initial row."""
        if table.name not in self.keys:
            return self.tables[table.name][ids_U].to(self._dtype)
        keys, row_of = [key % 2**64 for key in ids_U.tolist()], self.keys[table.name].row_of
        assert self._initial_rows is not None
        rows_UD = self._initial_rows(table, keys).to(self._row_dtype(table)).to(self._dtype)
        for index, key in enumerate(keys):
            if key in row_of:
                rows_UD[index] = self.tables[table.name][row_of[key]]
        return rows_UD

    def _grow(self, table: TableSpec, ids_U: Tensor) -> Tensor:
        """Count a read of each key, add rows for some; return the row number of each key, -1 for no row."""
        reference_keys = self.keys[table.name]
        keys = [key % 2**64 for key in ids_U.tolist()]
        admitted = reference_keys.count(keys, self._step)
        assert self._initial_rows is not None
        new_RD = self._initial_rows(table, admitted).to(self._row_dtype(table))
        self.tables[table.name] = torch.cat([self.tables[table.name], new_RD])
        for name, state in initial_state(table.optimizer, new_RD.to(self._dtype)).items():
            of_table = self.table_states[table.name]
            of_table[name] = torch.cat([of_table[name], state])
        return torch.tensor([reference_keys.row_of.get(key, -1) for key in keys], dtype=torch.int64)

    def _forward(
        self, nets: Sequence[DenseNet], slices: Sequence[Batch], rows: Mapping[str, _StepRows]
    ) -> list[Tensor]:
        """Return ``outputs_BO`` of each slice; a shared stage computes all samples together."""
        dense = [batch.dense_features.to(self._dtype) for batch in slices]
        features, sizes = range(len(self._features)), [len(each) for each in dense]
        pooled = [
            torch.cat([self._pool(batch.sparse_features, k, rows) for k in features], dim=1)
            for batch in slices
        ]
        if self._config.dense.ddp == "outside":
            nets, dense, pooled = nets[:1], [torch.cat(dense)], [torch.cat(pooled)]
        hidden = []
        for net, dense_BF, pooled_BE in zip(nets, dense, pooled, strict=True):
            with self._autocast():
                hidden.append(net.interaction(net.bottom(dense_BF), pooled_BE))
        if self.remote_net is not None:
            hidden = [self.remote_net(each.to(self._dtype)) for each in hidden]
        if self._config.dense.ddp != "none":
            nets, hidden = nets[:1], [torch.cat(hidden)]
        with self._autocast():
            outputs = [net.head(hidden_BH) for net, hidden_BH in zip(nets, hidden, strict=True)]
        outputs_BO = torch.cat(outputs).view(-1, self._config.num_outputs).to(self._dtype)
        return list(outputs_BO.split(sizes))

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._config.dense.autocast == "bfloat16")

    def _pool(self, sparse: SparseFeatures, feature: int, rows: Mapping[str, _StepRows]) -> Tensor:
        """Return the pooled vector of one feature for each sample, or the vectors of its sequence."""
        spec = self._features[feature]
        table = self._table_of[spec.name]
        ids_U, rows_UD = rows[table.name]
        ids_L, offsets, weights_L = _bags(sparse, feature)
        index_L = torch.searchsorted(ids_U, ids_L)
        if table.sequence:
            return self._sequence(index_L, offsets, weights_L, rows_UD, table.sequence)
        if weights_L is not None:
            weights_L = weights_L.to(self._dtype)
            sums_BD = F.embedding_bag(
                index_L, rows_UD, offsets, mode="sum", per_sample_weights=weights_L, include_last_offset=True
            )
            is_mean = table.pooling.value == "mean"  # torch does not support this with weights
            return sums_BD / offsets.diff().clamp(min=1).unsqueeze(1) if is_mean else sums_BD
        if sparse.offsets is None or not spec.multi_hot:
            return F.embedding(index_L, rows_UD)
        return F.embedding_bag(index_L, rows_UD, offsets, mode=table.pooling.value, include_last_offset=True)

    def _sequence(
        self, index_L: Tensor, offsets: Tensor, weights_L: Tensor | None, rows_UD: Tensor, length: int
    ) -> Tensor:
        """Return a row per sample: the vectors of its ids, padded to ``length``, and the number of ids."""
        vectors_LD = F.embedding(index_L, rows_UD)
        if weights_L is not None:
            vectors_LD = vectors_LD * weights_L.to(self._dtype).unsqueeze(1)
        vectors_BND, _ = pad_histories(vectors_LD, offsets)
        vectors_BND = F.pad(vectors_BND, (0, 0, 0, length - vectors_BND.size(1)))
        lengths_B1 = offsets.diff().unsqueeze(1).to(self._dtype)
        return torch.cat([vectors_BND.flatten(1), lengths_B1], dim=1)

    def _leaves(self, rows: Mapping[str, _StepRows]) -> list[Tensor]:
        return [*(t.rows_UD for t in rows.values()), *self._dense.parameters()]

    def _update(self, rows: Mapping[str, _StepRows], factor: float) -> None:
        if self._config.train.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._leaves(rows), self._config.train.clip_norm)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        for spec in self._specs:
            ids_U, rows_UD = rows[spec.name]
            if spec.optimizer.name == "frozen":
                continue
            assert rows_UD.grad is not None, "every table has a feature that reads it"
            grad_UD = rows_UD.grad
            keys_U = None
            if spec.name in self.keys:
                rows_U = self._grow(spec, ids_U)
                ids_U, keys_U, grad_UD = (each[rows_U >= 0] for each in (rows_U, ids_U, grad_UD))
            rate = spec.optimizer.learning_rate * factor
            table_RD, state = self.tables[spec.name], self.table_states[spec.name]
            rounded = partial(self._round, spec.name, keys_U) if spec.has_bfloat16_rows else None
            update_rows(spec.optimizer, rate, table_RD, state, ids_U, grad_UD, rounded)
            if spec.name in self.keys:
                self.keys[spec.name].sweep(self._step)

    def _round(self, table: str, keys_U: Tensor | None, rows_UD: Tensor, ids_U: Tensor) -> Tensor:
        numbers_U = ids_U if keys_U is None else keys_U
        return round_stochastically(rows_UD, numbers_U, self._config.run.seed, self._step, table)


def _bags(sparse: SparseFeatures, feature: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the ids of one feature, the offsets of bags (B + 1), and the weights (None if all are 1)."""
    size = sparse.batch_size
    offsets = sparse.offsets
    if offsets is None:
        offsets = torch.arange(len(sparse.ids_L) + 1)
    offsets = offsets[feature * size : (feature + 1) * size + 1]
    ids = slice(int(offsets[0]), int(offsets[-1]))
    weights_L = None if sparse.weights_L is None else sparse.weights_L[ids]
    if weights_L is not None and bool((weights_L == 1).all()):
        weights_L = None
    return sparse.ids_L[ids], offsets - offsets[0], weights_L


def _nets(net: DenseNet, section: DenseSection, trainers: int) -> list[DenseNet]:
    """Return a net per trainer. Nets share the modules that DDP or tensor parallelism keeps equal."""
    trainers_per_net = section.trainers_per_net
    if section.ddp == "outside":
        return [copy.deepcopy(net)] * trainers
    nets = [copy.deepcopy(net) for _ in range(trainers // trainers_per_net)]
    if section.ddp == "inside":
        for other in nets[1:]:
            other.head = nets[0].head
    return [nets[trainer // trainers_per_net] for trainer in range(trainers)]


def _dense_optimizer(
    nets: Sequence[nn.Module], remote_net: nn.Module | None, config: RunConfig
) -> torch.optim.Optimizer:
    dense, groups = config.dense, list(config.dense_groups.values())
    prefixed = [("", net) for net in nets] + ([] if remote_net is None else [("remote.", remote_net)])
    group_of: dict[nn.Parameter, dict[str, Any]] = {}
    for prefix, net in prefixed:
        for name, parameter in net.named_parameters():
            options: dict[str, Any] = {"params": [parameter]}
            for group in groups:
                if any(fnmatchcase(prefix + name, pattern) for pattern in group.parameters):
                    options |= _options(group.optimizer_options)
            group_of[parameter] = options
    name, arguments = dense.optimizer_call
    optimizer_class: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, name)
    return optimizer_class(list(group_of.values()), lr=dense.learning_rate, **_options(arguments))


def _options(texts: Sequence[str]) -> dict[str, Any]:
    options = tomllib.loads("\n".join(texts))
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def learning_rate_factors(section: ScheduleSection, total_steps: int) -> Iterator[float]:
    """Yield the factor of all learning rates in each step; the iterator is infinite.

    The rate rises in the first ``warmup_steps`` and then follows ``schedule.kind``. After the last step of
    the schedule, if it has one, the rate is constant.
    """
    rising = lr_scheduler.LinearLR(
        _unit_rate(), section.call["initial_factor"], total_iters=section.warmup_steps
    )
    return chain(islice(_rates(rising), section.warmup_steps), _falling_factors(section, total_steps))


def _falling_factors(section: ScheduleSection, total_steps: int) -> Iterator[float]:
    # A run may end before its warm-up does.
    steps = max(1, (section.steps or total_steps) - section.warmup_steps)
    call = section.call
    final = call.arguments.get("final_factor", 0.0)
    match call.name:
        case "step":
            return _rates(lr_scheduler.StepLR(_unit_rate(), call["decay_every"], call["decay_factor"]))
        case "cosine":
            return _rates(lr_scheduler.CosineAnnealingLR(_unit_rate(), steps, eta_min=final), steps)
        case "polynomial":
            falling = _rates(lr_scheduler.PolynomialLR(_unit_rate(), steps, call["power"]), steps)
            return (final + (1 - final) * factor for factor in falling)
        case "one_cycle" if call["peak_fraction"] * steps == 1:
            # With the peak in the first step, torch would divide by zero.
            return _rates(lr_scheduler.CosineAnnealingLR(_unit_rate(), steps - 1, eta_min=final), steps - 1)
        case "one_cycle":
            cycle = lr_scheduler.OneCycleLR(
                _unit_rate(),
                max_lr=1.0,
                total_steps=steps,
                pct_start=call["peak_fraction"],
                div_factor=1 / call["initial_factor"],
                final_div_factor=call["initial_factor"] / final if final else math.inf,
                cycle_momentum=False,
            )
            return _rates(cycle, steps - 1)
    return repeat(1.0)


def _unit_rate() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(())], lr=1.0)


def _rates(scheduler: lr_scheduler.LRScheduler, last_step: float = math.inf) -> Iterator[float]:
    """Yield the rate of each step, constant after ``last_step`` (torch's cosine would rise again)."""
    for step in count():
        yield float(scheduler.get_last_lr()[0])
        if step < last_step:
            scheduler.optimizer.step()  # torch warns if the scheduler steps before the optimizer
            scheduler.step()
