"""A cluster on this machine: its processes started, watched, ended, and started again.

Begin with ``launch``. Roles are forked (``role_processes``, ``forking``) from a ``fork_server`` that has
imported torch, in a network of their own (``namespace``); ``outcome`` and ``description`` are how each
ends, ``restarts`` whether to try again. The command line calls it.
"""
