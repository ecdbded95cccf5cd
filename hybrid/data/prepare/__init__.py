"""Input files to a prepared data set: made once, resumed after a kill, shared by concurrent runs.

Begin with ``preparation``.
"""
