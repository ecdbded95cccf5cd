"""The three roles, each from joining the cluster to leaving it.

Begin with ``run``, which runs one whoever started it. The ``master`` prepares, creates, watches and stops
everything; trainers and workers serve it. ``diagnosis`` says whose failure it was that the master has heard
of. The launcher and the command line call it.
"""
