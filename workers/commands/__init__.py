"""The commands of ``hybrid``, called by ``cli``. None imports torch before its arguments are checked.

``run_commands`` start whole clusters on this machine, ``role_commands`` one role; ``offline_commands`` need
no cluster. Each command takes its options, and the time when the user started it, and raises a HybridError
if something is wrong.
"""
