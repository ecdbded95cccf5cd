"""What a caller is told of an exception, and what the log of its owner has."""

import pytest

from hybrid.transport.rpc.pending_calls import failure_of

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
def test_a_peer_that_is_gone_leaves_no_stack(
    text: str, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    failure = failure_of(RuntimeError(text))
    assert (failure.message, failure.is_logged) == (f"RuntimeError: {text}", is_logged)
    assert bool(caplog.records) == is_logged
