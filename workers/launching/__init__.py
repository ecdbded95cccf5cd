"""A cluster on this machine: its processes are started, supervised, stopped and restarted.

Begin with ``launcher``. A ``fork_server`` imports torch once and forks the roles, in a network of their
own (``network_namespace``). ``role_processes`` supervises one start, ``role_failure``
describes how a role failed, ``restarts`` decides whether to try again.
"""
