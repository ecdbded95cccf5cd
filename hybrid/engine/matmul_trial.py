"""Whether the dense nets of a job are faster by oneDNN's products than by torch's: measured on a trainer."""

import math
from collections.abc import Sequence

from torch import nn

from hybrid.config.loading import with_own
from hybrid.config.validation import why_not_onednn
from hybrid.dense.devices import choose_devices
from hybrid.dense.matmul import layer_shapes, measured_gain
from hybrid.engine.model_builder import Blueprint


class MatmulTrial:
    """Lives on one trainer before there are nets anywhere; the master creates it there and asks it.

    Args:
        index: of the trainer.
        blueprint: of the nets.
        settings: what this role was given of its own.
    """

    def __init__(self, index: int, blueprint: Blueprint, settings: Sequence[str] = ()) -> None:
        self._index = index
        self._blueprint = blueprint
        self._settings = settings

    def gain(self) -> float:
        """How many times as fast as torch's products oneDNN's make the layers that can take them.

        1 where none can: of this configuration, on this trainer's device, or of so few samples.
        """
        config = with_own(self._blueprint.config, self._settings)
        if why_not_onednn(config):
            return 1.0
        devices = choose_devices(config.dense, self._index)
        if devices[0].type != "cpu":
            return 1.0
        parts = config.cluster.trainers * config.train.micro_batches * len(devices)
        num_samples = math.ceil(config.train.batch_size / parts)
        nets: list[nn.Module | None] = [self._blueprint.dense_net(), self._blueprint.remote_net()]
        shapes = [shape for net in nets if net is not None for shape in layer_shapes(net, num_samples)]
        if not shapes:
            return 1.0
        gain = measured_gain(shapes, num_samples)
        # A machine that is busy with something else may show a gain once.
        return min(gain, measured_gain(shapes, num_samples)) if gain > 1 else gain
