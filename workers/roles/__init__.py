"""The three roles, each from joining the cluster to leaving it.

Begin with ``master``: it prepares, creates, watches and stops everything; trainers and workers serve it
(``run``), whoever has started them. ``diagnosis`` says whose failure it was that the master has heard of. The
launcher and the command line call it.
"""
