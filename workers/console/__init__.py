"""Console output of every command.

Begin with ``terminal``: its ``TerminalView`` shows a run. Other commands print lines through ``messages``,
which also sets up logging, and lets a run continue after its output is closed.
"""
