"""What needs no cluster: predictions of a checkpoint in one process, and plans of clusters.

Begin with ``predictions`` (``hybrid evaluate``, ``hybrid predict``), which reads rows out of the
checkpoint's files. ``placement`` prints where tables would lie, and by ``planning`` what speed to expect.
The command line calls both.
"""
