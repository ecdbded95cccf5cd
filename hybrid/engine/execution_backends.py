"""How a trainer's dense net is computed: as it is, compiled, on several devices, or by several trainers.

Each of the three stages is put into the form that is asked for, over the parameters of the net::

    "none"      stage
    "replicas"  scatter ──► copies of the stage, one a device ──► gather
    "tensor"    samples of the tensor group ──► shards of the stage, one a trainer ──► own samples
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nn.modules.dropout import _DropoutNd

from hybrid.config import DenseSection
from hybrid.dense.compilation import compiled
from hybrid.dense.data_parallel.replicas import DataParallel
from hybrid.dense.tensor_parallel.sharded_module import TensorParallel, trainer_mesh
from hybrid.dense.tensor_parallel.sharding_plan import Plan, automatic_plan, parse_plan
from hybrid.dense.tensor_parallel.shared_stage import SharedStage
from hybrid.engine.dense_placement import Arrangement
from hybrid.engine.hybrid_model import HybridModel
from hybrid.engine.model_builder import Blueprint
from hybrid.errors import ConfigError, first_line

# What each stage is called with, by its name.
StageInputs = dict[str, tuple[Tensor, ...]]


def arrange(
    model: HybridModel,
    blueprint: Blueprint,
    devices: Sequence[torch.device],
) -> Arrangement:
    """Put a model's stages into the form that the configuration says; all trainers call it at once.

    Args:
        model: changed in place: its ``stages``, and where several trainers hold a net, its parameters.
        blueprint: that it was made by.
        devices: of this trainer; the first is where the model is.

    Raises:
        ConfigError: the net cannot take this form.
    """
    assert dist.group.WORLD is not None, "joining the cluster forms the trainers' process group"
    dense = blueprint.config.dense
    arrangement = Arrangement(dist.group.WORLD)
    if dense.compile == dense.parallel == "none":
        return arrangement
    inputs = _inputs(model, blueprint, num_samples=max(2, len(devices)))
    if dense.compile != "none":
        for name, stage in _stages(model):
            setattr(model.stages, name, compiled(stage, dense.compile, inputs[name]))
    if dense.parallel == "replicas":
        for name, stage in _stages(model):
            setattr(model.stages, name, DataParallel(stage, devices))
    elif dense.parallel == "tensor":
        arrangement = _split(model, dense, devices[0])
    if dense.parallel != "none":  # what is only compiled has been run already
        _try(model, dense, inputs)
    return arrangement


def _stages(model: HybridModel) -> list[tuple[str, nn.Module]]:
    """The stages that compute something, by name."""
    named = model.stages.named_children()
    return [(name, stage) for name, stage in named if not isinstance(stage, nn.Identity)]


def _inputs(model: HybridModel, blueprint: Blueprint, num_samples: int) -> StageInputs:
    """Samples of random numbers, as each stage takes them in training."""
    generator = torch.Generator().manual_seed(0)

    def make(width: int) -> Tensor:
        return torch.rand(num_samples, width, dtype=blueprint.dtype, generator=generator).to(model.device)

    dense_BF, pooled_BE = make(len(blueprint.input_spec.dense_features)), make(sum(blueprint.widths))
    with _evaluating(model):
        bottom_BH = model.net.bottom(dense_BF)
        hidden_BH = model.net.interaction(bottom_BH, pooled_BE)
    if remote_mlp := blueprint.config.dense.remote_mlp:
        hidden_BH = make(remote_mlp[-1])
    has_parameters = any(True for _ in model.net.bottom.parameters())
    later = (bottom_BH.requires_grad_(has_parameters), pooled_BE.requires_grad_())
    return {"bottom": (dense_BF,), "interaction": later, "head": (hidden_BH.requires_grad_(),)}


@contextmanager
def _evaluating(model: HybridModel) -> Iterator[None]:
    """In here, nothing is recorded, and running statistics stay as they are."""
    model.eval()
    with torch.no_grad():
        yield
    model.train()


def _split(model: HybridModel, dense: DenseSection, device: torch.device) -> Arrangement:
    """Split layers over the trainers of each tensor group.

    A stage that has parameters is computed by the group together even where none of them is split: what
    a trainer holds whole must see the samples of the whole group, as the shards do.
    """
    mesh = trainer_mesh(dense.tensor_size, device.type)
    plans = _plans(model, dense)
    layouts: dict[Tensor, DTensorSpec] = {}
    for name, stage in _stages(model):
        if not any(True for _ in stage.parameters()):
            continue
        _refuse_dropout(name, stage)
        part: nn.Module = stage
        if plan := plans.get(name):
            part = split = TensorParallel(stage, mesh["tensor"], plan)
            layouts |= split.layouts
        setattr(model.stages, name, SharedStage(part, mesh.get_group("tensor")))
    return Arrangement(mesh.get_group("data"), dense.tensor_size, layouts)


def _plans(model: HybridModel, dense: DenseSection) -> dict[str, Plan]:
    if dense.tensor_plan:
        return parse_plan(dense.tensor_plan, model.net)
    plans = {name: automatic_plan(stage) for name, stage in _stages(model)}
    if not any(plans.values()):
        raise ConfigError("dense.parallel", f"{dense.net} of these sizes has no layer to split", "tensor")
    return plans


def _refuse_dropout(name: str, stage: nn.Module) -> None:
    """ConfigError where a stage has dropout, whose masks must be alike where trainers hold the same."""
    for path, module in stage.named_modules():
        if isinstance(module, _DropoutNd):
            rule = f"takes no dropout ({name}.{path}): each trainer would draw a mask of its own"
            raise ConfigError("dense.parallel", rule, "tensor")


def _try(model: HybridModel, dense: DenseSection, inputs: StageInputs) -> None:
    """ConfigError, before training starts, where the stages fail in their new form."""
    for name, stage in model.stages.named_children():
        try:
            with _evaluating(model):
                stage(*inputs[name])
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            reason = f"{name} of the net fails in this form: {type(error).__name__}: {first_line(error)}"
            raise ConfigError("dense.parallel", reason, dense.parallel) from error
