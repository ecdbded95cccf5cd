"""Imports that take long, for a process from which others are forked."""

# ruff: noqa: F401

import encodings.idna
import sys
from unittest import mock

from cryptography.hazmat.backends import default_backend

from hybrid.module_imports import fast_imports

with fast_imports():
    import pytest  # by modules of cases
    import support.cluster
    import support.forked_commands
    import tensorboard.compat.proto.event_pb2  # type: ignore[import-untyped]
    import tensorboard.summary.writer.record_writer  # type: ignore[import-untyped]
    import torch._dynamo
    from support.faults import raise_on_signals

    import workers.master

    default_backend()  # which each role would import with its first key

# The curves of a report take as long as a short run. Tests of reports, and commands that start an
# interpreter, draw them.
PLOTS = mock.MagicMock()
PLOTS.Figure.return_value.savefig = lambda file, **_: file.write("<svg></svg>")
for module in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_svg"):
    sys.modules[module] = PLOTS
raise_on_signals()
