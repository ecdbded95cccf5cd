"""Imports that a master needs for its report, for processes to be forked from: they take long."""

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import tensorboard.compat.proto.event_pb2  # type: ignore[import-untyped]
import tensorboard.summary.writer.record_writer  # type: ignore[import-untyped]  # noqa: F401
