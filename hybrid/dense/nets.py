"""The dense nets: DLRM, DCN-v2, DeepFM, Wide&Deep, or the user's own, each in three stages.

::

    dense_BF ── bottom ── bottom_BH ─┐
                                     interaction ── hidden_BH ── head ── logits_B
    pooled_BE (embeddings) ──────────┘

The stages are apart since embeddings are asked for before ``bottom`` and awaited after it, and a
remote dense net may sit between ``interaction`` and ``head``. Every stage takes an empty batch.
"""

# No postponed annotations here: TorchScript checks those of buffers, as types.

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.config import NETS, RunConfig
from hybrid.dense.own_net import check_own_net
from hybrid.errors import ConfigError
from hybrid.input_spec import InputSpec
from hybrid.own_code.names import load_function

Stages = tuple[nn.Module, nn.Module]


class DenseNet(nn.Module):
    """``head(interaction(bottom(dense_BF), pooled_BE))`` gives ``logits_B``.

    ``pooled_BE`` holds the pooled embeddings of all sparse features, side by side in their order.
    """

    def __init__(self, bottom: nn.Module, interaction: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.bottom = bottom
        self.interaction = interaction
        self.head = head

    def forward(self, dense_BF: Tensor, pooled_BE: Tensor) -> Tensor:
        logits_B: Tensor = self.head(self.interaction(self.bottom(dense_BF), pooled_BE))
        return logits_B


class _PairwiseDots(torch.autograd.Function):
    """Dot products of chosen pairs of vectors.

    The gradient of a Gram matrix is symmetric, so one product gives what autograd takes two products
    and a scatter for: 1.5 ms instead of 2.4 ms forward and backward for 1024 x 27 vectors of 16.
    """

    @staticmethod
    def forward(ctx: Any, vectors_BND: Tensor, pairs_P: Tensor, pair_of_NN: Tensor) -> Tensor:
        ctx.save_for_backward(vectors_BND, pair_of_NN)
        return torch.bmm(vectors_BND, vectors_BND.mT).flatten(1).index_select(1, pairs_P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        vectors_BND, pair_of_NN = ctx.saved_tensors
        grad_BP = grads[0].to(vectors_BND.dtype)  # differs under autocast
        grad_BNN = grad_BP.index_select(1, pair_of_NN.flatten()).view(grad_BP.size(0), *pair_of_NN.shape)
        grad_BNN.diagonal(dim1=1, dim2=2).zero_()
        return torch.bmm(grad_BNN, vectors_BND), None, None


class DotInteraction(nn.Module):
    """DLRM's interaction: the bottom vector, then the dot product of every pair of vectors.

    The vectors are the bottom's (where there are dense features) and each feature's embedding; pairs
    come as in the rows of a lower triangle, (1,0), (2,0), (2,1), ... (Naumov et al. 2019).
    """

    pairs_P: Tensor  # where each pair lies in a flattened Gram matrix
    pair_of_NN: Tensor  # which pair lies at each place of it, its diagonal aside

    def __init__(self, num_vectors: int, dim: int) -> None:
        super().__init__()
        self.vectors_shape = (num_vectors, dim)
        rows_P, columns_P = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        pair_of_NN = torch.zeros(num_vectors, num_vectors, dtype=torch.int64)
        pair_of_NN[rows_P, columns_P] = pair_of_NN[columns_P, rows_P] = torch.arange(rows_P.numel())
        self.register_buffer("pairs_P", rows_P * num_vectors + columns_P, persistent=False)
        self.register_buffer("pair_of_NN", pair_of_NN, persistent=False)

    def forward(self, bottom_BD: Tensor, pooled_BE: Tensor) -> Tensor:
        vectors_BND = torch.cat([bottom_BD, pooled_BE], dim=1).view(pooled_BE.size(0), *self.vectors_shape)
        # TorchScript that calls a function of Python's can be neither saved nor sent.
        if torch.jit.is_scripting() or torch.jit.is_tracing():
            dots_BP = torch.bmm(vectors_BND, vectors_BND.mT).flatten(1).index_select(1, self.pairs_P)
        else:
            dots_BP = _PairwiseDots.apply(vectors_BND, self.pairs_P, self.pair_of_NN)  # type: ignore[no-untyped-call]
        return torch.cat([bottom_BD, dots_BP], dim=1)


class CrossInteraction(nn.Module):
    """DCN-v2's cross layers over all inputs: ``x = x0 * (W x + b) + x`` (Wang et al. 2021)."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, dense_BF: Tensor, pooled_BE: Tensor) -> Tensor:
        x0_BH = x_BH = torch.cat([dense_BF, pooled_BE], dim=1)
        for layer in self.layers:
            x_BH = torch.addcmul(x_BH, x0_BH, layer(x_BH))
        return x_BH


class LinearTerm(nn.Module):
    """First-order term of a sample: its features' own weights plus a linear map of its dense features."""

    def __init__(self, num_dense: int) -> None:
        super().__init__()
        # torch warns when it initialises an empty weight.
        self.dense_weights = nn.Linear(num_dense, 1, bias=False) if num_dense else None

    def forward(self, dense_BF: Tensor, weights_BK: Tensor) -> Tensor:
        term_B1 = weights_BK.sum(dim=1, keepdim=True)
        return term_B1 if self.dense_weights is None else term_B1 + self.dense_weights(dense_BF)


class FactorizationMachine(nn.Module):
    """DeepFM's interaction: its score in column 0, then the inputs of the deep net (Guo et al. 2017).

    A feature's vector is its D factors followed by its first-order weight.
    """

    def __init__(self, num_sparse: int, width: int, num_dense: int) -> None:
        super().__init__()
        self.vectors_shape = (num_sparse, width)
        self.linear = LinearTerm(num_dense)

    def forward(self, dense_BF: Tensor, pooled_BE: Tensor) -> Tensor:
        vectors_BKW = pooled_BE.view(pooled_BE.size(0), *self.vectors_shape)
        factors_BKD, weights_BK = vectors_BKW[..., :-1], vectors_BKW[..., -1]
        # The sum over pairs of dot products is half of the square of the sum less the sum of squares.
        pairs_BD = factors_BKD.sum(dim=1).square() - factors_BKD.square().sum(dim=1)
        score_B1 = self.linear(dense_BF, weights_BK) + 0.5 * pairs_BD.sum(dim=1, keepdim=True)
        return torch.cat([score_B1, dense_BF, factors_BKD.flatten(1)], dim=1)


class WideAndDeepInputs(nn.Module):
    """Wide&Deep's interaction: the wide score in column 0, then the deep inputs (Cheng et al. 2016).

    A feature's vector is its embedding, of any width, followed by its weight in the wide part.
    """

    wide_K: Tensor
    deep_E: Tensor

    def __init__(self, widths: Sequence[int], num_dense: int) -> None:
        super().__init__()
        ends_K = torch.tensor(widths).cumsum(0)
        is_wide_E = torch.zeros(sum(widths), dtype=torch.bool)
        is_wide_E[ends_K - 1] = True
        self.register_buffer("wide_K", is_wide_E.nonzero().flatten(), persistent=False)
        self.register_buffer("deep_E", is_wide_E.logical_not().nonzero().flatten(), persistent=False)
        self.linear = LinearTerm(num_dense)

    def forward(self, dense_BF: Tensor, pooled_BE: Tensor) -> Tensor:
        score_B1 = self.linear(dense_BF, pooled_BE.index_select(1, self.wide_K))
        return torch.cat([score_B1, dense_BF, pooled_BE.index_select(1, self.deep_E)], dim=1)


class WideHead(nn.Module):
    """Logits of a net with a wide part: column 0, plus what ``deep`` makes of the others."""

    def __init__(self, deep: nn.Module) -> None:
        super().__init__()
        self.deep = deep

    def forward(self, hidden_BH: Tensor) -> Tensor:
        deep_B: Tensor = self.deep(hidden_BH[:, 1:])
        return hidden_BH[:, 0] + deep_B


def extra_columns(net_name: str) -> int:
    """Columns that a net needs in every table beyond the embedding: 1 for a first-order weight, else 0."""
    return int(net_name in ("deepfm", "wide_deep"))


def build_dense_net(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> DenseNet:
    """The dense net of ``dense.net``; its weights depend on the arguments alone (``run.seed``).

    Where ``dense.remote_mlp`` is set, the head is one layer that takes the remote net's output. A net
    of the user's own is what ``function(config, input_spec, widths)`` of their module returns.

    Args:
        widths: width of each sparse feature's table, extra columns included.

    Raises:
        ConfigError: the tables' widths do not suit the net, or the user's own net cannot be had.
    """
    with _seeded(config.run.seed, "dense net"):
        if config.dense.net not in NETS:
            return _own_net(config, input_spec, widths)
        bottom, interaction = _STAGES[config.dense.net](config, input_spec, widths)
        if config.dense.remote_mlp:
            return DenseNet(bottom, interaction, _logits((config.dense.remote_mlp[-1],)))
        width = _hidden_width(bottom, interaction, input_spec, widths)
        if extra_columns(config.dense.net):
            return DenseNet(bottom, interaction, WideHead(_logits((width - 1, *config.dense.top_mlp))))
        return DenseNet(bottom, interaction, _logits((width, *config.dense.top_mlp)))


def build_remote_net(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> nn.Sequential:
    """The layers of ``dense.remote_mlp``, which take the interaction's output and feed the head."""
    width = interaction_width(config, input_spec, widths)
    with _seeded(config.run.seed, "remote dense net"):
        return _mlp((width, *config.dense.remote_mlp))


def interaction_width(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> int:
    """H of the ``hidden_BH`` that the net's interaction gives."""
    net = build_dense_net(config, input_spec, widths)
    return _hidden_width(net.bottom, net.interaction, input_spec, widths)


def _hidden_width(
    bottom: nn.Module, interaction: nn.Module, input_spec: InputSpec, widths: Sequence[int]
) -> int:
    parameters = (*bottom.parameters(), *interaction.parameters())
    dtype = next((parameter.dtype for parameter in parameters), torch.float32)
    with torch.no_grad():
        bottom_BH = bottom(torch.zeros(0, len(input_spec.dense_features), dtype=dtype))
        return int(interaction(bottom_BH, torch.zeros(0, sum(widths), dtype=dtype)).size(1))


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    """A linear layer and ReLU from each width to the next."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def _logits(widths: Sequence[int]) -> nn.Sequential:
    """An MLP over ``widths``, then a plain layer to one logit a sample."""
    return _mlp(widths).append(nn.Linear(widths[-1], 1)).append(nn.Flatten(0))


def _dlrm(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> Stages:
    dim = _common_width(config, widths)
    num_dense = len(input_spec.dense_features)
    bottom = _mlp((num_dense, *config.dense.bottom_mlp, dim)) if num_dense else nn.Identity()
    num_vectors = len(widths) + bool(num_dense)
    if num_vectors < 2:
        raise ConfigError("data.dense", "must name a column, since dlrm interacts two vectors or more")
    return bottom, DotInteraction(num_vectors, dim)


def _dcn_v2(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> Stages:
    width = len(input_spec.dense_features) + sum(widths)
    return nn.Identity(), CrossInteraction(width, config.dense.cross_layers)


def _deepfm(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> Stages:
    width = _common_width(config, widths)
    return nn.Identity(), FactorizationMachine(len(widths), width, len(input_spec.dense_features))


def _wide_deep(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> Stages:
    return nn.Identity(), WideAndDeepInputs(widths, len(input_spec.dense_features))


_STAGES = {"dlrm": _dlrm, "dcn_v2": _dcn_v2, "deepfm": _deepfm, "wide_deep": _wide_deep}


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
    check_own_net(net.to(dtype), config.dense.net, given, dtype)
    return net


@contextmanager
def _seeded(seed: int, purpose: str) -> Iterator[None]:
    """In here, torch's CPU generator is a function of ``seed`` and ``purpose``; outside it is untouched."""
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big"))
        yield
