"""The command line, ``hybrid COMMAND``.

Begin with ``command_line``. ``arguments`` has the options of every command, ``commands`` a function for each
command. ``model_commands`` uses a trained model; ``planning`` prints the plan of a run. Torch is imported
only after the arguments are valid.
"""

from workers.cli.command_line import main as main
