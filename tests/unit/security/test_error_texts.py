"""Texts that report exceptions and rejections to the caller in another process."""

import pytest

from hybrid import errors
from hybrid.errors import (
    CheckpointError,
    ConfigError,
    HybridError,
    OutageError,
    describe_exception,
    error_class,
    parse_exception,
)
from hybrid.security.rejections import describe_rejection, parse_rejection
from hybrid.transport.pending_calls import make_failure
from hybrid.user_code.user_modules import kind_and_text

TREE = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, HybridError)]


@pytest.mark.parametrize("kind", [*TREE, KeyError, RuntimeError], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("words", ["step 3: it's not finite", ""])
def test_a_deferred_exception_is_parsed(kind: type[Exception], words: str) -> None:
    error = ConfigError("train.epochs", words, 0) if kind is ConfigError else kind(words)
    text = describe_exception(error)
    assert parse_exception(text) == (kind.__name__, str(error))
    assert parse_exception(describe_exception(RuntimeError(f"RPC: {text}"))) == parse_exception(text)
    assert parse_rejection(text) is None
    assert error_class(kind.__name__) is (kind if kind in TREE else Exception)
    failure = make_failure(RuntimeError(text))
    assert (failure.kind, failure.is_self_contained) == (kind.__name__, kind in TREE)
    assert failure.message == (str(error).strip() if kind in TREE else kind_and_text(error))


def test_an_outage_is_reported_by_its_class() -> None:
    error = CheckpointError("cannot write rows")
    error.__cause__ = OutageError("s3: is down")
    assert parse_exception(describe_exception(error)) == ("OutageError", "cannot write rows")
    failure = make_failure(error)
    assert (failure.kind, failure.message) == ("OutageError", "cannot write rows")
    assert failure.is_self_contained


def test_a_rejection_is_parsed() -> None:
    text = f"RuntimeError: On WorkerInfo(id=3):\n{describe_rejection('it is not new: 7')}\nTraceback:"
    assert (parse_rejection(text), parse_exception(text)) == ("it is not new: 7", None)


PEER = "[10.77.0.2]:4711"


@pytest.mark.parametrize(
    ("text", "is_logged"),
    [
        (
            "ECONNRESET: connection reset by peer (this error originated at tensorpipe/transport/uv/a.cc:1)",
            False,
        ),
        ("EOF: end of file (this error originated at tensorpipe/transport/uv/connection_impl.cc:1)", False),
        (f"[/gloo/transport/tcp/pair.cc:5] Connection closed by peer {PEER}", False),
        (f"[/gloo/transport/tcp/pair.cc:5] Read error {PEER}: Connection reset by peer", False),
        (f"[/gloo/transport/tcp/pair.cc:5] writev {PEER}: Broken pipe", False),
        ("[enforce fail at /gloo/transport/tcp/pair.cc:5] op.preamble.length <= op.nbytes. 8 vs 4", True),
        ("connection reset by peer", True),
    ],
)
def test_a_lost_peer_logs_no_stack(text: str, is_logged: bool, caplog: pytest.LogCaptureFixture) -> None:
    failure = make_failure(RuntimeError(text))
    assert (failure.message, failure.is_logged) == (f"RuntimeError: {text}", is_logged)
    assert bool(caplog.records) == is_logged
