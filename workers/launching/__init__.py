"""A cluster on this machine: the start, supervision, stop and restart of its processes.

Begin with ``launcher``, which decides on restarts. A ``fork_server`` imports torch once and forks the roles,
if possible in a network namespace. ``role_processes`` supervises one start and describes failures of roles.
"""
