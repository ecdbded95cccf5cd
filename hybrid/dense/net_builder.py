"""Construction of built-in and custom dense nets from a configuration."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from hybrid.config import RunConfig
from hybrid.config.sections import NETS
from hybrid.dense.custom_net import check_custom_net
from hybrid.dense.matmul import prefers_onednn, use_onednn
from hybrid.dense.vector_columns import ColumnLayout
from hybrid.errors import ConfigError
from hybrid.input_spec import InputSpec
from hybrid.models.dcn_v2 import DCNv2
from hybrid.models.deepfm import DeepFM
from hybrid.models.dense_net import Concatenation, DenseNet
from hybrid.models.dlrm import DLRM
from hybrid.models.mlp import mlp
from hybrid.models.mmoe import MMoE
from hybrid.models.ple import PLE
from hybrid.models.wide_deep import WideAndDeep
from hybrid.user_code.function_names import load_function


def extra_columns(net_name: str) -> int:
    """Return the columns of every table beyond the embedding: 1 for a first-order weight, else 0."""
    return int(net_name in ("deepfm", "wide_deep"))


def build_dense_net(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> DenseNet:
    """Build the dense net of ``dense.net``; its initial weights are a function of the arguments.

    With ``dense.remote_mlp``, the head takes the output of the remote net. A custom net is the result of
    ``function(config, input_spec, widths)`` in the user's module. Matrix products are oneDNN's where these
    are faster.

    Args:
        widths: input width of each sparse feature, with extra columns. Built-in nets take each vector of a
            sequence as a separate feature.

    Raises:
        ConfigError: the widths do not fit the net, or the custom net fails.
    """
    with _seeded(config.run.seed, "dense net"):
        if config.dense.net_call.name in NETS:
            layout = ColumnLayout(config, input_spec, widths)
            net = _built_in_net(config, len(input_spec.dense_features), layout.widths)
            net.interaction = layout.without_lengths(net.interaction)
        else:
            net = _custom_net(config, input_spec, widths)
    if _takes_onednn(config):
        use_onednn(net)
    return net


def build_remote_net(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> nn.Sequential:
    """Build the remote net of ``dense.remote_mlp``, between interaction and head."""
    net = build_dense_net(config, input_spec, widths)
    parameters = (*net.bottom.parameters(), *net.interaction.parameters())
    dtype = next((parameter.dtype for parameter in parameters), torch.float32)
    with torch.no_grad():
        bottom_BH = net.bottom(torch.zeros(0, len(input_spec.dense_features), dtype=dtype))
        width = net.interaction(bottom_BH, torch.zeros(0, sum(widths), dtype=dtype)).size(1)
    with _seeded(config.run.seed, "remote dense net"):
        remote_net = mlp((width, *config.dense.remote_mlp))
    if _takes_onednn(config):
        use_onednn(remote_net)
    return remote_net


def _takes_onednn(config: RunConfig) -> bool:
    # torch.distributed splits no other layers than its own; its bfloat16 products are oneDNN's.
    dense = config.dense
    is_plain = dense.parallel != "tensor" and dense.autocast == "none"
    return is_plain and config.train.dtype == "float32" and prefers_onednn()


def _built_in_net(config: RunConfig, num_dense: int, widths: Sequence[int]) -> DenseNet:
    """Build one of ``hybrid.models`` over vectors of these widths."""
    dense, num_sparse = config.dense, len(widths)
    ends = {"num_outputs": config.num_outputs, "remote_width": sum(dense.remote_mlp[-1:])}
    call = dense.net_call
    match call.name:
        case "dlrm":
            dim = _common_width(config, widths)
            if num_sparse + bool(num_dense) < 2:
                rule = "must name a column, since dlrm interacts two vectors or more"
                raise ConfigError("data.dense", rule)
            return DLRM(num_dense, num_sparse, dim, dense.bottom_mlp, dense.top_mlp, **ends)
        case "dcn_v2":
            return DCNv2(num_dense + sum(widths), call["cross_layers"], dense.top_mlp, **ends)
        case "deepfm":
            dim = _common_width(config, widths) - 1
            return DeepFM(num_dense, num_sparse, dim, dense.top_mlp, **ends)
        case "wide_deep":
            return WideAndDeep(num_dense, [width - 1 for width in widths], dense.top_mlp, **ends)
        case _:
            model = {"mmoe": MMoE, "ple": PLE}[call.name]
            width = ends["remote_width"] or num_dense + sum(widths)
            tasks = [task.num_outputs for task in config.all_tasks.values()]
            head = model(width, tasks, call["experts"], call["expert_mlp"], dense.top_mlp)
            return DenseNet(nn.Identity(), Concatenation(), head)


def _common_width(config: RunConfig, widths: Sequence[int]) -> int:
    if len(set(widths)) != 1:
        dims = sorted({width - extra_columns(config.dense.net_call.name) for width in widths})
        rule = f"must be the same for all tables, since dense.net is {config.dense.net}"
        raise ConfigError("tables.*.dim", rule, dims)
    return widths[0]


def _custom_net(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> DenseNet:
    build = load_function("dense.net", config.dense.net, ("config", "input_spec", "widths"))
    net = build(config, input_spec, widths)
    if not isinstance(net, DenseNet):
        reason = f"must return a hybrid.models.dense_net.DenseNet, not a {type(net).__name__}"
        raise ConfigError("dense.net", reason, config.dense.net)
    dtype: torch.dtype = getattr(torch, config.train.dtype)
    given = [len(input_spec.dense_features), sum(widths), *config.dense.remote_mlp[-1:]]
    check_custom_net(net.to(dtype), config.dense.net, given, dtype, config.num_outputs)
    return net


@contextmanager
def _seeded(seed: int, purpose: str) -> Iterator[None]:
    """Seed torch's CPU generator by ``seed`` and ``purpose`` within the block, and restore it."""
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big"))
        yield
