"""A trained model as files for other programs, and tables of other programs in a checkpoint.

Begin with ``program_export``.
"""
