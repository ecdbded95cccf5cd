"""Console output of every command.

Begin with ``terminal``: its ``TerminalView`` shows a run. Other commands print lines through ``messages``,
which also sets up logging, and keeps a run alive after its output is closed.
"""
