"""A module of the user's own as plain PyTorch: what trains on a cluster, for whoever knows nothing of it."""

import copy
from collections.abc import Callable

from torch import Tensor, nn

from hybrid.custom_loop.embedding_modules import Embedding, EmbeddingBag, TableModule


def plain_copy(net: nn.Module, rows_of: Callable[[TableModule], Tensor]) -> nn.Module:
    """A copy of a module in which each table is torch's own, with its rows, on the CPU.

    Args:
        rows_of: gives the rows of a table, (rows, D).
    """
    tables = {name: module for name, module in net.named_modules() if isinstance(module, TableModule)}
    # Tables are bound to processes and connections, which have no copies.
    plain = {id(module): _plain(module, rows_of(module)) for module in tables.values()}
    return copy.deepcopy(net, plain).cpu()  # what is copied already, by its id


def _plain(module: TableModule, rows_RD: Tensor) -> nn.Module:
    if module.padding_idx is not None:
        rows_RD[module.padding_idx] = 0.0
    if isinstance(module, EmbeddingBag):
        bag: nn.Module = nn.EmbeddingBag.from_pretrained(
            rows_RD,
            freeze=False,
            mode=module.pooling.value,
            include_last_offset=module.include_last_offset,
            padding_idx=module.padding_idx,
        )
        return bag
    assert isinstance(module, Embedding)
    table: nn.Module = nn.Embedding.from_pretrained(rows_RD, freeze=False, padding_idx=module.padding_idx)
    return table
