"""The remote dense net: a net on a worker that all trainers call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.futures import Future

from hybrid.checkpoint.checkpoint_folders import REMOTE_FILE
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import load_state, pack_dense, unpack_dense
from hybrid.dense.data_parallel import shadow
from hybrid.dense.dense_optimizer import DenseOptimizer, squared_norm
from hybrid.errors import NonFiniteError
from hybrid.storage.remote_path import StoragePath
from hybrid.updates.barrier import UpdateBarrier
from hybrid.updates.hosted_module import HostedModule
from hybrid.updates.ticket import Purpose, Ticket
from hybrid.updates.update_rules import UpdateMode, UpdateRules


class HostedNet(HostedModule):
    """A net on a worker that all trainers call, with its optimizer and its update barrier.

    An update adds up the gradients of all trainers in trainer order, and makes one step of the optimizer.

    Args:
        net: must have no buffers, since calls run concurrently.
    """

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, rules: UpdateRules) -> None:
        super().__init__()
        self.net = net
        self.optimizer = DenseOptimizer(optimizer, rules.schedule)
        self.parameter_list = list(net.parameters())
        self._names = [name for name, _ in net.named_parameters()]
        self.rules = rules
        # Autograd records a function only if one of its inputs requires a gradient.
        self._anchor = torch.zeros(0, requires_grad=True)
        self.barrier = UpdateBarrier[Sequence[Tensor]](rules, self._merge, self.clock)

    def call(self, ticket: Ticket, hidden_BH: Tensor) -> Future[Tensor]:
        """Return a future of :meth:`forward`, which runs after the updates that ``ticket`` requires."""
        return self.barrier.run_when_ready(ticket, lambda: self.forward(ticket, hidden_BH))

    def forward(self, ticket: Ticket, hidden_BH: Tensor) -> Tensor:
        """Return the output for ``hidden_BH`` with the current parameters.

        For ``Purpose.PREDICT``, the net is in evaluation mode, and the output has no gradient. Otherwise, the
        backward pass sends the gradients of the parameters to the update barrier.
        """
        if ticket.purpose is Purpose.PREDICT:
            with torch.no_grad():
                predicted: Tensor = shadow(self.net, {}).eval()(hidden_BH)
            return predicted
        parameters = _Parameters.apply(self._anchor, self, ticket)  # type: ignore[no-untyped-call]
        with self.clock.span("remote net", ticket.step):
            net = shadow(self.net, dict(zip(self.parameter_list, parameters, strict=True))).train()
            output: Tensor = net(hidden_BH)
        return output

    def load(self, folder: StoragePath, step: int, has_state: bool = True) -> None:
        """Load a checkpoint, and continue after ``step`` steps; raise CheckpointError if it does not fit.

        Args:
            has_state: whether to load the optimizer's state; False for the checkpoint of another optimizer.
        """
        self.barrier.drain()
        net, state = unpack_dense(Checkpoint.open(folder).tensors(REMOTE_FILE))
        load_state(self.net, net, folder)
        if has_state:
            self.optimizer.load(state, folder)
        self.barrier.restart(step)

    def _files(self, is_copied: bool, is_delta: bool) -> dict[str, Callable[[], dict[str, Tensor]]]:
        # Always copies: a dense net is small.
        state = {} if is_delta else self.optimizer.optimizer.state_dict()["state"]
        tensors = pack_dense(self.net.state_dict(), state)
        return {REMOTE_FILE: lambda: tensors}

    def _merge(self, step: int, contributions: list[Sequence[Tensor]]) -> NetUpdate:
        merged = [gradient.clone() for gradient in contributions[0]]
        for contribution in contributions[1:]:
            for total, gradient in zip(merged, contribution, strict=True):
                total.add_(gradient)
        if self.rules.check_finite:
            for name, gradient in zip(self._names, merged, strict=True):
                if not gradient.isfinite().all():
                    raise NonFiniteError(
                        f"step {step}: the gradient of the remote net's {name} is not finite"
                    )
        return NetUpdate(self, step, merged)


class NetUpdate(NamedTuple):
    """One update of a net: gradients summed over trainers. In async mode, they may be of several steps."""

    hosted: HostedNet
    step: int
    gradients: list[Tensor]

    def squared_norm(self) -> float:
        return squared_norm(self.gradients)

    def apply(self, scale: float) -> None:
        gradients: dict[Tensor, Tensor] = dict(zip(self.hosted.parameter_list, self.gradients, strict=True))
        self.hosted.optimizer.step(self.step, gradients, scale)


class _Parameters(torch.autograd.Function):
    """Returns the parameters of a net. The backward pass sends their gradients to the update barrier."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, anchor: Tensor, hosted: HostedNet, ticket: Ticket
    ) -> tuple[Tensor, ...]:
        ctx.arguments = hosted, ticket  # type: ignore[attr-defined]
        # An update may overwrite the parameters before the backward pass of this call.
        if hosted.rules.mode is UpdateMode.ASYNC:
            return tuple(parameter.detach().clone() for parameter in hosted.parameter_list)
        return tuple(parameter.detach() for parameter in hosted.parameter_list)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[None, ...]:
        hosted, ticket = ctx.arguments  # type: ignore[attr-defined]
        hosted.barrier.contribute(ticket, grads)
        return None, None, None
