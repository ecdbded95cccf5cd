"""Imports that take long, for a process from which others are forked."""

# ruff: noqa: F401

import encodings.idna
from typing import Any, TextIO
from unittest.mock import MagicMock

from cryptography.hazmat.backends import default_backend

from hybrid.module_imports import fast_imports

with fast_imports():
    import matplotlib.backends.backend_svg
    import matplotlib.style
    import pytest  # by modules of cases
    import support.cluster
    import support.forked_commands
    import tensorboard.compat.proto.event_pb2  # type: ignore[import-untyped]
    import tensorboard.summary.writer.record_writer  # type: ignore[import-untyped]
    import torch._dynamo
    from matplotlib.figure import Figure
    from support.faults import raise_on_signals

    import workers.master

    default_backend()  # which each role would import with its first key


def write_empty_svg(figure: Figure, file: TextIO, **_: Any) -> None:
    """Replace the curves of a report, which take as long as a short run; tests of reports draw them."""
    file.write("<svg></svg>")


Figure.subplots, Figure.savefig = MagicMock(), write_empty_svg  # type: ignore[assignment,method-assign]
raise_on_signals()
