"""A job on a cluster, from the master's side: what it has created where, and the calls to it.

Begin with ``session``; ``dataset`` is the same on prepared data. ``trainer`` is what it creates on every
trainer, ``job`` what the two say to each other, ``saving`` a checkpoint on its way to the disk,
``capacity`` whether hosts have the memory, ``preparing`` how trainers' hosts help to prepare the data. Jobs
use it, and so may a program of the user's (``hybrid run``).
"""
