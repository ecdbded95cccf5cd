"""Console output of every command, and what happens to it when the console goes away.

Begin with ``terminal``: a run is shown through its ``TerminalView``, with ``data_notes`` for warnings about
rows. Other commands print lines through ``messages``, which also sets up logging. ``output_stream`` keeps a
run alive after its output is closed.
"""
