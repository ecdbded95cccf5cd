"""Rules that tie the keys of a dense net's parallel forms together."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid.config import ClusterSection, DenseSection, RunConfig
from hybrid.config_file import validate
from hybrid.errors import ConfigError


def config(trainers: int = 4, **dense: Any) -> RunConfig:
    return RunConfig(cluster=ClusterSection(trainers=trainers), dense=DenseSection(**dense))


def test_forms_that_go_together_pass() -> None:
    validate(config(parallel="replicas", devices=("cpu", "cpu"), compile="script"))
    validate(config(parallel="replicas", devices=("cuda:0", "cpu"), optimizer="Adafactor"))
    validate(config(parallel="tensor", tensor_size=4))
    validate(config(parallel="tensor", net="mine:net", tensor_plan=("head.0 = colwise_gathered",)))
    validate(config(compile="inductor", optimizer="Muon"))


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        ({"parallel": "tensor", "tensor_size": 3},
         "dense.tensor_size = 3: must divide cluster.trainers, which is 4"),
        ({"parallel": "tensor", "tensor_size": 1}, "dense.tensor_size = 1: must be an integer, at least 2"),
        ({"parallel": "tensor", "net": "mine:net"}, "dense.tensor_plan = (): must say how the layers"),
        ({"parallel": "tensor", "compile": "script"}, "dense.compile = 'script': must be none"),
        ({"parallel": "tensor", "optimizer": "Muon"}, "dense.optimizer = 'Muon': looks at whole matrices"),
        ({"parallel": "tensor", "devices": ("cpu",)},
         "dense.devices = ('cpu',): is read where dense.parallel is \"replicas\" only"),
        ({"devices": ("cpu",)},
         "dense.devices = ('cpu',): is read where dense.parallel is \"replicas\" only"),
        ({"parallel": "replicas", "devices": ("cpu",), "tensor_plan": ("head = rowwise",)},
         "dense.tensor_plan = ('head = rowwise',): is read where dense.parallel is \"tensor\" only"),
        ({"parallel": "replicas"}, "dense.devices = (): must name the devices"),
        ({"parallel": "replicas", "devices": ("cpu", "cuda")},
         "dense.devices = 'cuda': must hold cpu and cuda:N"),
        ({"parallel": "replicas", "devices": ("cpu",), "device": "cpu"},
         "dense.device = 'cpu': leave it out"),
        ({"parallel": "both"}, "dense.parallel = 'both': must be one of none, replicas, tensor"),
        ({"compile": "jit"}, "dense.compile = 'jit': must be one of none, script, trace"),
    ],
)  # fmt: skip
def test_forms_that_do_not_are_refused(dense: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(config(**dense))
    assert str(caught.value).startswith(message)
