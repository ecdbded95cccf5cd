"""Execution backends of the dense net: eager, compiled, replicas on several devices, or tensor parallel.

``dense.parallel`` selects how stages of the net run. A tensor group is the trainers that share one net::

    "none"      stage, perhaps compiled
    "replicas"  scatter ──► copies of the stage, one per device ──► gather
    "tensor"    samples of the tensor group ──► shards of the stage, one per trainer ──► local samples
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid.config import DenseSection
from hybrid.dense.compilation import compiled
from hybrid.dense.data_parallel import DataParallel
from hybrid.dense.tensor_parallel import (
    Layout,
    SharedStage,
    TensorParallel,
    automatic_plan,
    parse_plan,
    trainer_mesh,
)
from hybrid.engine.ddp import DensePlacement
from hybrid.engine.hybrid_model import HybridModel, evaluating
from hybrid.engine.model_builder import Blueprint
from hybrid.errors import ConfigError, first_line

# The inputs of each stage, by its name.
StageInputs = dict[str, tuple[Tensor, ...]]
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def apply_backend(
    model: HybridModel, blueprint: Blueprint, devices: Sequence[torch.device]
) -> DensePlacement:
    """Let the configured backend compute the stages of a model; return the placement of the parameters.

    All trainers must call this together.

    Args:
        model: changed in place: its ``stages``, and with tensor parallelism its parameters.
        devices: the devices of this trainer; the model is on the first.

    Raises:
        ConfigError: the backend does not support the net, or ``dense.tensor_plan`` does not fit the net.
    """
    assert dist.group.WORLD is not None, "joining the cluster forms the trainers' process group"
    dense = blueprint.config.dense
    placement = DensePlacement(dist.group.WORLD)
    if dense.compile == dense.parallel == "none":
        return placement
    inputs = _inputs(model, blueprint, num_samples=max(2, len(devices)))
    if dense.parallel == "none":
        for name, stage in _stages(model):
            setattr(model.stages, name, compiled(stage, dense.compile, inputs[name]))
        return placement
    if dense.parallel == "replicas":
        for name, stage in _stages(model):
            setattr(model.stages, name, DataParallel(stage, devices))
    else:
        placement = _split(model, dense, devices[0])
    for name, stage in model.stages.named_children():
        try:
            with evaluating(model):
                stage(*inputs[name])
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            reason = f"{name} of the net fails with this backend: {type(error).__name__}: {first_line(error)}"
            tensor_key = "dense.tensor_plan" if dense.tensor_plan else "dense.tensor_size"
            key = {"replicas": "dense.device", "tensor": tensor_key}[dense.parallel]
            raise ConfigError(key, reason) from error
    return placement


def _stages(model: HybridModel) -> list[tuple[str, nn.Module]]:
    named = model.stages.named_children()
    return [(name, stage) for name, stage in named if not isinstance(stage, nn.Identity)]


def _inputs(model: HybridModel, blueprint: Blueprint, num_samples: int) -> StageInputs:
    """Return random inputs for each stage, which require gradients if they do so in training."""
    generator = torch.Generator().manual_seed(0)

    def make(width: int) -> Tensor:
        return torch.rand(num_samples, width, dtype=blueprint.dtype, generator=generator).to(model.device)

    dense_BF, pooled_BE = make(len(blueprint.input_spec.dense_features)), make(sum(blueprint.widths))
    with evaluating(model):
        bottom_BH = model.net.bottom(dense_BF)
        hidden_BH = model.net.interaction(bottom_BH, pooled_BE)
    if remote_mlp := blueprint.config.dense.remote_mlp:
        hidden_BH = make(remote_mlp[-1])
    has_parameters = any(True for _ in model.net.bottom.parameters())
    later = (bottom_BH.requires_grad_(has_parameters), pooled_BE.requires_grad_())
    return {"bottom": (dense_BF,), "interaction": later, "head": (hidden_BH.requires_grad_(),)}


def _split(model: HybridModel, dense: DenseSection, device: torch.device) -> DensePlacement:
    """Split layers over the trainers of each tensor group, and return the placement of the parameters.

    A tensor group computes all stages with parameters together, even a stage without split layers. DDP sums a
    gradient over one trainer of each tensor group. So this gradient must cover all samples of the group.
    """
    if device.type != "cpu" and dist.get_backend() == "gloo":
        rule = "needs a GPU for each trainer, because gloo cannot gather tensors of GPUs"
        raise ConfigError("dense.tensor_size", rule, dense.tensor_size)
    mesh = trainer_mesh(dense.tensor_size, device.type)
    if dense.tensor_plan:
        plans = parse_plan(dense.tensor_plan, model.net)
    else:
        plans = {name: automatic_plan(stage) for name, stage in _stages(model)}
        if not any(plans.values()):
            raise ConfigError("dense.tensor_size", f"{dense.net} of these sizes has no layer to split")
    layouts: dict[Tensor, Layout] = {}
    for name, stage in _stages(model):
        if not any(True for _ in stage.parameters()):
            continue
        for path, module in stage.named_modules():
            if isinstance(module, _DROPOUTS):
                rule = f"takes no dropout ({name}.{path}): each trainer would draw a different mask"
                raise ConfigError("dense.tensor_size", rule)
        shard: nn.Module = stage
        if plan := plans.get(name):
            try:
                shard = split = TensorParallel(stage, mesh["tensor"], plan)
            except ValueError as error:  # of a tied parameter
                rule = f"cannot split {name} of the net: {error}; leave its layers out of dense.tensor_plan"
                raise ConfigError("dense.tensor_size", rule) from error
            layouts |= split.layouts
        setattr(model.stages, name, SharedStage(shard, mesh.get_group("tensor")))
    model.is_whole = not layouts
    return DensePlacement(mesh.get_group("data"), dense.tensor_size, layouts)
