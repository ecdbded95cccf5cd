"""Imports that take long, for a process from which others are forked."""

# ruff: noqa: F401

from cryptography.hazmat.backends import default_backend

from workers.module_imports import fast_imports

with fast_imports():
    import matplotlib.backends.backend_agg
    import matplotlib.figure
    import pytest  # by modules of cases
    import support.cluster
    import support.forked_commands
    import tensorboard.compat.proto.event_pb2  # type: ignore[import-untyped]
    import tensorboard.summary.writer.record_writer  # type: ignore[import-untyped]
    import torch._dynamo
    from support.faults import raise_on_signals

    import workers.master

    default_backend()  # which each role would import with its first key

raise_on_signals()
