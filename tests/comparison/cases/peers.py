"""Functions of trainers that compare local and distributed autograd.

The nets here are torch's own, under torch's own DDP, but where the project's is named.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from support.stock_rpc import stock_rpc
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd, rpc
from torch.distributed.nn import RemoteModule
from torch.nn.parallel import DistributedDataParallel

from hybrid import transport
from hybrid.batch import Batch
from hybrid.embedding.trainer.lookup import Lookup, TableSources
from hybrid.embedding.trainer.routes import Responses, Slot
from hybrid.engine.ddp import DdpMode, DdpModel, DensePlacement
from hybrid.engine.hybrid_model import HybridModel, MicroBatch
from hybrid.engine.uneven_batches import align_batches
from hybrid.models.dense_net import DenseNet
from hybrid.primitives.step_timings import StepClock
from hybrid.updates.ticket import Ticket
from workers.rendezvous.bootstrap import JoinedCluster

SECONDS = 20.0

Gradients: TypeAlias = dict[str, Tensor]
# Gradients of distributed autograd and of a local backward pass.
Compared: TypeAlias = tuple[Gradients, Gradients]
# A function that a trainer runs with its index.
Job: TypeAlias = Callable[[int], list[Compared]]


class _Peer:
    def __init__(self, index: int) -> None:
        self._index = index

    def run(self, job: Job) -> list[Compared]:
        # Inputs differ between trainers, so that gradients differ before DDP reduces them.
        torch.manual_seed(self._index)
        return job(self._index)


def on_all_trainers(cluster: JoinedCluster, job: Job) -> list[list[Compared]]:
    """Run ``job`` on all trainers at the same time; return the results."""
    creating = [
        transport.create(r, _Peer, r.index, timeout_seconds=SECONDS) for r in cluster.topology.trainers
    ]
    peers: list[transport.Remote[_Peer]] = transport.gather(creating)
    with stock_rpc(cluster.topology):
        return transport.gather([peer.call(_Peer.run, job, timeout_seconds=SECONDS) for peer in peers])


def _inputs(index: int, uneven: bool) -> list[Tensor]:
    """Return one input, or 3 on even trainers if numbers are uneven."""
    return [torch.rand(3, 2) for _ in range(3 if uneven and index % 2 == 0 else 1)]


class _BottomOnly(nn.Module):
    def forward(self, bottom_BH: Tensor, pooled_BE: Tensor) -> Tensor:
        return bottom_BH


class _NoFeatures:
    """The vectors of a model without sparse features."""

    def outputs(self, responses: Responses) -> tuple[Tensor, ...]:
        return (torch.empty(0, 0),)

    def gradients(self, grads: Sequence[Tensor]) -> Iterator[tuple[Slot, Tensor]]:
        return iter(())


def hybrid_model(uneven: bool, index: int) -> list[Compared]:
    """Use ``DdpModel`` of this project; trainers with fewer inputs continue with empty ones."""
    assert dist.group.WORLD is not None
    model = HybridModel(DenseNet(nn.Linear(2, 3), _BottomOnly(), nn.Identity()))
    ddp_model = DdpModel(model, DdpMode.OUTSIDE, DensePlacement(dist.group.WORLD))
    empty = Batch.empty(num_dense=2, num_sparse=0)
    own = (
        empty._replace(dense_features=x_BF, labels=torch.zeros(len(x_BF))) for x_BF in _inputs(index, uneven)
    )
    steps = align_batches(own, empty, dist.group.WORLD)
    return [_compare_ddp_model(ddp_model, batch) for batch in steps]


def _compare_ddp_model(ddp_model: DdpModel, batch: Batch) -> Compared:
    ticket = Ticket(0, 0, 0)
    sources = TableSources({}, StepClock())
    lookup = Lookup(ticket, {}, _NoFeatures(), sources)
    micro = MicroBatch(batch, ticket, lookup, is_last=True)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [ddp_model.module(micro, StepClock()).norm()])
        ddp_model.collect(dist_autograd.get_gradients(context))
        named = ddp_model.net.named_parameters()
        distributed = {name: ddp_model.gradients[p].clone() for name, p in named}
    ddp_model.module.zero_grad()
    ddp_model.module(micro, StepClock()).norm().backward()
    net = ddp_model.net
    ddp_model.collect({p: p.grad for p in net.parameters() if p.grad is not None})
    return distributed, {name: ddp_model.gradients[p].clone() for name, p in net.named_parameters()}


def sparse_gradients(index: int) -> list[Compared]:
    """Use an ``EmbeddingBag`` under DDP; every gradient must be sparse."""
    table = nn.EmbeddingBag(10, 3, sparse=True)
    ddp = DistributedDataParallel(table)
    ids_L, offsets = torch.randint(10, (10,)), torch.tensor([0, 4])
    ddp(ids_L, offsets).sum().backward()
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [ddp(ids_L, offsets).sum()])
        ((parameter, distributed),) = dist_autograd.get_gradients(context).items()
    local = table.weight.grad
    assert parameter is table.weight
    assert local is not None
    assert local.is_sparse
    assert distributed.is_sparse
    # torch.equal does not support sparse tensors.
    return [({"weight": distributed.to_dense()}, {"weight": local.to_dense()})]


class _RemoteLayer:
    """A layer on a worker, and a local layer with the same weight."""

    def __init__(self, remote_device: str, inputs: int, outputs: int) -> None:
        self.remote = RemoteModule(remote_device, nn.Linear, (inputs, outputs, False))
        self.local = nn.Linear(inputs, outputs, bias=False)
        # RPC has copied the weight.
        self.local.load_state_dict(self.remote.get_module_rref().to_here().state_dict())

    def compared(self, context: int) -> tuple[Tensor, Tensor]:
        """Return the gradient on the worker in a context, and that of the local layer."""
        rref = self.remote.get_module_rref()
        assert self.local.weight.grad is not None
        return rpc.rpc_sync(rref.owner(), _remote_gradient, args=(rref, context)), self.local.weight.grad


def _remote_gradient(rref: rpc.RRef[nn.Linear], context: int) -> Tensor:
    return dist_autograd.get_gradients(context)[rref.local_value().weight]


def local_vs_remote(remote_device: str, index: int) -> list[Compared]:
    """Use a layer on a worker, then a layer under DDP."""
    first, second = _RemoteLayer(remote_device, 10, 5), nn.Linear(5, 1)
    ddp, inputs_BF = DistributedDataParallel(second), torch.rand(10, 10)
    ddp(first.local(inputs_BF)).sum().backward()
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [ddp(first.remote.forward(inputs_BF)).sum()])
        pairs = {"1": first.compared(context), "2": _compared(second, context)}
    return [_split(pairs)]


def chain(device: str, index: int) -> list[Compared]:
    """Use four layers, alternately on a worker and under DDP on ``device``."""
    here = torch.device(device)
    first, third = _RemoteLayer("worker0/cpu", 10, 7), _RemoteLayer("worker0/cpu", 5, 3)
    second, fourth = nn.Linear(7, 5).to(here), nn.Linear(3, 1).to(here)
    device_ids = None if here.type == "cpu" else [here.index]
    ddp2, ddp4 = (DistributedDataParallel(layer, device_ids=device_ids) for layer in (second, fourth))
    inputs_BF = torch.rand(10, 10)

    def loss(layer1: Callable[[Tensor], Tensor], layer3: Callable[[Tensor], Tensor]) -> Tensor:
        total: Tensor = ddp4(layer3(ddp2(layer1(inputs_BF).to(here)).cpu()).to(here)).sum()
        return total

    loss(first.local, third.local).backward()
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [loss(first.remote.forward, third.remote.forward)])
        pairs = {
            "1": first.compared(context),
            "2": _compared(second, context),
            "3": third.compared(context),
            "4": _compared(fourth, context),
        }
    return [_split(pairs)]


def _compared(layer: nn.Linear, context: int) -> tuple[Tensor, Tensor]:
    assert layer.weight.grad is not None
    # RPC cannot send tensors from GPU to GPU here.
    return dist_autograd.get_gradients(context)[layer.weight].cpu(), layer.weight.grad.cpu()


def _split(pairs: dict[str, tuple[Tensor, Tensor]]) -> Compared:
    distributed = {name: gradient for name, (gradient, _) in pairs.items()}
    return distributed, {name: gradient for name, (_, gradient) in pairs.items()}
