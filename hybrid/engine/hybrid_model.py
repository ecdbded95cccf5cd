"""The model that spans processes: remote embeddings, a local dense net, and perhaps a remote one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.dense import step_replay
from hybrid.dense.layer_names import name_layer
from hybrid.dense.step_replay import Given
from hybrid.models.dense_net import DenseNet
from hybrid.primitives.deferred_response import Awaited
from hybrid.primitives.step_timings import StepClock
from hybrid.protocol.ticket import Ticket

AnySamples = TypeVar("AnySamples")


class MicroBatch(NamedTuple, Generic[AnySamples]):
    """Some samples of one step, with the way to their vectors.

    Attributes:
        batch: the samples.
        ticket: of the calls that the dense side makes for them.
        start: starts the lookup, or gives the one that was started ahead.
    """

    batch: AnySamples
    ticket: Ticket
    start: Callable[[], Awaited[Tensor]]


class RemoteStage(Protocol):
    """A dense net elsewhere: a stub of a :class:`hybrid.dense.hosted_net.HostedNet`, or a net at hand."""

    def __call__(self, ticket: Ticket, hidden_BH: Tensor) -> Tensor: ...


class LocalModel(nn.Module):
    """What DDP wraps: a net, and what it can tell of its last passes.

    Attributes:
        net: whose parameters are trained, by their names.
    """

    net: nn.Module

    def raise_of_backward(self) -> None:
        """Raise what the net's own backward pass raises, where that can be told."""

    def first_not_finite(self, is_whole: bool) -> str:
        """What of the last forward pass is the first that is not finite, as a part of a sentence, if any."""
        return ""


class HybridModel(LocalModel):
    """Remote embeddings + local net (+ a remote dense net between interaction and head).

    ::

        sparse ids ──► lookup ════ RPC ════► workers
        dense ──► bottom ──┐                   ║
                           ▼        pooled     ║
                      interaction ◄════════════╝
                           ▼
                      [remote net ═ RPC ═ worker]
                           ▼
                         head ──► outputs

    Lookups leave before ``bottom`` runs and are awaited after it, so the two overlap.

    Args:
        net: the local net; its parameters are this module's only ones.
        remote_net: a net across RPC, or None.
        dtype: of parameters, inputs and outputs.
        autocast: lower precision in which the local stages compute where that is safe, or None.
        num_outputs: of a sample, over all tasks.

    Attributes:
        net: the local net, with the names of its parameters.
        stages: what computes its stages: they themselves, or other forms over the same parameters.
    """

    net: DenseNet

    def __init__(
        self,
        net: DenseNet,
        remote_net: RemoteStage | None = None,
        dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
        num_outputs: int = 1,
    ) -> None:
        super().__init__()
        self.net = net.to(dtype)
        self.stages = DenseNet(net.bottom, net.interaction, net.head)
        # It holds no local parameters; kept out of the module tree so that DDP and state_dict pass by.
        self._remote = (remote_net,)
        self._dtype = dtype
        self._autocast = autocast
        self._shape = (-1,) if num_outputs == 1 else (-1, num_outputs)
        self._given: Given | None = None  # in the last forward pass

    def forward(self, micro: MicroBatch[Batch], clock: StepClock) -> Tensor:
        """``outputs_BO`` of a micro-batch; ``outputs_B`` where there is one of a sample.

        Under ``torch.no_grad`` nothing is recorded; the ticket's purpose must then be to predict.
        """
        try:
            return self._outputs(micro, clock)
        except Exception as error:
            name_layer(error, self.net, self.stages)
            raise

    def _outputs(self, micro: MicroBatch[Batch], clock: StepClock) -> Tensor:
        (remote_net,) = self._remote
        device = self.device
        self._given = None
        with clock.phase("lookup"):
            lookup = micro.start()
        with clock.phase("dense"), clock.span("bottom"), self._precision(device):
            dense_BF = to_device(micro.batch.dense_features.to(self._dtype), device)
            bottom_BH = self.stages.bottom(dense_BF)
        with clock.phase("lookup"), clock.span("wait"):
            pooled_BE = to_device(lookup.wait().to(self._dtype), device)
        given = Given(dense_BF, pooled_BE.detach(), None)
        with clock.phase("dense"):
            with clock.span("interaction"), self._precision(device):
                hidden_BH = self.stages.interaction(bottom_BH, pooled_BE)
            if remote_net is not None:
                with clock.span("remote net"):
                    hidden_BH = to_device(remote_net(micro.ticket, hidden_BH.to(self._dtype).cpu()), device)
                given = given._replace(remote_BH=hidden_BH.detach())
            with clock.span("head"), self._precision(device):
                outputs_BO: Tensor = self.stages.head(hidden_BH).view(self._shape)
        self._given = given
        return outputs_BO.to(self._dtype)

    def raise_of_backward(self) -> None:
        """See :func:`hybrid.dense.step_replay.raise_of_backward`; of the last forward pass."""
        if self._given is not None:
            step_replay.raise_of_backward(self.net, self._given, self._precision(self.device))

    def first_not_finite(self, is_whole: bool) -> str:
        """See :func:`hybrid.dense.step_replay.first_not_finite`; of the last forward pass."""
        if self._given is None:
            return ""
        return step_replay.first_not_finite(
            self.net, self._given, self._precision(self.device), is_whole=is_whole
        )

    def _precision(self, device: torch.device) -> AbstractContextManager[object]:
        """Autocast for what the trainer itself computes; it does not reach across RPC."""
        return nullcontext() if self._autocast is None else torch.autocast(device.type, dtype=self._autocast)

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
