"""What a master imports to report its run, for processes to be forked from: it takes its time."""

from workers.run_folder.curves import temporary_font_cache

with temporary_font_cache():
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import tensorboard.compat.proto.event_pb2  # type: ignore[import-untyped]
    import tensorboard.summary.writer.record_writer  # type: ignore[import-untyped]  # noqa: F401
