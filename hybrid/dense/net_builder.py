"""Construction of built-in and custom dense nets from a configuration, and checks of custom nets."""

import hashlib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hybrid.checkpoint.tensor_file import find_unstorable
from hybrid.config import RunConfig
from hybrid.config.sections import HISTORY_NETS, NETS
from hybrid.dense.compilation import restore_afterwards
from hybrid.dense.matmul import prefers_onednn, use_onednn
from hybrid.dense.vector_columns import ColumnLayout
from hybrid.errors import ConfigError
from hybrid.input_spec import InputSpec
from hybrid.models.dcn_v2 import DCNv2
from hybrid.models.deepfm import DeepFM
from hybrid.models.dense_net import Concatenation, DenseNet, HistoryInteraction
from hybrid.models.din import InterestAttention
from hybrid.models.dlrm import DLRM
from hybrid.models.hstu import HSTU
from hybrid.models.layers import mlp, output_mlp
from hybrid.models.mmoe import MMoE
from hybrid.models.ple import PLE
from hybrid.models.self_attention import LastQuery, SelfAttention
from hybrid.models.two_towers import TowerHead, TowerInputs
from hybrid.models.wide_deep import WideAndDeep
from hybrid.user_code.user_modules import describe_error, load_function


def extra_columns(net_name: str) -> int:
    """Return 1 if the net has a first-order weight after each vector (deepfm and wide_deep), else 0."""
    return int(net_name in ("deepfm", "wide_deep"))


def build_dense_net(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> DenseNet:
    """Build the dense net of ``dense.net``; equal arguments give equal initial weights.

    With ``dense.remote_mlp``, the input of the head is the output of the remote net. A custom net is the
    result of ``function(config, input_spec, widths)`` in the user's module. Of the built-in nets,
    ``HISTORY_NETS`` require one sequence, the history, and ``two_towers`` accepts none. The other nets
    take each vector of a sequence as a separate feature.

    Args:
        widths: for each sparse feature, its number of values in the input of the net; for a sequence, these
            are the values of all vectors, and the length.

    Raises:
        ConfigError: the net needs other columns or widths, or the custom net fails.
    """
    name = config.dense.net_call.name
    with _seeded(config.run.seed, "dense net"):
        if name in HISTORY_NETS:
            net = _history_net(config, input_spec, widths)
        elif name == "two_towers":
            net = _two_towers(config, input_spec, widths)
        elif name in NETS:
            layout = ColumnLayout(config, input_spec, widths)
            net = _built_in_net(config, len(input_spec.dense_features), layout.widths)
            net.interaction = layout.without_lengths(net.interaction)
        else:
            net = _custom_net(config, input_spec, widths)
    if _should_use_onednn(config):
        use_onednn(net)
    return net


def build_remote_net(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> nn.Sequential:
    """Build the remote net, whose input is the output of the interaction of the dense net."""
    net = build_dense_net(config, input_spec, widths)
    parameters = (*net.bottom.parameters(), *net.interaction.parameters())
    dtype = next((parameter.dtype for parameter in parameters), torch.float32)
    with torch.no_grad():
        bottom_BH = net.bottom(torch.zeros(0, len(input_spec.dense_features), dtype=dtype))
        width = net.interaction(bottom_BH, torch.zeros(0, sum(widths), dtype=dtype)).size(1)
    with _seeded(config.run.seed, "remote dense net"):
        remote_net = mlp((width, *config.dense.remote_mlp))
    if _should_use_onednn(config):
        use_onednn(remote_net)
    return remote_net


def _should_use_onednn(config: RunConfig) -> bool:
    # torch.distributed splits no other layers than its own; its bfloat16 products are oneDNN's.
    dense = config.dense
    is_plain = dense.parallel != "tensor" and dense.autocast == "none"
    return is_plain and config.train.dtype == "float32" and prefers_onednn()


def _built_in_net(config: RunConfig, num_dense: int, widths: Sequence[int]) -> DenseNet:
    dense, num_sparse, num_outputs = config.dense, len(widths), config.num_outputs
    call = dense.net_call
    match call.name:
        case "dlrm":
            dim = _common_width(config, widths)
            if num_sparse + bool(num_dense) < 2:
                rule = "must name a column, since dlrm interacts two vectors or more"
                raise ConfigError("data.dense", rule)
            net: DenseNet = DLRM(num_dense, num_sparse, dim, dense.bottom_mlp, dense.top_mlp, num_outputs)
        case "dcn_v2":
            net = DCNv2(num_dense + sum(widths), call["cross_layers"], dense.top_mlp, num_outputs)
        case "deepfm":
            dim = _common_width(config, widths) - 1
            net = DeepFM(num_dense, num_sparse, dim, dense.top_mlp, num_outputs)
        case "wide_deep":
            net = WideAndDeep(num_dense, [width - 1 for width in widths], dense.top_mlp, num_outputs)
        case _:
            model = {"mmoe": MMoE, "ple": PLE}[call.name]
            width = sum(dense.remote_mlp[-1:]) or num_dense + sum(widths)
            tasks = [task.num_outputs for task in config.all_tasks.values()]
            head = model(width, tasks, call["experts"], call["expert_mlp"], dense.top_mlp)
            return DenseNet(nn.Identity(), Concatenation(), head)
    if dense.remote_mlp:
        net.head = output_mlp(dense.remote_mlp[-1:], num_outputs)
    return net


def _history_net(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> DenseNet:
    dense, call = config.dense, config.dense.net_call
    layout = ColumnLayout(config, input_spec, widths)
    candidate, history = layout.vector(call["candidate"]), layout.sequence(call["history"])
    dim = history.dim
    if candidate.dim != dim:
        rule = f"must be equal for {call['candidate']} and {call['history']}, since dense.net compares them"
        raise ConfigError("tables.*.dim", rule, [candidate.dim, dim])
    if call.name == "din":
        user: nn.Module = InterestAttention(dim, call["attention_mlp"])
    elif dim % call["heads"]:
        rule = f"must have heads that divide the width {dim} of {call['history']}"
        raise ConfigError("dense.net", rule, dense.net)
    else:
        attention = {"self_attention": SelfAttention, "hstu": HSTU}[call.name]
        user = LastQuery(attention(dim, history.length, call["blocks"], call["heads"]))
    names = [feature.name for feature in input_spec.sparse_features if feature.name != call["history"]]
    columns = [layout.vector(name) for name in names]
    width = len(input_spec.dense_features) + dim + sum(column.dim for column in columns)
    head = output_mlp(dense.remote_mlp[-1:] or (width, *dense.top_mlp), config.num_outputs)
    return DenseNet(nn.Identity(), HistoryInteraction(user, candidate, history, columns), head)


def _two_towers(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> DenseNet:
    task = config.retrieval
    assert task is not None, "two_towers needs a retrieval task"
    layout = ColumnLayout(config, input_spec, widths)
    columns = {feature.name: layout.vector(feature.name) for feature in input_spec.sparse_features}
    item, width = columns[task.item], len(input_spec.dense_features) + sum(widths)
    head = TowerHead(width - item.dim, item.dim, config.dense.top_mlp, config.num_outputs // 2)
    return DenseNet(nn.Identity(), TowerInputs(item.start, item.dim), head)


def _common_width(config: RunConfig, widths: Sequence[int]) -> int:
    if len(set(widths)) != 1:
        dims = sorted({width - extra_columns(config.dense.net_call.name) for width in widths})
        rule = f"must be the same for all tables, since dense.net is {config.dense.net}"
        raise ConfigError("tables.*.dim", rule, dims)
    return widths[0]


def _custom_net(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> DenseNet:
    name, num_outputs = config.dense.net, config.num_outputs
    build = load_function("dense.net", name, ("config", "input_spec", "widths"))
    net = build(config, input_spec, widths)
    if not isinstance(net, DenseNet):
        reason = f"must return a hybrid.models.dense_net.DenseNet, not a {type(net).__name__}"
        raise ConfigError("dense.net", reason, name)
    state = net.state_dict(keep_vars=True)
    if (problem := find_unstorable(state)) is not None:
        raise ConfigError("dense.net", problem, name)
    for path, tensor in state.items():
        if is_lazy(tensor):
            reason = f"has {path} without a size; give its lazy layer all sizes, or run the net once"
            raise ConfigError("dense.net", reason, name)
    dtype: torch.dtype = getattr(torch, config.train.dtype)
    given = [len(input_spec.dense_features), sum(widths), *config.dense.remote_mlp[-1:]]
    with restore_afterwards(net.to(dtype), ()), torch.no_grad():
        net.eval()
        for size in (2, 0):  # the slice of a trainer may be empty
            dense_BF, pooled_BE, *remote_BH = (torch.zeros(size, width, dtype=dtype) for width in given)
            bottom_BH = _output(net, "bottom", name, dense_BF)
            hidden_BH = _output(net, "interaction", name, bottom_BH, pooled_BE)
            outputs_BO = _output(net, "head", name, *(remote_BH or [hidden_BH]))
            shape = list(outputs_BO.shape)
            shapes = [[size, num_outputs]] if num_outputs > 1 else [[size], [size, 1]]
            if shape not in shapes:
                required = " or ".join(map(str, shapes))
                reason = f"the head must return {required} for {size} samples, by task, not {shape}"
                raise ConfigError("dense.net", reason, name)
    return net


def _output(net: DenseNet, stage: str, name: str, *inputs: Tensor) -> Tensor:
    shapes = " and ".join(str(list(tensor.shape)) for tensor in inputs)
    module: nn.Module = getattr(net, stage)
    try:
        output: Tensor = module(*inputs)
    except Exception as error:  # user code may raise anything
        name_layer(error, net)
        reason = f"the {stage} fails for inputs {shapes}: {describe_error(error)}"
        raise ConfigError("dense.net", " ".join(reason.split()), name) from error
    if not isinstance(output, Tensor):
        raise ConfigError("dense.net", f"the {stage} returns a {type(output).__name__}, not a tensor", name)
    return output


def name_layer(error: BaseException, *nets: nn.Module) -> None:
    """Add a note to ``error`` that names the innermost layer of ``nets`` in the traceback, if there is one.

    If several nets contain the layer, the note has the name from the first of them.
    """
    names = {module: name for net in reversed(nets) for name, module in net.named_modules() if name}
    layer: nn.Module | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            layer = module
    if layer is not None:
        settings = layer.extra_repr()
        kind = f"{type(layer).__name__}({settings})" if settings else type(layer).__name__
        error.add_note(f"in {names[layer]} of the net, {kind}")


@contextmanager
def _seeded(seed: int, purpose: str) -> Iterator[None]:
    """Seed torch's CPU generator from ``seed`` and ``purpose``, and restore its state after the block."""
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big"))
        yield
