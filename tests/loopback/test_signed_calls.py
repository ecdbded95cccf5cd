"""Payloads that are rejected before anything in them is loaded, at the functions that torch calls."""

import itertools
import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.samples import features_of_bags
from support.socket_ends import connection
from torch import Tensor
from torch.distributed import distributed_c10d, rpc
from torch.distributed.rpc import api, internal
from torch.futures import Future

from hybrid import transport
from hybrid.batch import Batch
from hybrid.checkpoint.tensor_file import read_tensors
from hybrid.config import RunConfig
from hybrid.embedding.stored_matrix import read_shape
from hybrid.errors import ClusterError, HybridError
from hybrid.security.message_signature import PayloadKind, Signatures
from hybrid.security.rejections import RejectionError, RejectionLog, parse_rejection
from hybrid.security.secret import Secret
from hybrid.security.signed_pickler import SignedPickler, addressed_to, reject_pickled_classes
from hybrid.topology import MASTER, Role, RoleKind
from hybrid.transport import endpoints
from hybrid.transport.socket.frames import FrameKind, Message

WORKER = Role(RoleKind.WORKER)
SECRET, RUN = Secret.fresh(), b"a run"
CALL = internal.PythonUDF(endpoints.squared_norm, (7, 3), {})

MARK = "TEST_SIGNED_CALLS"  # set in the environment of a process that runs planted code
responses: list[Future[Any]] = []


def fail(text: str, later: bool) -> Future[Any]:
    if not later:
        raise ValueError(text)
    responses.append(Future())
    return responses[-1]


class Process:
    """The pickler of a process of a run, without RPC."""

    def __init__(self, name: str, secret: Secret = SECRET, run: bytes = RUN) -> None:
        self.refusals = RejectionLog()
        self.signatures = Signatures(secret, run, name)
        self.pickler = SignedPickler(self.signatures, (*endpoints.CALLS, fail), self.refusals)

    def call(self, to: str, udf: internal.PythonUDF = CALL) -> tuple[bytes, list[Tensor]]:
        with addressed_to(to):
            return self.pickler.serialize(udf)

    def refuses(self, payload: bytes, tensors: list[Tensor]) -> str:
        """Return the reason of the rejection; "" if the payload is accepted."""
        before = self.refusals.count
        loaded = self.pickler.deserialize(payload, tensors)
        if self.refusals.count == before:
            return ""
        assert isinstance(loaded, internal.RemoteException)
        reason = parse_rejection(loaded.msg)
        assert reason is not None
        return reason


@pytest.fixture
def worker() -> Process:
    return Process(WORKER.rpc_name)


@pytest.fixture
def trainer() -> Process:
    return Process("trainer0")


class Evil:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, (f"import os; os.environ[{MARK!r}] = 'ran'",)


@pytest.mark.parametrize(
    ("caller", "to"),
    [
        (Process("trainer0", Secret.fresh()), "worker0"),
        (Process("trainer0", run=b"another run"), "worker0"),
        (Process("trainer0"), "worker1"),
    ],
    ids=["another secret", "another run", "for another"],
)
def test_a_call_of_another_run_or_role_is_rejected(worker: Process, caller: Process, to: str) -> None:
    assert "not signed" in worker.refuses(*caller.call(to))


def test_a_repeated_call_is_rejected(worker: Process, trainer: Process) -> None:
    first, second = trainer.call("worker0"), trainer.call("worker0")
    assert not worker.refuses(*second)
    assert not worker.refuses(*first)
    assert {worker.refuses(*again) for again in (first, second)} == {"it was received before"}


@pytest.mark.parametrize("shape", [(2, 3), (90, 70)], ids=["small", "large"])
@pytest.mark.parametrize(
    "tamper",
    [
        lambda each: each.neg(),
        lambda each: each.view(each.shape[::-1]),
        lambda each: each.view(torch.int32),
        lambda each: each[:1].expand(len(each), -1),
        lambda each: each.to_sparse(),
        lambda each: each[:1, :1].expand(1 << 20, 1 << 20),
    ],
    ids=["bytes", "shape", "dtype", "strides", "sparse", "larger than memory"],
)
def test_tensors_are_signed(worker: Process, trainer: Process, shape: tuple[int, int], tamper: Any) -> None:
    udf = internal.PythonUDF(endpoints.echo, (torch.rand(shape),), {})
    payload, (sent,) = trainer.call("worker0", udf)
    assert "not signed" in worker.refuses(payload, [tamper(sent)])
    assert not worker.refuses(*trainer.call("worker0", udf))


def test_swapped_dropped_or_added_tensors_are_rejected(worker: Process, trainer: Process) -> None:
    udf = internal.PythonUDF(endpoints.echo, (torch.zeros(9000), torch.ones(9000)), {})
    payload, (zeros, ones) = trainer.call("worker0", udf)
    both, empty = torch.cat([zeros, ones]), torch.zeros(0)
    for wrong in ([ones, zeros], [zeros], [zeros, ones, ones], [both], [zeros, ones, empty], []):
        assert "not signed" in worker.refuses(payload, wrong)
    assert "not signed" in worker.refuses(payload, [both[:8999], both[8999:]])


def test_every_byte_is_signed(worker: Process, trainer: Process) -> None:
    payload, sent = trainer.call("worker0", internal.PythonUDF(endpoints.echo, (torch.ones(2),), {}))
    for at in range(len(payload)):
        changed = bytearray(payload)
        changed[at] ^= 1
        assert "not signed" in worker.refuses(bytes(changed), sent), at
    assert not worker.refuses(payload, sent)


def test_random_bytes_and_truncated_payloads_are_rejected(worker: Process, trainer: Process) -> None:
    payload, _ = trainer.call("worker0")
    halves = (payload[:length] for length in range(len(payload)))
    for wrong in itertools.chain(halves, (os.urandom(size) for size in (1, 29, 45, 200, 5000))):
        assert "not signed" in worker.refuses(wrong, [])


def plant_in_rpc(_: Path) -> None:
    """Send calls and responses that nobody signed."""
    for prefix in (b"", os.urandom(45), bytes(45)):
        loaded = Process("worker0").pickler.deserialize(prefix + pickle.dumps(Evil()), [])
        assert isinstance(loaded, internal.RemoteException)
    raise RejectionError(loaded.msg)


def plant_in_collective(_: Path) -> None:
    """Send an object as torch does while RPC groups form."""
    evil = torch.frombuffer(bytearray(pickle.dumps(Evil())), dtype=torch.uint8)
    with reject_pickled_classes():
        distributed_c10d._tensor_to_object(evil, torch.tensor([len(evil)]), None)


def plant_in_socket(is_sealed: bool, _: Path) -> None:
    """Send a message from a process without the secret, or from a role."""
    trainer, worker = connection()
    evil = pickle.dumps(Evil())
    message = b"".join(len(evil).to_bytes(size, "little") for size in (4, 8)) + evil
    if is_sealed:
        message = bytes(trainer.frames.seal(Message(FrameKind.CALL, 1, Evil())))
    with trainer.socket, worker.socket:
        trainer.socket.send(message)
        worker.frames.receive(worker.socket)
        worker.frames.next()


def plant_in_checkpoint(folder: Path) -> None:
    """Replace a file of a checkpoint."""
    (folder / "dense.safetensors").write_bytes(pickle.dumps(Evil()))
    read_tensors(folder / "dense.safetensors")


def plant_in_pretrained_rows(folder: Path) -> None:
    """Name a file with pretrained rows."""
    torch.save({"weight": Evil()}, folder / "rows.safetensors")
    read_shape(str(folder / "rows.safetensors"))


@pytest.mark.parametrize(
    "plant",
    [
        plant_in_rpc,
        plant_in_collective,
        partial(plant_in_socket, False),
        partial(plant_in_socket, True),
        plant_in_checkpoint,
        plant_in_pretrained_rows,
    ],
    ids=["RPC", "collective", "unauthenticated peer", "socket", "checkpoint", "state dict"],
)
def test_a_pickle_that_runs_code_is_not_loaded(plant: Callable[[Path], None], tmp_path: Path) -> None:
    os.environ.pop(MARK, None)
    with pytest.raises((RejectionError, HybridError)):
        plant(tmp_path)
    assert MARK not in os.environ


def test_values_arrive_as_they_were_sent(worker: Process, trainer: Process) -> None:
    bags = features_of_bags([[[0], [1, 1]]], [[[1.0], [0.5, 2.0]]])
    batch = Batch(torch.randn(2, 2), bags, torch.ones(4)[::2], 2)
    sent = [RunConfig(), {1j, MASTER}, Path("a/b"), torch.float32, np.eye(3), np.eye(3)[:, 1:], batch]
    payload, beside = trainer.call("worker0", internal.PythonUDF(endpoints.echo, (sent,), {}))
    _, ((*plain, whole, array, received),), _ = worker.pickler.deserialize(payload, beside)
    assert plain == sent[:4]
    assert np.array_equal(whole, np.eye(3))
    assert np.array_equal(array, np.eye(3)[:, 1:])
    assert isinstance(received, Batch)
    torch.testing.assert_close(received, batch, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("pickled", "raised"),
    [
        (b"junk", "UnpicklingError"),
        (pickle.dumps(7), "TypeError"),
        (pickle.dumps(("no_such:call", (), {})), "KeyError"),
        (b"cbuiltins\nbytearray\n(I%d\ntR." % (1 << 62), "MemoryError"),
        (b"chybrid.security.signed_pickler\nreceived_tensor\n(\x97Vfloat32\n(ttR.", "UnpicklingError"),
    ],
)
def test_invalid_pickles_are_rejected(pickled: bytes, raised: str, worker: Process, trainer: Process) -> None:
    payload = trainer.signatures.sign(PayloadKind.CALL, b"worker0", pickled, [])
    assert worker.refuses(payload, []) == f"it holds no call or response ({raised})"


def interrupt() -> None:
    raise ClusterError("worker 1 is gone")


class Interrupting:
    """Raises the master's interrupt where it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return interrupt, ()


def test_an_interrupt_while_a_message_is_loaded_is_raised(worker: Process, trainer: Process) -> None:
    udf = internal.PythonUDF(endpoints.echo, (Interrupting(),), {})
    with pytest.raises(ClusterError, match="worker 1 is gone"):
        worker.pickler.deserialize(*trainer.call("worker0", udf))
    assert worker.refusals.count == 0


def test_a_call_signed_for_all_roles_is_rejected(worker: Process, trainer: Process) -> None:
    """Only torch's own messages at the start and end are signed for all roles."""
    pickled = pickle.dumps(("hybrid.transport.endpoints:squared_norm", (7, 3), {}))
    payload = trainer.signatures.sign(PayloadKind.GATHER, b"", pickled, [])
    assert "cannot be signed for all roles" in worker.refuses(payload, [])


def test_a_call_without_a_receiver_is_not_sent(trainer: Process) -> None:
    with pytest.raises(ClusterError, match="has no receiver"):
        trainer.pickler.serialize(CALL)


def answer_to(caller: Process, served: Process) -> tuple[bytes, list[Tensor]]:
    """Return the response of ``served`` to a call of ``caller``."""
    greeting = internal.PythonUDF(endpoints.echo, (torch.ones(2),), {})
    udf = served.pickler.deserialize(*caller.call("worker0", greeting))
    return served.pickler.serialize(internal._run_function(udf))


def test_a_response_is_valid_for_its_caller_once(worker: Process, trainer: Process) -> None:
    other = Process("trainer0")
    payload, sent = answer_to(trainer, worker)
    assert "not signed" in other.refuses(payload, sent)
    assert torch.equal(trainer.pickler.deserialize(payload, sent), torch.ones(2))
    assert trainer.refuses(payload, sent) == "it was received before"


def test_a_response_is_not_accepted_as_an_error(worker: Process, trainer: Process) -> None:
    payload, sent = answer_to(trainer, worker)
    assert payload[16] == PayloadKind.RESPONSE
    forged = payload[:16] + bytes([PayloadKind.ERROR]) + payload[17:]
    assert "not signed" in trainer.refuses(forged, sent)
    assert not trainer.refuses(payload, sent)


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_a_caller_gets_an_error_as_it_was_raised(later: bool, worker: Process, trainer: Process) -> None:
    text = "größer als C:\\new\nund mehr"
    call = trainer.call("worker0", internal.PythonUDF(fail, (text, later), {}))
    raised = internal._run_function(worker.pickler.deserialize(*call))
    if later:
        responses.pop().set_exception(ValueError(text))
        raised = raised.wait()
    payload, sent = worker.pickler.serialize(raised)
    assert "not signed" in Process("trainer0").refuses(payload, sent)
    with pytest.raises(RuntimeError) as told:
        internal._handle_exception(trainer.pickler.deserialize(payload, sent))
    assert f"ValueError: {text}" in str(told.value)


def test_a_rejected_caller_gets_an_empty_response(worker: Process) -> None:
    stranger = Process("trainer0", Secret.fresh())
    refused = worker.pickler.deserialize(*stranger.call("worker0"))
    assert worker.pickler.serialize(internal._run_function(refused)) == (b"", [])
    assert "not signed" in stranger.refuses(b"", [])


def test_many_rejections_are_logged_in_one_line(worker: Process, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            worker.refuses(b"", [])
    assert worker.refusals.count == 1000
    (record,) = caplog.records
    assert "\n" not in record.getMessage()


def test_no_key_signs_with_one_nonce_twice(worker: Process, trainer: Process) -> None:
    """Two values under one key and nonce would reveal the key."""
    headers = [process.call("worker0")[0][:29] for process in (worker, trainer, worker, trainer)]
    assert len(set(headers)) == 4
    assert len({header[:16] for header in headers}) == 2


def test_collectives_load_plain_values_at_the_start() -> None:
    plain = pickle.dumps(("worker0", 0, {}, []))
    with reject_pickled_classes():
        buffer = torch.frombuffer(bytearray(plain), dtype=torch.uint8)
        loaded = distributed_c10d._tensor_to_object(buffer, torch.tensor([len(plain)]), None)
    assert loaded == ("worker0", 0, {}, [])
    assert distributed_c10d._unpickler is pickle.Unpickler


class Counter:
    """Something to call."""

    def __init__(self) -> None:
        self._total = 0

    def add(self, amount: int) -> int:
        self._total += amount
        return self._total

    def _reset(self) -> None:
        self._total = 0

    def apply(self, function: Any, value: int) -> Any:
        return function(value)


def times(factor: int, value: int) -> int:
    return factor * value


@pytest.fixture
def counter(loopback: None) -> transport.Remote[Counter]:
    made: transport.Remote[Counter] = transport.create(MASTER, Counter, timeout_seconds=5.0).wait()
    return made


def test_torch_uses_the_signed_pickler_in_both_directions(loopback: None) -> None:
    """A release of torch that keeps its pickler elsewhere fails here."""
    ours = internal._internal_rpc_pickler
    assert isinstance(ours, SignedPickler)
    assert api._default_pickler is ours
    assert internal._unpickler is pickle.Unpickler
    with pytest.raises(ClusterError, match="cannot be called by RPC"):
        rpc.rpc_sync(MASTER.rpc_name, os.getpid)


@pytest.mark.parametrize("method", ["_reset", "__init__", "__setattr__", "add.__call__"])
def test_private_methods_are_not_called(method: str, counter: transport.Remote[Counter]) -> None:
    assert counter.call(Counter.add, 2).wait() == 2
    with pytest.raises(transport.RemoteError, match=f"{method} cannot be called by RPC: it is not public"):
        counter.call(cast(Any, SimpleNamespace(__name__=method))).wait()
    assert counter.call(Counter.add, 2).wait() == 4


def test_functions_are_sent_by_name(counter: transport.Remote[Counter]) -> None:
    assert counter.call(Counter.apply, partial(times, 3), 4).wait() == 12


def test_calls_that_threads_load_at_once_are_rejected_again_later(worker: Process, trainer: Process) -> None:
    """RPC loads the first messages of a sender in several threads, which must share one window of numbers."""
    calls, start = [trainer.call("worker0") for _ in range(8)], threading.Barrier(8)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            loading = [pool.submit(load_at, start, worker, *call) for call in calls]
    finally:
        sys.setswitchinterval(interval)
    assert all(isinstance(each.result(), internal.PythonUDF) for each in loading)
    assert [worker.refuses(*call) for call in calls] == ["it was received before"] * 8


def load_at(start: threading.Barrier, process: Process, payload: bytes, tensors: list[Tensor]) -> Any:
    start.wait(5.0)
    return process.pickler.deserialize(payload, tensors)
