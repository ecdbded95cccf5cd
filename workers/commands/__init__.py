"""What each command of ``hybrid`` does. Nothing here imports torch before a command's arguments are right.

Begin with ``runs``, which starts whole clusters on this machine; ``roles`` is one role of a cluster,
``offline`` does what needs none, and ``wanted`` says which run a command is to start, or go on with. Each
takes its options, and the time at which it was given; what is wrong is a HybridError.

Called by ``cli``, which knows them by their names.
"""
