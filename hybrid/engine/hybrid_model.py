"""The model of a configured run on one trainer."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from hybrid.batch import Batch
from hybrid.dense.net_builder import name_layer
from hybrid.dense.sync_batch_norm import local_statistics
from hybrid.models.dense_net import DenseNet
from hybrid.primitives.device_copies import to_device
from hybrid.primitives.step_timings import StepClock
from hybrid.updates.ticket import Ticket

if TYPE_CHECKING:  # the systems that the benchmark compares build nets without numba
    from hybrid.embedding.trainer.lookup import Lookup

AnyBatch = TypeVar("AnyBatch")


class MicroBatch(NamedTuple, Generic[AnyBatch]):
    """Samples of one step, with a ticket for their remote calls, and their lookup once it is sent."""

    batch: AnyBatch
    ticket: Ticket  # identifies the calls for these samples
    lookup: "Lookup | None"  # None until it is sent
    is_last: bool  # whether it is the last micro-batch of its step


# A remote dense net: a stub of hybrid.dense.hosted_net.HostedNet, or a local substitute.
RemoteStage: TypeAlias = Callable[[Ticket, Tensor], Tensor]


class NetInputs(NamedTuple):
    """The inputs of a net: dense features, embedding vectors, and the output of the remote net or None."""

    dense_BF: Tensor
    pooled_BE: Tensor
    remote_BH: Tensor | None


class HybridModel(nn.Module):
    """A model of tables on workers, a local net, and perhaps a remote net between interaction and head.

    ::

        sparse ids ──► lookup ═ RPC or sockets ═► workers
        dense ──► bottom ──┐                        ║
                           ▼         pooled         ║
                      interaction ◄═════════════════╝
                           ▼
                      [remote net ═ RPC ═ worker]
                           ▼
                         head ──► outputs

    The caller sends the lookup before it calls the model. ``bottom`` runs while the vectors are on their way.

    Args:
        net: the local net; this module has no other parameters.
        remote_net: a function that calls the remote net by RPC; None if there is no remote net.
        dtype: of parameters, inputs and outputs.
        autocast: lower precision of the local stages, or None.
        num_outputs: outputs per sample, over all tasks.

    Attributes:
        stages: modules that compute the stages of ``net``; an execution backend may replace them.
        is_whole: whether this trainer holds the whole net, and not only shards of it.
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
        self.is_whole = True
        self._remote_net = remote_net
        self._dtype = dtype
        self._autocast = autocast
        self._shape = (-1,) if num_outputs == 1 else (-1, num_outputs)
        # Of the last forward pass, to find the layer of an error or a non-finite value afterwards.
        self._inputs: NetInputs | None = None

    def forward(self, micro: MicroBatch[Batch], clock: StepClock) -> Tensor:
        """Return ``outputs_BO`` of a micro-batch, or ``outputs_B`` for one output per sample.

        Under ``torch.no_grad``, the ticket must have ``Purpose.PREDICT``, or workers wait for gradients.
        """
        device = self.device
        self._inputs = None
        try:
            with clock.phase("dense"), clock.span("bottom"), self._precision(device):
                dense_BF = to_device(micro.batch.dense_features.to(self._dtype), device)
                bottom_BH = self.stages.bottom(dense_BF)
            with clock.phase("lookup"), clock.span("wait"):
                assert micro.lookup is not None, "the lookup is sent before the call"
                pooled_BE = to_device(micro.lookup.wait().to(self._dtype), device)
            inputs = NetInputs(dense_BF, pooled_BE.detach(), None)
            with clock.phase("dense"):
                with clock.span("interaction"), self._precision(device):
                    hidden_BH = self.stages.interaction(bottom_BH, pooled_BE)
                if self._remote_net is not None:
                    with clock.span("remote net"):
                        hidden_BH = self._remote_net(micro.ticket, hidden_BH.to(self._dtype).cpu())
                        hidden_BH = to_device(hidden_BH, device)
                    inputs = inputs._replace(remote_BH=hidden_BH.detach())
                with clock.span("head"), self._precision(device):
                    outputs_BO: Tensor = self.stages.head(hidden_BH).view(self._shape)
        except Exception as error:
            name_layer(error, self.net, self.stages)
            raise
        self._inputs = inputs
        return outputs_BO.to(self._dtype)

    def repeat_backward(self) -> None:
        """Repeat the last forward and backward pass of the local net, to raise its error again.

        Errors of distributed autograd do not show their location in user code; this error does. On a trainer
        with only shards of the net, this method does nothing, since the trainer cannot compute alone.
        """
        if self._inputs is None or not self.is_whole:
            return
        pooled_BE = self._inputs.pooled_BE.requires_grad_()
        with torch.enable_grad(), self._precision(self.device):
            outputs_BO = self._repeat(self._inputs)
        sources = [pooled_BE, *(parameter for parameter in self.net.parameters() if parameter.requires_grad)]
        torch.autograd.grad(outputs_BO.sum(), sources, allow_unused=True)

    def first_not_finite(self) -> str:
        """Return text about the first non-finite values of the last forward pass, or an empty string.

        The text names a non-finite input, or else the first layer with a non-finite output and the first
        non-finite parameter. A trainer with only shards of the net cannot compute alone, and names no layer.
        """
        if self._inputs is None:
            return ""
        dense_BF, pooled_BE, remote_BH = self._inputs
        for name, tensor in (
            ("numeric columns of the batch are", dense_BF),
            ("vectors of the tables are", pooled_BE),
            ("output of the remote net is", remote_BH),
        ):
            if tensor is not None and not tensor.isfinite().all():
                return f"the {name} not finite"
        layers = {module: name for name, module in self.net.named_modules() if name}
        outputs: list[str] = []  # in the order in which layers end

        def note(module: nn.Module, _: object, output: object) -> None:
            if module in layers and isinstance(output, Tensor) and not output.isfinite().all():
                outputs.append(f"the output of {layers[module]}")

        if self.is_whole:
            with register_module_forward_hook(note), torch.no_grad(), self._precision(self.device):
                self._repeat(self._inputs)
        parameters = [f"the parameter {n}" for n, p in self.net.named_parameters() if not p.isfinite().all()]
        first = [*outputs[:1], *parameters[:1]]
        return f"the first values that are not finite are in {' and in '.join(first)}" if first else ""

    def _repeat(self, inputs: NetInputs) -> Tensor:
        """Repeat the forward pass of this trainer's net on stored inputs, eagerly and alone."""
        with local_statistics():
            hidden_BH = self.net.interaction(self.net.bottom(inputs.dense_BF), inputs.pooled_BE)
            outputs_BO: Tensor = self.net.head(hidden_BH if inputs.remote_BH is None else inputs.remote_BH)
        return outputs_BO

    def _precision(self, device: torch.device) -> AbstractContextManager[object]:
        return nullcontext() if self._autocast is None else torch.autocast(device.type, dtype=self._autocast)

    @property
    def device(self) -> torch.device:
        """The device of the local net; the CPU if the net has no parameters."""
        return next((p.device for p in self.net.parameters()), torch.device("cpu"))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Run the block with ``module`` in evaluation mode and without gradients; then restore the old modes."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for each, is_training in modes:
            each.training = is_training
