"""The dense nets that a configuration names: those that are built in, and the user's own."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from hybrid.config import RunConfig
from hybrid.config.sections import NETS
from hybrid.dense.matmul import use_onednn
from hybrid.dense.nets import (
    CrossInteraction,
    DenseNet,
    DotInteraction,
    FactorizationMachine,
    WideAndDeepInputs,
    WideHead,
    mlp,
    output_mlp,
)
from hybrid.dense.own_net import check_own_net
from hybrid.errors import ConfigError
from hybrid.input_spec import InputSpec
from hybrid.own_code.names import load_function


def extra_columns(net_name: str) -> int:
    """Columns that a net needs in every table beyond the embedding: 1 for a first-order weight, else 0."""
    return int(net_name in ("deepfm", "wide_deep"))


def build_dense_net(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> DenseNet:
    """The dense net of ``dense.net``; its weights depend on the arguments alone (``run.seed``).

    Where ``dense.remote_mlp`` is set, the head is one layer that takes the remote net's output. A net
    of the user's own is what ``function(config, input_spec, widths)`` of their module returns. Its products
    are those of ``dense.matmul``; torch's where that is still to be decided.

    Args:
        widths: width of each sparse feature's table, extra columns included.

    Raises:
        ConfigError: the tables' widths do not suit the net, the user's own net cannot be had, or there is no
            oneDNN.
    """
    with _seeded(config.run.seed, "dense net"):
        if config.dense.net in NETS:
            net = _built_in_net(config, input_spec, widths)
        else:
            net = _own_net(config, input_spec, widths)
    if config.dense.matmul == "onednn":
        use_onednn(net)
    return net


def build_remote_net(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> nn.Sequential:
    """The layers of ``dense.remote_mlp``, which take the interaction's output and feed the head."""
    net = build_dense_net(config, input_spec, widths)
    width = _hidden_width(net.bottom, net.interaction, input_spec, widths)
    with _seeded(config.run.seed, "remote dense net"):
        remote_net = mlp((width, *config.dense.remote_mlp))
    if config.dense.matmul == "onednn":
        use_onednn(remote_net)
    return remote_net


def _built_in_net(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> DenseNet:
    bottom, interaction = _bottom_and_interaction(config, input_spec, widths)
    if config.dense.remote_mlp:
        return DenseNet(bottom, interaction, output_mlp((config.dense.remote_mlp[-1],), config.num_outputs))
    width = _hidden_width(bottom, interaction, input_spec, widths)
    has_wide_part = bool(extra_columns(config.dense.net))
    head = output_mlp((width - has_wide_part, *config.dense.top_mlp), config.num_outputs)
    return DenseNet(bottom, interaction, WideHead(head) if has_wide_part else head)


def _hidden_width(
    bottom: nn.Module, interaction: nn.Module, input_spec: InputSpec, widths: Sequence[int]
) -> int:
    """H of the ``hidden_BH`` that these stages give."""
    parameters = (*bottom.parameters(), *interaction.parameters())
    dtype = next((parameter.dtype for parameter in parameters), torch.float32)
    with torch.no_grad():
        bottom_BH = bottom(torch.zeros(0, len(input_spec.dense_features), dtype=dtype))
        return int(interaction(bottom_BH, torch.zeros(0, sum(widths), dtype=dtype)).size(1))


def _bottom_and_interaction(
    config: RunConfig, input_spec: InputSpec, widths: Sequence[int]
) -> tuple[nn.Module, nn.Module]:
    num_dense = len(input_spec.dense_features)
    match config.dense.net:
        case "dlrm":
            dim = _common_width(config, widths)
            bottom = mlp((num_dense, *config.dense.bottom_mlp, dim)) if num_dense else nn.Identity()
            num_vectors = len(widths) + bool(num_dense)
            if num_vectors < 2:
                rule = "must name a column, since dlrm interacts two vectors or more"
                raise ConfigError("data.dense", rule)
            return bottom, DotInteraction(num_vectors, dim)
        case "dcn_v2":
            return nn.Identity(), CrossInteraction(num_dense + sum(widths), config.dense.cross_layers)
        case "deepfm":
            return nn.Identity(), FactorizationMachine(len(widths), _common_width(config, widths), num_dense)
        case _:  # wide_deep
            return nn.Identity(), WideAndDeepInputs(widths, num_dense)


def _common_width(config: RunConfig, widths: Sequence[int]) -> int:
    if len(set(widths)) != 1:
        dims = sorted({width - extra_columns(config.dense.net) for width in widths})
        rule = f"must be the same for all tables, since dense.net is {config.dense.net}"
        raise ConfigError("tables.*.dim", rule, dims)
    return widths[0]


def _own_net(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> DenseNet:
    build = load_function("dense.net", config.dense.net, ("config", "input_spec", "widths"))
    net = build(config, input_spec, widths)
    if not isinstance(net, DenseNet):
        reason = f"must return a hybrid.dense.nets.DenseNet, not a {type(net).__name__}"
        raise ConfigError("dense.net", reason, config.dense.net)
    dtype: torch.dtype = getattr(torch, config.train.dtype)
    given = [len(input_spec.dense_features), sum(widths), *config.dense.remote_mlp[-1:]]
    check_own_net(net.to(dtype), config.dense.net, given, dtype, config.num_outputs)
    return net


@contextmanager
def _seeded(seed: int, purpose: str) -> Iterator[None]:
    """In here, torch's CPU generator is a function of ``seed`` and ``purpose``; outside it is untouched."""
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big"))
        yield
