"""What a payload may name, and what it can do with that: make plain values, in every version of Python."""

import pickle
import pickletools
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hybrid.batch import Batch
from hybrid.config import RunConfig, TableSection
from hybrid.dense.hosted_net import HostedNet
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.protocol.ticket import Ticket
from hybrid.protocol.update_rules import UpdateRules
from hybrid.security import allow_list, signed_pickler
from hybrid.security.allow_list import Allowed, ClassName, Unpickler
from hybrid.security.rejected_messages import RefusedPayload
from hybrid.topology import MASTER, Role, RoleKind, Topology
from hybrid.transport.rpc import endpoints, payload_classes
from workers.controller.deployment import CREATED, DATA

ALLOWED = Allowed((*payload_classes.DATA, *DATA), CREATED)
ENUMS = [each for each in ALLOWED.data.values() if isinstance(each, type) and issubclass(each, Enum)]


def travelled(value: Any) -> Any:
    return Unpickler(*signed_pickler._dump(value), ALLOWED).load()


def names_in(pickled: bytes) -> set[str]:
    return {str(argument) for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str)}


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("form", ["as this Python pickles it", "as Python 3.11.2 does"])
def test_an_enumeration_travels_by_value(
    kind: type[Enum], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "as Python 3.11.2 does":
        monkeypatch.setattr(kind, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    for member in kind:
        assert travelled(member) is member
        assert "getattr" not in names_in(signed_pickler._dump([member])[0])


def test_every_enumeration_that_may_travel_is_seen() -> None:
    assert {"RoleKind", "Pooling", "UpdateMode", "Purpose"} <= {kind.__name__ for kind in ENUMS}
    assert "builtins:getattr" not in ALLOWED.data


@pytest.mark.parametrize(
    "value",
    [
        RunConfig(tables={"a": TableSection(dim=4)}),
        UpdateRules(2),
        Ticket(1, 2, 3),
        (MASTER, [Role(RoleKind.WORKER, 3)], {"t": Topology(1, 2)}, {1, 2}, frozenset({3})),
        (torch.float32, torch.device("cpu"), torch.Size([2, 3]), torch.bfloat16),
        (range(3), slice(1, 2), 1j, bytearray(b"a"), bytearray()),
        Path("a/b"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_travel(value: object) -> None:
    assert travelled(value) == value
    assert type(travelled(value)) is type(value)


def test_tensors_within_named_tuples_travel_beside() -> None:
    batch = Batch.empty(2, 3)._replace(labels=torch.ones(2))
    there = travelled(batch)
    assert isinstance(there, Batch)
    assert torch.equal(there.labels, batch.labels)


@pytest.mark.parametrize(
    "array", [np.eye(3)[:, 1:], np.arange(3), np.zeros(0, np.bool_), np.full(1, 2**63, np.uint64)]
)
def test_arrays_travel_as_tensors_beside(array: npt.NDArray[Any]) -> None:
    array.setflags(write=False)
    pickled, tensors = signed_pickler._dump([array])
    assert len(tensors) == 1
    (there,) = Unpickler(pickled, tensors, ALLOWED).load()
    assert there.dtype == array.dtype
    assert np.array_equal(there, array)


def test_a_path_travels_by_its_text_wherever_python_keeps_the_class() -> None:
    assert travelled(PurePosixPath("/a")) == Path("/a")
    assert "pathlib._local" not in names_in(signed_pickler._dump(Path("/a"))[0])


def build(name: str, state: object) -> bytes:
    """A pickle that loads what is called ``name`` and has its state set."""
    module, _, attribute = name.partition(":")
    pickled_state = pickle.dumps(state, 2)[2:-1]  # without its first opcode, PROTO, and STOP
    return b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + pickled_state + b"b."


@pytest.mark.parametrize(
    "state", [{"planted": 1}, (None, {"planted": 1}), ({}, {"planted": 1})], ids=["dict", "slots", "both"]
)
@pytest.mark.parametrize(
    "name",
    [
        *sorted(ALLOWED.data.keys() - {f"torch:{each}" for each in dir(torch)}),
        "hybrid.security.allow_list:tensor_beside",
        "hybrid.security.allow_list:reference_to",
        "hybrid.security.allow_list:array_of",
        "hybrid.security.allow_list:made",
        "hybrid.security.allow_list:class_named",
    ],
)
def test_what_a_pickle_names_it_cannot_change(name: str, state: object) -> None:
    """With BUILD, of Python's pickles: of a class it would set attributes, of a function its ``__dict__``."""
    with pytest.raises(RefusedPayload, match="would change what it names"):
        Unpickler(build(name, state), (), ALLOWED).load()
    for each in (
        *ALLOWED.data.values(),
        Unpickler,
        Unpickler._tensor,
        allow_list.made,
        allow_list.reference_to,
    ):
        assert not hasattr(each, "planted")


@pytest.mark.parametrize("dtype", ["float32", "bool", "Size", "device"])
def test_types_of_torch_cannot_be_changed_either(dtype: str) -> None:
    with pytest.raises((RefusedPayload, AttributeError, TypeError)):
        Unpickler(build(f"torch:{dtype}", (None, {"planted": 1})), (), ALLOWED).load()
    assert not hasattr(getattr(torch, dtype), "planted")


@pytest.mark.parametrize(
    "name", ["builtins:getattr", "os:system", "hybrid.security.allow_list:Allowed", "torch:load"]
)
def test_what_is_not_listed_is_not_made_either(name: str) -> None:
    with pytest.raises(RefusedPayload, match=f"^{name} may not travel"):
        Unpickler(signed_pickler._dump(0)[0], (), ALLOWED).find_class(*name.split(":"))
    with pytest.raises(RefusedPayload, match=f"^{name} may not travel"):
        ALLOWED.marks["made"](name, (), {})


def test_a_function_that_may_travel_can_still_be_called() -> None:
    there = travelled(endpoints.create_module)
    with pytest.raises(AttributeError):
        there.planted = 1
    assert isinstance(there(travelled(ClassName("no_such_module:Net")), ()), endpoints._Unbuilt)
    assert issubclass(TableShards, torch.nn.Module)
    assert issubclass(HostedNet, torch.nn.Module)
