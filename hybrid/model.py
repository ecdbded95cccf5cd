"""The model that spans processes: remote embeddings, a local dense net, and perhaps a remote one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.clock import StepClock
from hybrid.dense.nets import DenseNet
from hybrid.embedding.lookup import Embeddings


class HybridModel(nn.Module):
    """Remote embeddings + local net (+ a remote dense net between interaction and head).

    ::

        sparse ids ──► lookup ════ RPC ════► workers
        dense ──► bottom ──┐                   ║
                           ▼        pooled     ║
                      interaction ◄════════════╝
                           ▼
                      [remote net ═ RPC ═ worker]
                           ▼
                         head ──► logits

    Lookups leave before ``bottom`` runs and are awaited after it, so the two overlap.

    Args:
        embeddings: the tables, wherever they are.
        net: the local stages; their parameters are this module's only ones.
        remote_net: a module across RPC, or None.
    """

    def __init__(self, embeddings: Embeddings, net: DenseNet, remote_net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net
        # Neither holds local parameters; kept out of the module tree so that DDP and state_dict pass by.
        self._remote = (embeddings, remote_net)

    def forward(self, batch: Batch, step: int, clock: StepClock) -> Tensor:
        """``logits_B`` of a batch; the lookups see all updates before ``step``.

        Under ``torch.no_grad`` nothing is recorded and the workers expect no gradients.
        """
        embeddings, remote_net = self._remote
        device = self.device
        with clock.phase("lookup"):
            lookup = embeddings.lookup(batch.sparse_features, step, train=torch.is_grad_enabled())
        with clock.phase("dense"):
            bottom_BH = self.net.bottom(to_device(batch.dense_features, device))
        with clock.phase("lookup"):
            pooled_BE = to_device(lookup.wait(), device)
        with clock.phase("dense"):
            hidden_BH = self.net.interaction(bottom_BH, pooled_BE)
            if remote_net is not None:
                hidden_BH = to_device(remote_net(hidden_BH.cpu()), device)
            logits_B: Tensor = self.net.head(hidden_BH).view(-1)
        return logits_B

    @property
    def device(self) -> torch.device:
        """Where the local net computes."""
        return next((p.device for p in self.net.parameters()), torch.device("cpu"))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; copies to a GPU start from pinned memory and overlap what follows."""
    if device.type == "cpu":
        return tensor
    moved: Tensor = _ToDevice.apply(tensor, device)  # type: ignore[no-untyped-call]
    return moved


class _ToDevice(torch.autograd.Function):
    """An overlapped copy; autograd knows no derivative of ``pin_memory``."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.pin_memory().to(device, non_blocking=True)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].cpu(), None
