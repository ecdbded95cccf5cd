"""Construction of models from a configuration, for trainers, workers, predictions and the comparison."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hybrid.config import RunConfig
from hybrid.dense.compilation import compiled
from hybrid.dense.dense_optimizer import make_optimizer, parameter_groups
from hybrid.dense.hosted_net import HostedNet
from hybrid.dense.net_builder import build_dense_net, build_remote_net
from hybrid.embedding.table_spec import TableSpec, tables_of
from hybrid.engine.hybrid_model import HybridModel, RemoteStage
from hybrid.input_spec import InputSpec
from hybrid.models.dense_net import DenseNet
from hybrid.protocol.update_rules import UpdateRules


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The specification of the dense nets of a run; every role builds the same nets from it."""

    config: RunConfig
    input_spec: InputSpec
    tables: Sequence[TableSpec]

    @property
    def dtype(self) -> torch.dtype:
        """The type of rows, dense nets and optimizer state."""
        dtype: torch.dtype = getattr(torch, self.config.train.dtype)
        return dtype

    @property
    def widths(self) -> list[int]:
        """The input width of each sparse feature, in feature order."""
        return [table.width for table in tables_of(self.input_spec, self.tables)]

    @property
    def sequences(self) -> tuple[int, ...]:
        """Indices of the features that are sequences, whose ids are ordered."""
        tables = tables_of(self.input_spec, self.tables)
        return tuple(k for k, table in enumerate(tables) if table.sequence)

    def dense_net(self) -> DenseNet:
        """Build the net of a trainer; see :func:`build_dense_net`."""
        return build_dense_net(self.config, self.input_spec, self.widths).to(self.dtype)

    def remote_net(self) -> nn.Sequential | None:
        """Build the remote net, if there is one."""
        if not self.config.dense.remote_mlp:
            return None
        return build_remote_net(self.config, self.input_spec, self.widths).to(self.dtype)

    def model(self, net: DenseNet, remote_net: RemoteStage | None) -> HybridModel:
        """Return the model of ``net``, with the configured precision."""
        config, name = self.config, self.config.dense.autocast
        autocast = None if name == "none" else getattr(torch, name)
        return HybridModel(net, remote_net, self.dtype, autocast, config.num_outputs)

    def optimizer(self, net: nn.Module, *, is_remote: bool = False) -> torch.optim.Optimizer:
        """Create the optimizer of a trainer's dense net, or of the remote net."""
        dense = self.config.dense
        named, sections = net.named_parameters(), self.config.dense_groups
        groups = parameter_groups(named, sections, is_remote=is_remote)
        return make_optimizer(
            net.parameters(), dense.optimizer_name, dense.learning_rate, dense.optimizer_options, groups
        )


def host_remote_net(blueprint: Blueprint, rules: UpdateRules) -> HostedNet:
    """Create the remote dense net of a run, on the worker that hosts it."""
    net = blueprint.remote_net()
    assert net is not None, "dense.remote_mlp asks for one"
    form, mode = None, blueprint.config.dense.compile
    if mode != "none":
        first = net[0]
        assert isinstance(first, nn.Linear)
        generator = torch.Generator().manual_seed(0)
        hidden_BH = torch.rand(2, first.in_features, dtype=blueprint.dtype, generator=generator)
        form = compiled(net, mode, [hidden_BH.requires_grad_()])
    return HostedNet(net, blueprint.optimizer(net, is_remote=True), rules, form)
