"""Commands that use a trained model in one process: evaluate, predict, export and import.

Begin with ``prediction_commands``. The command line calls this package.
"""
