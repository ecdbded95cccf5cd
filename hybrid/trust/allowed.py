"""What a payload may name: data types, by their exact names, and what a role may be asked to construct.

A pickle can name anything that can be imported, and have it called. Here it can name what is listed below,
all of which only holds data. Classes to construct, and functions of the user's own, travel as their names,
and are looked up where they are used: the project's in the list below, the user's by their modules
(``hybrid/own_code.py``).
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

from hybrid.own_code import load_own
from hybrid.trust.refusals import RefusedPayload
from hybrid.trust.signature import UNSIGNED

DATA = frozenset(
    f"{module}:{name}"
    for module, names in {
        "builtins": "range slice frozenset complex bytearray",
        "pathlib": "Path PosixPath PurePosixPath",
        "torch": "Size device bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64",
        "hybrid.batch": "Batch SparseFeatures",
        "hybrid.clock": "Span",
        "hybrid.config": (
            "RunConfig RunSection ClusterSection DataSection EmbeddingSection TableSection DenseSection "
            "TrainSection CheckpointSection ScheduleSection ProfileSection"
        ),
        "hybrid.embedding.kernels": "Bags",
        "hybrid.embedding.placement": "Placement Shard",
        "hybrid.embedding.spec": "FeatureSpec InputSpec OptimizerSpec Pooling TableSpec",
        "hybrid.own_code": "OwnFunction OwnValue",
        "hybrid.schedule": "Schedule",
        "hybrid.topology": "Role RoleKind Topology",
        "hybrid.update": "Purpose Staleness Ticket UpdateMode UpdateRules",
        "hybrid.wire.calls": "Vitals construct_module",
        "hybrid.wire.failure": "Failure",
        "hybrid.wire.stubs": "ModuleRef RemoteNet RemoteTables",
        "workers.trainer": "Job Report",
    }.items()
    for name in names.split()
)
HOSTED = frozenset(
    {"hybrid.embedding.shard:TableShards", "workers.session:RemoteMlp", "workers.trainer:Trainer"}
)


class Unpickler(pickle.Unpickler):
    """Loads plain data, tensors that came beside it, and references to objects of other processes.

    Args:
        pickled, tensors: of a payload whose signature is good; of the tensors it holds for their bytes alone.
    """

    def __init__(self, pickled: bytes, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        """What ``module`` calls ``name``, if it is on the list.

        Raises:
            RefusedPayload: it is not.
        """
        if module == __name__:
            if name == tensor_beside.__name__:
                return self._tensor
            if name == reference_to.__name__:
                return rpc.PyRRef._deserialize
        return _listed(module, name)

    def _tensor(self, index: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensors[index]
        if dtype_name(tensor.dtype) != dtype or tensor.shape != shape:
            raise RefusedPayload(UNSIGNED)
        return tensor


def tensor_beside(index: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """What a pickle names where a tensor was; :class:`Unpickler` puts the tensor there, if it is the one."""
    raise NotImplementedError(f"tensor {index} of no message")


def reference_to(fork: tuple[Any, ...]) -> rpc.RRef[Any]:
    """What a pickle names where an RRef was; :class:`Unpickler` puts one there."""
    raise NotImplementedError(f"reference {fork} of no message")


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """How a pickle calls the type of a tensor's values."""
    return str(dtype)


def hosted(name: str) -> type[Any]:
    """The class to construct that is called ``name``: the project's that are listed, and the user's own.

    Raises:
        ConfigError: there is no such class.
    """
    found: type[Any] = _found(*name.split(":")) if name in HOSTED else load_own(name)
    return found


def _listed(module: str, name: str) -> Any:
    if f"{module}:{name}" not in DATA:
        raise RefusedPayload(f"{module}:{name} may not travel; hybrid/trust/allowed.py lists what may")
    return _found(module, name)


@cache
def _found(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
