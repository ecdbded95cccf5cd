"""The code of the documentation, run on the trainers of a cluster."""

import copy
from typing import Any

import torch
from comparison.cases.peers import Compared
from torch import nn


def split_net(code: str, index: int) -> list[Compared]:
    """Return the outputs of the net that ``code`` defines as ``ddp``, and of a plain copy."""
    torch.manual_seed(1)
    names: dict[str, Any] = {"net": nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3))}
    plain, inputs_BF = copy.deepcopy(names["net"]), torch.randn(5, 4)
    exec(code, names)
    assert sum(p.numel() for p in names["ddp"].parameters()) < sum(p.numel() for p in plain.parameters())
    return [({"outputs": names["ddp"](inputs_BF).detach()}, {"outputs": plain(inputs_BF).detach()})]
