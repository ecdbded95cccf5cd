"""What needs no cluster: predictions of a checkpoint in one process, and the placement of tables.

Begin with ``predictions`` (``hybrid evaluate``, ``hybrid predict``), which reads rows out of the
checkpoint's files. ``placement`` prints where tables would lie. The command line calls both.
"""
